"""Rules by input length and drift: error that grows along a text, or with the input's length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suite_rows import item_row

from eval.checks.registry import Scored
from eval.errors import EvaluationError, GateSpecError
from eval.gate import judge
from eval.gate_spec import GateSpec, parse_gates
from eval.metrics import answers, divergence, drift
from eval.metrics.answers import PairedItem
from eval.metrics.divergence import WindowScores
from eval.metrics.lengths import label_of, length_bucket
from eval.planned import make_plan
from eval.stats import Sampling
from eval.suites import TaskItem
from eval.windows import Window

FEW = Sampling(draws=1000)
EDGES = (1024, 2048, 4096)


def window(number: int, growth: float, size: int = 40) -> WindowScores:
    """KL and change of NLL: 0.02 at the beginning, `growth` more in the last quarter."""
    rng = np.random.default_rng(number)
    late = np.arange(size) * 4 // size == 3
    kl = 0.02 + growth * late + rng.normal(0, 0.005, size)
    base = rng.exponential(2.0, size)
    return WindowScores(
        window=Window(document=f"d{number}", source="s", lang="en", start=0,
                      token_ids=tuple(range(size + 1)), num_context=1),
        base_nll=base, candidate_nll=base + kl, kl=kl, agrees=np.ones(size),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("growth", "expected"), [(0.0, "pass"), (0.2, "fail"), (0.05, "inconclusive")]
)
def test_error_that_grows_along_the_text_is_judged(growth: float, expected: str) -> None:
    scores = [window(n, growth) for n in range(30)]
    found = {m.name: m for m in divergence.measure(scores, FEW, EDGES)}
    rules = {"kl_drift": {"max": 0.05}, "nll_drift": {"max": 0.05}}
    verdict = judge(GateSpec.model_validate({"version": 1, "metrics": rules}), found)
    assert {f.outcome for f in verdict.findings} == {expected}
    every = [(s.kl[-10:].sum(), s.kl[:10].sum()) for s in scores]
    late, early = (sum(side) / 300 for side in zip(*every, strict=True))
    for name in rules:
        assert found[name].estimate == pytest.approx(late - early)
    assert found["kl_drift"].num_scored == 600
    assert "last quarter of each window minus its first" in verdict.findings[0].reason


def test_tokens_count_in_the_length_that_stands_before_them() -> None:
    """40 scored tokens behind one of context: 15 and 16 tokens before are on either side of 16."""
    scores = [window(n, 0.0) for n in range(6)]
    found = {m.name: m for m in divergence.measure(scores, FEW, (16, 32))}
    kl = dict(found["kl_mean"].domains)
    sizes = {name: part.num_scored for name, part in kl.items() if name.startswith("length:")}
    assert sizes == {"length:0-16": 15 * 6, "length:16-32": 16 * 6, "length:32+": 9 * 6}
    assert kl["length:32+"].estimate == pytest.approx(float(np.mean([s.kl[31:] for s in scores])))
    alone = {m.name: dict(m.domains) for m in divergence.measure(scores, FEW, EDGES)}
    assert not any(name.startswith("length:") for name in alone["kl_mean"])


def scored(value: float) -> Scored:
    return Scored(values={"schema_valid": value, "field_f1": (value, 0.0, 1 - value)}, signals={},
                  problem="", details={}, truncated=False, failed=False)  # fmt: skip


def pairs(length: int, count: int, lost: int, per_doc: int = 1) -> list[PairedItem]:
    """`count` items of one length that the base gets right; `lost` of them are lost."""
    found = []
    for number in range(count):
        row = item_row(number)
        name = f"{length}-{number}"
        item = TaskItem(id=name, doc=f"{length}-{number // per_doc}", source=row["source"],
                        lang="en", messages=row["messages"], checks=())  # fmt: skip
        candidate = scored(float(number >= lost))
        found.append(
            PairedItem(item=item, base=scored(1.0), candidate=candidate, num_prompt_tokens=length)
        )
    return found


def drifts(*groups: list[PairedItem]) -> dict[str, Any]:
    together = [pair for group in groups for pair in group]
    return {m.name: m for m in drift.measure(together, FEW, EDGES)}


def test_the_longest_are_held_to_the_shortest() -> None:
    found = drifts(pairs(100, 100, 2), pairs(1500, 80, 40), pairs(3000, 60, 18))
    for name in ("schema_valid_drift", "field_f1_drift"):
        assert found[name].num_scored == 160
        assert "60 items of 2k+ tokens against 100 of 0-1k" in found[name].about
    passed = found["schema_valid_drift"]
    assert passed.estimate == pytest.approx(18 / 60 - 2 / 100)
    # Newcombe's interval of the two independent ends, about 10 points either way.
    assert 0.15 < passed.lower < 0.22
    assert 0.34 < passed.upper < 0.42


def test_a_thin_end_takes_in_its_neighbour() -> None:
    found = drifts(pairs(100, 60, 0), pairs(1500, 50, 0), pairs(3000, 10, 0), pairs(9000, 45, 9))
    assert "55 items of 2k+ tokens against 60 of 0-1k" in found["schema_valid_drift"].about
    assert drifts(pairs(100, 60, 0), pairs(1500, 40, 0)) == {}
    assert drifts(pairs(100, 500, 0)) == {}
    assert "schema_valid_drift" in drifts(pairs(100, 50, 0), pairs(1500, 50, 0))


def test_nothing_lost_is_no_proof_that_nothing_is() -> None:
    """Resampling 50 flawless items shows no spread; the bound is that of both ends together."""
    flawless = drifts(pairs(100, 50, 0), pairs(3000, 50, 0))["schema_valid_drift"]
    assert flawless.estimate == 0
    assert 0.04 < flawless.upper < 0.09
    assert flawless.lower == pytest.approx(-flawless.upper)


def test_items_of_one_document_count_once() -> None:
    wide = drifts(pairs(100, 100, 0), pairs(3000, 100, 30, per_doc=10))["schema_valid_drift"]
    narrow = drifts(pairs(100, 100, 0), pairs(3000, 100, 30))["schema_valid_drift"]
    assert wide.num_clusters == 110
    assert wide.upper - wide.lower > 1.5 * (narrow.upper - narrow.lower)


def test_a_drift_that_was_not_measured_says_what_it_takes() -> None:
    spec = GateSpec.model_validate(
        {"version": 1, "metrics": {"schema_valid_drift": {"max_drop": 0.05}}}
    )
    with pytest.raises(EvaluationError, match="it takes 50 short and 50 long inputs"):
        judge(spec, {})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{max: 0.05}", "takes the limit 'max_drop'"),
        ("{max_drop: 0.05, at_least: 0.9}", "no floor, no at_least"),
        ("{max_drop: 0.05, strata: {'lang:zh': {max_drop: 0.1}}}", "no strata or domains"),
    ],
)
def test_what_a_drift_cannot_be_asked(rule: str, message: str) -> None:
    with pytest.raises(GateSpecError, match=message):
        parse_gates(f"version: 1\nmetrics:\n  schema_valid_drift: {rule}\n")


@pytest.mark.parametrize("edges", ["[]", "[10, 10]", "[0]", "['1k']", "[1.5]", "4"])
def test_edges_must_rise(edges: str) -> None:
    with pytest.raises(GateSpecError, match="length_edges"):
        parse_gates(f"version: 1\nlength_edges: {edges}\nmetrics:\n  kl_mean: {{max: 0.1}}\n")


def test_edges_of_ones_own_name_the_strata() -> None:
    spec = parse_gates("version: 1\nlength_edges: [256, 1024]\nmetrics:\n  kl_mean: {max: 0.1}\n")
    assert spec.length_edges == (256, 1024)
    assert [length_bucket(n, spec.length_edges) for n in (0, 255, 256, 1024)] == [
        "0-256", "0-256", "256-1024", "1k+",
    ]  # fmt: skip
    assert label_of(1, 3, EDGES) == "1k+"
    found = answers.measure([*pairs(100, 5, 0), *pairs(300, 4, 0)], FEW, spec.length_edges)
    sizes = {name: m.num_scored for name, m in found[0].domains if name.startswith("length:")}
    assert sizes == {"length:0-256": 5, "length:256-1024": 4}


def test_a_length_that_holds_everything_is_not_asked_twice() -> None:
    guard = {"length:*": {"max_drop": 0.05, "required": False}}
    rules = {"schema_valid": {"max_drop": 0.05, "strata": guard}}
    spec = GateSpec.model_validate({"version": 1, "metrics": rules})

    def strata(*groups: list[PairedItem]) -> list[str]:
        every = [pair for group in groups for pair in group]
        found = {m.name: m for m in answers.measure(every, FEW, EDGES)}
        return [f.stratum for f in judge(spec, found).findings]

    assert strata(pairs(100, 60, 0)) == [""]
    assert strata(pairs(100, 60, 0), pairs(1500, 60, 0)) == ["", "length:0-1k", "length:1-2k"]


def test_a_plan_knows_lengths_and_drift(
    taught_model: Path, suite_dir: Path, tmp_path: Path
) -> None:
    gates = tmp_path / "g.yaml"
    gates.write_text(
        "version: 1\nlength_edges: [23, 24]\nmetrics:\n  schema_valid:\n    max_drop: 0.05\n"
        "    strata: {'length:*': {max_drop: 0.1, required: false}}\n"
        "  schema_valid_drift: {max_drop: 0.05, required: false}\n"
    )
    options: dict[str, Any] = {"gates": str(gates), "suite": suite_dir, "num_items": 70}
    blind = make_plan(**options)
    assert [row.label for row in blind.metrics] == ["Schema valid"]
    assert any("--tokenizer ART counts" in line for line in blind.remarks)
    # 2 x 2 % x ((1.645 + .842) / .05)^2 items of either end.
    assert any("about 99 items at either end" in line for line in blind.remarks)
    made = make_plan(**options, tokenizer=taught_model)
    held = {row.label: row.ability.num_items for row in made.metrics if "length:" in row.label}
    assert sum(held.values()) == 70
    assert len(held) > 1
