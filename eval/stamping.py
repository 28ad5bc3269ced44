"""The stamp: an evaluation as gate.json in the artifact it judged, and people's review."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval import wording
from eval.errors import UsageError
from eval.evaluation import Evaluation
from eval.gate import Finding
from eval.gate_rules import Outcome
from eval.measurement import Measurement
from eval.preflight import require_unchanged
from eval.review.verdict import is_demanded
from eval.suites import TEXT_FILE
from quant.artifact.stamp import (
    STAMP_NAME,
    MetricRecord,
    Numerics,
    ReviewRecord,
    Stamp,
    Verdict,
    read_stamp,
    write_stamp,
)
from runtime.engine.build import build

_VERDICTS: dict[Outcome, Verdict] = {
    "pass": "accepted",
    "fail": "rejected",
    "inconclusive": "inconclusive",
}


def write(evaluation: Evaluation) -> Path:
    """Write gate.json; the last thing a run does, so that a stamp is always of a whole run.

    EvaluationError when another artifact has taken this one's place: it is not to get the stamp.
    """
    require_unchanged(evaluation.artifact)
    return put(evaluation.artifact.path, to_stamp(evaluation))


def to_stamp(evaluation: Evaluation) -> Stamp:
    """The stamp's content."""
    e = evaluation
    return Stamp(
        artifact_digest=e.artifact.digest,
        verdict=e.verdict.result,
        judged_at=e.judged_at.isoformat(timespec="seconds"),
        base=f"{e.base.name} (sha256 {e.base.digest})",
        gates_sha256=e.gates.sha256,
        metrics=tuple(_record(finding, e) for finding in e.verdict.findings),
        numerics=Numerics(
            device_class=e.numerics.device_class,
            compute_dtype=e.numerics.compute_dtype,
            kv_cache_dtype=e.numerics.kv_cache_dtype,
            lm_head_scheme=e.numerics.lm_head_scheme,
            chat_template_sha256=e.numerics.chat_template_sha256,
        ),
        suites=dict(e.suite.digests),
        seeds=_seeds(e),
        engine=build(),
        summary=wording.summary(e),
        review=_review_to_come(e),
    )


def reviewed(data: Mapping[str, Any]) -> tuple[Path, Stamp] | None:
    """The artifact's folder, and its stamp with the review of report.json's values in it.

    None when the artifact has no stamp (or is elsewhere). UsageError when its stamp is another
    evaluation's or demands what the report does not; ArtifactError when it cannot be read.
    """
    artifact = Path(data["artifact"]["path"])
    stamp = read_stamp(artifact)
    if stamp is None:
        return None
    for what, found, expected in (
        ("artifact digest", stamp.artifact_digest, data["artifact"]["digest"]),
        ("gates_sha256", stamp.gates_sha256, data["gates"]["sha256"]),
        ("judged_at", stamp.judged_at, data["judged_at"]),
    ):
        if found != expected:
            raise UsageError(
                f"{artifact / STAMP_NAME} is the stamp of another evaluation: its {what} is "
                f"{found}, the report's {expected}; evaluate again, or pass --no-stamp"
            )
    _require_kin(stamp, data)
    joined = {
        "verdict": data["verdict"], "summary": data["summary"], "review": review_record(data),
        "format_version": Stamp.model_fields["format_version"].default,
    }  # fmt: skip
    return artifact, stamp.model_copy(update=joined)


def put(artifact: Path, stamp: Stamp) -> Path:
    """Write a stamp; StorageError when the disk refuses."""
    write_stamp(artifact, stamp)
    return artifact / STAMP_NAME


def _require_kin(stamp: Stamp, data: Mapping[str, Any]) -> None:
    """What one run wrote into its report and its stamp agrees; UsageError where one was edited."""
    failed = stamp.verdict == "rejected" and (
        stamp.review is None or stamp.review.verdict != "rejected"
    )
    demands = stamp.review is not None and stamp.review.required
    if failed and data["verdict"] != "rejected" or demands and not is_demanded(data):
        raise UsageError(
            f"{Path(data['artifact']['path']) / STAMP_NAME} was written by this evaluation and "
            "disagrees with its report (verdict, or the demand for a review): one of them was "
            "edited; evaluate again"
        )


def _review_to_come(e: Evaluation) -> ReviewRecord | None:
    """Of a run that asked nobody: the review that rejected these answers before, or a demand."""
    if e.rejected_before is not None:
        return e.rejected_before.model_copy(update={"required": e.verdict.awaits_review})
    return ReviewRecord(verdict="pending", required=True) if e.verdict.awaits_review else None


def review_record(data: Mapping[str, Any]) -> ReviewRecord:
    """The review in report.json's values as a stamp has it."""
    review = data["review"]
    preference = (review["preference"] or {}).get("net", {})
    critical = (review["faults"] or {}).get("new", {})
    return ReviewRecord(
        verdict=review["verdict"],
        required=is_demanded(data),
        num_raters=sum(rater["standing"] != "failed" for rater in review["raters"]),
        num_requests=review["num_rated"],
        preference=preference.get("estimate"),
        preference_low=preference.get("lower"),
        preference_high=preference.get("upper"),
        critical=critical.get("estimate"),
        critical_low=critical.get("lower"),
        critical_high=critical.get("upper"),
        pack_sha256=review["pack"]["sha256"],
        samples_sha256=review["samples_sha256"],
        summary=review["summary"],
    )


def _seeds(e: Evaluation) -> dict[str, int]:
    drawn = e.amounts.sampled.seeds if e.amounts.sampled else ()
    passes = {f"sampled pass {number}": seed for number, seed in enumerate(drawn, start=1)}
    return {"items and windows": e.amounts.seed, "bootstrap": e.sampling.seed, **passes}


def _record(finding: Finding, e: Evaluation) -> MetricRecord:
    m = finding.measurement
    return MetricRecord(
        name=f"{finding.name}[{finding.stratum}]" if finding.stratum else finding.name,
        suite=f"{_files(m, e)}, seed {e.amounts.seed}",
        value=_finite(m.estimate),
        low=_finite(m.lower),
        high=_finite(m.upper),
        base=_finite(m.base),
        threshold=finding.rule.limit,
        verdict=_VERDICTS[finding.outcome],
        num_samples=m.num_scored,
        note=finding.reason,
    )


def _files(m: Measurement, e: Evaluation) -> str:
    """The suite's files behind a measurement, with their digests."""
    names = [name for name in e.suite.digests if (name == TEXT_FILE) == (m.counted == "tokens")]
    return ", ".join(f"{name} sha256 {e.suite.digests[name]}" for name in names)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
