"""match: the answer is one of the given texts, to the letter and in normal form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Outcome, Reply, only
from eval.metrics.normalise import normalise


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every text that is right."""

    gold: tuple[str, ...]


def read(row: Mapping[str, Any]) -> Options:
    """`gold`: a text, or a list of texts that are all right."""
    only(row, "gold")
    gold = row.get("gold")
    texts = [gold] if isinstance(gold, str) else gold
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and text.strip() for text in texts)
    ):
        raise ValueError(f"expected 'gold' to be a text or a list of texts, found {gold!r}")
    return Options(gold=tuple(texts))


def score(reply: Reply, options: Options) -> Outcome:
    """exact_match (but for white space around it), normalised_match."""
    text = reply.text.strip()
    exact = text in {gold.strip() for gold in options.gold}
    normal = normalise(text) in {normalise(gold) for gold in options.gold}
    return Outcome(
        values={"exact_match": float(exact), "normalised_match": float(exact or normal)},
        problem="" if exact or normal else f"expected {options.gold[0]!r}",
    )
