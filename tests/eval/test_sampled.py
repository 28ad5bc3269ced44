"""Sampled passes: the same random numbers for both models, averaged within the item, pass^k."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mock_server import chat, serving
from suite_rows import item_row

from eval.amounts import SampledPasses
from eval.api import evaluate, sampled_passes
from eval.asking import drawn
from eval.cache import Cache
from eval.checks.registry import Scored
from eval.errors import EvaluationError, UsageError
from eval.gate import judge
from eval.gate_spec import GateSpec
from eval.metrics import sampled
from eval.metrics.answers import PairedItem
from eval.metrics.lengths import LENGTH_EDGES
from eval.stats import Sampling, mcnemar_p
from eval.suites import TaskItem
from eval.targets.base import Draw, Prompt
from eval.targets.checkpoint import locate
from eval.targets.engine import EngineTarget
from eval.targets.reference import ReferenceTarget
from eval.targets.server import ServerTarget, Service
from runtime.config import EngineConfig
from runtime.text import TextProcessor

FEW = Sampling(draws=1000)


def silent(count: int) -> None:
    pass


def prompts(text: TextProcessor, count: int, **how: Any) -> list[Prompt]:
    found = []
    for number in range(count):
        messages = ({"role": "user", "content": f"Case {number}? " + "so " * (number % 5)},)
        draw = Draw(**{"temperature": 1.0, "top_p": 0.9, "seed": 100 + number, **how})
        ids = tuple(text.encode_chat(messages))
        found.append(Prompt(token_ids=ids, max_tokens=10, messages=messages, draw=draw))
    return found


@pytest.fixture(scope="module")
def both(
    tiny_model: Callable[..., Path], dense_artifact: Callable[[Path], Path]
) -> tuple[ReferenceTarget, EngineTarget, TextProcessor]:
    """An untaught model, whose next token is nearly as open as a die's next face."""
    folder = tiny_model()
    base = ReferenceTarget(locate(str(folder)), device="cpu", cache=Cache(None))
    return (
        base, EngineTarget(dense_artifact(folder), EngineConfig()), TextProcessor.load(folder),
    )  # fmt: skip


def test_both_models_draw_the_same_whatever_the_batch(
    both: tuple[ReferenceTarget, EngineTarget, TextProcessor],
) -> None:
    base, engine, text = both
    asked = prompts(text, 9)
    by_base = base.generate(asked, engine.stop_ids, silent)
    alone = base.generate(asked, engine.stop_ids, silent, together=False)
    assert [a.token_ids for a in by_base] == [a.token_ids for a in alone]
    by_engine = engine.generate(asked, silent)
    assert [a.token_ids for a in by_engine] == [a.token_ids for a in by_base]
    assert [a.finish for a in by_engine] == [a.finish for a in by_base]
    greedy = base.generate([Prompt(token_ids=p.token_ids, max_tokens=10) for p in asked],
                           engine.stop_ids, silent)  # fmt: skip
    assert sum(a.token_ids != b.token_ids for a, b in zip(by_base, greedy, strict=True)) >= 8
    mixed = [asked[0], Prompt(token_ids=asked[1].token_ids, max_tokens=10), asked[2]]
    found = base.generate(mixed, engine.stop_ids, silent)
    assert [a.token_ids for a in found] == [
        by_base[0].token_ids, greedy[1].token_ids, by_base[2].token_ids,
    ]  # fmt: skip


@torch.no_grad()
def test_the_base_draws_by_its_own_probabilities(
    both: tuple[ReferenceTarget, EngineTarget, TextProcessor],
) -> None:
    """800 first tokens against a nucleus worked out in numpy from a plain forward."""
    base, engine, text = both
    [first] = prompts(text, 1)
    asked = [
        Prompt(token_ids=first.token_ids, max_tokens=1,
               draw=Draw(temperature=0.25, top_p=0.6, seed=seed))
        for seed in range(800)
    ]  # fmt: skip
    said = base.generate(asked, (), silent)
    counted = Counter(answer.token_ids[0] for answer in said)
    logits = base.model(input_ids=torch.tensor([first.token_ids])).logits[0, -1].double() / 0.25
    p = logits.softmax(-1).numpy()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), 0.6)) + 1]
    share = p[kept] / p[kept].sum()
    assert set(counted) <= set(kept.tolist())
    expected = dict(zip(kept.tolist(), share, strict=True))
    likely = [token for token in expected if expected[token] * 800 > 10]
    assert likely
    for token in likely:
        spread = (800 * expected[token] * (1 - expected[token])) ** 0.5
        assert abs(counted[token] - 800 * expected[token]) < 4.5 * spread


