"""Rules: one limit against one measurement, with three answers. Pure.

Every rule is a non-inferiority question: pass (the bound lies within the limit), fail (the opposite
bound lies beyond it) or inconclusive (too few samples to tell, or a base too weak for a loss to
show). `eval.gate` decides which rule meets which measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from eval.errors import EvaluationError
from eval.gate_spec import FLOOR_MARGINS, MetricRule, StratumRule
from eval.measurement import Measurement, format_distance, format_interval, format_value
from eval.stats import (
    PairedCounts,
    clopper_pearson_lower,
    clopper_pearson_upper,
    drop_lower,
    drop_upper,
)

Outcome = Literal["pass", "fail", "inconclusive"]

# Below this many discordant pairs the score test is too optimistic at the margin, so the exact
# bound of the lost rate must lie within the margin too.
FEW_DISCORDANT = 5
# Of the items the base got right, at most this many margins may be lost: gains elsewhere must not
# hide losses.
RETENTION_MARGINS = 2
MOST_ITEMS = 20_000
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rule says, in one plain sentence; num_needed: how much in all would decide."""

    outcome: Outcome
    reason: str
    num_needed: int | None = None


def answer(rule: StratumRule, m: Measurement, confidence: float, noise: float | None) -> Answer:
    """Apply one rule. noise: how far the base is from itself by this metric, None when unknown.

    EvaluationError: the base's own outputs are not numbers.
    """
    if broken := _broken(rule, m):
        return broken
    if math.isnan(m.estimate):
        raise EvaluationError(f"{m.name} is {m.estimate}: the base's own outputs are not finite")
    found = _judge_bounds(rule, m) if m.paired is None else _judge_paired(rule, m, confidence)
    if found.outcome == "fail":
        return found
    return _broken_domain(rule, m) or _too_weak(rule, m) or _drowned(rule, m, noise) or found


