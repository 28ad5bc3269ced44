"""Plans: group sizes that fit, patterns that match, fused modules that agree, costs that add up."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quant.artifact.scheme import GROUP_SIZES, PRESETS, with_group_size
from quant.errors import AlreadyQuantizedError, PlanError, UnsupportedModelError
from quant.estimate import estimate
from quant.module_names import general_name, join_layers
from quant.peak_memory import Workload
from quant.plan import Plan, make_plan
from quant.plan_rows import fit_group_size
from quant.plan_table import duration, render_plan, size
from quant.recipe import Recipe
from quant.run_time import H200
from quant.stored_size import row_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "vocab_size": 300,
    "dtype": "bfloat16",
}
RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
GOOD = "scheme: w4a16\nmethod: gptq\n"


def shapes(hidden: int = 96, inner: int = 344, layers: int = 12) -> dict[str, tuple[int, int]]:
    """T-ODD of cases.md: neither width is a multiple of 128 or 64."""
    found: dict[str, tuple[int, int]] = {"lm_head": (300, hidden)}
    for i in range(layers):
        for leaf in ("q", "k", "v", "o"):
            found[f"model.layers.{i}.self_attn.{leaf}_proj"] = (hidden, hidden)
        for leaf in ("gate", "up"):
            found[f"model.layers.{i}.mlp.{leaf}_proj"] = (inner, hidden)
        found[f"model.layers.{i}.mlp.down_proj"] = (hidden, inner)
    return found


def plan(text: str = GOOD, *, strict: bool = False, **config: Any) -> Plan:
    recipe = Recipe.parse(text, "r.yaml")
    return make_plan(recipe, shapes(), 12, {**CONFIG, **config}, strict=strict)


def work(tokens: int) -> Workload:
    return Workload(tokens=tokens, window_tokens=100, batch_tokens=100)


def fault(text: str = GOOD, **keywords: Any) -> str:
    with pytest.raises(PlanError) as caught:
        plan(text, **keywords)
    return str(caught.value)


def printed(made: Plan, width: int = 100, **keywords: Any) -> str:
    out = io.StringIO()
    cost = estimate(made, work(1000), H200)
    Console(file=out, width=width).print(render_plan(made, cost, tokens=1000, **keywords))
    return out.getvalue()


def test_one_row_per_linear_with_its_reason() -> None:
    rows = {row.module: row for row in plan().rows}
    assert set(rows) == set(shapes())
    assert rows["lm_head"].scheme.is_dense
    assert rows["lm_head"].note == "skip: lm_head"
    assert rows["model.layers.3.self_attn.q_proj"].scheme.label == "w4a16-g32"
    assert rows["model.layers.3.self_attn.q_proj"].note == "128 does not divide 96"
    assert rows["model.layers.3.mlp.down_proj"].scheme.label == "w4a16-channel"


@given(st.integers(1, 5000), st.sampled_from(GROUP_SIZES))
def test_group_size_is_the_largest_that_divides(columns: int, asked: int) -> None:
    scheme, note = fit_group_size(with_group_size(PRESETS["w4a16"], asked), columns)
    assert scheme.weights is not None
    fitting = [g for g in GROUP_SIZES if g <= asked and columns % g == 0]
    assert scheme.weights.group_size == (max(fitting) if fitting else None)
    assert bool(note) == (scheme.weights.group_size != asked)


def test_strict_lists_modules_with_columns_and_group() -> None:
    """cases.md A09."""
    message = fault(strict=True)
    assert "model.layers.0-11.mlp.down_proj (344 columns, group 128)" in message
    assert "84 modules" in message
    plan(GOOD + "group_size: channel\n", strict=True)


def test_four_bits_per_channel_as_fallback_is_warned_about() -> None:
    assert "12 modules fall back to 4 bits" in plan().warnings[0]
    assert plan(GOOD + "group_size: channel\n").warnings == ()
    assert plan("scheme: w8a8\nmethod: rtn\n").warnings == ()


def test_layer_one_is_not_layers_ten_and_eleven() -> None:
    """cases.md A07."""
    made = plan(GOOD + "overrides: [{match: 'model.layers.1.*', scheme: w8a16}]\n")
    eight = {row.layer for row in made.rows if row.scheme.label.startswith("w8")}
    assert eight == {1}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("skip: [down_proj]\n", ["r.yaml:3: skip", "mean '*.down_proj'"]),
        ("skip: ['*.mpl.*']\n", ["nearest names: ", "model.layers.*.mlp."]),
        ("overrides: [{match: layers.1, method: rtn}]\n", ["overrides[0]", "'*layers.1*'"]),
        ("overrides: [{match: '*', layers: [12], method: rtn}]\n", ["layers 0 to 11"]),
        (
            "overrides:\n- {match: 'model.layers.*', method: rtn}\n- {match: '*', scheme: w8a16}\n",
            ["r.yaml:4: overrides[0]", "decides nothing"],
        ),
        ("overrides: [{match: lm_head, scheme: w8a16}]\n", ["decides nothing"]),
        ("overrides: [{match: 'model.model.layers.*', scheme: w8a16}]\n", ["matches no module"]),
    ],
)
def test_patterns_that_do_nothing_are_errors(text: str, parts: list[str]) -> None:
    """cases.md B09: keys in another naming never match in silence."""
    message = fault(GOOD + text)
    assert all(part in message for part in parts), message


def test_fused_modules_must_agree() -> None:
    message = fault(GOOD + "overrides: [{match: '*.v_proj', scheme: w8a16}]\n")
    assert "model.layers.0-11.self_attn (q_proj w4a16-g32, k_proj" in message
    assert r"re:.*\.(q_proj|k_proj|v_proj)" in message
    plan(GOOD + r"overrides: [{match: 're:.*\.(q_proj|k_proj|v_proj)', scheme: w8a16}]" + "\n")
    assert "gate_proj" in fault(GOOD + "skip: ['*.up_proj']\n")


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_eight_bit_activation_schemes_are_per_channel(scheme: str) -> None:
    labels = {row.scheme.label for row in plan(f"scheme: {scheme}\nmethod: rtn\n").rows}
    assert labels == {f"{scheme}-channel", "dense"}


def test_a_tied_head_stays_dense() -> None:
    made = plan(tie_word_embeddings=True)
    assert made.rows[-1].note == "tied to the embedding"
    assert "lm_head shares its weight" in fault(GOOD + "skip: []\n", tie_word_embeddings=True)
    assert plan(GOOD + "skip: []\n").rows[-1].scheme.label == "w4a16-g32"


def test_a_head_of_eight_bits() -> None:
    made = plan(GOOD + "lm_head: w8a16\n")
    row = made.rows[-1]
    assert (row.module, row.scheme.label, row.method) == ("lm_head", "w8a16-channel", "rtn")
    assert row.note == "lm_head: w8a16"
    assert plan(GOOD + "lm_head: dense\nskip: []\n").rows[-1].note == "lm_head: dense"
    assert plan(GOOD + "lm_head: dense\n", tie_word_embeddings=True).rows[-1].scheme.is_dense


def test_a_tied_head_has_no_scheme_of_its_own() -> None:
    message = fault(GOOD + "lm_head: w8a16\n", tie_word_embeddings=True)
    assert "r.yaml:3: lm_head: found w8a16" in message
    assert "write `lm_head: dense`" in message
    recipe = Recipe.parse(GOOD + "lm_head: dense\n", "r.yaml").with_overrides({"lm_head": "w8a16"})
    with pytest.raises(PlanError, match=r"--lm-head \(over r.yaml\): lm_head: found w8a16"):
        make_plan(recipe, shapes(64, 128, 1), 1, {"tie_word_embeddings": True})


def test_quantized_sources_and_experts_are_refused() -> None:
    """cases.md A31 and A19."""
    with pytest.raises(AlreadyQuantizedError, match="quant_method gptq, bits 4"):
        plan(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"MixtralForCausalLM.*num_local_experts = 8"):
        plan(architectures=["MixtralForCausalLM"], num_local_experts=8)


def test_row_bytes_count_codes_scales_and_zero_points() -> None:
    made = make_plan(
        Recipe.parse("scheme: w4a16\nmethod: rtn\nsymmetric: false\n"),
        {"model.layers.0.mlp.down_proj": (100, 256)},
        1,
        CONFIG,
    )
    codes, scales, zero_points = 100 * 256 // 2, 100 * 2 * 2, 4 * 13 * 2
    assert row_bytes(made.rows[0], "bfloat16") == codes + scales + zero_points + 16


def test_estimates_grow_with_tokens_and_shrink_with_bits() -> None:
    few, many = (estimate(plan(), work(n), H200) for n in (10**6, 10**8))
    assert few.seconds is not None
    assert many.seconds is not None
    assert many.seconds > few.seconds
    assert many.host_bytes > few.host_bytes
    eight = estimate(plan("scheme: w8a8\nmethod: rtn\n"), work(0))
    assert few.artifact_bytes < eight.artifact_bytes < eight.source_bytes
    assert 4 < few.quantized_bits < 5
    assert eight.seconds is None


def test_estimated_time_includes_loading_the_source_and_the_embedding() -> None:
    """Without calibration a run is mostly reading and writing, of which layers are one part."""
    text = "scheme: w8a8\nmethod: rtn\n"

    def seconds(made: Plan, opening_s: float) -> float:
        found = estimate(made, work(0), H200, opening_s=opening_s)
        assert found.seconds is not None
        return found.seconds

    assert seconds(plan(text), 12) == pytest.approx(12 + seconds(plan(text), 0))
    large = seconds(plan(text, vocab_size=300_000), 0) - seconds(plan(text, vocab_size=0), 0)
    moved = 2 * 300_000 * 96 * (2 + 2)
    assert large == pytest.approx(moved / H200.moved_bytes_per_s), "read twice, written, read back"


def test_the_printed_plan_shows_fallbacks_before_anything_is_spent() -> None:
    text = printed(plan())
    for part in ("128 does not divide 96", "w4a16-channel", "0-11", "skip: lm_head", "warning: 12"):
        assert part in text
    assert len(text.splitlines()) < 30
    assert "model.layers.11.mlp.up_proj" in printed(plan(), every_module=True, width=140)
    dense = printed(plan("scheme: dense\nmethod: none\n"))
    assert "nothing quantized" in dense
    assert "0%" not in dense


@pytest.mark.parametrize("every_module", [False, True])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_fits_80_columns(path: Path, every_module: bool) -> None:
    """SmolLM2-135M's widths: 128 does not divide 576. No cell is cropped, no row is wrapped."""
    found = shapes(576, 1536, 30) | {"lm_head": (49152, 576)}
    config = {**CONFIG, "hidden_size": 576, "vocab_size": 49152, "tie_word_embeddings": True}
    made = make_plan(Recipe.load(path), found, 30, config)
    text = printed(made, width=80, every_module=every_module, gguf_bytes=96_600_000)
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text, "nothing is cropped"
    table = text.split("\n\n")[0].splitlines()
    rows = {(r.module if every_module else general_name(r.module), r.scheme, r.note)
            for r in made.rows}  # fmt: skip
    assert len(table) == 2 + len(rows), "one line per row"
    said = text.split("\n\n")[1]
    words = {word for row in made.rows for part in row.note.split("; ") for word in part.split()}
    assert words <= set(re.split(r"[\s:]+", said)) | {"skip:"}
    assert all(p in said.replace("\n", "") for p in made.overrides)
    assert "the GGUF has 96.6 MB" in " ".join(text.split())


