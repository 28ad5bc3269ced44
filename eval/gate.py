"""The gate: rules from a gates file plus measurements make a verdict. Pure; read this file first.

One finding a rule: over all items, and within each stratum that has a limit of its own. All that
are required must pass, so passing needs no correction for their number; alarms, of which one in
twenty would be false, are corrected by Holm's method over everything measured in pairs. Knows no
model, file or clock; `eval.gate_rules` says what one rule makes of one measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from eval.checks.catalogue import pass_k, sampled
from eval.errors import EvaluationError
from eval.gate_rules import Outcome, answer
from eval.gate_spec import METRICS, GateSpec, MetricRule, StratumRule
from eval.measurement import Measurement
from eval.metrics.lengths import ENOUGH
from eval.review.rules import ReviewDemand
from eval.stats import holm, mcnemar_p

Result = Literal["accepted", "rejected", "inconclusive"]
EXIT_CODES: dict[Result, int] = {"accepted": 0, "rejected": 1, "inconclusive": 3}
ALARM_P = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one rule; `reason` is one plain sentence.

    stratum: where it was asked ("lang:zh"), "" for all items.
    num_needed: how many items or tokens in all would decide, where more of them can.
    p_value, holm_p: of "the candidate is worse", by itself and corrected; None when not paired.
    alarm: the loss is significant after the correction although the rule did not fail.
    noise: how far the base is from itself by this metric, None when that was not measured.
    """

    name: str
    outcome: Outcome
    reason: str
    rule: StratumRule
    measurement: Measurement
    stratum: str = ""
    num_needed: int | None = None
    p_value: float | None = None
    holm_p: float | None = None
    alarm: bool = False
    noise: float | None = None

    @property
    def label(self) -> str:
        """The metric as a person calls it, with its stratum."""
        return _label(self.name, self.stratum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A metric by which the candidate is significantly worse, judged by a rule or not."""

    name: str
    stratum: str
    p_value: float
    holm_p: float

    @property
    def label(self) -> str:
        """The metric as a person calls it, with its stratum."""
        return _label(self.name, self.stratum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the gate says about an artifact: one finding per rule, in the file's order.

    awaits_review: the gates demand a passed review by people, which comes after the measuring.
    """

    result: Result
    findings: tuple[Finding, ...]
    alarms: tuple[Alarm, ...] = ()
    awaits_review: bool = False

    @property
    def measured(self) -> Result:
        """What layers 1 and 2 alone say."""
        return _result(self.findings)

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 rejected, 3 inconclusive."""
        return EXIT_CODES[self.result]

    @property
    def deciding(self) -> tuple[Finding, ...]:
        """The findings that made layers 1 and 2 say what they do; all of them to accept."""
        if self.measured == "accepted":
            return self.findings
        if self.measured == "rejected":
            return tuple(f for f in self.findings if f.outcome == "fail")
        return tuple(f for f in self.findings if f.outcome == "inconclusive" and f.rule.required)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A rule and the measurement it is asked about."""

    name: str
    stratum: str
    rule: StratumRule
    measurement: Measurement

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.stratum


def judge(
    spec: GateSpec,
    measurements: Mapping[str, Measurement],
    noise: Mapping[str, Measurement] | None = None,
) -> Verdict:
    """Apply every rule of the gates file.

    Args:
        spec: the rules. measurements: the candidate against the base, by metric.
        noise: the base against itself computed another way (batching, dtype), by metric; what the
            candidate changes no more often than this is no alarm, and a limit within it cannot be
            judged.

    Raises:
        EvaluationError: a rule's metric or stratum was not measured, scored nothing, or is not a
            number for the base. Missing evidence is never a pass.
    """
    noise = noise or {}
    questions = [
        question
        for name, rule in spec.metrics.items()
        if name in measurements or not rule.if_measured
        for question in _questions(name, rule, _evidence(name, measurements))
    ]
    p_values = {(name, ""): p for name, m in measurements.items() if (p := _p_value(m)) is not None}
    p_values |= {q.key: p for q in questions if (p := _p_value(q.measurement)) is not None}
    adjusted = holm(p_values)
    alarms = tuple(
        Alarm(name=name, stratum=stratum, p_value=p, holm_p=adjusted[name, stratum])
        for (name, stratum), p in p_values.items()
        if adjusted[name, stratum] < ALARM_P
        and not _is_noise(_within(measurements[name], stratum), noise.get(name))
    )
    raised = {(alarm.name, alarm.stratum) for alarm in alarms}
    findings = tuple(
        _finding(q, spec.confidence, noise.get(q.name), p_values, adjusted, raised)
        for q in questions
    )
    return Verdict(result=_result(findings), findings=findings, alarms=alarms)


def await_review(verdict: Verdict, demand: ReviewDemand | None, num_differing: int) -> Verdict:
    """The verdict before people were asked, where a gates file demands that they be.

    num_differing: answers that are not the base's; without one, nobody can prefer anything.
    """
    if demand is None or not demand.required or not num_differing:
        return verdict
    is_open = verdict.result == "accepted"
    return replace(
        verdict, awaits_review=True, result="inconclusive" if is_open else verdict.result
    )


def _result(findings: tuple[Finding, ...]) -> Result:
    if any(f.outcome == "fail" for f in findings):
        return "rejected"
    if any(f.outcome == "inconclusive" and f.rule.required for f in findings):
        return "inconclusive"
    return "accepted"


def _label(name: str, stratum: str) -> str:
    label = METRICS[name].label if name in METRICS else name
    return f"{label} in {stratum}" if stratum else label


def _evidence(name: str, measurements: Mapping[str, Measurement]) -> Measurement:
    if name not in measurements:
        raise EvaluationError(
            f"the gates file judges {name}, but it was not measured{_why(name)}; measured: "
            f"{', '.join(sorted(measurements)) or 'nothing'}"
        )
    return _scored(name, measurements[name])


def _why(name: str) -> str:
    if name in METRICS and METRICS[name].difference:
        return (
            f" (it takes {ENOUGH} short and {ENOUGH} long inputs, in different buckets of "
            "length_edges)"
        )
    if name.endswith((sampled(""), pass_k(""))):
        return " (--sampled K draws answers)"
    return ""


def _scored(where: str, measurement: Measurement) -> Measurement:
    if measurement.num_scored == 0:
        raise EvaluationError(
            f"{where}: zero {measurement.counted} were scored, so nothing can be said; "
            "check that the suite holds usable documents and gold fields that are not null"
        )
    return measurement


def _questions(name: str, rule: MetricRule, whole: Measurement) -> Iterator[_Question]:
    """The rule itself, then its strata; a stratum named in full goes before its kind's `*`."""
    yield _Question(name=name, stratum="", rule=rule, measurement=whole)
    measured = dict(whole.domains)
    for pattern, within in rule.strata.items():
        found = [s for s in measured if _matches(pattern, s)]
        if not found:
            raise EvaluationError(
                f"the gates file judges {name} in {pattern}, but the suite holds no such items; "
                f"measured: {', '.join(measured) or 'no strata'}"
            )
        for stratum in found:
            if stratum == pattern or stratum not in rule.strata:
                part = _scored(f"{name} in {stratum}", measured[stratum])
                if stratum != pattern and _says_nothing_new(rule, within, whole, part):
                    continue
                yield _Question(name=name, stratum=stratum, rule=within, measurement=part)


def _says_nothing_new(
    rule: MetricRule, within: StratumRule, whole: Measurement, part: Measurement
) -> bool:
    """A stratum that holds everything, held to no more than the whole is."""
    is_looser = within.limit <= rule.limit if rule.kind == "min" else within.limit >= rule.limit
    return (
        part.num_scored == whole.num_scored
        and is_looser
        and within.judge == rule.judge
        and within.at_least in (None, rule.at_least)
        and within.floor <= rule.floor
        and (rule.required or not within.required)
    )


def _matches(pattern: str, stratum: str) -> bool:
    kind, value = pattern.split(":", 1)
    return stratum == pattern or (value == "*" and stratum.startswith(f"{kind}:"))


def _within(whole: Measurement, stratum: str) -> Measurement:
    return dict(whole.domains)[stratum] if stratum else whole


def _p_value(m: Measurement) -> float | None:
    if m.p_value is not None or m.paired is None:
        return m.p_value
    return mcnemar_p(m.paired)


def _is_noise(m: Measurement, noise: Measurement | None) -> bool:
    return noise is not None and m.distance <= noise.noise_floor


def _finding(
    question: _Question,
    confidence: float,
    noise: Measurement | None,
    p_values: Mapping[tuple[str, str], float],
    adjusted: Mapping[tuple[str, str], float],
    raised: set[tuple[str, str]],
) -> Finding:
    floor = None if noise is None else noise.noise_floor
    found = answer(question.rule, question.measurement, confidence, floor)
    return Finding(
        name=question.name,
        stratum=question.stratum,
        outcome=found.outcome,
        reason=f"{_label(*question.key)}: {found.reason}",
        rule=question.rule,
        measurement=question.measurement,
        num_needed=found.num_needed,
        p_value=p_values.get(question.key),
        holm_p=adjusted.get(question.key),
        alarm=question.key in raised and found.outcome != "fail",
        noise=None if noise is None else noise.distance,
    )
