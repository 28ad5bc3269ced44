"""What `evaluate review pack` and `score` do, as functions: read, work, write."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eval.errors import UsageError
from eval.places import beside, check_out, write_files
from eval.review import render
from eval.review.draw import Draw, draw
from eval.review.pack import (
    Key,
    Origin,
    Pack,
    check_place,
    key_path,
    open_key,
    open_pack,
    seal,
)
from eval.review.ratings import read_all
from eval.review.rules import ReviewDemand, Rules
from eval.review.samples import SAMPLES_NAME, explain, read_samples
from eval.review.score import Review, score

REPORT_NAME = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A pack that was made."""

    path: Path
    key: Path
    draw: Draw
    asked: int


def make_pack(
    evaluation: Path,
    out: Path,
    *,
    count: int,
    seed: int,
    redact: bool,
    margin: float | None = None,
    max_critical: float | None = None,
) -> Packed:
    """Draw from an evaluation's samples.jsonl and seal.

    margin, max_critical: the pack's rules; None takes what the evaluation's gates demand.
    Raises UsageError (SuiteError for the samples); nothing is written then.
    """
    check_place(out)
    check_out(out)
    samples, digest = read_samples(evaluation / SAMPLES_NAME)
    report = _report(evaluation / REPORT_NAME)
    if report is not None and report.get("samples_sha256", digest) != digest:
        raise UsageError(
            f"{evaluation / SAMPLES_NAME} is not as its evaluation wrote it (the sha256 is not "
            f"{REPORT_NAME}'s), so no verdict could take the review in; evaluate again"
        )
    rules = _rules(report, margin, max_critical)
    drawn = draw(samples, count, seed)
    origin = Origin(samples_sha256=digest, artifact_digest=_artifact_digest(report), seed=seed)
    key = seal(drawn, out, origin, rules=rules, redact=redact)
    return Packed(path=out, key=key, draw=drawn, asked=count)


def _report(path: Path) -> dict[str, Any] | None:
    """The evaluation's report, None where samples were made without one."""
    try:
        report = json.loads(path.read_bytes())
        report["artifact"]["digest"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} does not name the artifact it judges ({error!r}); "
            "evaluate again, so that the review can be bound to it"
        ) from error
    if report.get("is_redacted", False):
        raise UsageError(
            f"{path.parent} was written with --redact and holds no answers to compare; evaluate "
            "again without it: the pack hides personal data by itself"
        )
    found: dict[str, Any] = report
    return found


def _artifact_digest(report: dict[str, Any] | None) -> str | None:
    return None if report is None else str(report["artifact"]["digest"])


def _rules(
    report: dict[str, Any] | None, margin: float | None, max_critical: float | None
) -> Rules:
    """The gates' demand where they have one, else the defaults, as far as nothing else was said."""
    demanded = (report or {}).get("gates", {}).get("review")
    if demanded is None or report is None:
        said = {"margin": margin, "max_critical": max_critical}
        return Rules(**{name: value for name, value in said.items() if value is not None})
    try:
        demand = ReviewDemand.model_validate(demanded)
        return demand.rules(report["method"]["confidence"], margin, max_critical)
    except ValidationError as error:
        raise UsageError(
            f"{REPORT_NAME} is not as `evaluate` wrote it: {explain(error)}; evaluate again"
        ) from None
    except ValueError as error:
        raise UsageError(str(error)) from error


def score_pack(pack: Path, *, key: Path | None, out: Path | None) -> tuple[Review, Path]:
    """Unseal, judge, write review.json, review.md and review.html; the review and their folder.

    Raises EvaluationError when pack, key and ratings do not belong together.
    """
    opened = open_pack(pack)
    unsealed = open_key(key or key_path(pack), opened)
    review = score(unsealed, opened.info.rules, read_all(opened))
    folder = out or beside(pack, "-review")
    check_out(folder)
    write_files(_files(review, opened, unsealed), folder)
    return review, folder


def _files(review: Review, pack: Pack, key: Key) -> dict[str, str]:
    facts = render.to_json(review) | _provenance(pack, key)
    return {
        "review.md": render.to_markdown(review),
        "review.html": render.to_html(review, pack.items),
        "review.json": json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    }


def _provenance(pack: Pack, key: Key) -> dict[str, Any]:
    return {
        "pack": {
            "sha256": pack.digest,
            "key_sha256": pack.info.key_sha256,
            "items_sha256": pack.info.items_sha256,
            "created_at": pack.info.created_at,
            "redacted": pack.info.redacted,
            "seed": key.seed,
        },
        "samples_sha256": key.samples_sha256,
        "artifact_digest": key.artifact_digest,
        "ratings": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(pack.ratings.glob("*.jsonl"))
        },
    }
