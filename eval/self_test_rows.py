"""Rows of a self-test: one candidate's verdict, whether it was the right one, what to do if not.

Pure: knows verdicts and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from eval.gate import Finding, Verdict

READING = "reading check"
Outcome = Literal["accepted", "rejected", "inconclusive", "refused", "not applicable"]
# A defect must not pass; one that nothing could be planted into says nothing.
CAUGHT: tuple[Outcome, ...] = ("rejected", "refused", "not applicable")
_MOST_REASONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate of the self-test.

    outcome: the gate's verdict; "refused" where it would not even ask the candidate. spoke: who
    decided. reason: in the gate's words. advice: what to do, "" when there is nothing to do.
    num_needed: how many items or tokens would decide. beside: what the answers alone would say of
    a defect that was refused before any question.
    """

    name: str
    title: str
    planted: str
    outcome: Outcome
    spoke: str
    reason: str
    advice: str = ""
    num_needed: int | None = None
    beside: str = ""
    as_expected: bool
    seconds: float


def sound_row(verdict: Verdict, *, num_windows: int, seconds: float) -> Row:
    """The base against itself: accepted, or undecided for want of items alone."""
    undecided = [f for f in verdict.deciding if f.outcome == "inconclusive"]
    lacking = verdict.result == "inconclusive" and all(map(_lacks_items, undecided))
    return Row(
        name="base",
        title="base against itself",
        planted="nothing",
        outcome=verdict.result,
        spoke="" if verdict.result == "accepted" else spoke(verdict),
        reason=_reasons(verdict),
        advice=_advice_on_sound(verdict, num_windows, lacking=lacking),
        num_needed=max((f.num_needed or 0 for f in undecided), default=0) or None,
        as_expected=verdict.result == "accepted" or lacking,
        seconds=seconds,
    )


def defect_row(
    name: str, title: str, planted: str, verdict: Verdict, *, num_windows: int, seconds: float
) -> Row:
    """A defect that was measured: rejected, or the gate has missed it."""
    caught = verdict.result in CAUGHT
    nearest = None if caught else _would_reject(verdict)
    return Row(
        name=name,
        title=title,
        planted=planted,
        outcome=verdict.result,
        spoke=spoke(verdict) if caught else "",
        reason=_reasons(verdict),
        advice="" if caught else _advice_on_missed(nearest, num_windows),
        num_needed=None if nearest is None else nearest.num_needed,
        as_expected=caught,
        seconds=seconds,
    )


def spoke(verdict: Verdict) -> str:
    """The first metric that made the verdict what it is."""
    return verdict.deciding[0].label if verdict.deciding else ""


def _lacks_items(finding: Finding) -> bool:
    """Whether the rule is undecided because there is too little to tell, and for no other cause."""
    return finding.num_needed is not None or not finding.measurement.has_interval


def _reasons(verdict: Verdict) -> str:
    if verdict.result == "accepted":
        return "every limit is kept"
    return "; ".join(finding.reason for finding in verdict.deciding[:_MOST_REASONS])


def _advice_on_sound(verdict: Verdict, num_windows: int, *, lacking: bool) -> str:
    if verdict.result == "accepted":
        return ""
    if lacking:
        wants = (f"{f.label}: {_amount(f, num_windows)}" for f in verdict.deciding)
        return f"your suite has too few items to accept anything; {'; '.join(wants)}"
    return (
        "this gate does not accept the base itself, so no candidate can pass: use a stronger base, "
        "an easier suite, or limits wider than the engine's own noise"
    )


def _advice_on_missed(nearest: Finding | None, num_windows: int) -> str:
    if nearest is not None:
        return (
            f"your suite has too few items to see it; {nearest.label}: "
            f"{_amount(nearest, num_windows)}"
        )
    return (
        "the loss that was seen lies within the limits, so more items would not reject it: tighten "
        "the limits of the gates file, or add items that ask for what this defect breaks"
    )


def _amount(finding: Finding, num_windows: int) -> str:
    """How much would decide a rule, as something a person can pass."""
    m, needed = finding.measurement, finding.num_needed
    if needed is None:
        return f"more {m.clusters} than these {m.num_clusters} would do"
    if m.counted == "items":
        return f"{needed} items would do, {m.num_scored} were used"
    wanted = ceil(num_windows * needed / m.num_scored)
    return f"{wanted} windows of text would do, {num_windows} were used"


def _would_reject(verdict: Verdict) -> Finding | None:
    """The undecided rule that fewest items turn into a failure, should the loss stay as seen."""
    beyond = [
        f for f in verdict.findings
        if f.outcome == "inconclusive" and f.num_needed is not None and _is_beyond(f)
    ]  # fmt: skip
    return min(beyond, key=lambda f: f.num_needed or 0, default=None)


def _is_beyond(finding: Finding) -> bool:
    rule, estimate = finding.rule, finding.measurement.estimate
    return estimate < rule.limit if rule.kind == "min" else estimate > rule.limit
