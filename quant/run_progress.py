"""How far a run is, and how long its stages took."""

from __future__ import annotations

import time
from typing import Protocol


class Progress(Protocol):
    """Told how far a run is."""

    def start(self, total_layers: int) -> None: ...

    def layer(self, index: int, text: str) -> None: ...

    def done(self) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def start(self, total_layers: int) -> None:
        return

    def layer(self, index: int, text: str) -> None:
        return

    def done(self) -> None:
        return


class Clock:
    """Seconds per stage of a run, in order."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Book the time since the last lap under `stage`."""
        now = time.perf_counter()
        self.seconds[stage], self._since = now - self._since, now
