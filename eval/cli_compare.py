"""`evaluate compare A B`: did B lose anything against A? Over two folders of logged samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eval.errors import UsageError
from eval.places import check_out, write_files

NAME = "compare"
HELP = (
    "Compare two runs of lm-eval tasks, question by question: A is the base, B what is judged "
    "against it.\n\n"
    "A and B are folders written by lm-eval with --log_samples or by [bold]evaluate lm-eval "
    "--log-samples[/]. Their samples are paired by document and prompt; runs that did not answer "
    "the same questions are refused with what differs. Every metric gets the interval of its loss, "
    "McNemar's test (Holm-corrected over all), what was lost and gained, and a verdict: within the "
    "margin, beyond it, or too few items to tell."
)
EPILOG = (
    "[bold]Exit codes:[/] 0 no metric of B is worse by the margin or more, 1 one certainly is, "
    "2 wrong usage, 3 too few items to tell (the text says how many would do), 4 the runs cannot "
    "be paired or a value is missing.\n\n"
    "[bold]Examples:[/]\n\n"
    "evaluate compare runs/original runs/w4a16\n\n"
    "evaluate compare runs/original runs/w4a16 --tasks intent --metrics acc --margin 0.03 --out cmp"
)


def command(
    base: Annotated[Path, typer.Argument(metavar="A", help="The base's samples.")],
    candidate: Annotated[Path, typer.Argument(metavar="B", help="The samples to judge.")],
    margin: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Loss allowed in a rate or score (0.02 = 2 points of 100)."
        ),
    ] = 0.02,
    ppl_margin: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Rise allowed in perplexity (0.03 = 3 %)."),
    ] = 0.03,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these tasks, separated by commas."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these metrics, separated by commas."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="A field of the documents: items that share its value are one piece of evidence.",
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(metavar="SHARE", help="One-sided confidence of every bound.")
    ] = 0.95,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write compare.md and compare.json into DIR."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON instead of the text.")
    ] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave out prompts and answers.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seeds the bootstrap.")] = 0,
) -> None:
    """Compare two runs; the text of --help is HELP."""
    from eval import compare_report
    from eval.compare import Limits, compare
    from eval.compare_files import read_run
    from eval.stats import Sampling

    _check(margin, ppl_margin, confidence, seed)
    if out is not None:
        check_out(out)
    named_tasks, named_metrics = _names(tasks), _names(metrics)
    runs = [
        read_run(folder, lambda task: not named_tasks or task in named_tasks)
        for folder in (base, candidate)
    ]
    _all_there("--tasks", named_tasks, {task for run in runs for task in run.tasks})
    made = compare(
        *runs,
        limits=Limits(margin=margin, ratio=1 + ppl_margin),
        sampling=Sampling(confidence=confidence, seed=seed),
        wanted=lambda metric: not named_metrics or metric in named_metrics,
        cluster=cluster,
    )
    _all_there("--metrics", named_metrics, {m.metric for m in made.metrics})
    text = compare_report.as_markdown(made, redact=redact)
    data = json.dumps(compare_report.as_json(made, redact=redact), indent=2, ensure_ascii=False)
    if out is not None:
        write_files({"compare.md": text, "compare.json": data + "\n"}, out)
    typer.echo(data if as_json else text)
    raise typer.Exit(made.exit_code)


def _names(said: str | None) -> frozenset[str]:
    return frozenset(name.strip() for name in (said or "").split(",") if name.strip())


def _all_there(option: str, named: frozenset[str], found: set[str]) -> None:
    if missing := sorted(named - found):
        raise UsageError(
            f"{option}: {', '.join(missing)} cannot be compared here; there are "
            f"{', '.join(sorted(found)) or 'none'}"
        )


def _check(margin: float, ppl_margin: float, confidence: float, seed: int) -> None:
    for name, value, most in (
        ("margin", margin, 0.5), ("ppl-margin", ppl_margin, 10.0), ("confidence", confidence, 1.0),
    ):  # fmt: skip
        if not 0 < value < most:
            raise UsageError(f"--{name} is {value:g}; expected more than 0 and less than {most:g}")
    if confidence <= 0.5:
        raise UsageError(f"--confidence is {confidence:g}; expected more than 0.5")
    if seed < 0:
        raise UsageError(f"--seed is {seed}; expected at least 0")
