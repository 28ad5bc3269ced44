"""Reports: an evaluation as report.json (versioned, every number), report.html and report.md (to be
read), junit.xml and summary.md (for a pipeline and its pull request), samples.jsonl (one item a
line with both answers and their scores).

All files are made first and then moved into place, so a reader never meets half a report.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eval import report_layer1, wording
from eval.checks.catalogue import TASK_METRICS
from eval.checks.registry import Scored
from eval.errors import UsageError
from eval.evaluation import Evaluation, Exchange
from eval.gate import Finding
from eval.gate_spec import METRICS
from eval.measurement import Measurement
from eval.metrics.normalise import NORMALISATION_VERSION
from eval.redaction import redacted
from eval.report_formats import to_junit, to_summary
from eval.report_page import to_html
from eval.stats import mcnemar_p
from eval.targets.base import Answer

REPORT_VERSION = "1.2"
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
    data = to_json(evaluation)
    data = redacted(data) if redact else data
    write_files({MARKDOWN_NAME: to_markdown(evaluation, redact=redact), **pages(data)}, out)
    return out / MARKDOWN_NAME, out / JSON_NAME


def pages(data: dict[str, Any]) -> dict[str, str]:
    """The files that are made from report.json's values, it among them."""
    return {
        JSON_NAME: json.dumps(data, indent=2, ensure_ascii=False) + "\n",
        HTML_NAME: to_html(data),
        JUNIT_NAME: to_junit(data),
        SUMMARY_NAME: to_summary(data),
        SAMPLES_NAME: "".join(json.dumps(i, ensure_ascii=False) + "\n" for i in data["items"]),
    }


def write_files(texts: dict[str, str], out: Path) -> None:
    """Write them into `out`, all or none; UsageError when the disk refuses."""
    files = {out / name: text for name, text in texts.items()}
    staged = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in files}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            # A lone surrogate in a model's answer must not cost the report.
            staged[path].write_text(text, encoding="utf-8", errors="backslashreplace")
        for path in files:
            staged[path].replace(path)
    except OSError as error:
        for path in staged.values():
            path.unlink(missing_ok=True)
        raise UsageError(f"cannot write the report to {out}: {error.strerror}") from error


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """All of it as JSON values. Infinite bounds (too few clusters) become null."""
    e = evaluation
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
        "gates": {"path": str(e.gates.path), "sha256": e.gates.sha256},
        "suite": {"directory": str(e.suite.directory), "sha256": e.suite.digests},
        "method": {
            **asdict(e.amounts),
            **asdict(e.sampling),
            "unit": UNIT,
            "num_windows": e.num_windows,
            "num_documents": e.num_documents,
            "num_items": len(e.exchanges),
            "normalisation_version": NORMALISATION_VERSION,
            "decoding": "greedy",
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
        "items": [sample(exchange) for exchange in e.exchanges],
    }


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


