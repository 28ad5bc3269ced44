"""The gate: three answers per rule, three verdicts, and no way to pass without evidence."""

from __future__ import annotations

import math
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
        num_scored=n,
        num_clusters=n,
        paired=paired,
        **more,
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