def test_a_remark_is_said_once_for_all_rows_that_share_it() -> None:
    text = printed(plan(GOOD + "overrides:\n  - match: '*.o_proj'\n    group_size: 64\n"), width=80)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "1 128 does not divide 96: 32 used (5 kinds of module)" in lines
    assert "2 override 1 takes *.o_proj" in lines
    assert "3 64 does not divide 96: 32 used" in lines
    assert any(line.startswith("self_attn.o_proj") and line.endswith(" 2, 3") for line in lines)


def test_scattered_layers_crop_no_remark() -> None:
    scattered = "re:model[.]layers[.](0|2|4|6|8|10)[.]mlp[.]down_proj"
    override = f"overrides:\n  - match: '{scattered}'\n    scheme: w8a16\n    group_size: 64\n"
    for width in (72, 80):
        lines = [line.rstrip() for line in printed(plan(GOOD + override), width=width).splitlines()]
        table = lines[: lines.index("")]
        assert any(line.endswith(" note") for line in table[:2])
        assert any("w8a16" in line and line.endswith("kB  2, 3") for line in table)


def test_durations_are_plain_numbers_within_half_a_unit() -> None:
    unit = {"s": 1, "min": 60, "h": 3600}
    for tenth in range(10, 100_001):
        words = duration(tenth / 10).split()
        pairs = list(zip(words[::2], words[1::2], strict=True))
        assert all(number.isdigit() for number, _ in pairs), words
        shown = sum(int(number) * unit[name] for number, name in pairs)
        assert abs(shown - tenth / 10) <= unit[pairs[-1][1]] / 2
    assert {duration(s / 100) for s in range(100)} == {"under 1 s"}
    assert [duration(s) for s in (9.4, 9.5, 9.7, 10)] == ["9 s", "10 s", "10 s", "10 s"]


def test_names_and_figures_read_well() -> None:
    assert join_layers(["a.layers.0.q", "a.layers.1.q", "a.layers.3.q", "h"]) == [
        "a.layers.0-1, 3.q",
        "h",
    ]
    assert [size(n) for n in (5, 1500, 999_999, 2.5e9)] == ["5 B", "1.5 kB", "1 MB", "2.5 GB"]
    assert [duration(s) for s in (0.2, 5, 80, 400, 9000)] == [
        "under 1 s",
        "5 s",
        "80 s",
        "7 min",
        "2 h 30 min",
    ]