def to_markdown(evaluation: Evaluation, *, redact: bool = False) -> str:
    """The report a person reads: verdict first, provenance last. redact: without the answers."""
    e = evaluation
    parts = [
        f"# {e.verdict.result.upper()}: {e.artifact.path.name}",
        f"{wording.summary(e)}",
        "\n".join(f"- {step}" for step in wording.next_steps(e)),
        "## Gate",
        _gate_table(e),
        "In parentheses: guards, which reject what certainly got worse but need not be decided.",
        *wording.remarks(e),
        wording.detectable(e),
        *[f"> {note}" for note in e.notes],
        "## Domains",
        _domain_table(e),
        "## Divergence from the base, per token",
        _kld_table(e),
        "## Every statistic by domain, position and input length",
        report_layer1.to_markdown(e.layer1, _table),
        "## Answers",
        _answer_table(e),
        "## Worst regressions",
        "(redacted)" if redact else _regressions(e),
        "## Provenance",
        _provenance(e),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _gate_table(e: Evaluation) -> str:
    return _table(
        ("metric", "base", "candidate", "difference [interval]", "limit", "verdict"),
        (
            (
                f.label,
                wording.value(f.measurement.base, f.measurement),
                wording.value(f.measurement.candidate, f.measurement),
                wording.difference(f.measurement),
                wording.limit(f.rule),
                wording.in_words(f),
            )
            for f in e.verdict.findings
        ),
    )


def _domain_table(e: Evaluation) -> str:
    measured = {m.name: dict(m.domains) for m in e.measurements}
    names = sorted({name for domains in measured.values() for name in domains})
    return _table(
        ("domain", *(METRICS[name].label for name in measured)),
        (
            (
                domain,
                *(
                    wording.difference(parts[domain]) if domain in parts else ""
                    for parts in measured.values()
                ),
            )
            for domain in names
        ),
    )


def _kld_table(e: Evaluation) -> str:
    ladder = e.ladder
    rows = [("Mean KLD", f"{ladder.mean:.5f}"), ("Maximum KLD", f"{ladder.maximum:.5f}")]
    for percent, nats in sorted(ladder.percentiles.items(), reverse=True):
        label = "Median KLD" if percent == 50 else f"{percent:.1f}% KLD"
        rows.append((label, f"{nats:.5f}"))
    rows += [
        (f"tokens with KLD > {nats:g}", f"{share:.2%}") for nats, share in ladder.above.items()
    ]
    return _table(("statistic", "nats"), rows)


def _answer_table(e: Evaluation) -> str:
    answers = _answers(e)
    rows = [
        (
            METRICS[key].label if key in METRICS else key,
            f"{answers['base'][key]:.1%}",
            f"{answers['candidate'][key]:.1%}",
        )
        for key in answers["base"]
    ]
    apart = answers["median_first_divergence"]
    tail = f"{answers['identical']:.1%} of the answers are identical"
    tail += "." if apart is None else f"; the others part at token {apart} (median)."
    return _table(("share of answers", "base", "candidate"), rows) + "\n\n" + tail


def _regressions(e: Evaluation) -> str:
    worst = wording.regressions(e)
    if not worst:
        return "No item got worse."
    return "\n\n".join(
        f"**{x.pair.item.id}**: {wording.went_wrong(x)}\n\n"
        + "\n".join(
            _quoted(who, text)
            for who, text in (
                ("right", wording.gold(x)),
                ("base", x.base_text),
                ("candidate", x.candidate_text),
            )
        )
        for x in worst
    )


def _quoted(who: str, text: str) -> str:
    body = "\n".join("    " + line for line in text.strip().splitlines() or ["(empty)"])
    return f"{who}:\n\n{body}\n"


def _provenance(e: Evaluation) -> str:
    schemes = ", ".join(f"{label} x {count}" for label, count in e.artifact.schemes.items())
    rows = [
        ("artifact", f"{e.artifact.path}, digest {e.artifact.digest}"),
        ("recipe", e.artifact.recipe),
        ("schemes", schemes),
        ("base", f"{e.base.name}, digest {e.base.digest}"),
        ("base computed by", e.base.description),
        ("candidate computed by", f"{e.numerics.description}, lm_head {e.numerics.lm_head_scheme}"),
        ("chat template", str(e.numerics.chat_template_sha256)),
        ("gates", f"{e.gates.path}, sha256 {e.gates.sha256}"),
        ("suite", f"{e.suite.directory}"),
        *((name, f"sha256 {digest}") for name, digest in e.suite.digests.items()),
        ("perplexity", f"{UNIT}; {e.num_windows} windows of <= {e.amounts.window_tokens} tokens"),
        ("scored", wording.scope(e)),
        (
            "intervals",
            f"one-sided {e.sampling.confidence:.0%} bounds; score test (paired proportions), "
            f"bootstrap over documents and items, {e.sampling.draws:,} draws, seed "
            f"{e.sampling.seed}",
        ),
        ("judged", f"{e.judged_at.isoformat(timespec='seconds')}, {e.seconds:.0f} s"),
    ]
    return _table(("", ""), rows)
