"""Gates files: what is accepted, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.errors import GateSpecError
from eval.gate_spec import METRICS, load_gates, parse_gates

SHIPPED = Path(__file__).parents[2] / "recipes" / "gates" / "default.yaml"


def test_shipped_gates_hold_the_published_limits() -> None:
    gates = load_gates(SHIPPED)
    rules = gates.spec.metrics
    assert rules["perplexity_ratio"].max == 1.03
    assert rules["perplexity_ratio"].judge == "bound"
    assert rules["kl_mean"].max == 0.05
    assert rules["top1_agreement"].min == 0.92
    assert rules["schema_valid"].max_drop == 0.05
    required = {name for name, rule in rules.items() if rule.required}
    assert required == {"perplexity_ratio", "kl_mean", "top1_agreement", "schema_valid"}
    assert set(rules) < set(METRICS)
    # A suite without tool calls or code must not make the shipped gates an error.
    always = {name for name, rule in rules.items() if not rule.if_measured}
    assert always - required == {
        "json_valid", "field_completeness", "field_f1", "critical_fields", "kl_p99",
    }  # fmt: skip
    assert len(gates.sha256) == 64


HEAD = "version: 1\nmetrics:\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "  kl_mean: {max: .05}\n  kl_meen: {max: 3}", "g.yaml:4: unknown metric 'kl_meen'; "
         "did you mean 'kl_mean'"),
        (HEAD + "  kl_mean:\n    maxx: .05", "g.yaml:4: unknown key 'metrics.kl_mean.maxx'; "
         "did you mean 'max'"),
        ("version: 1\nmetrix: {}\nmetrics: {kl_mean: {max: 1}}", "g.yaml:2: unknown key 'metrix'"),
        (HEAD + "  kl_mean: {max: yes please}", "g.yaml:3: metrics.kl_mean.max"),
        (HEAD + "  kl_mean: {max: .nan}", "finite"),
        (HEAD + "  kl_mean: {max: .inf}", "finite"),
        (HEAD + "  kl_mean: {max: 1, min: 0.5}", "exactly one of max, min, max_drop"),
        (HEAD + "  kl_mean: {}", "exactly one of max, min, max_drop"),
        (HEAD + "  schema_valid: {max: .5}", "g.yaml:3: schema_valid takes the limit 'max_drop'"),
        (HEAD + "  kl_mean: {max: 1, required: false}", "no metric is required whatever"),
        ("version: 1\nmetrics: {}", "at least 1"),
        ("version: 9\nmetrics: {kl_mean: {max: 1}}", "g.yaml:1: version"),
        ("version: 1\nversion: 1\nmetrics: {}", "g.yaml:2: key 'version' twice"),
        (HEAD + "  kl_mean: {max: 1}\n  kl_mean: {max: 2}", "g.yaml:4: key 'kl_mean' twice"),
        ("metrics: {kl_mean: {max: 1}}", "the key 'version' is missing"),
        ("- 1", "expected a mapping"),
        ("", "expected a mapping"),
        ("a: [", "not valid YAML"),
        (HEAD + "  kl_mean: {max: 2020-13-45}", "not valid YAML: month"),
        ("version: 1\nmetrics: &m {kl_mean: *m}", "an anchor that contains itself"),
        (HEAD + "  kl_mean: {max: true}", "valid number (found True)"),
        (HEAD + "  top1_agreement: {min: false}", "valid number (found False)"),
        (HEAD + "  kl_mean: {max: '0.05'}", "valid number (found '0.05')"),
        (HEAD + "  kl_mean: {max: 1, required: 'no'}", "valid boolean (found 'no')"),
        (HEAD + "  kl_mean: {max: -1}", "greater than 0"),
        ("version: true\nmetrics: {kl_mean: {max: 1}}", "g.yaml:1: version"),
        (HEAD + "  schema_valid: {max_drop: 0.6}", "no base could show the loss"),
        (HEAD + "  schema_valid: {max_drop: 0.05, judge: estimate}", "always judged by its bounds"),
        (HEAD + "  schema_valid: {max_drop: 0.02, strata: {zh: {max_drop: 0.05}}}",
         "g.yaml:3: metrics.schema_valid: stratum 'zh': expected KIND:VALUE"),
        (HEAD + "  schema_valid:\n    max_drop: 0.02\n    strata:\n      lang:zh: {max: 0.05}",
         "g.yaml:6: schema_valid takes the limit 'max_drop', found 'max'"),
        (HEAD + "  schema_valid:\n    max_drop: 0.02\n    strata:\n      lang:zh: {max_dop: 0.05}",
         "did you mean 'max_drop'"),
        (HEAD + "  schema_valid: {max_drop: 0.02, strata: {'lang:zh': {max_drop: 0.05, "
         "domains: true}}}", "unknown key 'metrics.schema_valid.strata.lang:zh.domains'"),
        (HEAD + "  kl_mean: {max: 1, at_least: 0.5}", "only max_drop metrics take at_least"),
        (HEAD + "  kl_mean: {max: 1, floor: 0.5}", "only max_drop metrics have a floor"),
    ],
)  # fmt: skip
def test_bad_gates(text: str, message: str) -> None:
    with pytest.raises(GateSpecError) as caught:
        parse_gates(text, "g.yaml")
    assert message in str(caught.value)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(GateSpecError, match="cannot read the gates file"):
        load_gates(tmp_path / "none.yaml")
