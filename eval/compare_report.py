"""What `evaluate compare` says: markdown for people and pull requests, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from eval.compare import Comparison, MetricComparison
from eval.compare_files import Pair, RunFolder
from eval.measurement import format_interval

FORMAT_VERSION = "1.0"
_WORDS = {"pass": "pass", "fail": "FAIL", "inconclusive": "inconclusive"}
_EXAMPLES = 3
_JSON_EXAMPLES = 20
_SHOWN_CHARS = 300


def as_markdown(made: Comparison, *, redact: bool = False) -> str:
    """The verdict, one row per metric, why, and the worst pairs."""
    parts = [
        f"# {made.result.capitalize()}: {made.candidate.name} against {made.base.name}",
        _sides(made),
        _table(made),
        "\n".join(f"- **{m.name}**: {_why(m)}" for m in made.metrics),
    ]
    if made.left_out:
        parts.append("Not compared: " + "; ".join(made.left_out) + ".")
    parts += [_section(m, redact) for m in made.metrics if m.lost or m.gained]
    return "\n\n".join(parts) + "\n"


def _sides(made: Comparison) -> str:
    return "\n".join(
        f"- {side}: `{run.folder}`{_facts(run)}"
        for side, run in (("A (base)", made.base), ("B", made.candidate))
    )


def _facts(run: RunFolder) -> str:
    shown = {
        k: str(v)[:12] if k.endswith(("digest", "sha256")) else v for k, v in run.facts.items()
    }
    return "".join(f", {key.replace('_', ' ')} {value}" for key, value in shown.items())


def _table(made: Comparison) -> str:
    head = ("metric", "n", "A", "B", "B is worse by", "lost / gained", "changed", "p (Holm)", "")
    rows = [
        (
            m.name,
            f"{m.measurement.num_scored:,}",
            _value(m, m.measurement.base),
            _value(m, m.measurement.candidate),
            _interval(m),
            f"{len(m.lost)} / {len(m.gained)}",
            f"{m.changed:.1%}",
            _p_values(m),
            _WORDS[m.answer.outcome] + (" (alarm)" if m.alarm else ""),
        )
        for m in made.metrics
    ]
    lines = [head, ("---",) + ("--:",) * 7 + ("---",), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _value(m: MetricComparison, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if m.kind == "likelihood" else f"{value:.1%}"


def _interval(m: MetricComparison) -> str:
    found = m.measurement
    said = format_interval(found.estimate, found.lower, found.upper, found.unit)
    if m.kind == "likelihood":
        return f"x {said}"
    return said.replace(" pp", " % of A's mean") if m.scale != 1 else said


def _p_values(m: MetricComparison) -> str:
    if m.p_value is None or m.holm_p is None:
        return ""
    return f"{m.p_value:.3g} ({m.holm_p:.3g})"


def _why(m: MetricComparison) -> str:
    """The rule's sentence, what would decide it, and the alarm."""
    said = m.answer.reason
    if m.answer.num_needed is not None:
        said += f"; about {m.answer.num_needed:,} items would decide"
    if m.alarm:
        said += f"; significantly worse all the same (McNemar, Holm p {m.holm_p:.3g})"
    return said + "."


def _section(m: MetricComparison, redact: bool) -> str:
    words = ("Lost", "Gained") if m.kind == "pass or fail" else ("Fell", "Rose")
    parts = [f"## {m.name}"]
    for word, pairs in zip(words, (m.lost, m.gained), strict=True):
        if pairs:
            ids = ", ".join(str(p.base.doc_id) for p in pairs[:_JSON_EXAMPLES])
            more = ", ..." if len(pairs) > _JSON_EXAMPLES else ""
            parts.append(f"{word}: {len(pairs)} (doc_id {ids}{more})")
            parts += [] if redact or m.kind == "likelihood" else list(_examples(m, pairs))
    return "\n\n".join(parts)


def _examples(m: MetricComparison, pairs: tuple[Pair, ...]) -> Iterator[str]:
    for pair in pairs[:_EXAMPLES]:
        values = [side.values[m.metric] for side in (pair.base, pair.candidate)]
        lines = [
            f"    doc_id {pair.base.doc_id}: {values[0]} -> {values[1]}",
            f"    asked:  {_end(pair.base.prompt)}",
            f"    right:  {_short(pair.base.target)}",
            f"    A said: {_short(pair.base.answer)}",
            f"    B said: {_short(pair.candidate.answer)}",
        ]
        yield "\n".join(lines)


def _short(text: str) -> str:
    line = _one_line(text)
    return line if len(line) <= _SHOWN_CHARS else line[:_SHOWN_CHARS] + "..."


def _end(text: str) -> str:
    cut = "..." if len(text) > _SHOWN_CHARS else ""
    return cut + _one_line(text[-_SHOWN_CHARS:])


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def as_json(made: Comparison, *, redact: bool = False) -> dict[str, Any]:
    """All figures. `lost` and `gained` list every doc_id, and texts of the first ones."""
    return {
        "format_version": FORMAT_VERSION,
        "result": made.result,
        "exit_code": made.exit_code,
        "base": _side_json(made.base),
        "candidate": _side_json(made.candidate),
        "limits": asdict(made.limits),
        "sampling": asdict(made.sampling),
        "metrics": [_metric_json(m, redact) for m in made.metrics],
        "left_out": list(made.left_out),
    }


def _side_json(run: RunFolder) -> dict[str, Any]:
    return {"folder": str(run.folder), "name": run.name, **run.facts}


def _metric_json(m: MetricComparison, redact: bool) -> dict[str, Any]:
    found = m.measurement
    return {
        "task": m.task,
        "metric": m.metric,
        "filter": m.filter,
        "kind": m.kind,
        "outcome": m.answer.outcome,
        "reason": m.answer.reason,
        "num_needed": m.answer.num_needed,
        "base": found.base,
        "candidate": found.candidate,
        "unit": found.unit,
        "estimate": found.estimate,
        "lower": _finite(found.lower),
        "upper": _finite(found.upper),
        "scale": m.scale,
        "num_items": found.num_scored,
        "num_clusters": found.num_clusters,
        "design_effect": found.design_effect,
        "changed": m.changed,
        "p_value": m.p_value,
        "holm_p": m.holm_p,
        "alarm": m.alarm,
        "lost": _pairs_json(m, m.lost, redact),
        "gained": _pairs_json(m, m.gained, redact),
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity: a bound that there were too few items for is null."""
    return value if abs(value) < float("inf") else None


def _pairs_json(m: MetricComparison, pairs: tuple[Pair, ...], redact: bool) -> dict[str, Any]:
    examples = [
        {
            "doc_id": pair.base.doc_id,
            "prompt": pair.base.prompt,
            "target": pair.base.target,
            "base": {"value": pair.base.values[m.metric], "answer": pair.base.answer},
            "candidate": {
                "value": pair.candidate.values[m.metric],
                "answer": pair.candidate.answer,
            },
        }
        for pair in pairs[: 0 if redact else _JSON_EXAMPLES]
    ]
    return {"doc_ids": [pair.base.doc_id for pair in pairs], "examples": examples}
