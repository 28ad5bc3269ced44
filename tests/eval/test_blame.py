"""`evaluate blame`: a planted broken layer is named, a spread loss is not pinned on anyone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from suite_rows import document_row, item_row, write_rows

from eval.blame import Unit, find
from eval.blame_model import SwappedModel, pattern_of, round_to_8_bits, units_of
from eval.blame_run import Blamed, BlameJob, recipe_overrides, run
from eval.cli import main
from eval.gate_spec import GateSpec
from eval.progress import Silent
from eval.suites import Suite, load_suite
from quant.artifact.artifact import open_artifact
from runtime.config import EngineConfig

NUM_LAYERS = 4
SMOOTHED = {"scheme": "w8a16", "method": "gptq", "smoothing": "search"}
LINEARS = [
    f"model.layers.{layer}.{name}"
    for layer in range(30)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                 "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]  # fmt: skip


def additive(costs: dict[str, float], rest: float = 0.001) -> Callable[[frozenset[str]], float]:
    """A loss to which each module adds its own, put back or not."""
    return lambda back: sum(costs.get(name, rest) for name in LINEARS if name not in back)


def test_one_broken_linear_of_thirty_layers_is_found_in_a_few_measurements() -> None:
    name = "model.layers.17.mlp.down_proj"
    blame = find(units_of(LINEARS), additive({name: 3.0}), target=0.5, budget=60)
    assert [c.unit.name for c in blame.culprits] == [name]
    assert blame.culprits[0].gain == pytest.approx(3.0)
    assert blame.is_fixed
    assert blame.num_measured <= 20


def test_two_broken_layers_come_heaviest_first() -> None:
    costs = {"model.layers.3.self_attn.k_proj": 1.0, "model.layers.28.mlp.up_proj": 2.0}
    blame = find(units_of(LINEARS), additive(costs), target=0.3, budget=60)
    assert [c.unit.name for c in blame.culprits] == [
        "model.layers.28.mlp.gate_up_proj", "model.layers.3.self_attn.qkv_proj",
    ]  # fmt: skip


def test_a_block_is_named_where_no_group_of_it_stands_out() -> None:
    costs = dict.fromkeys(("model.layers.9.mlp.down_proj", "model.layers.9.mlp.up_proj"), 1.0)
    blame = find(units_of(LINEARS), additive(costs), target=0.3, budget=60)
    assert [c.unit.name for c in blame.culprits] == ["model.layers.9.mlp"]


def test_a_spread_loss_is_pinned_on_no_one() -> None:
    blame = find(units_of(LINEARS), additive({}, rest=0.01), target=0.1, budget=40)
    assert not blame.is_fixed
    assert blame.num_measured <= 44


def test_patterns_are_those_of_recipes() -> None:
    from quant.recipe_keys import OverrideRule
    from quant.recipe_rules import override_applies

    units = {unit.name: unit for unit in _leaves(units_of([*LINEARS, "lm_head"]))}
    for name, count in (
        ("model.layers.3.self_attn.qkv_proj", 3), ("model.layers.3.mlp.down_proj", 1),
        ("model.layers.3.mlp", 3), ("model.layers.3.self_attn", 4),
    ):  # fmt: skip
        match, layer = pattern_of(units[name])
        assert layer == 3
        rule = OverrideRule(match=match, layers=(layer,))
        hit = [module for module in LINEARS if override_applies(rule, module, 30)]
        assert len(hit) == count
        assert set(hit) == units[name].names
    assert pattern_of(units["lm_head"]) == ("lm_head", None)


def _leaves(units: Any) -> list[Unit]:
    found = []
    for unit in units:
        found += [unit] if unit.is_block else []
        found += _leaves(unit.parts)
    return found


def test_rounding_to_8_bits_is_half_a_step() -> None:
    weight = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    error = (round_to_8_bits(weight) - weight).abs().reshape(5, -1, 64)
    step = weight.abs().reshape(5, -1, 64).amax(-1) / 127.5
    assert (error <= 0.51 * step.unsqueeze(-1) + 1e-7).all()
    assert error.max() > 0


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    folder = tmp_path_factory.mktemp("suite")
    write_rows(folder / "text.jsonl", [document_row(n) for n in range(6)])
    write_rows(folder / "extraction.jsonl", [item_row(n) for n in range(4)])
    return load_suite(folder)


@pytest.fixture(scope="module")
def base(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(num_hidden_layers=NUM_LAYERS)


def damaged(base: Path, folder: Path, names: list[str]) -> Path:
    """A copy of the model with noise on the named weights, half as large as they are."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    noise = torch.Generator().manual_seed(0)
    for name in names:
        weight = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = weight + 0.5 * weight.std() * torch.randn(
            weight.shape, generator=noise
        )
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def job_of(artifact: Path, base: Path, suite: Suite, **options: Any) -> BlameJob:
    gates = GateSpec.model_validate({"version": 1, "metrics": {"kl_mean": {"max": 0.05}}})
    return BlameJob(
        artifact=artifact, base=str(base), suite=suite, gates=gates, cache=None,
        engine=EngineConfig(device="cpu", kv_cache_memory_bytes=1 << 24),
        num_windows=4, window_tokens=64, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "recipe"),
    [
        ("model.layers.2.self_attn.o_proj", {"scheme": "w8a8"}),
        # Scales folded into norms: a linear alone does not fit back, its block does.
        ("model.layers.1.mlp.up_proj", SMOOTHED),
    ],
    ids=["w8a8", "smoothed"],
)  # fmt: skip
def test_a_planted_broken_layer_is_named(
    base: Path, suite: Suite, artifact: Callable[..., Path], tmp_path: Path, broken: str,
    recipe: dict[str, Any],
) -> None:  # fmt: skip
    art = artifact(damaged(base, tmp_path / "broken", [broken]), **recipe)
    found = run(job_of(art, base, suite), Silent())
    (culprit, *_) = found.blame.culprits
    assert broken in culprit.unit.names
    layer = re.match(r"model\.layers\.\d+", broken)
    assert layer is not None
    assert culprit.unit.name.startswith(layer.group() + ".")
    assert culprit.gain > 0.5 * found.blame.loss
    assert not found.is_engine_worse
    assert found.engine == pytest.approx(found.blame.loss, rel=0.05)


