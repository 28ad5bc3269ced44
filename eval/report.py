"""Reports: an evaluation as report.json (versioned, every number), report.html and report.md (to be
read), junit.xml and summary.md (for a pipeline and its pull request), samples.jsonl (one item a
line with both answers and their scores).

All files are made first and then moved into place, so a reader never meets half a report.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eval import report_layer1, wording
from eval.checks.catalogue import TASK_METRICS
from eval.checks.registry import Scored
from eval.evaluation import Evaluation, Exchange, num_differing
from eval.gate import Finding
from eval.gate_spec import METRICS
from eval.measurement import Measurement
from eval.metrics.normalise import NORMALISATION_VERSION
from eval.places import as_bytes, write_files
from eval.redaction import redacted
from eval.report_formats import shown, to_junit, to_summary
from eval.report_markdown import to_markdown
from eval.report_page import to_html
from eval.stats import mcnemar_p
from eval.targets.base import Answer
from runtime.engine.build import build

REPORT_VERSION = "1.4"
JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"
JUNIT_NAME, SUMMARY_NAME, SAMPLES_NAME = "junit.xml", "summary.md", "samples.jsonl"
UNIT = (
    "per token of the artifact's own tokenizer; windows of one document share no scored token; "
    "every token but the first (or the BOS) is scored once; perplexity = exp(total NLL / tokens)"
)


def write_report(evaluation: Evaluation, out: Path, *, redact: bool = False) -> tuple[Path, Path]:
    """Write all reports into `out`; UsageError when the disk refuses.

    redact: none of them quotes a request, an answer or a right value.
    Returns the paths of report.md and report.json.
    """
    data = to_json(evaluation, out)
    write_files(pages(redacted(data) if redact else data), out)
    return out / MARKDOWN_NAME, out / JSON_NAME


def pages(data: dict[str, Any]) -> dict[str, str]:
    """The files that are made from report.json's values, and it at the end: once it is there, so
    are the others."""
    return {
        MARKDOWN_NAME: shown(to_markdown(data)),
        HTML_NAME: shown(to_html(data)),
        JUNIT_NAME: shown(to_junit(data)),
        SUMMARY_NAME: shown(to_summary(data)),
        SAMPLES_NAME: _lines(data["items"]),
        JSON_NAME: _json(data, indent=2) + "\n",
    }


def _lines(items: Sequence[dict[str, Any]]) -> str:
    """samples.jsonl."""
    return "".join(_json(item) + "\n" for item in items)


def _json(value: Any, indent: int | None = None) -> str:
    """JSON text. What an answer spelled as 1e999 becomes null: JSON has no infinity."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite_only(value), indent=indent, ensure_ascii=False)


