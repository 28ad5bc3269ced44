"""What teams that quantize their own models reported, held against plans and shipped recipes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from quant.plan import Plan, make_plan
from quant.recipe import Recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 512, "vocab_size": 1000}
LAYERS = 24


def shapes() -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {"lm_head": (1000, 512)}
    for i in range(LAYERS):
        for leaf in ("q", "k", "v", "o"):
            found[f"model.layers.{i}.self_attn.{leaf}_proj"] = (512, 512)
        for leaf, shape in (("gate", (1536, 512)), ("up", (1536, 512)), ("down", (512, 1536))):
            found[f"model.layers.{i}.mlp.{leaf}_proj"] = shape
    return found


def planned(recipe: Recipe) -> Plan:
    return make_plan(recipe, shapes(), LAYERS, CONFIG)


def shipped(name: str) -> Recipe:
    return Recipe.load(RECIPES / f"{name}.yaml")


def test_eight_bit_inputs_are_smoothed_by_default() -> None:
    """W8A8 needs channel smoothing because of activation outliers."""
    assert shipped("w8a8").smoothing == "search"


@pytest.mark.parametrize("scheme", ["w4a8", "w4a8-fp8"])
def test_w4a8_is_for_those_who_evaluate(scheme: str) -> None:
    """Only after full evaluation; the plan says so, and what helps where it was left out."""
    bare = planned(Recipe.parse(f"scheme: {scheme}\nmethod: rtn"))
    assert any("judge the artifact with `evaluate`" in line for line in bare.warnings)
    assert any("smoothing: search" in line for line in bare.warnings)
    smooth = planned(Recipe.parse(f"scheme: {scheme}\nmethod: rtn\nsmoothing: search"))
    assert any("judge the artifact with `evaluate`" in line for line in smooth.warnings)
    assert not any("smoothing: search" in line for line in smooth.warnings)
    for other in ("w4a16", "w8a8", "fp8"):
        plan = planned(Recipe.parse(f"scheme: {other}\nmethod: rtn"))
        assert not any("evaluate" in line for line in plan.warnings)


def test_most_layers_at_four_bits_and_the_sensitive_ones_at_eight() -> None:
    """All-4-bit broke code generation; v_proj and the outermost down_proj are sensitive."""
    plan = planned(shipped("mixed"))
    bits = {row.module: row.scheme.weights.num_bits for row in plan.rows if row.scheme.weights}
    weights = Counter[int]()
    for row in plan.rows:
        if row.scheme.weights is not None:
            weights[row.scheme.weights.num_bits] += row.shape[0] * row.shape[1]
    assert weights[4] > 2 * weights[8] > 0
    for module in (
        "layers.7.self_attn.v_proj",
        "layers.0.mlp.down_proj",
        "layers.23.mlp.down_proj",
    ):
        assert bits[f"model.{module}"] == 8
    assert "lm_head" not in bits, "format compliance is the first to suffer from a 4-bit head"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_ask_for_as_much_text_as_helps(path: Path) -> None:
    """128 to 512 samples suffice, long texts included (smoothing alone reads a few hundred tokens
    of fewer); a head of less than 8 bits is not shipped."""
    recipe = Recipe.load(path)
    if recipe.method == "gptq":
        assert 128 <= recipe.calibration.samples <= 512
    assert recipe.calibration.max_tokens >= 512
    assert recipe.lm_head in (None, "dense", "w8a16")
