"""`evaluate plan`: how many items a margin needs, and what a given number could show. No model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from eval.amounts import Amounts

if TYPE_CHECKING:
    from eval.planned import MetricPlan, Plan

HELP = (
    "Say what a suite can decide before anyone waits for it.\n\n"
    "For each margin of the gates file: how many items it takes to accept a candidate that is as "
    "good as its base, by how often the two answer differently (discordance); then what your "
    "number of items could accept, notice and reject. Exact probabilities under the gate's own "
    "rule, in seconds, without a model."
)
EPILOG = (
    "[bold]Examples:[/]\n\n"
    "evaluate plan\n\n"
    "evaluate plan --gates gates/full.yaml --items 900\n\n"
    "evaluate plan --margin 0.01 --margin 0.02 --discordance 0.04 --power 0.9\n\n"
    "evaluate plan --report ART-evaluation/report.json   [dim]# the discordance seen there[/]"
)


def plan(
    gates: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Where the margins stand. [dim]Default: gates/default.yaml.[/]"
        ),
    ] = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Whose strata to count. [dim]Default: the shipped gate half.[/]"
        ),
    ] = None,
    items: Annotated[
        int, typer.Option(metavar="N", min=1, max=50_000, help="Items you would use.")
    ] = Amounts.num_items,
    margin: Annotated[
        list[float] | None,
        typer.Option(
            metavar="SHARE",
            min=0.001,
            max=0.499,
            help="Further margins (0.02 = 2 points); repeatable.",
        ),
    ] = None,
    discordance: Annotated[
        list[float] | None,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=0.9,
            help="Share of items that change from right to wrong or back; repeatable. "
            "[dim]Default: 0.01, 0.02, 0.04, 0.08.[/]",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A report.json: plan with the discordance and base scores seen."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A model or artifact, by whose tokens the items are sorted into `length:` strata.",
        ),
    ] = None,
    base: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0.01, max=1.0, help="Share the base gets right."),
    ] = 0.98,
    power: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0.5, max=0.99, help="Wanted chance of the right answer."),
    ] = 0.8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and no tables.")] = False,
) -> None:
    """Plan; the text of --help is HELP."""
    from eval.planned import Seen, make_plan, read_seen

    seen = Seen() if report is None else read_seen(report)
    made = make_plan(
        gates=gates,
        suite=suite,
        num_items=items,
        margins=tuple(margin or ()),
        discordances=tuple(discordance or ()),
        seen=replace(seen, default_base=base),
        power=power,
        tokenizer=tokenizer,
    )
    if as_json:
        typer.echo(json.dumps(asdict(made), indent=2))
        return
    _show(Console(highlight=False), made)


def _show(console: Console, made: Plan) -> None:
    console.print(_needed_table(made))
    console.print(_ability_table(made))
    for line in made.remarks:
        console.print(line, markup=False)


def _needed_table(made: Plan) -> Table:
    table = Table(
        title=f"Items that accept an equal candidate {made.power:.0%} of the time",
        title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    table.add_column("margin \\ discordance")
    for share in made.discordances:
        table.add_column(f"{share:.1%}", justify="right")
    for margin, row in made.needed.items():
        table.add_row(f"{margin * 100:g} pp", *(_count(n) for n in row))
    return table


def _ability_table(made: Plan) -> Table:
    table = Table(
        title=f"\nWhat {made.num_items:,} items can do: accept an equal candidate, notice and "
        f"reject a drop (power {made.power:.0%})",
        title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    table.add_column("metric")
    for name in ("items", "margin", "differ", "accepts", "notices", "rejects", "needs"):
        table.add_column(name, justify="right")
    for row in made.metrics:
        table.add_row(*_cells(row))
    return table


def _cells(row: MetricPlan) -> tuple[str, ...]:
    can = row.ability
    return (
        row.label if row.required else f"({row.label})",
        f"{can.num_items:,}",
        f"{can.margin * 100:g} pp",
        f"{can.discordance:.1%}",
        f"{can.accepts_equal:.0%}",
        _drop(can.noticed),
        _drop(can.rejected),
        _count(row.needed),
    )


def _drop(share: float | None) -> str:
    return "nothing" if share is None else f"{share * 100:.1f} pp"


def _count(number: int | None) -> str:
    return "never" if number is None else f"{number:,}"
