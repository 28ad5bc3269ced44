"""`evaluate review`: pack, serve and score. Parses and shows; `eval.review` works."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Layer 3: people compare both models' answers without knowing which is which.",
    epilog="[bold]Example:[/]\n\n"
    "evaluate my-model-w4a16 --out report\n\n"
    "evaluate review pack report --out blind\n\n"
    "evaluate review serve blind\n\n"
    "evaluate review score blind --evaluation report",
)

PackArgument = Annotated[
    Path, typer.Argument(metavar="PACK", help="The folder that `review pack` made.")
]


@app.command(
    help="Draw requests that both models answered differently, seal the sides, plant controls.\n\n"
    "Writes the folder PACK for the raters and PACK.key.json beside it, which says which side was "
    "which: keep it from the raters until they are done."
)
def pack(
    evaluation: Annotated[
        Path,
        typer.Argument(metavar="EVALUATION_DIR", help="Where `evaluate` wrote samples.jsonl."),
    ],
    out: Annotated[Path, typer.Option(metavar="PACK", help="The folder to make.")],
    n: Annotated[
        int, typer.Option("--n", min=10, max=1000, help="Requests; 100-200 is what people manage.")
    ] = 150,
    seed: Annotated[int, typer.Option(min=0, help="Which requests are drawn.")] = 0,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact/--no-redact",
            help="Replace e-mail addresses, telephone, identity and card numbers and keys.",
        ),
    ] = True,
    margin: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=0.999,
            help="Net share of requests in which the base may be preferred. "
            "[dim]Default: what the gates demand, else 0.15.[/]",
        ),
    ] = None,
    max_critical: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=0.999,
            help="Share of requests in which the candidate alone may do "
            "harm. [dim]Default: what the gates demand, else 0.03.[/]",
        ),
    ] = None,
) -> None:
    """Make a pack; the text of --help is above."""
    from eval.review.commands import make_pack
    from eval.review.wording import packed

    made = make_pack(
        evaluation,
        out,
        count=n,
        seed=seed,
        redact=redact,
        margin=margin,
        max_critical=max_critical,
    )
    for line in packed(made.draw, made.asked):
        typer.echo(line)
    typer.echo(f"Give the raters {out}; keep {made.key} from them until they are done.")
    typer.echo(f"Next: evaluate review serve {out}")


@app.command(
    help="Show a pack in the browser, on this machine only (127.0.0.1).\n\n"
    "Every rating is on disk before the page goes on; start again and go on at any time. Several "
    "raters may work at once, each under a name of their own."
)
def serve(
    pack: PackArgument,
    rater: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose page this is; otherwise it asks.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8090,
) -> None:
    """Serve the rating page; the text of --help is above."""
    from eval.review import web
    from eval.review.pack import open_pack
    from eval.review.ratings import rater_name, read_all
    from quant.artifact.signals import Terminated

    opened = open_pack(pack)
    read_all(opened)
    served = web.make_app(opened, None if rater is None else rater_name(rater))
    listener = web.bind(port)
    typer.echo(
        f"{len(opened.items)} items. Open http://{web.HOST}:{listener.getsockname()[1]}/ "
        "(Ctrl-C ends; ratings are saved as they are made)"
    )
    # A signal is how this ends, not how it fails.
    with suppress(KeyboardInterrupt, Terminated):
        web.make_server(served).run(sockets=[listener])
    score = shlex.join(["evaluate", "review", "score", str(pack), "--evaluation"])
    typer.echo(f"Next, when all have rated: {score} EVALUATION_DIR")


@app.command(
    help="Unseal a pack and judge it.\n\n"
    "[bold]Exit codes:[/] 0 accepted, 1 rejected, 2 wrong usage, 3 pending (requests without a "
    "rating) or inconclusive, 4 could not judge (pack, key or ratings are not as they were made)."
)
def score(
    pack: PackArgument,
    key: Annotated[
        Path | None, typer.Option(metavar="KEY", help="The key.  [dim]Default: PACK.key.json.[/]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="For review.json, .md, .html. [dim]Default: PACK-review.[/]"
        ),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            metavar="EVALUATION_DIR",
            help="The evaluation that the pack is from: layer 3 joins its verdict, in its report "
            "and in the artifact's stamp, and the exit code is that of all layers.",
        ),
    ] = None,
    stamp: Annotated[
        bool,
        typer.Option(
            "--stamp/--no-stamp", help="With --evaluation: write the verdict into the artifact."
        ),
    ] = True,
) -> None:
    """Score a pack; the text of --help is above."""
    from eval.review.commands import score_pack
    from eval.review.wording import scored

    review, folder = score_pack(pack, key=key, out=out)
    console = Console(highlight=False)
    for line in scored(review):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"\nFiles: {folder}/review.html, review.md, review.json", markup=False)
    if evaluation is None:
        console.print(_ALONE, markup=False, soft_wrap=True)
        raise typer.Exit(review.exit_code)
    raise typer.Exit(_join(console, evaluation, folder / "review.json", stamp=stamp))


_ALONE = (
    "No evaluation knows of it yet: --evaluation DIR brings it into the report and the artifact's "
    "stamp."
)


def _join(console: Console, evaluation: Path, review: Path, *, stamp: bool) -> int:
    """Layer 3 into the evaluation's verdict; its exit code."""
    from eval.joining import complete
    from eval.reading import read_object, read_report

    data = read_report(evaluation / "report.json")
    joined = complete(data, read_object(review), str(review), evaluation, stamp=stamp)
    console.print(f"\n{joined.data['verdict'].upper()}: {joined.data['summary']}", markup=False)
    stamped = joined.stamp or "none written (--no-stamp, or the artifact has none)"
    console.print(f"report   {evaluation}/report.html\nstamp    {stamped}", markup=False)
    return int(joined.data["exit_code"])
