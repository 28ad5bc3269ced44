"""report.md: the report a person reads in a terminal or a pull request, from report.json's values.

Verdict first, provenance last. Knows no model and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eval import figures, report_layer1
from eval.charts import measurement_of
from eval.provenance import provenance
from eval.review.verdict import review_of, state

_WHO = ("right", "base", "candidate")
_PEOPLE = {
    "none": "Not asked: the gates do not demand a review, and none was given.",
    "pending": "Pending.", "pass": "Passed.", "fail": "FAILED.", "inconclusive": "Undecided.",
}  # fmt: skip


def to_markdown(data: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    parts = [
        f"# {data['verdict'].upper()}: {Path(data['artifact']['path']).name}",
        data["summary"],
        "\n".join(f"- {step}" for step in data["next"]),
        "## Gate",
        _gate_table(data),
        "In parentheses: guards, which reject what certainly got worse but need not be decided.",
        *data["remarks"],
        data["method"]["detectable"],
        *[f"> {note}" for note in data["notes"]],
        "## Domains",
        _domain_table(data["measurements"]),
        "## Divergence from the base, per token",
        _kld_table(data["kld"]),
        "## Every statistic by domain, position and input length",
        report_layer1.to_markdown(data["layer1"], table),
        "## Answers",
        _answer_table(data),
        "## Worst regressions",
        "(redacted)" if data.get("is_redacted") else _regressions(data),
        "## People (layer 3)",
        _people(data),
        "## Provenance",
        table(("", ""), provenance(data)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _gate_table(data: Mapping[str, Any]) -> str:
    rows = []
    for finding in data["findings"]:
        m = measurement_of(finding, data["measurements"])
        rows.append(
            (
                finding["label"],
                figures.value(m["base"], m["unit"]),
                figures.value(m["candidate"], m["unit"]),
                figures.of_measurement(m),
                figures.limit_of(finding),
                figures.outcome(finding["outcome"], required=finding["required"]),
            )
        )
    return table(("metric", "base", "candidate", "difference [interval]", "limit", "verdict"), rows)


def _domain_table(measured: Mapping[str, Any]) -> str:
    """A row each metric: there are more of them than a terminal is wide."""
    parts = {m["label"]: m["domains"] for m in measured.values() if m.get("domains")}
    names = sorted({name for domains in parts.values() for name in domains})
    rows = (
        (label, *(figures.of_measurement(found[n]) if n in found else "" for n in names))
        for label, found in parts.items()
    )
    return table(("metric", *names), rows)


def _kld_table(kld: Mapping[str, Any]) -> str:
    rows = [(label, f"{nats:.5f}") for label, nats in figures.kld_steps(kld)]
    rows += [
        (f"tokens with KLD > {key.removeprefix('share_above_')}", f"{share:.2%}")
        for key, share in kld.items()
        if key.startswith("share_above_")
    ]
    return table(("statistic", "nats"), rows)


def _answer_table(data: Mapping[str, Any]) -> str:
    answers, measured = data["answers"], data["measurements"]
    rows = [
        (
            measured[key]["label"] if key in measured else key,
            f"{answers['base'][key]:.1%}",
            f"{answers['candidate'][key]:.1%}",
        )
        for key in answers["base"]
    ]
    apart = answers["median_first_divergence"]
    tail = f"{answers['identical']:.1%} of the answers are identical"
    tail += "." if apart is None else f"; the others part at token {apart} (median)."
    return table(("share of answers", "base", "candidate"), rows) + "\n\n" + tail


def _regressions(data: Mapping[str, Any]) -> str:
    if not data["regressions"]:
        return "No item got worse."
    items = {item["id"]: item for item in data["items"]}
    return "\n\n".join(_regression(items[each["id"]], each) for each in data["regressions"])


def _regression(item: Mapping[str, Any], said: Mapping[str, str]) -> str:
    texts = (said["gold"], item["base"]["text"], item["candidate"]["text"])
    quoted = (_quoted(who, text) for who, text in zip(_WHO, texts, strict=True))
    return f"**{item['id']}**: {said['why']}\n\n" + "\n".join(quoted)


def _quoted(who: str, text: str) -> str:
    body = "\n".join("    " + line for line in text.strip().splitlines() or ["(empty)"])
    return f"{who}:\n\n{body}\n"


def _people(data: Mapping[str, Any]) -> str:
    review, how = review_of(data), _PEOPLE[state(data)]
    if review is None:
        return how
    return f"{how} {review['summary']}. {review.get('could_show', '')}".rstrip()
