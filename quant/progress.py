"""Progress of a run on stderr: a bar on a terminal, now and then a line in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from quant.plan_table import duration

_LINE_EVERY_S = 10.0


class TimeLeft(ProgressColumn):
    """`2:50 left`, counting down to the `ends` of the task (a time of its clock, or None).

    rich's own column looks at the last 30 seconds, in which slow layers never finish.
    """

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        return Text("" if ends is None else f"{_clock(max(0.0, ends - task.get_time()))} left")


class BarProgress:
    """`quantizing  layer 7 of 30 ----- 6/30 0:00:41 2:50 left`, redrawn in place."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeLeft(),
            console=console,
            transient=True,
            get_time=clock,
        )

    def start(self, total_layers: int) -> None:
        self._total, self._began = total_layers, self._now()
        self._task = self._bar.add_task("starting", total=total_layers, ends=None)
        self._bar.start()

    def layer(self, index: int, text: str) -> None:
        now = self._now()
        left = seconds_left(now - self._began, index, self._total)
        ends = None if left is None else now + left
        self._bar.update(self._task, completed=index, description=text, ends=ends)

    def done(self) -> None:
        self._bar.update(self._task, completed=self._bar.tasks[0].total)
        self._bar.stop()

    def stop(self) -> None:
        """Give the terminal back after an error or Ctrl-C."""
        self._bar.stop()


class LineProgress:
    """A line for the first layer, then at most one every ten seconds, and rarer as time goes by."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = console, clock

    def start(self, total_layers: int) -> None:
        self._total, self._began, self._spoke = total_layers, self._now(), float("-inf")

    def layer(self, index: int, text: str) -> None:
        now = self._now()
        elapsed = now - self._began
        if now - self._spoke < max(_LINE_EVERY_S, elapsed / 10):
            return
        self._spoke = now
        left = seconds_left(elapsed, index, self._total)
        rest = "" if left is None else f", about {duration(left)} left"
        self._console.print(f"{text} ({_clock(elapsed)} so far{rest})")

    def done(self) -> None:
        self._console.print(f"done after {_clock(self._now() - self._began)}")

    def stop(self) -> None:
        return


def seconds_left(elapsed: float, index: int, total: int) -> float | None:
    """At the speed of the first `index` layers of `total`; None before one is done."""
    return elapsed / index * (total - index) if index else None


def _clock(seconds: float) -> str:
    """`2:05`, `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def make_progress(console: Console) -> BarProgress | LineProgress:
    """A bar where it can be redrawn, else lines."""
    return BarProgress(console) if console.is_terminal else LineProgress(console)
