"""The gate: rules from a gates file plus measurements make a verdict. Pure; read this file first.

Every rule is a non-inferiority question with three answers: pass (the bound lies within the limit),
fail (the opposite bound lies beyond it) and inconclusive (too few samples to tell, or a base too
weak for a loss to show). Knows no model, file or clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from eval.errors import EvaluationError
from eval.gate_spec import FLOOR_MARGINS, METRICS, GateSpec, MetricRule
from eval.measurement import Measurement, format_interval, format_value
from eval.stats import (
    PairedCounts,
    clopper_pearson_lower,
    clopper_pearson_upper,
    drop_lower,
    drop_upper,
    mcnemar_p,
)

Outcome = Literal["pass", "fail", "inconclusive"]
Result = Literal["accepted", "rejected", "inconclusive"]
EXIT_CODES: dict[Result, int] = {"accepted": 0, "rejected": 1, "inconclusive": 3}

# Below this many discordant pairs the score test is too optimistic at the margin, so the exact
# bound of the lost rate must lie within the margin too.
FEW_DISCORDANT = 5
# Of the items the base got right, at most this many margins may be lost: gains elsewhere must not
# hide losses.
RETENTION_MARGINS = 2
MOST_ITEMS = 20_000
ALARM_P = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one rule; `reason` is one plain sentence.

    num_needed: how many items or tokens in all would decide, where more of them can.
    alarm: the loss is significant by itself (exact McNemar) although the rule did not fail.
    """

    name: str
    outcome: Outcome
    reason: str
    rule: MetricRule
    measurement: Measurement
    num_needed: int | None = None
    alarm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the gate says about an artifact: one finding per rule, in the file's order."""

    result: Result
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 rejected, 3 inconclusive."""
        return EXIT_CODES[self.result]

    @property
    def deciding(self) -> tuple[Finding, ...]:
        """The findings that made the verdict what it is; all of them when it is accepted."""
        if self.result == "accepted":
            return self.findings
        if self.result == "rejected":
            return tuple(f for f in self.findings if f.outcome == "fail")
        return tuple(f for f in self.findings if f.outcome == "inconclusive" and f.rule.required)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    outcome: Outcome
    reason: str
    num_needed: int | None = None


def judge(spec: GateSpec, measurements: Mapping[str, Measurement]) -> Verdict:
    """Apply every rule of the gates file.

    Raises:
        EvaluationError: a rule's metric was not measured, scored nothing, or is not a number for
            the base. Missing evidence is never a pass.
    """
    findings = tuple(
        _finding(name, rule, _evidence(name, measurements), spec.confidence)
        for name, rule in spec.metrics.items()
    )
    return Verdict(result=_result(findings), findings=findings)


def _result(findings: tuple[Finding, ...]) -> Result:
    if any(f.outcome == "fail" for f in findings):
        return "rejected"
    if any(f.outcome == "inconclusive" and f.rule.required for f in findings):
        return "inconclusive"
    return "accepted"


def _evidence(name: str, measurements: Mapping[str, Measurement]) -> Measurement:
    if name not in measurements:
        raise EvaluationError(
            f"the gates file judges {name}, but it was not measured; measured: "
            f"{', '.join(sorted(measurements)) or 'nothing'}"
        )
    measurement = measurements[name]
    if measurement.num_scored == 0:
        raise EvaluationError(
            f"{name}: zero {measurement.counted} were scored, so nothing can be said; "
            "check that the suite holds usable documents and gold fields that are not null"
        )
    return measurement


def _finding(name: str, rule: MetricRule, m: Measurement, confidence: float) -> Finding:
    answer = _answer(rule, m, confidence)
    alarm = m.paired is not None and answer.outcome != "fail" and mcnemar_p(m.paired) < ALARM_P
    return Finding(
        name=name,
        outcome=answer.outcome,
        reason=f"{METRICS[name].label}: {answer.reason}",
        rule=rule,
        measurement=m,
        num_needed=answer.num_needed,
        alarm=alarm,
    )


def _answer(rule: MetricRule, m: Measurement, confidence: float) -> _Answer:
    if m.num_nonfinite:
        return _Answer(
            outcome="fail",
            reason=f"the candidate gave NaN, Inf or an error at {m.num_nonfinite} of "
            f"{m.num_scored} {m.counted}",
        )
    if math.isinf(m.estimate):
        return _Answer(outcome="fail", reason="the candidate's loss is too large for a number")
    if math.isnan(m.estimate):
        raise EvaluationError(f"{m.name} is {m.estimate}: the base's own outputs are not finite")
    weak = _too_weak(rule, m)
    answer = (
        _judge_paired(rule, m, m.paired, confidence)
        if m.paired is not None
        else _judge_bounds(rule, m)
    )
    if answer.outcome == "fail":
        return answer
    return _broken_domain(rule, m) or weak or answer


def _too_weak(rule: MetricRule, m: Measurement) -> _Answer | None:
    """A base that sits on the metric's floor has nothing to lose, so a small drop says nothing."""
    if rule.max_drop is None or m.base is None:
        return None
    least = rule.floor + FLOOR_MARGINS * rule.max_drop
    if m.base >= least:
        return None
    return _Answer(
        outcome="inconclusive",
        reason=f"base too weak to judge: it reaches {m.base:.1%} where at least {least:.1%} is "
        "needed for a loss to show; use a stronger base or an easier suite",
    )


