"""`evaluate self-test`: does the gate say yes to the base and no to planted faults?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.amounts import Amounts
from eval.cli_options import (
    ComputeKind,
    Device,
    DeviceKind,
    DType,
    Gates,
    Items,
    KVCacheDType,
    KVKind,
    NoiseItems,
    Seed,
    SuiteDir,
    Threads,
    Windows,
    WindowTokens,
    engine_config,
)
from eval.places import beside, check_out

if TYPE_CHECKING:
    from eval.self_test import SelfTest

NAME = "self-test"
# A defect shows on far less text than a sound artifact needs; fewer than 59 items cannot
# accept the base at a margin of 5 pp (`evaluate plan`).
_DEFAULT = Amounts(num_windows=24, window_tokens=128, num_items=60, num_noise_items=8)
_COLOURS = {"accepted": "green", "rejected": "red", "refused": "red", "inconclusive": "yellow"}
HELP = (
    "Prove the gate on your own data before you trust it: with your base, your suite and your "
    "limits, the base against itself must be accepted, and copies of it with planted defects must "
    "not be.\n\n"
    "Planted are: 3-bit rounding, a layer of noise, a layer of zeros, the weights of another "
    "tokenizer; and in the files that say how text is read a chat template without roles, one "
    "without generation prompt, a tokenizer with two ids exchanged (refused before any question, "
    "because the base reads otherwise). A missed defect comes with what would show it. Nothing is "
    "written into the artifact."
)
EPILOG = (
    "[bold]Exit codes:[/] 0 all as it should be (where the base against itself is undecided only "
    "for want of items, that is said), 1 the gate failed its test, 2 wrong usage, 4 could not.\n\n"
    "[bold]Space and time:[/] one candidate is in memory at a time, and on disk two copies of the "
    "base in the temporary folder (TMPDIR). A defect that the held-out text alone rejects is not "
    "asked the tasks; the base's answers are kept as [bold]evaluate[/] keeps them.\n\n"
    "[bold]Examples:[/]\n\n"
    "evaluate self-test my-model-w4a16\n\n"
    "evaluate self-test --base models/smollm2 --suite mine --gates mine.yaml\n\n"
    "evaluate self-test my-model-w4a16 --defect 3-bit --defect template-roles --items 60"
)


def command(
    artifact: Annotated[
        Path | None,
        typer.Argument(metavar="ART", help="An artifact: its base is tested with."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Instead of ART: a model directory, a GGUF file or a hub id."
        ),
    ] = None,
    gates: Gates = None,
    suite: SuiteDir = None,
    items: Items = _DEFAULT.num_items,
    noise_items: NoiseItems = _DEFAULT.num_noise_items,
    windows: Windows = _DEFAULT.num_windows,
    window_tokens: WindowTokens = _DEFAULT.window_tokens,
    defect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Plant only this one (repeatable): template-roles, template-prompt, tokenizer, "
            "3-bit, noise-layer, zero-layer, vocabulary.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where self-test.md and self-test.json go. [dim]Default: ART-self-test, or "
            "MODEL-self-test here.[/]",
        ),
    ] = None,
    device: Device = DeviceKind.auto,
    dtype: DType = ComputeKind.auto,
    kv_cache_dtype: KVCacheDType = KVKind.auto,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Test the gate; the text of --help is HELP."""
    from eval import self_test_report
    from eval.api import make_job
    from eval.self_test import self_test
    from eval.terminal import TerminalProgress

    job = make_job(
        artifact or Path(),
        base,
        gates,
        suite=suite,
        amounts=Amounts(
            num_windows=windows,
            window_tokens=window_tokens,
            num_items=items,
            num_noise_items=noise_items,
            seed=seed,
        ),
        engine=engine_config(device, dtype, kv_cache_dtype, threads),
    )
    folder = out or _default_out(artifact, base)
    check_out(folder)
    console = Console(highlight=False)
    with TerminalProgress(console) as progress:
        made = self_test(job, progress, artifact=artifact, wanted=tuple(defect or ()))
    self_test_report.write(made, folder)
    show(console, made, folder)
    raise typer.Exit(made.exit_code)


def _default_out(artifact: Path | None, base: str | None) -> Path:
    if artifact is not None:
        return beside(artifact, "-self-test")
    return Path(f"{Path(base or '').name}-self-test")


def show(console: Console, made: SelfTest, folder: Path) -> None:
    """The sentence, the table, what to do about each row, where the files lie."""
    from eval import self_test_report

    passed = made.exit_code == 0
    head = Text("PASSED" if passed else "FAILED", style="bold green" if passed else "bold red")
    head.append("  " + self_test_report.summary(made), style="not bold default")
    console.print(head, soft_wrap=True)
    console.print()
    console.print(_table(made))
    for row in made.rows:
        for line in self_test_report.lines(row):
            console.print(f"{row.title}: {line}", markup=False, soft_wrap=True)
    console.print(
        f"\nBase {made.base.description}; candidates {made.candidate}; {made.seconds:.0f} s",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    path = folder / self_test_report.MARKDOWN_NAME
    console.print(f"Written: {path} and .json beside it", markup=False, soft_wrap=True)


def _table(made: SelfTest) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("candidate", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("spoke first", no_wrap=True)
    table.add_column("right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for row in made.rows:
        right = "yes" if row.as_expected else "NO"
        table.add_row(
            row.title,
            Text(row.outcome, style=_COLOURS.get(row.outcome, "dim")),
            row.spoke or "-",
            "-" if row.outcome == "not applicable" else right,
            f"{row.seconds:.1f}",
        )
    return table
