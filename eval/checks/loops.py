"""no_loop: the answer does not end in repetition.

A loop is (a) the same unit of 1 to 64 tokens at least four times at the end, (b) fewer than 30 %
distinct 4-grams in the last 128 tokens, or (c) the token limit was hit and the text compresses
more than fourfold. Boilerplate and tables repeat too, so only the difference to the base is judged.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from eval.checks.base import Outcome, Reply

LONGEST_UNIT, REPEATS = 64, 4
TAIL, NGRAM, FEWEST_DISTINCT = 128, 4, 0.3
COMPRESSION = 4.0
# Fewer 4-grams than this say nothing about variety.
SHORTEST_TAIL = 64


def score(reply: Reply, options: None) -> Outcome:
    """no_loop."""
    problem = _loop(reply)
    return Outcome(values={"no_loop": float(not problem)}, problem=problem)


def _loop(reply: Reply) -> str:
    if unit := repeated_unit(reply.tokens):
        return f"the last {unit} tokens repeat"
    if distinct_share(reply.tokens[-TAIL:]) < FEWEST_DISTINCT:
        return f"few distinct {NGRAM}-grams at the end"
    data = reply.text.encode("utf-8", "replace")
    if reply.is_truncated and len(data) > COMPRESSION * len(zlib.compress(data, 9)):
        return "cut off at its limit while repeating itself"
    return ""


def repeated_unit(tokens: Sequence[int | str]) -> int:
    """The shortest unit that stands REPEATS times at the end, 0 where none does."""
    for unit in range(1, min(LONGEST_UNIT, len(tokens) // REPEATS) + 1):
        span = tokens[len(tokens) - unit * REPEATS :]
        if all(span[i] == span[i - unit] for i in range(unit, len(span))):
            return unit
    return 0


def distinct_share(tokens: Sequence[int | str]) -> float:
    """Distinct 4-grams as a share of all; 1.0 for too short a text."""
    if len(tokens) < SHORTEST_TAIL:
        return 1.0
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return len(set(grams)) / len(grams)
