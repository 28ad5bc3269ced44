"""The stamp: an evaluation as gate.json beside the artifact it judged."""

from __future__ import annotations

import math
from pathlib import Path

from eval import wording
from eval.evaluation import Evaluation
from eval.gate import Finding
from eval.gate_rules import Outcome
from eval.measurement import Measurement
from eval.suites import TEXT_FILE
from quant.artifact.stamp import STAMP_NAME, MetricRecord, Numerics, Stamp, Verdict, write_stamp
from runtime.engine.build import build

_VERDICTS: dict[Outcome, Verdict] = {
    "pass": "accepted",
    "fail": "rejected",
    "inconclusive": "inconclusive",
}


def write(evaluation: Evaluation) -> Path:
    """Write gate.json; the last thing a run does, so that a stamp is always of a whole run."""
    write_stamp(evaluation.artifact.path, to_stamp(evaluation))
    return evaluation.artifact.path / STAMP_NAME


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
        seeds={"items and windows": e.amounts.seed, "bootstrap": e.sampling.seed},
        engine=build(),
        summary=wording.summary(e),
    )


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
