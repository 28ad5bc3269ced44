"""`evaluate report`: the pages of an evaluation made anew from its report.json."""

from __future__ import annotations

import json
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
            metavar="FILE", help="review.json of `evaluate review score`, for the third layer."
        ),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact",
            help="Keep requests, answers and right values out. Not with --out: for good.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where they go. [dim]Default: the same folder.[/]"),
    ] = None,
) -> None:
    """Make report.html, junit.xml and summary.md anew from report.json, for another look: with the
    people's review, or without confidential words."""
    from eval.redaction import redacted
    from eval.report import HTML_NAME, JSON_NAME, MARKDOWN_NAME, pages, write_files

    data = read_report(evaluation / JSON_NAME)
    if review is not None:
        data["review"] = _of_the_same(_read(review), data, review)
    data = redacted(data) if redact else data
    place = out or evaluation
    write_files(pages(data), place)
    if redact and out is None:
        # It quotes answers, and cannot be made from values without them.
        (evaluation / MARKDOWN_NAME).unlink(missing_ok=True)
    Console(highlight=False).print(str(place / HTML_NAME), markup=False, soft_wrap=True)


def _of_the_same(review: dict[str, Any], data: dict[str, Any], path: Path) -> dict[str, Any]:
    """`review`, which must be of the artifact that the report judges."""
    found, expected = review.get("artifact_digest"), data["artifact"]["digest"]
    if found != expected or "verdict" not in review:
        raise UsageError(
            f"{path} is no review of this artifact: it names the digest {found}, the report "
            f"{expected}"
        )
    return review


def read_report(path: Path) -> dict[str, Any]:
    """The values of a report.json of this major version; UsageError names what is wrong."""
    from eval.report import REPORT_VERSION

    data = _read(path)
    found, major = data.get("format_version"), REPORT_VERSION.partition(".")[0]
    if not isinstance(found, str) or found.partition(".")[0] != major:
        raise UsageError(
            f"{path}: format_version is {found!r}; expected {major}.x, as `evaluate` writes it"
        )
    missing = {"verdict", "findings", "measurements", "items", "kld", "artifact"} - data.keys()
    if missing:
        raise UsageError(f"{path}: no report of `evaluate`, it lacks {', '.join(sorted(missing))}")
    return data


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON text: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds {type(data).__name__}; expected an object")
    return data
