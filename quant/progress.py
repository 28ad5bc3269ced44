"""Progress of a run on stderr: a bar on a terminal, now and then a line in a log file."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from quant.plan_table import duration

_LINE_EVERY_S = 10.0


class BarProgress:
    """`quantizing  layer 7 of 30 ----- 6/30 0:00:41 0:02:50`, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def start(self, total_layers: int) -> None:
        self._task = self._bar.add_task("starting", total=total_layers)
        self._bar.start()

    def layer(self, index: int, text: str) -> None:
        self._bar.update(self._task, completed=index, description=text)

    def done(self) -> None:
        self._bar.update(self._task, completed=self._bar.tasks[0].total)
        self._bar.stop()

    def stop(self) -> None:
        """Give the terminal back after an error or Ctrl-C."""
        self._bar.stop()


class LineProgress:
    """A line for the first layer, then at most one every ten seconds, and rarer as time goes by."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, total_layers: int) -> None:
        self._total, self._began, self._spoke = total_layers, time.monotonic(), float("-inf")

    def layer(self, index: int, text: str) -> None:
        now = time.monotonic()
        elapsed = now - self._began
        if now - self._spoke < max(_LINE_EVERY_S, elapsed / 10):
            return
        self._spoke = now
        left = elapsed / index * (self._total - index) if index else None
        rest = "" if left is None else f", about {duration(left)} left"
        self._console.print(f"{text} ({_clock(elapsed)} so far{rest})")

    def done(self) -> None:
        self._console.print(f"all {self._total} layers done")

    def stop(self) -> None:
        return


def _clock(seconds: float) -> str:
    """`2:05`, `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def make_progress(console: Console) -> BarProgress | LineProgress:
    """A bar where it can be redrawn, else lines."""
    return BarProgress(console) if console.is_terminal else LineProgress(console)
