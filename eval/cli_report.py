"""`evaluate report`: the pages of an evaluation made anew from its report.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eval.errors import UsageError


def report(
    evaluation: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of an evaluation's reports.")
    ],
    review: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="review.json of `evaluate review score`: layer 3 joins the verdict, in the "
            "report and in the artifact's stamp.",
        ),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What `runtime bench --json FILE` measured of the artifact."
        ),
    ] = None,
    bench_base: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same of the base, under the same load."),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact",
            help="Keep requests, answers and right values out. Not with --out: for good.",
        ),
    ] = False,
    stamp: Annotated[
        bool,
        typer.Option(
            "--stamp/--no-stamp", help="With --review: write the verdict of all layers into ART."
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where they go. [dim]Default: the same folder.[/]"),
    ] = None,
) -> None:
    """Make all pages anew from report.json, for another look: with the people's review, with
    measured speed, or without confidential words. The exit code is 0 whatever the verdict."""
    from eval.joining import complete
    from eval.places import check_out, write_files
    from eval.reading import read_object, read_report
    from eval.redaction import redacted
    from eval.report import HTML_NAME, JSON_NAME, pages

    data = read_report(evaluation / JSON_NAME)
    check_out(out or evaluation)
    if bench is not None or bench_base is not None:
        data["speed"] = _speed(bench, bench_base)
    data = redacted(data) if redact else data
    place = out or evaluation
    console = Console(highlight=False)
    if review is not None:
        found = read_object(review)
        joined = complete(data, found, str(review), place, stamp=stamp, redact=redact)
        console.print(f"{joined.data['verdict'].upper()}: {joined.data['summary']}", markup=False)
    else:
        write_files(pages(data), place)
    console.print(str(place / HTML_NAME), markup=False, soft_wrap=True)


# What two runs must have in common, with the option of `runtime bench` that sets it.
_LOAD = {
    "concurrency": "--concurrency",
    "max_tokens": "--max-tokens",
    "asked_sha256": "--prompt or --prompts, and --temperature",
}


def _speed(bench: Path | None, bench_base: Path | None) -> dict[str, Any]:
    """Both runs of `runtime bench`, which must be comparable."""
    if bench is None:
        raise UsageError("--bench-base needs --bench: what the artifact does itself")
    found = {"candidate": _bench(bench)}
    if bench_base is None:
        return found
    found["base"] = _bench(bench_base)
    for key, option in _LOAD.items():
        # Files of an earlier version have only the first of them.
        loads = [run[key] for run in found.values() if key in run]
        if len(set(loads)) > 1:
            raise UsageError(
                f"{bench} and {bench_base} are of different loads ({key} {loads[0]} and "
                f"{loads[1]}) and cannot be compared; run both with the same {option}"
            )
    return found


def _bench(path: Path) -> dict[str, Any]:
    from eval.reading import read_object

    run = read_object(path)
    missing = {"sent", "ok", "concurrency", "output_tok_s", "ttft_ms", "tpot_ms"} - run.keys()
    if missing:
        raise UsageError(
            f"{path} is not what `runtime bench --json` writes: it lacks "
            f"{', '.join(sorted(missing))}"
        )
    if run["ok"] < run["sent"] or not run["ok"] or not run["tpot_ms"]:
        raise UsageError(
            f"{path}: only {run['ok']} of {run['sent']} requests were answered with text; a speed "
            "is that of a run without failures"
        )
    if run.get("rate") is not None:
        raise UsageError(
            f"{path} is of an open loop (--rate {run['rate']:g}): its throughput is what was sent; "
            "run without --rate"
        )
    return run
