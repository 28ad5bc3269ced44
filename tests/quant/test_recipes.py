"""The shipped recipes teach: every key is commented, every one plans on a small model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quant.plan import make_plan
from quant.recipe import Recipe

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
KEY = re.compile(r"^\s*(?:- )?(\w+):")

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 300}


def tiny_shapes(layers: int) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {"lm_head": (300, 64)}
    for i in range(layers):
        for leaf in ("q", "k", "v", "o"):
            found[f"model.layers.{i}.self_attn.{leaf}_proj"] = (64, 64)
        for leaf, shape in (("gate", (160, 64)), ("up", (160, 64)), ("down", (64, 160))):
            found[f"model.layers.{i}.mlp.{leaf}_proj"] = shape
    return found


def uncommented_keys(text: str) -> list[str]:
    """Keys whose line has no comment and does not follow a comment line."""
    lines = text.splitlines()
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(lines, start=1)
        if KEY.match(line)
        and "#" not in line
        and not (number > 1 and lines[number - 2].lstrip().startswith("#"))
    ]


def test_the_recipes_are_shipped() -> None:
    assert {path.stem for path in RECIPES} == {
        "fp8",
        "mixed",
        "mixed-auto",
        "none",
        "w4a16",
        "w8a8",
        "w8a16",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_is_commented(path: Path) -> None:
    text = path.read_text()
    assert uncommented_keys(text) == []
    assert uncommented_keys(text + "zzz: 1\n") != []
    assert text.startswith("# "), "a recipe begins by saying what it is for"
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("layers", [1, 2, 6])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_plans_on_a_tiny_model(path: Path, layers: int) -> None:
    recipe = Recipe.load(path)
    plan = make_plan(recipe, tiny_shapes(layers), layers, CONFIG)
    labels = {row.scheme.label for row in plan.rows if row.module != "lm_head"}
    expected = {
        "w4a16": {"w4a16-g64", "w4a16-g32"},
        "w8a8": {"w8a8-channel"},
        "w8a16": {"w8a16-channel"},
        "fp8": {"fp8-channel"},
        "none": {"dense"},
        "mixed-auto": {"w4a16-g64", "w4a16-g32"},
        "mixed": {"w4a16-g64", "w8a16-g64", "w8a16-g32"} | ({"w4a16-g32"} if layers > 4 else set()),
    }
    assert labels == expected[path.stem]
    assert plan.needs_calibration == (path.stem in ("w4a16", "w8a8", "mixed", "mixed-auto"))


def test_mixed_keeps_the_sensitive_modules_at_eight_bits() -> None:
    plan = make_plan(Recipe.load(FOLDER / "mixed.yaml"), tiny_shapes(6), 6, CONFIG)
    eight = {row.module for row in plan.rows if row.scheme.label.startswith("w8")}
    down = {m for m in eight if m.endswith("down_proj")}
    assert down == {f"model.layers.{i}.mlp.down_proj" for i in (0, 1, 4, 5)}
    assert len(eight) == 6 * 3 + 4
