"""fields: the answer's JSON fields against a gold object, in normal form.

Completeness (present and not empty), accuracy and F1 over (field, value) pairs, the critical fields
all exactly right, and whether each value kept its JSON type. A value where gold is null or an
empty text counts as invented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Outcome, Reply, Value, only, printable
from eval.checks.json_text import parse_strict
from eval.metrics.normalise import flatten, normalise, step


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The right object, and the names of top-level fields that must be exactly right."""

    gold: dict[str, Any]
    critical: tuple[str, ...]


def read(row: Mapping[str, Any]) -> Options:
    """`gold`: the right object. `critical`: names of its fields."""
    only(row, "gold", "critical")
    gold, critical = row.get("gold"), row.get("critical", [])
    if not isinstance(gold, dict) or not gold:
        raise ValueError(f"expected a non-empty 'gold' (dict), found {gold!r}")
    if not isinstance(critical, list) or not all(isinstance(name, str) for name in critical):
        raise ValueError(f"expected 'critical' to be a list of field names, found {critical!r}")
    if missing := [name for name in critical if name not in gold]:
        raise ValueError(f"critical fields {missing} are not in gold")
    return Options(gold=gold, critical=tuple(critical))


def score(reply: Reply, options: Options) -> Outcome:
    """field_completeness, field_accuracy, field_f1, type_fidelity, critical_fields."""
    value = parse_strict(reply.text).value
    gold = flatten(options.gold)
    answer = flatten(value) if isinstance(value, dict) else {}
    expected = {k: n for k, v in gold.items() if not _is_empty(n := normalise(v))}
    claimed = {k: n for k, v in answer.items() if not _is_empty(n := normalise(v))}
    hits = {k for k, v in expected.items() if k in claimed and _same(claimed[k], v)}
    wrong = [k for k in {**gold, **claimed} if k not in hits and (k in expected or k in claimed)]
    fields, found = float(len(expected)), float(len(hits))
    present = [k for k in expected if k in claimed]
    typed = sum(_type(answer[k]) == _type(gold[k]) for k in present)
    values: dict[str, Value] = {
        "field_completeness": (float(len(present)), fields),
        "field_accuracy": (found, fields),
        "field_f1": (found, len(claimed) - found, fields - found),
        "type_fidelity": (float(typed), float(len(present))),
        "critical_fields": float(_critical_right(answer, wrong, options.critical)),
    }
    shown = [printable(k) for k in wrong]
    return Outcome(
        values=values,
        problem=f"wrong fields: {', '.join(shown)}" if shown else "",
        details={"wrong_fields": shown},
    )


def _critical_right(
    answer: Mapping[str, Any], wrong: Sequence[str], critical: Sequence[str]
) -> bool:
    return bool(answer) and not any(_belongs(path, critical) for path in wrong)


def _is_empty(value: Any) -> bool:
    return value is None or value == ""


def _same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _type(value: Any) -> str:
    """The JSON type of a leaf; 1 and 1.0 are both numbers."""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def _belongs(path: str, names: Sequence[str]) -> bool:
    tops = [step(name) for name in names]
    return any(path == top or path.startswith((f"{top}.", f"{top}[")) for top in tops)
