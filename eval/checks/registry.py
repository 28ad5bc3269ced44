"""The table of check kinds, reading a row's `checks`, and applying all of them to one answer."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.checks import (
    choice,
    code,
    constraints,
    fields,
    json_text,
    language,
    loops,
    manners,
    match,
    schema,
    state,
    tool_call,
)
from eval.checks.base import Check, Kind, Outcome, Reply, Value, no_options

# What a row may ask for.
KINDS: dict[str, Kind] = {
    "json_valid": Kind(read=no_options, score=json_text.score),
    "schema_valid": Kind(read=schema.read, score=schema.score),
    "fields": Kind(read=fields.read, score=fields.score),
    "tool_call": Kind(read=tool_call.read, score=tool_call.score),
    "choice": Kind(read=choice.read, score=choice.score),
    "match": Kind(read=match.read, score=match.score),
    "code": Kind(read=code.read, score=code.score),
    "constraints": Kind(read=constraints.read, score=constraints.score),
    "state": Kind(read=state.read, score=state.score),
    "language": Kind(read=language.read, score=language.score),
}
# What every written answer is looked at for, asked or not.
AUTOMATIC: dict[str, Kind] = {
    "no_loop": Kind(read=no_options, score=loops.score),
    "no_leaked_tokens": Kind(read=no_options, score=manners.score_leaks),
    "no_stray_characters": Kind(read=no_options, score=language.score_stray),
    "stopped": Kind(read=no_options, score=manners.score_end),
    "language_kept": Kind(read=no_options, score=language.score_kept),
    "refusal_kept": Kind(read=no_options, score=manners.score_refusal),
    "length_kept": Kind(read=no_options, score=manners.score_length),
}
CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """All that the checks found in one answer.

    values, signals, details: as in Outcome, over all checks. problem: the first check's that found
    one. truncated: cut off at its token limit. failed: the model gave no answer at all.
    """

    values: dict[str, Value]
    signals: dict[str, Any]
    problem: str
    details: dict[str, Any]
    truncated: bool
    failed: bool


def read_checks(listed: Any) -> tuple[Check, ...]:
    """The checks of a row; ValueError says which one is wrong and how."""
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"expected a non-empty 'checks' (list), found {listed!r}")
    checks = tuple(_read(each) for each in listed)
    kinds = [check.kind for check in checks]
    if len(set(kinds)) < len(kinds):
        raise ValueError("the same kind of check twice in one row")
    if CHOICE in kinds and len(kinds) > 1:
        raise ValueError("'choice' is answered by likelihood and takes no other check beside it")
    return checks


def _read(value: Any) -> Check:
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        close = difflib.get_close_matches(str(kind), KINDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(KINDS))}"
        raise ValueError(f"unknown kind of check {kind!r}; {hint}")
    return Check(kind=kind, options=KINDS[kind].read(value))


def score_reply(reply: Reply, checks: Sequence[Check]) -> Scored:
    """Apply a row's checks and the automatic ones. A model that failed is wrong everywhere."""
    asked = [KINDS[check.kind].score(reply, check.options) for check in checks]
    is_chosen = any(check.kind == CHOICE for check in checks)
    automatic = [] if is_chosen else [kind.score(reply, None) for kind in AUTOMATIC.values()]
    failed = reply.finish == "error"
    values = _joined([*asked, *automatic], "values")
    return Scored(
        values=_all_wrong(values) if failed else values,
        signals=_joined(automatic, "signals"),
        problem="no answer: the model failed" if failed else _first_problem([*asked, *automatic]),
        details=_joined(asked, "details"),
        truncated=reply.is_truncated,
        failed=failed,
    )


def _all_wrong(values: dict[str, Value]) -> dict[str, Value]:
    """Silence is no answer, not even one without loops. Counts of an empty answer are right."""
    return {name: v if isinstance(v, tuple) else 0.0 for name, v in values.items()}


def _joined(outcomes: Sequence[Outcome], part: str) -> dict[str, Any]:
    return {key: value for each in outcomes for key, value in getattr(each, part).items()}


def _first_problem(outcomes: Sequence[Outcome]) -> str:
    return next((outcome.problem for outcome in outcomes if outcome.problem), "")