def test_every_weight_put_back_is_the_base(
    base: Path, suite: Suite, artifact: Callable[..., Path]
) -> None:
    from eval.cache import Cache
    from eval.targets.checkpoint import locate
    from eval.targets.reference import ReferenceTarget
    from eval.windows import pick_windows
    from runtime.text import TextProcessor

    art = artifact(base, **SMOOTHED | {"scheme": "w4a16"})
    reference = ReferenceTarget(locate(str(base)), device="cpu", cache=Cache(None))
    text = TextProcessor.load(art)
    windows = pick_windows(suite.documents, text, count=2, width=64, seed=0)
    logprobs = list(reference.logprobs([w.token_ids for w in windows]))
    model = SwappedModel(reference.model, open_artifact(art))
    assert model.divergence(windows, logprobs) > 1e-3
    blocks = _leaves(model.units)
    model.put_back(frozenset[str]().union(*(unit.names for unit in blocks)))
    assert abs(model.divergence(windows, logprobs)) < 1e-9
    model.restore_base()
    assert abs(model.divergence(windows, logprobs)) < 1e-9


def test_the_printed_override_mends_the_artifact(
    base: Path, suite: Suite, artifact: Callable[..., Path]
) -> None:
    bad = {"match": "*.mlp.down_proj", "layers": [2], "scheme": "w3a16", "group_size": 32}
    recipe: dict[str, Any] = {"scheme": "w4a16", "overrides": [bad]}
    art = artifact(base, **recipe)
    loss = run(job_of(art, base, suite, target=1e-4, budget=4), Silent()).blame.loss
    found = run(job_of(art, base, suite, target=0.7 * loss), Silent())
    assert found.blame.is_fixed
    said = yaml.safe_load(found.overrides)
    mended = artifact(base, **recipe | {"overrides": [*recipe["overrides"], *said["overrides"]]})
    again = run(job_of(mended, base, suite, target=loss, budget=4), Silent())
    assert again.blame.loss <= found.blame.target * 1.1


def test_8_bits_are_advised_only_where_they_do() -> None:
    blame = find(units_of(LINEARS), additive({LINEARS[0]: 3.0}), target=0.5, budget=60)
    for kl, schemes, scheme in (
        (0.4, {"w4a16-g64"}, "w8a16"),
        (2.0, {"w4a16-g64"}, "dense"),
        (0.4, {"w8a8-channel"}, "dense"),
    ):
        (entry,) = yaml.safe_load(recipe_overrides(blame, kl, schemes))["overrides"]
        assert entry == {"match": r"re:.*\.self_attn\.(q|k|v)_proj", "layers": [0],
                         "scheme": scheme}  # fmt: skip


def test_the_command(
    base: Path, suite: Suite, artifact: Callable[..., Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    broken = "model.layers.3.mlp.down_proj"
    art = artifact(damaged(base, tmp_path / "broken", [broken]), scheme="w8a16")
    words = ["blame", str(art), "--base", str(base), "--suite", str(suite.directory),
             "--windows", "4", "--window-tokens", "64", "--device", "cpu"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert ended.value.code == (0 if data["is_fixed"] else 3)
    assert data["culprits"][0]["name"] == broken
    for extra, code, message in (
        (["--target", "-1"], 2, "--target is -1"), (["--budget", "1"], 2, "--budget is 1"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main([*words, *extra])
        assert message in capsys.readouterr().err
        assert ended.value.code == code


def test_an_engine_that_loses_more_than_its_weights_is_pointed_at() -> None:
    from eval.cli_blame import as_text

    blame = find(units_of(LINEARS), additive({LINEARS[0]: 0.01}, rest=0), target=0.005, budget=60)
    plain = Blamed(blame=blame, engine=0.0101, with_8_bits=None, overrides="", num_tokens=9,
                   description="", schemes={c.unit.name: "" for c in blame.culprits})  # fmt: skip
    assert "look at the KV cache" not in as_text(plain)
    worse = Blamed(blame=blame, engine=0.05, with_8_bits=None, overrides="", num_tokens=9,
                   description="", schemes={c.unit.name: "" for c in blame.culprits})  # fmt: skip
    assert "look at the KV cache" in as_text(worse)
