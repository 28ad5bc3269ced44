"""choice: of several continuations, the likeliest is the right one. Nothing is generated.

The log-likelihood of a choice is the sum over its tokens; `per: "byte"` divides by its UTF-8 bytes,
so that long choices are not at a disadvantage (what lm-eval calls acc_norm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eval.checks.base import Outcome, Reply, only


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The continuations, which of them is right, and what their likelihoods are divided by."""

    choices: tuple[str, ...]
    gold: int
    per: Literal["choice", "byte"]


def read(row: Mapping[str, Any]) -> Options:
    """`choices`: two texts or more. `gold`: index of the right one. `per`: choice or byte."""
    only(row, "choices", "gold", "per")
    choices, gold, per = row.get("choices"), row.get("gold"), row.get("per", "choice")
    if (
        not isinstance(choices, list)
        or len(set(map(str, choices))) < 2
        or not all(isinstance(text, str) and text for text in choices)
    ):
        raise ValueError(f"expected 'choices' to be two different texts or more, found {choices!r}")
    if len(set(choices)) < len(choices):
        raise ValueError("two of the 'choices' are alike")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
        raise ValueError(f"expected 'gold' to be an index of 'choices', found {gold!r}")
    if per not in ("choice", "byte"):
        raise ValueError(f"expected 'per' to be 'choice' or 'byte', found {per!r}")
    return Options(choices=tuple(choices), gold=gold, per=per)


def score(reply: Reply, options: Options) -> Outcome:
    """choice_accuracy. Without finite likelihoods nothing was chosen."""
    found = reply.choice_logprobs or ()
    if len(found) != len(options.choices) or not all(map(math.isfinite, found)):
        return Outcome(values={"choice_accuracy": 0.0}, problem="no likelihoods")
    weights = [
        value / (len(text.encode()) if options.per == "byte" else 1)
        for value, text in zip(found, options.choices, strict=True)
    ]
    chosen = max(range(len(weights)), key=weights.__getitem__)
    is_right = chosen == options.gold
    return Outcome(
        values={"choice_accuracy": float(is_right)},
        problem="" if is_right else f"chose {options.choices[chosen]!r}",
        details={"chosen": options.choices[chosen], "logprobs": [round(v, 4) for v in found]},
    )
