"""state: the state of a dialog after this turn as one JSON object, every slot right, none invented.

What the field calls joint goal accuracy. The turns of a dialog share their `doc`, so they count as
one cluster, and a slip in an early turn that the later ones repeat is not several independent ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Outcome, Reply, only, printable
from eval.checks.json_text import parse_strict
from eval.metrics.normalise import flatten, normalise


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The right state; a slot that is null must be null or absent."""

    gold: dict[str, Any]


def read(row: Mapping[str, Any]) -> Options:
    """`gold`: the state after this turn, slot to value."""
    only(row, "gold")
    gold = row.get("gold")
    if not isinstance(gold, dict) or not gold:
        raise ValueError(f"expected a non-empty 'gold' (dict), found {gold!r}")
    return Options(gold=gold)


def score(reply: Reply, options: Options) -> Outcome:
    """dialog_state."""
    parsed = parse_strict(reply.text)
    if not isinstance(parsed.value, dict):
        return Outcome(values={"dialog_state": 0.0}, problem=parsed.problem or "not a JSON object")
    wanted, found = _slots(options.gold), _slots(parsed.value)
    wrong = [slot for slot in {**wanted, **found} if wanted.get(slot) != found.get(slot)]
    problem = f"wrong slots: {', '.join(map(printable, wrong))}" if wrong else ""
    return Outcome(values={"dialog_state": float(not wrong)}, problem=problem)


def _slots(value: dict[str, Any]) -> dict[str, Any]:
    """Filled slots in normal form; booleans apart from 1 and 0."""
    normal = {path: normalise(leaf) for path, leaf in flatten(value).items()}
    return {path: (type(n) is bool, n) for path, n in normal.items() if n is not None and n != ""}
