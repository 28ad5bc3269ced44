"""The gate: three answers per rule, three verdicts, and no way to pass without evidence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from eval.errors import EvaluationError
from eval.gate import judge
from eval.gate_spec import GateSpec
from eval.measurement import Measurement
from eval.stats import PairedCounts, drop_interval


def spec(**metrics: dict[str, Any]) -> GateSpec:
    return GateSpec.model_validate({"version": 1, "metrics": metrics})


def tokens(name: str, estimate: float, lower: float, upper: float, **more: Any) -> Measurement:
    unit = {"perplexity_ratio": "ratio", "kl_mean": "nats", "top1_agreement": "share"}[name]
    fields: dict[str, Any] = {"num_scored": 9000, "num_clusters": 36, **more}
    return Measurement(
        name=name,
        unit=unit,  # type: ignore[arg-type]
        base=None,
        candidate=None,
        estimate=estimate,
        lower=lower,
        upper=upper,
        counted="tokens",
        **fields,
    )


def items(n: int, base_ok: int, lost: int, gained: int, **more: Any) -> Measurement:
    paired = PairedCounts(num_items=n, num_base_ok=base_ok, lost=lost, gained=gained)
    interval = drop_interval(paired)
    return Measurement(
        name="schema_valid",
        unit="drop",
        base=base_ok / n,
        candidate=(base_ok - lost + gained) / n,
        estimate=interval.estimate,
        lower=interval.lower,
        upper=interval.upper,
        counted="items",
        paired=paired,
        **{"num_scored": n, "num_clusters": n, **more},
    )


def outcome(rule: dict[str, Any], measurement: Measurement) -> str:
    verdict = judge(spec(**{measurement.name: rule}), {measurement.name: measurement})
    return verdict.findings[0].outcome


# Margin 2 pp; the base gets all items right that the candidate does not gain.
VECTORS = [
    (100, 0, 0, "inconclusive"),
    (150, 0, 0, "pass"),
    (200, 1, 1, "inconclusive"),
    (200, 4, 0, "inconclusive"),
    (400, 2, 2, "pass"),
    (400, 4, 1, "pass"),
    (400, 8, 0, "inconclusive"),
    (1000, 10, 5, "pass"),
    (1000, 20, 10, "pass"),
    (1000, 30, 10, "inconclusive"),
    (60, 10, 0, "fail"),
    (100, 16, 0, "fail"),
    (400, 64, 0, "fail"),
]


@pytest.mark.parametrize(("n", "lost", "gained", "expected"), VECTORS)
def test_paired_rule(n: int, lost: int, gained: int, expected: str) -> None:
    assert outcome({"max_drop": 0.02}, items(n, n - gained, lost, gained)) == expected


def measured(*found: Measurement, **named: Measurement) -> dict[str, Measurement]:
    return {m.name: m for m in found} | named


def within(stratum: str, part: Measurement, whole: Measurement) -> Measurement:
    return replace(whole, domains=((stratum, part), *whole.domains))


def test_a_stratum_has_a_margin_of_its_own() -> None:
    """Flawless over all, undecided where there are few, rejected where the loss is."""
    whole = items(900, 900, 0, 0)
    rule = {"max_drop": 0.02, "strata": {"length:4k-8k": {"max_drop": 0.05}}}
    for part, expected in ((items(100, 100, 0, 0), 0), (items(40, 40, 0, 0), 3),
                           (items(100, 100, 16, 0), 1)):  # fmt: skip
        found = measured(within("length:4k-8k", part, whole))
        verdict = judge(spec(schema_valid=rule), found)
        assert verdict.exit_code == expected
        assert [f.stratum for f in verdict.findings] == ["", "length:4k-8k"]
    assert verdict.deciding[0].label == "Schema valid in length:4k-8k"
    assert "Schema valid in length:4k-8k: a drop of" in verdict.deciding[0].reason


def test_a_star_is_every_stratum_of_its_kind_that_has_no_rule_of_its_own() -> None:
    part = items(100, 100, 0, 0)
    whole = items(900, 900, 0, 0)
    for name in ("lang:en", "source:code", "lang:zh"):
        whole = within(name, part, whole)
    strata = {"lang:*": {"max_drop": 0.05}, "lang:zh": {"max_drop": 0.1}}
    verdict = judge(spec(schema_valid={"max_drop": 0.02, "strata": strata}), measured(whole))
    assert [(f.stratum, f.rule.limit) for f in verdict.findings] == [
        ("", 0.02), ("lang:en", 0.05), ("lang:zh", 0.1),
    ]  # fmt: skip


def test_a_star_over_a_single_stratum_may_ask_more_than_the_whole() -> None:
    """Of 56 % right with 50 % by chance, no loss of 5 points could show."""
    found = measured(within("lang:en", items(900, 500, 0, 0), items(900, 500, 0, 0)))
    asked = {"same": {"max_drop": 0.05}, "more": {"max_drop": 0.05, "floor": 0.5}}
    verdicts = {
        name: judge(spec(schema_valid={"max_drop": 0.05, "strata": {"lang:*": rule}}), found)
        for name, rule in asked.items()
    }
    assert [len(v.findings) for v in verdicts.values()] == [1, 2]
    assert [v.result for v in verdicts.values()] == ["accepted", "inconclusive"]


@pytest.mark.parametrize("pattern", ["lang:zh", "length:*"])
def test_a_stratum_without_items_is_an_error(pattern: str) -> None:
    whole = within("lang:en", items(900, 900, 0, 0), items(900, 900, 0, 0))
    rule = {"max_drop": 0.02, "strata": {pattern: {"max_drop": 0.05}}}
    with pytest.raises(EvaluationError, match="holds no such items; measured: lang:en"):
        judge(spec(schema_valid=rule), measured(whole))
    empty = within("lang:zh", items(1, 1, 0, 0, num_scored=0), whole)
    if pattern == "lang:zh":
        with pytest.raises(EvaluationError, match="schema_valid in lang:zh: zero items"):
            judge(spec(schema_valid=rule), measured(empty))


def test_a_guard_within_a_stratum_need_not_be_decided() -> None:
    whole = within("lang:zh", items(10, 10, 0, 0), items(900, 900, 0, 0))
    rule = {"max_drop": 0.02, "strata": {"lang:zh": {"max_drop": 0.05, "required": False}}}
    assert judge(spec(schema_valid=rule), measured(whole)).exit_code == 0


def test_alarms_are_corrected_for_all_that_was_measured() -> None:
    """p = .0039 is an alarm among three metrics and none among twenty."""
    rules = spec(schema_valid={"max_drop": 0.02})
    worse = items(400, 400, 8, 0)
    for others, expected in ((2, True), (19, False)):
        more = {f"guard{i}": items(400, 400, 1, 1) for i in range(others)}
        verdict = judge(rules, measured(worse, **more))
        finding = verdict.findings[0]
        assert finding.p_value == pytest.approx(2**-8)
        assert finding.holm_p == pytest.approx((others + 1) * 2**-8)
        assert finding.alarm is expected
        assert bool(verdict.alarms) is expected


def test_a_metric_without_a_rule_raises_the_alarm_too() -> None:
    unruled = items(400, 400, 12, 0)
    verdict = judge(spec(schema_valid={"max_drop": 0.02}),
                    measured(items(400, 400, 0, 0), language_kept=unruled))  # fmt: skip
    assert verdict.exit_code == 0
    assert [alarm.name for alarm in verdict.alarms] == ["language_kept"]


def test_changes_within_the_noise_of_the_base_are_no_alarm() -> None:
    """The base against itself flips 16 of 400; the candidate flips 8."""
    worse = items(400, 400, 8, 0)
    noise = {"schema_valid": items(400, 400, 8, 8)}
    rules = spec(schema_valid={"max_drop": 0.05})
    assert judge(rules, measured(worse)).findings[0].alarm
    finding = judge(rules, measured(worse), noise).findings[0]
    assert not finding.alarm
    assert finding.noise == pytest.approx(0.02)
    assert judge(rules, measured(worse), noise).alarms == ()


@pytest.mark.parametrize(
    ("rule", "found", "noise"),
    [
        ({"max_drop": 0.02}, items(900, 900, 0, 0), items(900, 900, 30, 30)),
        ({"max": 0.01}, tokens("kl_mean", 0.001, 0.0, 0.002), tokens("kl_mean", 0.02, 0.01, 0.03)),
        ({"max": 1.01}, tokens("perplexity_ratio", 1, 1, 1),
         tokens("perplexity_ratio", 0.98, 1, 1)),
        ({"min": 0.99}, tokens("top1_agreement", 1, 1, 1), tokens("top1_agreement", 0.98, 0.9, 1)),
    ],
)  # fmt: skip
def test_a_limit_within_the_noise_cannot_be_judged(
    rule: dict[str, Any], found: Measurement, noise: Measurement
) -> None:
    rules = spec(**{found.name: rule})
    assert judge(rules, measured(found)).exit_code == 0
    assert judge(rules, measured(found), measured(replace(noise, name=found.name))).exit_code == 3
    quiet = replace(noise, paired=None, estimate=found.estimate)
    verdict = judge(rules, measured(found), {found.name: quiet})
    assert verdict.exit_code == 0


def test_noise_does_not_excuse_a_certain_loss() -> None:
    noise = {"schema_valid": items(900, 900, 30, 30)}
    rules = spec(schema_valid={"max_drop": 0.02})
    assert judge(rules, measured(items(900, 900, 90, 0)), noise).exit_code == 1


def test_a_lost_golden_item_rejects() -> None:
    found = items(900, 900, 1, 0, golden_lost=("contract-7",))
    verdict = judge(spec(schema_valid={"max_drop": 0.05}), measured(found))
    assert verdict.exit_code == 1
    assert "golden items, which must never be lost, are lost (contract-7)" in (
        verdict.findings[0].reason
    )


def test_the_candidate_must_reach_its_own_minimum() -> None:
    rule = {"max_drop": 0.05, "at_least": 0.95}
    assert outcome(rule, items(900, 860, 0, 0)) == "pass"
    assert outcome(rule, items(900, 850, 0, 0)) == "fail"


def test_items_of_one_document_are_not_independent() -> None:
    """400 items pass; as 10 each of 40 documents that stand or fall together, they do not."""
    assert outcome({"max_drop": 0.02}, items(400, 400, 0, 0)) == "pass"
    clustered = items(400, 400, 0, 0, num_clusters=40, design_effect=10.0)
    verdict = judge(spec(schema_valid={"max_drop": 0.02}), measured(clustered))
    assert verdict.exit_code == 3
    assert "in 40 documents (worth 40 independent ones)" in verdict.findings[0].reason
    assert 1460 <= (verdict.findings[0].num_needed or 0) <= 1530


def test_regression_is_suspected_when_significant_but_not_certainly_beyond_the_margin() -> None:
    verdict = judge(spec(schema_valid={"max_drop": 0.02}), {"schema_valid": items(400, 400, 8, 0)})
    assert verdict.findings[0].alarm


def test_gains_elsewhere_do_not_hide_losses() -> None:
    """16 of 120 right answers lost, 37 others gained: better on average, still not accepted."""
    assert outcome({"max_drop": 0.05}, items(160, 120, 16, 21)) == "inconclusive"
    assert outcome({"max_drop": 0.05}, items(160, 120, 0, 21)) == "pass"


def test_a_base_on_the_floor_can_lose_nothing() -> None:
    found = judge(spec(schema_valid={"max_drop": 0.05}), {"schema_valid": items(200, 15, 0, 0)})
    assert found.result == "inconclusive"
    assert "base too weak to judge" in found.findings[0].reason
    assert found.findings[0].num_needed is None
    chance = {"max_drop": 0.05, "floor": 0.5}
    assert outcome(chance, items(400, 230, 0, 0)) == "inconclusive"
    assert outcome(chance, items(400, 380, 0, 0)) == "pass"


def test_sixty_items_are_the_fewest_that_accept_a_flawless_candidate_at_five_points() -> None:
    assert outcome({"max_drop": 0.05}, items(60, 60, 0, 0)) == "pass"
    assert outcome({"max_drop": 0.05}, items(58, 58, 0, 0)) == "inconclusive"


def test_inconclusive_names_the_number_that_decides() -> None:
    finding = judge(
        spec(schema_valid={"max_drop": 0.02}), {"schema_valid": items(100, 100, 0, 0)}
    ).findings[0]
    assert finding.num_needed is not None
    assert 146 <= finding.num_needed <= 153
    n = finding.num_needed
    assert outcome({"max_drop": 0.02}, items(n, n, 0, 0)) == "pass"


def test_a_loss_at_the_margin_is_never_decided() -> None:
    finding = judge(
        spec(schema_valid={"max_drop": 0.02}), {"schema_valid": items(200, 200, 4, 0)}
    ).findings[0]
    assert finding.num_needed is None


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [(1.0, 1.03, "pass"), (1.0, 1.0301, "inconclusive"), (1.0301, 1.06, "fail")],
)
def test_bound_rule(lower: float, upper: float, expected: str) -> None:
    m = tokens("perplexity_ratio", (lower + upper) / 2, lower, upper)
    assert outcome({"max": 1.03}, m) == expected


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [(0.92, 0.99, "pass"), (0.90, 0.95, "inconclusive"), (0.80, 0.9199, "fail")],
)
def test_bound_rule_where_less_is_worse(lower: float, upper: float, expected: str) -> None:
    m = tokens("top1_agreement", (lower + upper) / 2, lower, upper)
    assert outcome({"min": 0.92}, m) == expected


def test_estimate_rule_looks_at_the_estimate_only() -> None:
    rule = {"max": 0.05, "judge": "estimate"}
    assert outcome(rule, tokens("kl_mean", 0.05, 0.01, 0.20)) == "pass"
    assert outcome(rule, tokens("kl_mean", 0.0501, 0.01, 0.20)) == "fail"


def test_more_tokens_are_asked_for_in_proportion_to_the_square_of_the_gap() -> None:
    m = tokens("perplexity_ratio", 1.02, 1.00, 1.04)
    finding = judge(spec(perplexity_ratio={"max": 1.03}), {m.name: m}).findings[0]
    assert finding.num_needed == pytest.approx(9000 * 4, rel=0.001)


def test_one_broken_domain_rejects_what_the_pool_hides() -> None:
    bad = tokens("perplexity_ratio", 1.3, 1.2, 1.4)
    good = tokens("perplexity_ratio", 1.0, 0.99, 1.01)
    pooled = tokens(
        "perplexity_ratio",
        1.01,
        1.0,
        1.02,
        domains=(("source:code", bad), ("source:contracts", good)),
    )
    assert outcome({"max": 1.03}, pooled) == "pass"
    verdict = judge(spec(perplexity_ratio={"max": 1.03, "domains": True}), {pooled.name: pooled})
    assert verdict.result == "rejected"
    assert "source:code" in verdict.findings[0].reason


def test_verdict_prefers_rejection_then_doubt() -> None:
    measured = {
        "kl_mean": tokens("kl_mean", 0.01, 0.005, 0.02),
        "top1_agreement": tokens("top1_agreement", 0.93, 0.91, 0.95),
        "schema_valid": items(100, 100, 16, 0),
    }
    kl, top1 = {"max": 0.05}, {"min": 0.92}
    assert judge(spec(kl_mean=kl), measured).exit_code == 0
    assert judge(spec(kl_mean=kl, top1_agreement=top1), measured).exit_code == 3
    guard = {"min": 0.92, "required": False}
    assert judge(spec(kl_mean=kl, top1_agreement=guard), measured).exit_code == 0
    everything = spec(kl_mean=kl, top1_agreement=top1, schema_valid={"max_drop": 0.05})
    verdict = judge(everything, measured)
    assert verdict.exit_code == 1
    assert [f.name for f in verdict.deciding] == ["schema_valid"]


def test_a_guard_that_fails_rejects() -> None:
    rules = spec(kl_mean={"max": 0.05}, schema_valid={"max_drop": 0.05, "required": False})
    measured = {"kl_mean": tokens("kl_mean", 0, 0, 0), "schema_valid": items(100, 100, 16, 0)}
    assert judge(rules, measured).result == "rejected"


def test_missing_metric_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="schema_valid, but it was not measured"):
        judge(spec(schema_valid={"max_drop": 0.05}), {"kl_mean": tokens("kl_mean", 0, 0, 0)})


def test_zero_scored_tokens_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="zero tokens were scored"):
        judge(spec(kl_mean={"max": 0.05}), {"kl_mean": tokens("kl_mean", 0, 0, 0, num_scored=0)})


def test_nan_of_the_candidate_rejects_and_nan_of_the_base_is_an_error() -> None:
    broken = tokens("kl_mean", math.nan, -math.inf, math.inf, num_nonfinite=3)
    verdict = judge(spec(kl_mean={"max": 0.05}), {"kl_mean": broken})
    assert verdict.result == "rejected"
    assert "NaN" in verdict.findings[0].reason
    with pytest.raises(EvaluationError, match="base"):
        judge(spec(kl_mean={"max": 0.05}), {"kl_mean": tokens("kl_mean", math.nan, 0, 0)})


def test_one_nan_hidden_among_good_numbers_rejects() -> None:
    rule = {"max": 0.05}
    assert outcome(rule, tokens("kl_mean", 0.01, 0.0, 0.02, num_nonfinite=1)) == "fail"
    assert outcome({"max_drop": 0.05}, items(100, 100, 0, 0, num_nonfinite=1)) == "fail"


def test_too_few_clusters_never_pass() -> None:
    m = tokens("perplexity_ratio", 1.0, -math.inf, math.inf, num_clusters=1)
    finding = judge(spec(perplexity_ratio={"max": 1.03}), {m.name: m}).findings[0]
    assert finding.outcome == "inconclusive"
    assert finding.num_needed is None


def test_an_infinite_loss_rejects() -> None:
    found = tokens("perplexity_ratio", math.inf, -math.inf, math.inf)
    assert outcome({"max": 1.03}, found) == "fail"


@pytest.mark.parametrize("rule", [{"max": 0.5}, {"max": 0.5, "judge": "estimate"}])
def test_an_estimate_without_an_interval_is_no_evidence(rule: dict[str, Any]) -> None:
    found = tokens("kl_mean", 0.001, -math.inf, math.inf, num_clusters=2)
    verdict = judge(spec(kl_mean=rule), {"kl_mean": found})
    assert verdict.exit_code == 3
    assert "too few documents for an interval (2)" in verdict.findings[0].reason


def test_a_domain_rejects_only_what_is_certain_there() -> None:
    rule = {"max": 0.05, "judge": "estimate", "domains": True}
    for lower, expected in ((0.04, "pass"), (0.06, "fail")):
        part = tokens("kl_mean", 0.07, lower, 0.1, num_clusters=6)
        whole = tokens("kl_mean", 0.01, 0.005, 0.02, domains=(("source:code", part),))
        assert outcome(rule, whole) == expected
