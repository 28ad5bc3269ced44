"""Where the time of a start goes, from the beginning of the process to the first answer.

Laps follow one another without gaps, so their sum is the whole. Stdlib only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Seconds of each phase of a start, in order; a phase named twice is the sum."""

    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class StartupClock:
    """Books time under names; the first lap begins where `since` (perf_counter) says.

    Without `since` that is the start of the process where the system tells it (Linux), else now.
    """

    def __init__(self, since: float | None = None) -> None:
        self._since = perf_counter() - process_age_s() if since is None else since
        self._seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """The time since the last lap went into `phase`."""
        now = perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def startup(self) -> Startup:
        """All laps so far."""
        return Startup(seconds=dict(self._seconds))


def process_age_s() -> float:
    """Seconds since this process was started, to 10 ms; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0.0
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), counted from 3
    return max(uptime_s - started_s, 0.0)