def _finite_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_only(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_only(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(evaluation: Evaluation, out: Path) -> dict[str, Any]:
    """All of it as JSON values. Infinite bounds (too few clusters) become null.

    out: the folder the reports go to, for the commands that come next.
    """
    e = evaluation
    items = [sample(exchange) for exchange in e.exchanges]
    return {
        "format_version": REPORT_VERSION,
        "verdict": e.verdict.result,
        "exit_code": e.verdict.exit_code,
        "summary": wording.summary(e),
        "judged_at": e.judged_at.isoformat(timespec="seconds"),
        "seconds": round(e.seconds, 1),
        "artifact": {**asdict(e.artifact), "path": str(e.artifact.path)},
        "sizes": {"artifact_bytes": e.artifact.stored_bytes, "dense_bytes": e.artifact.dense_bytes},
        "base": asdict(e.base),
        "numerics": asdict(e.numerics),
        "measured": {
            "verdict": e.verdict.measured, "summary": wording.summary_of_measured(e),
        },
        "next": wording.next_steps(e, out),
        "remarks": wording.remarks(e),
        "engine": build(),
        "gates": {
            "path": str(e.gates.path),
            "sha256": e.gates.sha256,
            "review": None if (asked := e.gates.spec.review) is None else asked.model_dump(),
        },
        "suite": {"directory": str(e.suite.directory), "sha256": e.suite.digests},
        "method": {
            **asdict(e.amounts),
            **asdict(e.sampling),
            "unit": f"{UNIT}; {e.num_windows} windows of <= {e.amounts.window_tokens} tokens",
            "scope": wording.scope(e),
            "num_windows": e.num_windows,
            "num_documents": e.num_documents,
            "num_items": len(e.exchanges),
            "normalisation_version": NORMALISATION_VERSION,
            "decoding": _decoding(e),
            "detectable": wording.detectable(e),
            "power": [
                {"metric": f.name, "stratum": f.stratum, **asdict(can)}
                for f, can in wording.powers(e)
            ],
        },
        "findings": [_finding(f) for f in e.verdict.findings],
        "alarms": [asdict(alarm) for alarm in e.verdict.alarms],
        "measurements": {m.name: _measurement(m) for m in e.measurements},
        "kld": _kld(e),
        "layer1": report_layer1.to_json(e.layer1),
        "answers": _answers(e),
        "notes": list(e.notes),
        "regressions": [
            {"id": x.pair.item.id, "why": wording.went_wrong(x), "gold": wording.gold(x)}
            for x in wording.regressions(e)
        ],
        "review": None,
        "rejected_before": None if (before := e.rejected_before) is None else before.model_dump(),
        "samples_sha256": samples_sha256(e),
        "items": items,
    }  # fmt: skip


def samples_sha256(evaluation: Evaluation) -> str:
    """Of samples.jsonl, from which packs for people are drawn."""
    lines = _lines([sample(exchange) for exchange in evaluation.exchanges])
    return hashlib.sha256(as_bytes(lines)).hexdigest()


def _decoding(e: Evaluation) -> str:
    drawn = e.amounts.sampled
    if drawn is None:
        return "greedy"
    return (
        f"greedy, and drawn {len(drawn.seeds)} times (temperature {drawn.temperature:g}, top-p "
        f"{drawn.top_p:g}, seeds {', '.join(map(str, drawn.seeds))})"
    )


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _finding(f: Finding) -> dict[str, Any]:
    return {
        "metric": f.name,
        "stratum": f.stratum,
        "label": f.label,
        "outcome": f.outcome,
        "required": f.rule.required,
        "limit": f.rule.model_dump(exclude_none=True),
        "reason": f.reason,
        "num_needed": f.num_needed,
        "p_value": f.p_value,
        "holm_p": f.holm_p,
        "regression_suspected": f.alarm,
        "noise_floor": f.noise,
    }


def _measurement(m: Measurement) -> dict[str, Any]:
    row: dict[str, Any] = {
        "label": METRICS[m.name].label,
        "unit": m.unit,
        "base": _finite(m.base),
        "candidate": _finite(m.candidate),
        "estimate": _finite(m.estimate),
        "lower": _finite(m.lower),
        "upper": _finite(m.upper),
        f"num_{m.counted}": m.num_scored,
        "num_clusters": m.num_clusters,
        "num_nonfinite": m.num_nonfinite,
    }
    if m.paired is not None:
        row |= {"lost": m.paired.lost, "gained": m.paired.gained, "mcnemar_p": mcnemar_p(m.paired)}
        row["design_effect"] = m.design_effect
    if m.about:
        row["about"] = m.about
    if m.domains:
        row["domains"] = {name: _measurement(part) for name, part in m.domains}
    return row


def _kld(e: Evaluation) -> dict[str, Any]:
    ladder = e.ladder
    return {
        "num_tokens": ladder.num_tokens,
        "mean": _finite(ladder.mean),
        **{f"p{p:g}": _finite(nats) for p, nats in ladder.percentiles.items()},
        "max": _finite(ladder.maximum),
        **{f"share_above_{nats:g}": share for nats, share in ladder.above.items()},
    }


def _answers(e: Evaluation) -> dict[str, Any]:
    """What is shown beside the gate: lenient format, truncation, length, first divergence."""
    apart = sorted(x.divergence for x in e.exchanges if x.divergence is not None)
    return {
        "base": _side([x.pair.base for x in e.exchanges]),
        "candidate": _side([x.pair.candidate for x in e.exchanges]),
        "num_differing": num_differing(e.exchanges),
        "identical": 1 - len(apart) / len(e.exchanges),
        "median_first_divergence": apart[len(apart) // 2] if apart else None,
        "token_ratio_percentiles": _lengths(e.exchanges),
        "token_ratio": _ratio(
            sum(len(x.candidate_answer.token_ids) for x in e.exchanges),
            sum(len(x.base_answer.token_ids) for x in e.exchanges),
        ),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _side(scores: list[Scored]) -> dict[str, float]:
    """Shares of the answers, over those that a check gives a value for."""
    names = [name for name, m in TASK_METRICS.items() if m.shape == "pass"]
    shares = {}
    for name in names:
        values = [float(s.values[name]) for s in scores if name in s.values]  # type: ignore[arg-type]
        if values:
            shares[name] = sum(values) / len(values)
    for name in ("truncated", "failed"):
        shares[name] = sum(getattr(s, name) for s in scores) / len(scores)
    return shares


def _lengths(exchanges: Sequence[Exchange]) -> dict[str, float] | None:
    """How much longer the candidate's answers are than the base's: percentiles of the ratio."""
    pairs = [(len(x.base_answer.token_ids), len(x.candidate_answer.token_ids)) for x in exchanges]
    ratios = [candidate / base for base, candidate in pairs if base]
    if not ratios:
        return None
    return {f"p{p}": float(np.percentile(ratios, p)) for p in (5, 50, 95)}


def sample(x: Exchange) -> dict[str, Any]:
    """One item with both answers and all that was found in them: a line of samples.jsonl."""
    item = x.pair.item
    return {
        "id": item.id,
        "doc": item.doc,
        "source": item.source,
        "lang": item.lang,
        "checks": [check.kind for check in item.checks],
        "follows": item.follows,
        "messages": item.messages,
        "tools": item.tools,
        "gold": item.gold,
        "num_prompt_tokens": x.pair.num_prompt_tokens,
        "base": _answer(x.base_text, x.base_answer, x.pair.base),
        "candidate": _answer(x.candidate_text, x.candidate_answer, x.pair.candidate),
        "first_divergence": x.divergence,
    }


def _answer(text: str, answer: Answer, scored: Scored) -> dict[str, Any]:
    return {
        "text": text,
        "finish": answer.finish,
        "num_tokens": len(answer.token_ids),
        **asdict(scored),
    }
