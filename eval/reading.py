"""Reading: report.json and review.json back from disk, as `evaluate` wrote them or not at all.

What a command decides by is held to its shape, and to itself: a verdict that its own findings do
not make was edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eval.errors import UsageError
from eval.gate_rules import Outcome
from eval.report import REPORT_VERSION, pages
from eval.review.rules import ReviewDemand, Rules
from eval.review.samples import explain
from eval.review.verdict import with_review
from quant.artifact.errors import ArtifactError
from quant.artifact.jsonio import parse_object
from quant.artifact.stamp import ReviewRecord

REVIEW_MAJOR = "1"
# What a page can fail with over values that have another shape than `evaluate` gives them.
_MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
              TemplateError, UsageError)  # fmt: skip

_QUESTIONS = {"preference", "critical_faults"}

Result = Literal["accepted", "rejected", "inconclusive"]
Count = Annotated[int, Field(ge=0)]


class _Shape(BaseModel):
    """What a file must hold to be believed; more than that is let be."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class _Interval(_Shape):
    estimate: float
    lower: float | None
    upper: float | None


class _Preference(_Shape):
    net: _Interval


class _Faults(_Shape):
    new: _Interval


class _Answer(_Shape):
    name: str
    outcome: Outcome
    reason: str
    num_needed: int | None = None


class _Rater(_Shape):
    rater: str
    standing: str


class _Vote(_Shape):
    note: str


class _Rated(_Shape):
    votes: list[_Vote]


class _Pack(_Shape):
    sha256: str


class _Review(_Shape):
    """review.json, as far as a verdict and its pages need it."""

    format_version: str
    verdict: Literal["accepted", "rejected", "inconclusive", "pending"]
    summary: str
    could_show: str
    rules: Rules
    pack: _Pack
    num_rated: Count
    num_packed: Count
    num_differing: Count
    num_requests: Count
    raters: list[_Rater]
    preference: _Preference | None
    faults: _Faults | None
    answers: list[_Answer]
    items: list[_Rated] = []
    artifact_digest: str | None = None
    samples_sha256: str | None = None


class _Measured(_Shape):
    verdict: Result
    summary: str


class _Artifact(_Shape):
    path: str
    digest: str


class _Gates(_Shape):
    sha256: str
    review: ReviewDemand | None


class _Method(_Shape):
    confidence: Annotated[float, Field(gt=0.5, lt=1)]


class _Finding(_Shape):
    outcome: Outcome
    required: bool


class _Report(_Shape):
    """report.json, as far as a verdict needs it; the pages need more."""

    verdict: Result
    exit_code: int
    summary: str
    judged_at: str
    measured: _Measured
    artifact: _Artifact
    gates: _Gates
    method: _Method
    findings: Annotated[list[_Finding], Field(min_length=1)]
    samples_sha256: str
    next: list[str]
    review: _Review | None
    rejected_before: ReviewRecord | None = None


def read_report(path: Path) -> dict[str, Any]:
    """The values of a report.json of this major version; UsageError names what is wrong."""
    data = read_object(path)
    found, major = data.get("format_version"), REPORT_VERSION.partition(".")[0]
    if "report_version" in data:
        raise UsageError(
            f"{path} is what `quantize` wrote of an artifact; give the folder that `evaluate` "
            "wrote its report to (--out, by default ART-evaluation)"
        )
    if not isinstance(found, str) or found.partition(".")[0] != major:
        raise UsageError(
            f"{path}: format_version is {found!r}; expected {major}.x, as `evaluate` writes it"
        )
    try:
        report = _Report.model_validate(data)
    except ValidationError as error:
        raise UsageError(
            f"{path}: no report of this version's `evaluate`: {explain(error)}; evaluate again"
        ) from None
    if report.review is not None:
        _require_consistent_review(report.review, str(path))
    try:
        joint = with_review(data, data["review"])["verdict"]
        pages(data)
    except _MISSHAPEN as error:
        raise UsageError(
            f"{path}: no report of this version's `evaluate`, its pages cannot be made "
            f"({error!r:.200}); evaluate again"
        ) from error
    if (report.measured.verdict, report.verdict) != (_measured(report), joint):
        raise UsageError(
            f"{path}: its verdict {report.verdict} (layers 1 and 2: {report.measured.verdict}) is "
            "not what its findings make, so it was edited; evaluate again"
        )
    return data


def _measured(report: _Report) -> Result:
    """As `eval.gate` makes a verdict of findings."""
    if any(f.outcome == "fail" for f in report.findings):
        return "rejected"
    if any(f.outcome == "inconclusive" and f.required for f in report.findings):
        return "inconclusive"
    return "accepted"


def check_review(data: Mapping[str, Any], where: str) -> None:
    """UsageError unless these are the values of a review.json that agrees with itself."""
    if not str(data.get("format_version")).startswith(f"{REVIEW_MAJOR}."):
        raise UsageError(
            f"{where} is no review.json of `evaluate review score`, format {REVIEW_MAJOR}.x"
        )
    try:
        review = _Review.model_validate(data)
    except ValidationError as error:
        raise UsageError(
            f"{where} is no review.json of `evaluate review score`: {explain(error)}"
        ) from None
    _require_consistent_review(review, where)


def _require_consistent_review(review: _Review, where: str) -> None:
    outcomes = {answer.outcome for answer in review.answers}
    made = "accepted"
    if {answer.name for answer in review.answers} != _QUESTIONS or not review.num_rated:
        made = "pending"
    elif "fail" in outcomes:
        made = "rejected"
    elif "inconclusive" in outcomes:
        made = "inconclusive"
    if made != review.verdict:
        raise UsageError(
            f"{where}: the review's verdict {review.verdict} is not what its answers make "
            f"({made}), so it was edited; run `evaluate review score` again"
        )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; UsageError names what is wrong."""
    try:
        return parse_object(path)
    except ArtifactError as error:
        raise UsageError(str(error)) from error
