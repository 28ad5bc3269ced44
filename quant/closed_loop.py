"""The closed loop: the smallest plan that the gate accepts, by bisection over its size.

The gate is a command (`evaluate`, or any other with its exit codes), never an import: it judges the
artifact as whoever serves it would. Sensitivities are measured once; each step builds the best plan
of one size and asks. It does not know what the gate asks for.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quant.allocation import Allocation, Allocator, Group
from quant.artifact.integrity import sha256_of
from quant.errors import PipelineError

# What `evaluate` exits with when it has judged; everything else means that it could not.
VERDICTS = {0: "accepted", 1: "rejected", 3: "inconclusive"}
INTERRUPTED = 130
ACCEPTED = VERDICTS[0]
_MOST_BYTES = 64 << 20  # of a script or a suite's file; models are larger


def _read_by(place: Path) -> list[Path]:
    """The script that a word of the gate's command names, or the files of the suite."""
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place] if place.is_file() else []
    return [file for file in files if file.stat().st_size <= _MOST_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The command that judges (without the artifact), and the file that says what it asks for."""

    command: tuple[str, ...]
    gates: Path

    @property
    def key(self) -> str:
        """A hash of what a verdict depends on beside the artifact: the command, the scripts and
        suites that it names, and the gates."""
        named = (sha256_of(file) for word in self.command for file in _read_by(Path(word)))
        asked = "\0".join((*self.command, *named)).encode() + b"\0\0" + self.gates.read_bytes()
        return hashlib.sha256(asked).hexdigest()

    def judge(self, artifact: Path, out: Path) -> str:
        """`accepted`, `rejected` or `inconclusive`; the gate's own report and log go to `out`.

        Raises PipelineError when the gate could not judge, with what it said last, and
        KeyboardInterrupt when it was interrupted.
        """
        out.mkdir(parents=True, exist_ok=True)
        command = [*self.command, str(artifact), "--gates", str(self.gates), "--out", str(out)]
        log = out / "log.txt"
        try:
            with log.open("wb") as file:
                code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    check=False,
                ).returncode  # fmt: skip
        except OSError as error:
            raise PipelineError(
                f"the gate {command[0]!r} cannot be run: {error.strerror}; install it, or name "
                "another with --gate-command"
            ) from error
        if code in (INTERRUPTED, -2):
            raise KeyboardInterrupt
        if code not in VERDICTS:
            raise PipelineError(
                f"the gate could not judge {artifact.name} (exit code {code}): {_last(log)}; its "
                f"whole output is in {log}"
            )
        return VERDICTS[code]


def default_command(device: str) -> tuple[str, ...]:
    """`evaluate` of this installation, on the kind of device that quantizes."""
    return (sys.executable, "-m", "eval.cli", "--device", device.partition(":")[0])


def bisect(
    verdict_of: Callable[[Allocation], str],
    groups: Sequence[Group],
    limit: int | None,
    step: int,
    count: int,
) -> Iterator[tuple[Allocation, str]]:
    """Plans and verdicts on the way to the smallest accepted one, `count` at most.

    limit: bytes of the largest plan (None: the best there is). Ends when an accepted plan is less
    than `step` bytes above a size that was not accepted; where nothing was, the largest is asked
    last.
    """
    allocator = Allocator(groups, limit=limit)
    top = allocator.most_bytes if limit is None else min(limit, allocator.most_bytes)
    known: dict[Allocation, str] = {}
    low, high, is_accepted = allocator.least_bytes, top, False
    while high - low > step and len(known) < count - (not is_accepted):
        middle = (low + high) // 2
        plan = allocator.within(middle)
        if plan not in known:
            known[plan] = verdict_of(plan)
            yield plan, known[plan]
        if known[plan] == ACCEPTED:
            high, is_accepted = plan.num_bytes, True
        else:
            low = middle
    largest = allocator.within(top)
    if not is_accepted and largest not in known:
        yield largest, verdict_of(largest)


def _last(log: Path) -> str:
    """The last line that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else "it said nothing"
