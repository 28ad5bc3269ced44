"""Redaction: a report without the words of requests, answers and gold values.

Contracts are confidential, verdicts are not. What stays are scores, names of the fields that are
asked for, and how long each text was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from eval.checks.base import printable
from eval.metrics.normalise import flatten

# What stands for a field's name that no right answer has: a model's own words.
INVENTED = "(a field of its own)"
_HIDDEN = re.compile(r"\[([0-9]+ characters|number)\]")


def redacted(data: Mapping[str, Any]) -> dict[str, Any]:
    """report.json's values with every text of an item put out of sight."""
    return {
        **data,
        "is_redacted": True,
        "items": data["items"] if data.get("is_redacted") else [_item(i) for i in data["items"]],
        "regressions": [],
        "review": _review(data.get("review")),
    }


def _review(review: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Votes without what raters noted; raters are numbered in the order in which they stand."""
    if review is None:
        return None
    names = {r["rater"]: f"rater {n}" for n, r in enumerate(review["raters"], start=1)}
    files = enumerate(review.get("ratings", {}).values(), start=1)  # named like the raters
    return {
        **review,
        "raters": [{**r, "rater": names[r["rater"]]} for r in review["raters"]],
        "agreement": _agreement(review.get("agreement"), names),
        "ratings": {f"file {n}": digest for n, digest in files},
        "items": [
            {**item, "votes": [_vote(vote, names) for vote in item["votes"]]}
            for item in review.get("items", ())
        ],
    }


def _vote(vote: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {**vote, "rater": names.get(vote.get("rater", "")), "note": _hidden(vote["note"])}


def _agreement(agreement: Any, names: Mapping[str, str]) -> Any:
    if not agreement:
        return agreement
    pairs = [{**p, "raters": [names.get(r) for r in p["raters"]]} for p in agreement["pairs"]]
    return {**agreement, "pairs": pairs}


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    found = {**item, "gold": _hidden(item.get("gold")), "tools": _hidden(item.get("tools"))}
    if "messages" in item:
        found["messages"] = [{**m, "content": _hidden(m["content"])} for m in item["messages"]]
    asked = {printable(path) for path in flatten(item.get("gold"))}
    for side in ("base", "candidate"):
        answer = dict(item[side])
        found[side] = {**answer, "text": _hidden(answer["text"]), "problem": _kind(answer)}
        details = answer["details"].items()
        found[side]["details"] = {k: _detail(k, v, asked) for k, v in details}
    return found


def _detail(name: str, value: Any, asked: Set[str]) -> Any:
    """One detail of an answer. asked: the fields of the right answer, which a suite's author named;
    any other name was written by a model."""
    if name == "missed":  # of instructions
        return value
    if name == "wrong_fields":
        return [field if field in asked else INVENTED for field in value]
    if name == "calls":
        return [[_hidden(leaf) for leaf in flatten(call).values()] for call in value]
    return _hidden(value)


def _kind(answer: Mapping[str, Any]) -> str:
    """What went wrong without quoting: `not JSON`, `does not fit the schema`."""
    if not answer["problem"]:
        return ""
    if answer["values"].get("json_valid") == 0:
        return "not JSON"
    return "does not fit the schema" if answer["values"].get("schema_valid") == 0 else "wrong"


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_hidden(each) for each in value]
    if isinstance(value, str):
        # Twice redacted is once redacted: of its own mark a text says nothing.
        return value if _HIDDEN.fullmatch(value) else f"[{len(value)} characters]"
    return value if value is None or isinstance(value, bool) else "[number]"
