"""Recipes: every fault names the file, the line, the key, the nearest key and what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from quant.artifact.scheme import PRESETS, with_group_size
from quant.errors import RecipeError
from quant.module_names import matches
from quant.recipe import Recipe

GOOD = "scheme: w4a16\nmethod: gptq\n"


def fault(text: str, **changes: object) -> str:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(text, "r.yaml").with_overrides(changes)
    return str(caught.value)


def test_a_recipe_keeps_its_text_and_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = "# why\r\nscheme: w4a16  # preset\nmethod: rtn\n"
    path.write_bytes(text.encode())
    recipe = Recipe.load(path)
    assert (recipe.text, recipe.name) == (text, "mine")
    assert recipe.sha256 != Recipe.parse(text.replace("why", "how")).sha256


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("scheme: w4a16\nmethod: gptq\ngrup_size: 64\n", ["r.yaml:3: grup_size", "'group_size'"]),
        (GOOD + "calibration:\n  sample: 4\n", ["r.yaml:4: calibration.sample", "'samples'"]),
        (GOOD + "overrides:\n- match: x\n  shceme: fp8\n", ["r.yaml:5: overrides[0].shceme"]),
        ("scheme: w4a61\nmethod: gptq\n", ["r.yaml:1: scheme: found 'w4a61'", "mean 'w4a16'"]),
        (GOOD + "group_size: 100\n", ["r.yaml:3: group_size", "32 or 64 or 128 or channel"]),
        (GOOD + "skip: lm_head\n", ["r.yaml:3: skip", "expected a list"]),
        (GOOD + "gptq: {damping: 0}\n", ["r.yaml:3: gptq.damping", "more than 0"]),
        (GOOD + "calibration: {samples: true}\n", ["calibration.samples: found True", "whole"]),
        (GOOD + "scheme: w8a8\n", ["r.yaml:3: scheme: given twice (first on line 1)"]),
        (GOOD + "skip: [*.mlp]\n", ["r.yaml:3", "quotes"]),
        (GOOD + "skip: [*mlp]\n", ["r.yaml:3", "quotes"]),
        (GOOD + "skip: ['re:(']\n", ["r.yaml:3: skip[0]", "no regular expression"]),
        (GOOD + "skip: ['']\n", ["r.yaml:3: skip[0]: found an empty pattern"]),
        (GOOD + "overrides: [{match: x}]\n", ["overrides[0]: changes nothing"]),
        ("method: gptq\n", ["scheme: missing"]),
        ("scheme: w4a16\n", ["method: missing"]),
        ("", ["an empty file"]),
        ("- a\n", ["found a list"]),
        ("a: [\n", ["r.yaml:2: not YAML"]),
        ("1: x\n", ["r.yaml:1", "not a word"]),
        ("a: &a [x]\nb: [*a, *a]\n", ["r.yaml:2: found the YAML alias *a"]),
        ("a: " + "[" * 600 + "]" * 600, ["nested too deeply"]),
        (GOOD + "group_size: '64'\n", ["r.yaml:3: group_size: found '64'", "without quotes"]),
        ("scheme: !!python/object/apply:os.system [ls]\n", ["r.yaml:1: scheme: found ['ls']"]),
        ("scheme: w4a16\n\tmethod: rtn\n", ["r.yaml:2: not YAML"]),
    ],
)
def test_faults_say_where_what_and_what_else(text: str, parts: list[str]) -> None:
    message = fault(text)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("scheme: w8a8\nmethod: rtn\ngroup_size: 64\n", "r.yaml:3: group_size: found 64"),
        ("scheme: fp8\nmethod: rtn\nsymmetric: false\n", "r.yaml:3: symmetric"),
        ("scheme: dense\nmethod: gptq\n", "expected none"),
        ("scheme: w4a16\nmethod: none\n", "expected rtn, gptq, awq, auto or gradient"),
        ("scheme: w4a16\nweights: {num_bits: 4}\nmethod: rtn\n", "not both"),
        ("activations: {}\nscheme: w8a8\nmethod: rtn\n", "given without weights"),
        ("weights: {num_bits: 3}\nactivations: {}\nmethod: rtn\n", "8-bit inputs is W4A8"),
        ("scheme: w4a8\nmethod: rtn\nsymmetric: false\n", "r.yaml:3: symmetric"),
    ],
)
def test_contradictions_are_refused(text: str, part: str) -> None:
    assert part in fault(text)


def test_every_fault_is_reported_at_once() -> None:
    assert len(fault("scheme: x\nmethod: y\nzzz: 1\n").splitlines()) == 3


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"scheme: \xff")
    with pytest.raises(RecipeError, match="not UTF-8"):
        Recipe.load(path)
    with pytest.raises(RecipeError, match="cannot read"):
        Recipe.load(tmp_path)


def test_long_form_equals_the_presets() -> None:
    spelled = {
        "w4a16": "weights: {num_bits: 4}",
        "w8a16": "weights: {num_bits: 8}",
        "w8a8": "weights: {num_bits: 8}\nactivations: {num_bits: 8}",
        "fp8": "weights: {num_bits: 8, kind: float}\nactivations: {kind: float}",
    }
    for name, text in spelled.items():
        recipe = Recipe.parse(f"{text}\nmethod: rtn\n")
        assert recipe.module_rule("any").scheme == PRESETS[name]


def test_the_last_match_wins_and_skip_wins_over_all() -> None:
    recipe = Recipe.parse(
        GOOD + "group_size: 32\nskip: ['*.0.*']\noverrides:\n"
        "- {match: '*.down_proj', scheme: w8a16}\n"
        "- {match: '*.down_proj', layers: [-1], scheme: w8a8, method: rtn}\n"
        "- {match: '*.up_proj', scheme: dense}\n"
    )
    rules = [recipe.module_rule(f"model.layers.{i}.mlp.down_proj", 4) for i in range(4)]
    assert rules[0].scheme is None
    assert rules[1].scheme == with_group_size(PRESETS["w8a16"], 32)
    assert (rules[3].scheme, rules[3].method) == (PRESETS["w8a8"], "rtn")
    up = recipe.module_rule("model.layers.2.mlp.up_proj", 4)
    assert (up.scheme, up.method) == (None, "none")


def test_lm_head_speaks_for_the_head_alone() -> None:
    recipe = Recipe.parse(GOOD + "lm_head: w8a16\noverrides: [{match: '*', scheme: w8a8}]\n")
    rule = recipe.module_rule("lm_head")
    assert (rule.scheme, rule.method) == (with_group_size(PRESETS["w8a16"], None), "rtn")
    assert rule.reason == "lm_head: w8a16"
    assert recipe.module_rule("model.layers.0.mlp.up_proj").scheme == PRESETS["w8a8"]
    kept = Recipe.parse(GOOD + "lm_head: dense\nskip: []\n").module_rule("lm_head")
    assert (kept.scheme, kept.method) == (None, "none")


@pytest.mark.parametrize("skip", ["lm_head", "'*'", "'re:lm_.*'"])
def test_a_head_both_skipped_and_given_a_scheme_is_refused(skip: str) -> None:
    message = fault(GOOD + f"lm_head: w8a16\nskip: [{skip}]\n")
    assert "r.yaml:3: lm_head: found w8a16" in message
    assert "take the pattern out" in message
    assert Recipe.parse(GOOD + f"lm_head: dense\nskip: [{skip}]\n").lm_head == "dense"


def test_other_schemes_of_the_head_are_refused() -> None:
    assert "w8a16" in fault(GOOD + "lm_head: w4a16\n")


def test_patterns_match_the_whole_name() -> None:
    """cases.md A07: layer 1 is not layers 10 to 19."""
    assert matches("model.layers.1.*", "model.layers.1.mlp.up_proj")
    assert not matches("model.layers.1.*", "model.layers.10.mlp.up_proj")
    assert not matches("down_proj", "model.layers.1.mlp.down_proj")
    assert not matches("re:layers.1", "model.layers.1.mlp.down_proj")
    assert not matches("LM_HEAD", "lm_head")


def test_command_line_overrides_make_a_new_recipe_and_are_recorded() -> None:
    recipe = Recipe.parse(GOOD + "calibration: {samples: 8, seed: 3}\n")
    changed = recipe.with_overrides({"calibration.samples": 4, "group_size": 64, "method": None})
    assert (changed.calibration.samples, changed.calibration.seed) == (4, 3)
    assert changed.cli_overrides == {"calibration.samples": 4, "group_size": 64}
    assert changed.text == recipe.text
    assert (recipe.calibration.samples, recipe.cli_overrides) == (8, {})
    again = changed.with_overrides({"calibration.seed": 1})
    assert (again.calibration.samples, again.calibration.seed) == (4, 1)


def test_wrong_command_line_values_name_the_flag() -> None:
    assert "--group-size (over r.yaml): found 48" in fault(GOOD, group_size=48)
    assert "--samples (over r.yaml)" in fault(GOOD, **{"calibration.samples": 0})
    assert "--grop-size (over r.yaml): unknown key" in fault(GOOD, grop_size=64)


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe.parse(GOOD).method = "rtn"  # type: ignore[misc]


def test_four_bits_with_eight_bit_inputs_are_spelt_out_or_named() -> None:
    named = Recipe.parse("scheme: w4a8-fp8\nmethod: rtn\n").module_rule("x").scheme
    spelt = "weights: {num_bits: 4}\nactivations: {kind: float}\nmethod: rtn\n"
    assert Recipe.parse(spelt).module_rule("x").scheme == named
    assert named is not None
    assert named.label == "w4a8-fp8-g128"
    inherited = "scheme: w4a16\nsymmetric: false\nmethod: rtn\noverrides: "
    rule = Recipe.parse(inherited + "[{match: x, scheme: w4a8}]\n").module_rule("x")
    assert rule.scheme is not None
    assert rule.scheme.label == "w4a8-g128"
