"""The terminal's view of an evaluation: progress while it runs, then verdict, table, next steps.

Plain lines without colour or boxes when the output is not a terminal.
"""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from eval import figures, wording
from eval.api import Written
from eval.evaluation import Evaluation, Exchange
from eval.measurement import Measurement

_COLOURS = {
    "accepted": "green",
    "rejected": "red",
    "inconclusive": "yellow",
    "pass": "green",
    "fail": "red",
}
_LONGEST_ANSWER = 300
GUARDS = "In parentheses: guards. They reject what certainly got worse, but need not be decided."


class TerminalProgress:
    """`eval.progress.Progress` on a terminal: one bar per stage, gone when the verdict comes.

    Elsewhere (a log, a pipe) each stage leaves one line with its seconds when it is over; where
    nobody can be told, the work goes on.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=32),
            TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._began = 0.0

    def __enter__(self) -> TerminalProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()
        if error is None:
            self._log()

    def stage(self, text: str, total: int) -> None:
        """A new bar; the one before stays as it is."""
        self._log()
        self._stage, self._began = text, time.monotonic()
        self._task = self._bars.add_task(text, total=total)

    def advance(self, count: int) -> None:
        """Move the current bar."""
        assert self._task is not None
        self._bars.advance(self._task, count)

    def _log(self) -> None:
        if self._stage and not self._console.is_terminal:
            with suppress(OSError, SystemExit):  # the latter is rich's, of a pipe without reader
                self._console.print(f"{self._stage:<24} {time.monotonic() - self._began:6.1f} s")


def show(console: Console, written: Written, *, redact: bool = False) -> None:
    """Verdict, one row per rule, the worst regressions, what to do next, where the files lie.

    redact: without what was said in the regressions; a log is kept as a report is.
    """
    e = written.evaluation
    console.print(_verdict(e, boxed=console.is_terminal))
    console.print()
    console.print(_gate_table(e, console))
    if not all(finding.rule.required for finding in e.verdict.findings):
        console.print(Text(GUARDS, style="dim"))
    for line in wording.remarks(e):
        console.print(Text(line, style="yellow"))
    for note in e.notes:
        console.print(Text(f"note: {note}", style="dim"))
    if not redact:
        _show_regressions(console, e)
    if steps := wording.next_steps(e, written.json.parent):
        console.print("\n[bold]Next[/]")
    for step in steps:
        console.print(f"  {escape(step)}", soft_wrap=True)
    console.print("\n[bold]Files[/]")
    for what, path in (
        ("report", written.html),
        ("numbers", written.json),
        ("stamp", written.stamp or _unstamped(e)),
    ):
        console.print(f"  {what:<8} {escape(str(path))}", soft_wrap=True)


def _unstamped(e: Evaluation) -> str:
    why = "a server's answers were judged" if "against" in e.said else "--no-stamp"
    return f"none written ({why})"


def _verdict(e: Evaluation, *, boxed: bool) -> RenderableType:
    result = e.verdict.result
    head = Text(result.upper(), style=f"bold {_COLOURS[result]}")
    head.append(f"  {e.artifact.path.name}", style="bold")
    why = [Text(line) for line in wording.why(e)]
    scope = "" if result == "accepted" else f"{wording.scope(e)}; "
    how = Text(
        f"{scope}base {e.base.description}; candidate {e.numerics.description}; {e.seconds:.0f} s",
        style="dim",
    )
    body = Group(head, *why, how)
    return Panel(body, border_style=_COLOURS[result], padding=(0, 1)) if boxed else body


def _gate_table(e: Evaluation, console: Console) -> Table:
    percent = round((2 * e.sampling.confidence - 1) * 100)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("metric", min_width=12, overflow="fold")
    for name in ("base", "candidate"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"difference [{percent} %]", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for f in e.verdict.findings:
        table.add_row(
            Text(f.label),
            figures.value(f.measurement.base, f.measurement.unit),
            figures.value(f.measurement.candidate, f.measurement.unit),
            Text(_difference(f.measurement)),
            figures.limit(f.rule.kind, f.rule.limit),
            Text(
                figures.outcome(f.outcome, required=f.rule.required),
                style=_COLOURS.get(f.outcome, "yellow"),
            ),
        )
    return table


def _difference(m: Measurement) -> str:
    return figures.difference(m.estimate, m.lower, m.upper, m.unit)


def _show_regressions(console: Console, e: Evaluation) -> None:
    worst = wording.regressions(e)
    console.print("\n[bold]Worst regressions[/]" + ("" if worst else ": no item got worse"))
    for exchange in worst:
        item = exchange.pair.item
        console.print(
            f"  [bold]{escape(item.id)}[/] ({escape(item.source)}, {escape(item.lang)}): "
            f"{escape(wording.went_wrong(exchange))}",
            soft_wrap=True,
        )
        console.print(Padding(_answers(exchange), (0, 0, 0, 4)))


def _answers(exchange: Exchange) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for who, text in (
        ("right", wording.gold(exchange)),
        ("base", exchange.base_text),
        ("candidate", exchange.candidate_text),
    ):
        table.add_row(who, Text(_one_line(text)))
    return table


def _one_line(text: str) -> str:
    """One line without control characters: an answer must not drive the reader's terminal."""
    shown = "".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in text)
    line = " ".join(shown.split()) or "(empty)"
    return line if len(line) <= _LONGEST_ANSWER else line[: _LONGEST_ANSWER - 3] + "..."