def _broken_domain(rule: MetricRule, m: Measurement) -> _Answer | None:
    """Fail for the first domain whose whole interval lies beyond the limit."""
    if not rule.domains:
        return None
    certainly = rule.model_copy(update={"judge": "bound"})
    for domain, part in m.domains:
        answer = _judge_bounds(certainly, part)
        if answer.outcome == "fail":
            return _Answer(outcome="fail", reason=f"in {domain}, {answer.reason}")
    return None


def _judge_bounds(rule: MetricRule, m: Measurement) -> _Answer:
    """Judge an interval, whichever direction is worse."""
    sign = -1.0 if rule.kind == "min" else 1.0
    worst, best = (m.lower, m.upper) if rule.kind == "min" else (m.upper, m.lower)
    limit = sign * rule.limit
    if rule.judge == "estimate":
        worst = best = m.estimate
    found = _found(rule, m)
    if not m.has_interval:
        return _Answer(
            outcome="inconclusive",
            reason=f"{found}; too few {m.clusters} for an interval ({m.num_clusters})",
        )
    if sign * worst <= limit:
        return _Answer(outcome="pass", reason=f"{found} keeps the limit")
    if sign * best > limit:
        return _Answer(outcome="fail", reason=f"{found} breaks the limit")
    return _Answer(
        outcome="inconclusive",
        reason=f"{found} may lie on either side of the limit",
        num_needed=_more_tokens(m, worst, best, rule.limit),
    )


def _found(rule: MetricRule, m: Measurement) -> str:
    word = "at least" if rule.kind == "min" else "at most"
    found = format_interval(m.estimate, m.lower, m.upper, m.unit)
    found = f"a drop of {found}" if m.unit == "drop" else found
    return f"{found} against {word} {format_value(rule.limit, m.unit)}"


def _more_tokens(m: Measurement, worst: float, best: float, limit: float) -> int | None:
    """The count at which the nearer bound would reach the limit, widths shrinking by 1/sqrt(n)."""
    decisive = worst if (m.estimate - limit) * (worst - limit) < 0 else best
    gap = abs(m.estimate - limit)
    reach = abs(decisive - m.estimate)
    if gap == 0 or not math.isfinite(reach):
        return None
    needed = math.ceil(m.num_scored * (reach / gap) ** 2)
    return needed if needed <= MOST_ITEMS * 1000 else None


def _judge_paired(rule: MetricRule, m: Measurement, counts: PairedCounts, conf: float) -> _Answer:
    """Judge a pass-or-fail metric: score bounds of the drop, then the two safeguards."""
    margin = rule.limit
    outcome, why = _decide_paired(counts, margin, conf)
    reason = f"{_found(rule, m)}, {counts.lost} lost and {counts.gained} gained of "
    reason += f"{counts.num_items} {m.counted}: {why}"
    needed = None
    if outcome == "inconclusive":
        needed = items_to_decide(
            counts, lambda scaled: _decide_paired(scaled, margin, conf)[0] != "inconclusive"
        )
    return _Answer(outcome=outcome, reason=reason, num_needed=needed)


def _decide_paired(counts: PairedCounts, margin: float, confidence: float) -> tuple[Outcome, str]:
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
