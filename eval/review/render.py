"""review.json, review.md and review.html. Knows no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from eval.review import wording
from eval.review.pack import Item
from eval.review.score import Judged, Review

FORMAT_VERSION = "1.0"
_MOST_SHOWN = 40


def to_json(review: Review) -> dict[str, Any]:
    """All numbers as JSON values; bounds that do not exist are null."""
    facts = {
        name: value
        for name, value in asdict(review).items()
        if name not in ("judged", "rules", "result")
    }
    return {
        "format_version": FORMAT_VERSION,
        "layer": 3,
        "verdict": review.result,
        "exit_code": review.exit_code,
        "summary": wording.headline(review),
        "could_show": wording.could_show(review),
        "rules": review.rules.model_dump(),
        **_finite(facts),
        "items": [_item(item) for item in review.judged],
    }


def _item(item: Judged) -> dict[str, Any]:
    return {
        "sample": item.entry.sample,
        "item": item.entry.id,
        "weight": item.entry.weight,
        "preference": item.preference,
        "candidate_fault": item.candidate_fault,
        "base_fault": item.base_fault,
        "votes": [asdict(vote) for vote in item.votes],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def to_markdown(review: Review) -> str:
    """At most a screen, for a pull request."""
    lines = [f"## Blind review: {review.result}", "", wording.scope(review), ""]
    lines += [f"- {_plain(line)}" for line in (*wording.reasons(review), *wording.counts(review))]
    lines += ["", wording.could_show(review), "", "### Raters", ""]
    lines += [f"- {_plain(wording.rater_line(rater))}" for rater in review.raters]
    lines += [f"- {_plain(line)}" for line in wording.agreement_lines(review.agreement)]
    if found := wording.faulty(review):
        lines += ["", "### Critical faults of the candidate alone", ""]
        lines += [f"- {_plain(wording.fault_line(item))}" for item in found]
    return "\n".join(lines) + "\n"


def _plain(line: str) -> str:
    """Names and notes are other people's text: no Markdown, no HTML."""
    for mark in "\\`*_[]<>":
        line = line.replace(mark, "\\" + mark)
    return line


def to_html(review: Review, items: Mapping[str, Item]) -> str:
    """One self-contained page; its <section id="review"> is the report's part on layer 3."""
    worst = sorted(
        (i for i in review.judged if i.is_new_fault or i.preference < 0),
        key=lambda i: (not i.is_new_fault, i.preference),
    )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        (files("eval.review") / "review.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        review=review,
        wording=wording,
        could_show=wording.could_show(review),
        shown=[_shown(item, items[item.entry.id]) for item in worst[:_MOST_SHOWN]],
        num_worst=len(worst),
    )


def _shown(judged: Judged, item: Item) -> dict[str, Any]:
    """A request for drill-down, the sides named."""
    is_a = judged.entry.candidate == "a"
    return {
        "sample": judged.entry.sample,
        "source": judged.entry.source,
        "is_new_fault": judged.is_new_fault,
        "messages": [(m.role, m.text) for m in item.messages],
        "candidate": item.a if is_a else item.b,
        "base": item.b if is_a else item.a,
        "notes": [(vote.rater, vote.note) for vote in judged.votes if vote.note],
    }