def test_drawn_answers_are_cached_apart_from_greedy_ones(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model()
    text = TextProcessor.load(folder)
    asked = prompts(text, 3)
    first = ReferenceTarget(locate(str(folder)), device="cpu", cache=Cache(tmp_path))
    said = first.generate(asked, (2,), silent)
    again = ReferenceTarget(locate(str(folder)), device="cpu", cache=Cache(tmp_path))

    def refuse(*_: Any) -> Any:
        raise AssertionError("asked again")

    monkeypatch.setattr(again, "_generate_batch", refuse)
    assert again.generate(asked, (2,), silent) == said
    for other in (prompts(text, 3, seed=5), prompts(text, 3, top_p=0.8),
                  [Prompt(token_ids=p.token_ids, max_tokens=10) for p in asked]):  # fmt: skip
        with pytest.raises(AssertionError, match="asked again"):
            again.generate(other, (2,), silent)


def test_items_and_passes_have_streams_of_their_own() -> None:
    passes = SampledPasses(seeds=(1, 2, 3))
    items = [TaskItem(id=f"i{n}", doc="d", source="s", lang="en", messages=[], checks=())
             for n in range(50)]  # fmt: skip
    draws = [drawn(passes, seed)(item) for seed in passes.seeds for item in items]
    assert len({d.seed for d in draws if d is not None}) == 150
    assert drawn(passes, 2)(items[7]) == drawn(passes, 2)(items[7])


def test_a_server_is_asked_with_the_same_seeds(
    both: tuple[ReferenceTarget, EngineTarget, TextProcessor],
) -> None:
    with serving(lambda path, body: chat("x")) as (url, mock):
        target = ServerTarget(Service(url=url), both[2], "d" * 64)
        target.generate(prompts(both[2], 1), silent)
    [body] = mock.asked
    assert (body["temperature"], body["top_p"], body["seed"]) == (1.0, 0.9, 100)


def answered(value: float) -> Scored:
    return Scored(values={"schema_valid": value, "field_f1": (value, 0.0, 1 - value)}, signals={},
                  problem="", details={}, truncated=False, failed=False)  # fmt: skip


def item_passes(number: int, base: str, candidate: str) -> list[PairedItem]:
    """One item; "110" passed the first two of three."""
    row = item_row(number)
    item = TaskItem(id=row["id"], doc=row["id"], source=row["source"], lang=row["lang"],
                    messages=row["messages"], checks=())  # fmt: skip
    return [PairedItem(item=item, base=answered(float(b)), candidate=answered(float(c)))
            for b, c in zip(base, candidate, strict=True)]  # fmt: skip


def test_averaged_within_the_item_then_paired() -> None:
    """60 items: 40 alike, 10 that pass once less, 10 that never pass any more."""
    items = [item_passes(n, "111", "111" if n < 40 else "110" if n < 50 else "000")
             for n in range(60)]  # fmt: skip
    found = {m.name: m for m in sampled.measure(items, FEW, LENGTH_EDGES)}
    mean = found["schema_valid_sampled"]
    assert (mean.num_scored, mean.num_clusters) == (60, 60)
    assert mean.candidate == pytest.approx((40 + 10 * 2 / 3) / 60)
    assert mean.estimate == pytest.approx((10 / 3 + 10) / 60)
    drops = np.array([0.0] * 40 + [1 / 3] * 10 + [1.0] * 10)
    reach = 1.671 * drops.std(ddof=1) / 60**0.5
    assert mean.upper == pytest.approx(drops.mean() + reach, abs=0.02)
    assert mean.lower == pytest.approx(drops.mean() - reach, abs=0.02)
    every = found["schema_valid_pass_k"]
    assert every.paired is not None
    assert (every.base, every.candidate) == (1.0, pytest.approx(40 / 60))
    assert (every.paired.lost, every.paired.gained, every.paired.num_items) == (20, 0, 60)
    c = mean.candidate
    assert found["field_f1_sampled"].estimate == pytest.approx(1 - 2 * c / (2 * c + 1 - c))
    assert "field_f1_pass_k" not in found
    assert dict(mean.domains)["lang:zh"].num_scored == 12


def test_an_answer_that_failed_fails_both_metrics() -> None:
    items = [item_passes(n, "111", "111") for n in range(300)]
    items[7][1] = replace(items[7][1], candidate=replace(answered(0.0), failed=True))
    found = {m.name: m for m in sampled.measure(items, FEW, LENGTH_EDGES)}
    for name in ("schema_valid_sampled", "schema_valid_pass_k"):
        spec = GateSpec.model_validate({"version": 1, "metrics": {name: {"max_drop": 0.1}}})
        verdict = judge(spec, found)
        assert verdict.result == "rejected"
        assert "an error at 1 of 300 items" in verdict.findings[0].reason


def test_three_answers_of_an_item_are_no_three_items() -> None:
    few = [item_passes(n, "111", "111") for n in range(20)]
    found = {m.name: m for m in sampled.measure(few, FEW, LENGTH_EDGES)}
    # None of 20: the exact bound, and not the one of 60.
    assert found["schema_valid_sampled"].upper == pytest.approx(1 - 0.05 ** (1 / 20))


def test_alarms_count_one_test_a_metric_more() -> None:
    items = [item_passes(n, "111", "111" if n < 180 else "000") for n in range(200)]
    found = {m.name: m for m in sampled.measure(items, FEW, LENGTH_EDGES)}
    rules = {name: {"max_drop": 0.4} for name in ("schema_valid_sampled", "schema_valid_pass_k")}
    verdict = judge(GateSpec.model_validate({"version": 1, "metrics": rules}), found)
    [alarm] = verdict.alarms
    assert alarm.name == "schema_valid_pass_k"
    assert alarm.holm_p == alarm.p_value == mcnemar_p(found["schema_valid_pass_k"].paired)
    with pytest.raises(EvaluationError, match=r"not measured \(--sampled K draws answers\)"):
        judge(GateSpec.model_validate({"version": 1, "metrics": rules}), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((2, 0, None, None), "--sampled is 2; expected 0 or at least 3"),
        ((-1, 0, None, None), "--sampled is -1"),
        ((3, 0, 0.0, None), "--temperature is 0"),
        ((3, 0, 2.5, None), "--temperature is 2.5"),
        ((3, 0, float("nan"), None), "--temperature is nan"),
        ((3, 0, None, 0.0), "--top-p is 0"),
        ((3, 0, None, 1.1), "--top-p is 1.1"),
        ((0, 0, 0.5, None), "pass --sampled K"),
    ],
)
def test_what_cannot_be_drawn(options: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sampled_passes(*options)
    assert sampled_passes(0, 0, None, None) is None


def test_a_whole_run_records_its_seeds(
    taught_model: Path, dense_artifact: Callable[[Path], Path], suite_dir: Path, cache_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    made = shutil.copytree(dense_artifact(taught_model), tmp_path / "art",
                           ignore=shutil.ignore_patterns("gate.json"))  # fmt: skip
    verdict = evaluate(made, suite=suite_dir, cache=cache_dir, out=tmp_path / "out", windows=8,
                       window_tokens=48, items=12, noise_items=0, sampled=3, seed=4,
                       temperature=0.4)  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["method"]["sampled"] == {"seeds": [5, 6, 7], "temperature": 0.4, "top_p": 0.95}
    stamp = json.loads((made / "gate.json").read_text())
    assert [stamp["seeds"][f"sampled pass {n}"] for n in (1, 2, 3)] == [5, 6, 7]
    assert verdict.exit_code == 3  # twelve items decide nothing
    found = report["measurements"]
    for name in ("schema_valid_sampled", "schema_valid_pass_k"):
        assert found[name]["base"] == found[name]["candidate"]
        assert any(row["name"] == name for row in stamp["metrics"])
    assert any("100.0% of them are the same" in note for note in report["notes"])
    assert len(report["items"]) == 12