def _broken(rule: StratumRule, m: Measurement) -> Answer | None:
    """What no statistics excuse: no number, a golden item lost, a score below its own minimum."""
    reason = None
    if m.num_nonfinite:
        reason = (
            f"the candidate gave NaN, Inf or an error at {m.num_nonfinite} of {m.num_scored} "
            f"{m.counted}"
        )
    elif math.isinf(m.estimate):
        reason = "the candidate's loss is too large for a number"
    elif m.golden_lost:
        more = len(m.golden_lost) - _SHOWN
        names = ", ".join(m.golden_lost[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        reason = f"{len(m.golden_lost)} golden items, which must never be lost, are lost ({names})"
    elif rule.at_least is not None and m.candidate is not None and m.candidate < rule.at_least:
        reason = (
            f"the candidate reaches {m.candidate:.1%} where at least {rule.at_least:.1%} is "
            "demanded"
        )
    return None if reason is None else Answer(outcome="fail", reason=reason)


def _drowned(rule: StratumRule, m: Measurement, noise: float | None) -> Answer | None:
    """A limit that the base's own noise reaches judges the noise."""
    if noise is None or noise < slack(rule, m):
        return None
    room, floor = (format_distance(d, m.unit) for d in (slack(rule, m), noise))
    return Answer(
        outcome="inconclusive",
        reason=f"the limit is {room} away and the base differs from itself by {floor} (noise "
        "floor): a difference this small cannot be judged; widen the limit or compute more exactly",
    )


def slack(rule: StratumRule, m: Measurement) -> float:
    """How far the limit lies from "no difference", in the metric's unit."""
    return abs(rule.limit - 1) if m.unit in ("ratio", "share") else rule.limit


def _too_weak(rule: StratumRule, m: Measurement) -> Answer | None:
    """A base that sits on the metric's floor has nothing to lose, so a small drop says nothing."""
    if rule.max_drop is None or m.base is None:
        return None
    least = rule.floor + FLOOR_MARGINS * rule.max_drop
    if m.base >= least:
        return None
    return Answer(
        outcome="inconclusive",
        reason=f"base too weak to judge: it reaches {m.base:.1%} where at least {least:.1%} is "
        "needed for a loss to show; use a stronger base or an easier suite",
    )


def _broken_domain(rule: StratumRule, m: Measurement) -> Answer | None:
    """Fail for the first domain whose whole interval lies beyond the limit."""
    if not isinstance(rule, MetricRule) or not rule.domains:
        return None
    certainly = rule.model_copy(update={"judge": "bound"})
    for domain, part in m.domains:
        answer = _judge_bounds(certainly, part)
        if answer.outcome == "fail":
            return Answer(outcome="fail", reason=f"in {domain}, {answer.reason}")
    return None


def _judge_bounds(rule: StratumRule, m: Measurement) -> Answer:
    """Judge an interval, whichever direction is worse."""
    sign = -1.0 if rule.kind == "min" else 1.0
    worst, best = (m.lower, m.upper) if rule.kind == "min" else (m.upper, m.lower)
    limit = sign * rule.limit
    if rule.judge == "estimate":
        worst = best = m.estimate
    found = _found(rule, m)
    if not m.has_interval:
        return Answer(
            outcome="inconclusive",
            reason=f"{found}; too few {m.clusters} for an interval ({m.num_clusters})",
        )
    if sign * worst <= limit:
        return Answer(outcome="pass", reason=f"{found} keeps the limit")
    if sign * best > limit:
        return Answer(outcome="fail", reason=f"{found} breaks the limit")
    return Answer(
        outcome="inconclusive",
        reason=f"{found} may lie on either side of the limit",
        num_needed=_more_tokens(m, worst, best, rule.limit),
    )


def _found(rule: StratumRule, m: Measurement) -> str:
    word = "at least" if rule.kind == "min" else "at most"
    found = format_interval(m.estimate, m.lower, m.upper, m.unit)
    found = f"a drop of {found}" if m.unit == "drop" else found
    about = f" ({m.about})" if m.about else ""
    return f"{found} against {word} {format_value(rule.limit, m.unit)}{about}"


def _more_tokens(m: Measurement, worst: float, best: float, limit: float) -> int | None:
    """The count at which the nearer bound would reach the limit, widths shrinking by 1/sqrt(n)."""
    decisive = worst if (m.estimate - limit) * (worst - limit) < 0 else best
    gap = abs(m.estimate - limit)
    reach = abs(decisive - m.estimate)
    if gap == 0 or not math.isfinite(reach):
        return None
    needed = math.ceil(m.num_scored * (reach / gap) ** 2)
    return needed if needed <= MOST_ITEMS * 1000 else None


def _judge_paired(rule: StratumRule, m: Measurement, confidence: float) -> Answer:
    """Judge a pass-or-fail metric: score bounds of the drop, then the two safeguards."""
    said, counts = m.paired, m.evidence
    assert said is not None
    assert counts is not None
    margin = rule.limit
    outcome, why = decide_paired(counts, margin, confidence)
    reason = f"{_found(rule, m)}, {said.lost} lost and {said.gained} gained of "
    reason += f"{said.num_items} {m.counted}"
    if counts != said:
        reason += f" in {m.num_clusters} documents (worth {counts.num_items} independent ones)"
    needed = None
    if outcome == "inconclusive":
        independent = items_to_decide(
            counts, lambda scaled: decide_paired(scaled, margin, confidence)[0] != "inconclusive"
        )
        needed = None if independent is None else math.ceil(independent * m.design_effect)
    return Answer(outcome=outcome, reason=f"{reason}: {why}", num_needed=needed)


def decide_paired(counts: PairedCounts, margin: float, confidence: float) -> tuple[Outcome, str]:
    """The rule of non-inferiority for paired proportions, and in words which part of it spoke."""
    if drop_lower(counts, confidence) > margin:
        return "fail", "the loss is certainly larger than allowed"
    allowed = RETENTION_MARGINS * margin
    if clopper_pearson_lower(counts.lost, counts.num_base_ok, confidence) > allowed:
        return "fail", (
            f"of {counts.num_base_ok} the base gets right, certainly more than {allowed:.1%} are "
            "lost, whatever is gained elsewhere"
        )
    if drop_upper(counts, confidence) >= margin:
        return "inconclusive", "too few items to exclude a larger loss"
    few = counts.lost + counts.gained < FEW_DISCORDANT
    if few and clopper_pearson_upper(counts.lost, counts.num_items, confidence) >= margin:
        return "inconclusive", "too few items to exclude a larger loss"
    kept = clopper_pearson_upper(counts.lost, counts.num_base_ok, confidence)
    if kept >= allowed:
        return "inconclusive", (
            f"up to {kept:.1%} of the {counts.num_base_ok} the base gets right may be lost, "
            f"{allowed:.1%} is allowed"
        )
    return "pass", "the loss is within the margin"


def items_to_decide(counts: PairedCounts, decided: Callable[[PairedCounts], bool]) -> int | None:
    """The smallest number of items that decides if the rates stay as observed (to about 1 %).

    None when no number up to MOST_ITEMS does: the loss lies too close to the margin.
    """
    low, high = counts.num_items, counts.num_items
    while not decided(_scaled(counts, high)):
        low, high = high, high + max(1, high // 8)
        if high > MOST_ITEMS:
            return None
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if decided(_scaled(counts, middle)) else (middle, high)
    return high


def _scaled(counts: PairedCounts, n: int) -> PairedCounts:
    factor = n / counts.num_items
    return PairedCounts(
        num_items=n,
        num_base_ok=round(counts.num_base_ok * factor),
        lost=round(counts.lost * factor),
        gained=round(counts.gained * factor),
    )
