"""Joining: people's review into an evaluation that is written, its report, verdict and stamp.

The review must be of these very answers: its artifact digest and the sha256 of the samples that its
pack was drawn from are held to the report's.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval import stamping, wording
from eval.errors import EvaluationError, UsageError
from eval.evaluation import Evaluation
from eval.places import write_files
from eval.reading import check_review, read_report
from eval.redaction import redacted
from eval.report import JSON_NAME, pages, samples_sha256
from eval.review.rules import ReviewDemand, Rules
from eval.review.verdict import state, with_review
from quant.artifact.errors import ArtifactError
from quant.artifact.stamp import ReviewRecord, read_stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The evaluation's values with the review, and the stamp; None where there was none."""

    data: dict[str, Any]
    stamp: Path | None


def join(data: Mapping[str, Any], review: Mapping[str, Any], where: str) -> dict[str, Any]:
    """report.json's values with the review and the verdict of all layers.

    where: begins the message of the UsageError for a review that is not of this evaluation, or
    that asked less than its gates demand.
    """
    check_review(review, where)
    _require_same(data, review, where)
    _require_no_second_try(data, review, where)
    demanded = data["gates"].get("review")
    if demanded is not None:
        demand = ReviewDemand.model_validate(demanded)
        laxer = demand.laxer(Rules.model_validate(review["rules"]), data["method"]["confidence"])
        if laxer:
            raise UsageError(
                f"{where} asked less of the candidate than the gates demand: {laxer}; make a new "
                "pack, whose rules are then the gates'"
            )
    joined = with_review(data, review)
    return {**joined, "next": _next(joined)}


def _require_same(data: Mapping[str, Any], review: Mapping[str, Any], where: str) -> None:
    for what, found, expected in (
        ("artifact", review.get("artifact_digest"), data["artifact"]["digest"]),
        ("answers", review.get("samples_sha256"), data["samples_sha256"]),
    ):
        if found != expected:
            raise UsageError(
                f"{where} is a review of other {what}: it names the digest {found}, the report "
                f"{expected}; make the pack from this evaluation"
            )


def _require_no_second_try(data: Mapping[str, Any], review: Mapping[str, Any], where: str) -> None:
    """A pack drawn after a review has rejected these answers would be drawn until one accepts."""
    earlier = _rejection_in(data)
    if earlier is not None and earlier.pack_sha256 != review["pack"]["sha256"]:
        raise UsageError(
            f"{where} is of another pack than the review that rejected these very answers (pack "
            f"sha256 {str(earlier.pack_sha256)[:8]}...), and asking until one accepts proves "
            "nothing; let more raters answer that pack, or change the artifact"
        )


def _rejection_in(data: Mapping[str, Any]) -> ReviewRecord | None:
    """The review in report.json's values that rejected its answers, now or at an earlier time."""
    if data.get("review") is not None:
        return stamping.review_record(data) if data["review"]["verdict"] == "rejected" else None
    before = data.get("rejected_before")
    return None if before is None else ReviewRecord.model_validate(before)


def remembering(evaluation: Evaluation, folder: Path) -> Evaluation:
    """The evaluation, rejected where people rejected these very answers when they were judged
    before: so says the report in `folder` or the artifact's stamp, which this one replaces.

    Otherwise to evaluate again would be a way around that review.
    """
    before = _rejection_before(evaluation, folder)
    if before is None:
        return evaluation
    verdict = replace(evaluation.verdict, result="rejected")
    return replace(evaluation, verdict=verdict, rejected_before=before)


def _rejection_before(evaluation: Evaluation, folder: Path) -> ReviewRecord | None:
    digest, answers = evaluation.artifact.digest, samples_sha256(evaluation)
    with suppress(UsageError):  # what cannot be read is no report
        data = read_report(folder / JSON_NAME)
        same = (data["artifact"]["digest"], data["samples_sha256"]) == (digest, answers)
        if same and (found := _rejection_in(data)) is not None:
            return found
    with suppress(ArtifactError):
        stamp = read_stamp(evaluation.artifact.path)
        review = None if stamp is None or stamp.artifact_digest != digest else stamp.review
        if review is not None and review.verdict == "rejected":
            return review if review.samples_sha256 == answers else None
    return None


def _next(data: Mapping[str, Any]) -> list[str]:
    """What to do once people were asked."""
    if data["verdict"] == "accepted":
        return [wording.serve(Path(data["artifact"]["path"]))]
    steps = {
        "fail": wording.PEOPLE_FOUND,
        "pending": "Let the raters finish: evaluate review serve PACK, then evaluate review score.",
        "inconclusive": _larger(data),
    }
    said = steps.get(state(data))
    return [said] if said else list(data["next"])


def _larger(data: Mapping[str, Any]) -> str:
    needed = [a["num_needed"] for a in data["review"]["answers"] if a.get("num_needed")]
    if not needed:
        return "No number of requests would decide this review at the rates it found."
    command = shlex.join(["evaluate", "review", "pack", "DIR", "--n", str(max(needed))])
    return f"Ask about more requests: {command} --out PACK"


def complete(
    data: Mapping[str, Any],
    review: Mapping[str, Any],
    where: str,
    folder: Path,
    *,
    stamp: bool,
    redact: bool = False,
) -> Joined:
    """Join, stamp the artifact where it has this evaluation's stamp, and write the pages anew.

    Raises UsageError and EvaluationError; nothing is written then.
    """
    joined = join(data, review, where)
    try:
        stamped = stamping.reviewed(joined) if stamp else None
        write_files(pages(redacted(joined) if redact else joined), folder)
        return Joined(data=joined, stamp=None if stamped is None else stamping.put(*stamped))
    except ArtifactError as error:
        raise EvaluationError(str(error)) from error
