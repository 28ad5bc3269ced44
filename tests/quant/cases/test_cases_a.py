"""Known faults of quantizers, section A of the list of cases: each by its number, with the right
behaviour, through the command."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from front_door import (
    WEIGHTS,
    changed_model,
    check_sound,
    codes_of,
    recipe_file,
    reference_nll,
    report_of,
    rows_file,
    served_nll,
    stored_tensors,
    weights_of,
)
from safetensors.torch import load_file
from said import Quantize
from survival import Nursery, contents
from torch import Tensor

from quant.artifact.artifact import open_artifact, verify
from quant.artifact.layout import dequantize
from quant.calibration import windows_from_token_lists
from quant.pipeline import run
from quant.plan import make_plan
from quant.recipe import Recipe
from quant.source import open_source
from runtime.config import ConfigError
from tests.conftest import TRAINING_TEXT

Tiny = Callable[..., Path]
IDS = tuple(range(5, 60))
SMOOTH = {"scheme": "w8a8", "method": "rtn", "smoothing": "search", "smooth": {"refine_steps": 20}}
GPTQ = {"scheme": "w4a16", "method": "gptq", "group_size": 32}
DEAD = 7


def kill_activation(tensors: dict[str, Tensor]) -> None:
    """Channel 7 of what layer 0's attention and layer 1's MLP read is always 0."""
    tensors["model.layers.0.input_layernorm.weight"][DEAD] = 0
    tensors["model.layers.1.post_attention_layernorm.weight"][DEAD] = 0


def kill_weights(tensors: dict[str, Tensor]) -> None:
    """A column, a row and a group of 32 of a linear that are all zero."""
    for leaf in ("q_proj", "k_proj", "v_proj"):
        tensors[f"model.layers.0.self_attn.{leaf}.weight"][:, DEAD] = 0
    tensors["model.layers.0.mlp.gate_proj.weight"][3] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][5, 32:64] = 0


def silence_tokens(tensors: dict[str, Tensor]) -> None:
    """The tokens of a whole calibration row have no embedding: layer 0 reads zeros."""
    tensors["model.embed_tokens.weight"][list(range(60, 90))] = 0


@pytest.mark.parametrize(
    ("keys", "kills"),
    [
        (SMOOTH, (kill_activation, kill_weights)),
        (SMOOTH, (kill_activation,)),
        (SMOOTH, (kill_weights,)),
        (GPTQ, (kill_activation, kill_weights)),
        ({"scheme": "fp8", "method": "gptq", "kv_cache": "fp8"}, (kill_activation, silence_tokens)),
    ],
    ids=["smooth-both", "smooth-activation", "smooth-weight", "gptq-both", "fp8-silent-row"],
)
def test_a01_dead_channels(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, calibration_file: Path,
    keys: dict[str, Any], kills: tuple[Callable[[dict[str, Tensor]], None], ...],
) -> None:  # fmt: skip
    def kill(tensors: dict[str, Tensor]) -> None:
        for one in kills:
            one(tensors)

    model = changed_model(tiny_model(), tmp_path / "model", kill)
    recipe = recipe_file(tmp_path, **keys)
    said = quantize(
        "--recipe", recipe, "--calib", calibration_file, "--model", model, "--out", "art"
    )
    assert said.code == 0, said.err
    check_sound(tmp_path / "art")
    weights = weights_of(tmp_path / "art")
    if kill_weights in kills:
        assert not weights["model.layers.0.self_attn.q_proj"][:, DEAD].any()
        assert not weights["model.layers.0.mlp.gate_proj"][3].any()
        assert not weights["model.layers.0.mlp.down_proj"][5, 32:64].any()
    if kill_activation in kills:
        norm = stored_tensors(tmp_path / "art")["model.layers.0.input_layernorm.weight"]
        assert norm[DEAD] == 0
        assert re.search(r"\d+ input (columns|channels) of \d+ modules were always 0", said.text)
    difference = served_nll(tmp_path / "art", IDS) - reference_nll(model, IDS)
    assert difference.abs().mean() < (0.5 if keys is GPTQ else 0.2)


def test_a03_hessians_that_are_not_positive_definite(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Fewer tokens than columns, one row many times, dead channels; then damping too small to help
    by itself climbs, and what it came to stands in the report."""
    text = TRAINING_TEXT[0][:12]
    few = rows_file(tmp_path, [{"text": text}], "few")
    repeated = rows_file(tmp_path, [{"text": text + " "[: i % 2]} for i in range(64)], "repeated")
    dead = changed_model(tiny_model(), tmp_path / "dead", kill_activation)
    gentle = recipe_file(tmp_path, "gentle", **GPTQ)
    harsh = recipe_file(tmp_path, "harsh", **GPTQ, gptq={"damping": 1e-30})
    runs = [(gentle, few, tiny_model()), (gentle, repeated, tiny_model()), (harsh, few, dead)]
    for i, (recipe, calib, model) in enumerate(runs):
        out = tmp_path / f"art-{i}"
        said = quantize("--recipe", recipe, "--calib", calib, "--model", model, "--out", out)
        assert said.code == 0, said.err
        check_sound(out)
        rows = [row for row in report_of(out)["modules"] if row["scheme"] != "dense"]
        assert all(row["damping"] is not None or row["fallback"] for row in rows)
    climbed = [row for row in rows if row["fallback"] or row["damping"] > 1e-30]
    assert climbed, "no damping of 1e-30 factors a Hessian of fewer tokens than columns"
    for row in climbed:
        leaf = row["module"].rpartition(".")[2]
        assert leaf in said.text, "the summary names what needed help"
    assert re.search(r"damping|rounded to nearest|fell back", said.text)


def leave_one_input(tensors: dict[str, Tensor]) -> None:
    """All but one of what layer 0's down_proj reads are always 0; that one has little weight."""
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    up[torch.arange(len(up)) != DEAD] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][:, DEAD] *= 1e-5


def test_a03_the_error_is_that_of_the_inputs_that_there_are(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, calibration_file: Path
) -> None:
    """What the dead inputs' columns lose in rounding is far more, and no loss."""
    name = "model.layers.0.mlp.down_proj"
    model = changed_model(tiny_model(), tmp_path / "model", leave_one_input)
    weight = load_file(model / "model.safetensors")[f"{name}.weight"].float()
    for size in (32, "channel"):
        recipe = recipe_file(tmp_path, **{**GPTQ, "group_size": size, "symmetric": False})
        out = tmp_path / f"art-{size}"
        said = quantize(
            "--recipe", recipe, "--calib", calibration_file, "--model", model, "--out", out
        )
        assert said.code == 0, said.err
        lost = (weights_of(out)[name].float() - weight)[:, DEAD].norm() / weight[:, DEAD].norm()
        row = next(row for row in report_of(out)["modules"] if row["module"] == name)
        assert row["rel_error"] == pytest.approx(float(lost), rel=0.02)


def plant(values: dict[str, float]) -> Callable[[dict[str, Tensor]], None]:
    """Set row 2 of each named tensor to +- its value."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name, value in values.items():
            row = tensors[name][2]
            tensors[name][2] = torch.where(row >= 0, value, -value)

    return change


LARGE, SMALL = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "w8a16", "fp8"])
def test_a05_bfloat16_weights_beyond_float16(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, scheme: str
) -> None:
    """In bfloat16 they reproduce; in float16 what does not fit is an error naming the module."""

    def model(name: str, **values: float) -> Path:
        rows = {f"{globals()[key]}.weight": value for key, value in values.items()}
        return changed_model(tiny_model(), tmp_path / name, plant(rows), torch.bfloat16)

    recipe = recipe_file(tmp_path, scheme=scheme, method="rtn")
    both = model("both", LARGE=1e5, SMALL=1e-9)
    said = quantize("--recipe", recipe, "--model", both, "--out", "art")
    assert said.code == 0, said.err
    check_sound(tmp_path / "art")
    weights, source = weights_of(tmp_path / "art"), load_file(both / WEIGHTS)
    for module in (LARGE, SMALL):
        wanted = source[f"{module}.weight"][2].double()
        found = weights[module][2].double()
        torch.testing.assert_close(found, wanted, rtol=0.08, atol=0)
    for module, values in ((LARGE, {"LARGE": 1e5}), (SMALL, {"SMALL": 1e-9})):
        half = ("--recipe", recipe, "--model", model(module, **values), "--dtype", "float16")
        said = quantize(*half, "--out", "half")
        assert said.code == 2
        assert module in said.error
        assert "float16" in said.error
        assert not (tmp_path / "half").exists()
        assert not (tmp_path / "half.partial").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.norm.weight", 1e5),
        ("lm_head.weight", 1e6),
        ("model.layers.1.mlp.up_proj.weight", 1e7),
    ],
)
def test_a05_what_overflows_float16_is_named(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, name: str, value: float
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    model = changed_model(tiny_model(), tmp_path / "model", change, torch.bfloat16)
    said = quantize(
        "--recipe", "w4a16.yaml", "--method", "rtn", "--model", model, "--dtype", "float16"
    )
    assert said.code == 2
    assert name.removesuffix(".weight") in said.error
    assert "float16" in said.error
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a07_a_pattern_matches_the_whole_name(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    model = tiny_model(num_hidden_layers=12)

    def plan(pattern: str) -> Any:
        rule = {"match": pattern, "scheme": "w8a16"}
        recipe = recipe_file(
            tmp_path, scheme="w4a16", method="rtn", group_size=32, overrides=[rule]
        )
        return quantize("plan", "--all", "--recipe", recipe, "--model", model)

    for pattern in ("model.layers.1.*", r"re:model\.layers\.1\..*", "re:model.layers.1[.].*"):
        said = plan(pattern)
        assert said.code == 0
        listed = re.findall(r"model\.layers\.(\d+)\.\S+ .*?(w\da16-g32)", said.out)
        assert len(listed) == 12 * 7, "one line per module"
        assert {layer for layer, scheme in listed if scheme == "w8a16-g32"} == {"1"}
    for pattern in ("layers.1", "re:layers.1", "model.layers.1", r"re:model\.layers\.1"):
        said = plan(pattern)
        assert said.code == 2, "half a name is no name"
        assert "matches no module" in said.error
    listed = re.findall(r"model\.layers\.(\d+)\.\S+ .*?(w8a16-g32)", plan("*layers.1*").out)
    assert {layer for layer, _ in listed} == {"1", "10", "11"}, "what was said, and it is shown"


def test_a09_group_sizes_that_do_not_divide(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Hidden 96, intermediate 344: the rule is applied and shown before anything is spent."""
    model = tiny_model(hidden_size=96, intermediate_size=344)
    arguments = ("--recipe", "w4a16.yaml", "--model", model, "--group-size", 128)
    said = quantize("plan", *arguments)
    assert said.code == 0
    assert "128 does not divide 96" in said.text
    assert "no group of 128/64/32 divides 344" in said.text
    assert re.search(r"gate_proj .*w4a16-g32", said.out)
    assert re.search(r"down_proj .*w4a16-channel", said.out)
    calib = rows_file(tmp_path, [])  # would be an error, were it read
    said = quantize(*arguments, "--calib", calib, "--strict")
    assert said.code == 2
    assert "down_proj (344 columns, group 128)" in said.error
    assert "gate_proj (96 columns, group 128)" in said.error
    assert "smaller group_size" in said.error
    said = quantize(*arguments, "--method", "rtn", "--out", "art")
    assert said.code == 0, said.err
    assert codes_of(tmp_path / "art", "model.layers.0.mlp.up_proj").scale.shape == (344, 3)
    assert codes_of(tmp_path / "art", "model.layers.0.mlp.down_proj").scale.shape == (96, 1)


def test_a11_long_rows_are_cut_into_windows(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    """20 rows of 600 tokens and more, 512 at a time: all are used, and the account is printed."""
    calib = rows_file(tmp_path, [{"text": f"{i} " + TRAINING_TEXT[i % 3] * 40} for i in range(20)])
    arguments = ("plan", "--recipe", recipe_file(tmp_path, **GPTQ), "--model", tiny_model())
    arguments += ("--max-tokens", 512, "--samples", 64)
    said = quantize(*arguments, "--calib", calib)
    assert said.code == 0, said.err
    found = re.search(r"(\d+) samples, ([\d,]+) tokens from 20 of 20 rows \(20 cut into", said.text)
    assert found is not None, said.text
    assert int(found[1]) >= 40
    assert int(found[2].replace(",", "")) >= 20 * 600
    said = quantize(*arguments, "--calib", rows_file(tmp_path, [{"text": " \n"}] * 3, "blank"))
    assert said.code == 2, "nothing usable is an error"
    assert "blank.jsonl" in said.error


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("\n\n\n", "blank"),
        ('{"text": ""}\n{"text": "  "}\n', "text"),
        ('{"body": "something"}\n', "body"),
        ("", "empty"),
    ],
)
def test_a13_blank_rows(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, content: str, part: str
) -> None:
    (tmp_path / "calib.jsonl").write_text(content)
    arguments = ("--recipe", "w4a16.yaml", "--model", tiny_model(), "--calib", "calib.jsonl")
    said = quantize(*arguments)
    assert said.code == 2
    assert "calib.jsonl" in said.error
    assert part in said.error
    assert {p.name for p in tmp_path.iterdir()} == {"calib.jsonl"}


def test_a15_padding_counts_for_nothing(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Rows of 3 to 120 tokens, one by one and in padded batches."""
    words = (TRAINING_TEXT[0] + TRAINING_TEXT[1]) * 4
    rows = [
        {"text": f"{i}" + words[7 * i : 7 * i + n]}
        for i, n in enumerate((4, 9, 20, 40, 70, 110, 160, 220))
    ]
    calib = rows_file(tmp_path, rows)
    for name, size in (("alone", 1), ("padded", 4096)):
        recipe = recipe_file(
            tmp_path, name, **GPTQ, symmetric=False, kv_cache="fp8",
            calibration={"batch_tokens": size},
        )  # fmt: skip
        said = quantize(
            "--recipe", recipe, "--calib", calib, "--model", tiny_model(), "--out", name
        )
        assert said.code == 0, said.err
    alone, padded = (stored_tensors(tmp_path / name) for name in ("alone", "padded"))
    errors = [
        {row["module"]: row["rel_error"] for row in report_of(tmp_path / name)["modules"]}
        for name in ("alone", "padded")
    ]
    for name, tensor in alone.items():
        if name.endswith("_scale"):
            torch.testing.assert_close(padded[name], tensor, rtol=1e-4, atol=1e-7)
        elif name.endswith(("_packed", "_zero_point")):
            same = (codes(padded[name]) == codes(tensor)).float().mean()
            assert same > 0.995, f"{name}: {same}"
    for module, error in errors[0].items():
        assert errors[1][module] == (None if error is None else pytest.approx(error, rel=0.01))


def codes(packed: Tensor) -> Tensor:
    """The eight nibbles of each word."""
    return torch.stack([(packed >> (4 * i)) & 15 for i in range(8)])


def test_a17_a_repeated_prefix_is_reported(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    prefix = " ".join(f"rule {i} of the house is {i * i}." for i in range(40))
    rows = [{"text": f"{prefix} Now {i}: {TRAINING_TEXT[i % 3][i : i + 60]}"} for i in range(64)]
    arguments = ("plan", "--recipe", recipe_file(tmp_path, **GPTQ), "--model", tiny_model())
    said = quantize(*arguments, "--calib", rows_file(tmp_path, rows))
    found = re.search(r"64 of 64 samples begin with the same (\d+) tokens", said.text)
    assert found is not None, said.text
    assert int(found[1]) >= 200
    assert "system prompt" in said.text
    twice = [{"text": TRAINING_TEXT[i % 3]} for i in range(9)]
    said = quantize(*arguments, "--calib", rows_file(tmp_path, twice))
    assert "6 of 9 rows are exact duplicates and count once" in said.text


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a19_experts_that_saw_no_tokens(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, family: str
) -> None:
    model = tiny_model(family)
    calib = rows_file(tmp_path, [{"text": "Pay now."}, {"text": "The fee is due."}])
    recipe = recipe_file(tmp_path, scheme="w8a8", method="gptq")
    said = quantize("--recipe", recipe, "--calib", calib, "--model", model, "--out", "art")
    assert said.code == 0, said.err
    check_sound(tmp_path / "art")
    experts = [m for m in report_of(tmp_path / "art")["modules"] if ".experts." in m["module"]]
    assert all(m["tokens_seen"] is not None for m in experts)
    starved = [m for m in experts if m["is_starved"]]
    assert starved, "16 tokens cannot feed every expert"
    assert "experts saw too few calibration tokens" in said.text
    weights, source = weights_of(tmp_path / "art"), load_file(model / WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    for row in experts:  # whatever the router may send there
        name = row["module"]
        inputs = torch.randn(16, row["shape"][1], generator=generator)
        wanted = inputs @ source[f"{name}.weight"].float().T
        found = inputs @ weights[name].float().T
        assert (found - wanted).norm() < 0.03 * wanted.norm(), name


def test_a21_a_model_with_other_names(quantize: Quantize, tiny_model: Tiny, tmp_path: Path) -> None:
    names = {
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "input_layernorm": "ln_a",
        "post_attention_layernorm": "ln_b",
    }

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            new = name
            for old, other in names.items():
                new = new.replace(old, other)
            tensors[new] = tensors.pop(name)

    model = changed_model(tiny_model(), tmp_path / "model", rename)
    recipe = recipe_file(tmp_path, **SMOOTH)
    said = quantize("--recipe", recipe, "--model", model, "--out", "art")
    assert said.code == 2
    assert "LlamaForCausalLM" in said.error
    assert "model.layers.0.mlp.up_proj.weight" in said.error.replace("\n", " "), (
        "what was looked for"
    )
    assert re.search(r"mlp\.fc1|mlp\.fc2|ln_a|ln_b", said.error), "what was found"
    other = changed_model(
        tiny_model(),
        tmp_path / "other",
        model_type="gpt_neox",
        architectures=["GPTNeoXForCausalLM"],
    )
    said = quantize("--recipe", recipe, "--model", other, "--out", "art")
    assert said.code == 2
    assert "GPTNeoXForCausalLM" in said.error
    assert "LlamaForCausalLM" in said.error, "what is supported"


EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda w: w.abs() + 0.01,
    "negative": lambda w: -w.abs() - 0.01,
    "constant": lambda w: torch.full_like(w, 0.37),
    "negative-constant": lambda w: torch.full_like(w, -0.37),
    "zero": torch.zeros_like,
    "outlier": lambda w: torch.where(torch.arange(w.shape[1]) % 32 == 5, 9.0, w * 1e-3),
    "negative-outlier": lambda w: torch.where(torch.arange(w.shape[1]) % 32 == 31, -9.0, w * 1e-3),
}


@pytest.mark.parametrize("scheme", ["w3a16", "w4a16", "w8a16"])
def test_a23_zero_points_at_the_edge(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, scheme: str
) -> None:
    """Zero point 0, 2^b - 1, constants and outliers: codes and zero points come back as they are,
    and no element within reach is off by more than half a step."""
    bits, module = int(scheme[1]), "model.layers.0.mlp.gate_proj"
    top = 2**bits - 1
    planted = {name: slice(10 * i, 10 * (i + 1)) for i, name in enumerate(EDGES)}

    def change(tensors: dict[str, Tensor]) -> None:
        weight = tensors[f"{module}.weight"]
        for name, rows in planted.items():
            weight[rows] = EDGES[name](weight[rows])

    model = changed_model(tiny_model(), tmp_path / "model", change)
    recipe = recipe_file(tmp_path, scheme=scheme, method="rtn", group_size=32, symmetric=False)
    said = quantize("--recipe", recipe, "--model", model, "--out", "art")
    assert said.code == 0, said.err
    stored, weight = stored_tensors(tmp_path / "art"), codes_of(tmp_path / "art", module)
    source = load_file(model / WEIGHTS)[f"{module}.weight"]
    zero = fields(stored[f"{module}.weight_zero_point"].T.contiguous(), bits, 160).T
    packed = fields(stored[f"{module}.weight_packed"], bits, 64)
    assert torch.equal(packed, weight.codes.int() + 2 ** (bits - 1))
    ends = {"positive": 0, "constant": 0, "negative": top, "negative-constant": top}
    for name, rows in planted.items():
        if name in ends:  # a scale is a bfloat16 number: of 255 steps it may miss half a one
            assert bool(((zero[rows] - ends[name]).abs() <= bits // 8).all()), name
    spread = [part.float().repeat_interleave(32, dim=1) for part in (weight.scale, zero)]
    scale, zero = spread
    found, low, high = dequantize(weight), (0 - zero) * scale, (top - zero) * scale
    short = torch.maximum(source - high, low - source).clamp(min=0)
    assert bool(((found - source).abs() <= torch.maximum(short, scale / 2) * (1 + 1e-5)).all())
    assert bool((short <= scale * (0.5 + top * 2**-8)).all()), "nothing wraps around"
    for name in ("constant", "negative-constant", "zero"):
        rows = planted[name]
        torch.testing.assert_close(found[rows], source[rows], rtol=2**-8, atol=0)
    converted = quantize(
        "convert", foreign(tmp_path / "art", tmp_path / "foreign"), "--out", "again"
    )
    assert converted.code == 0, converted.err
    again = stored_tensors(tmp_path / "again")
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())


def fields(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned `bits`-wide fields of each row's little-endian bit stream."""
    stream = (packed.to(torch.int64)[..., None] >> torch.arange(32)) & 1
    stream = stream.reshape(packed.shape[0], -1)[:, : count * bits].reshape(
        packed.shape[0], count, bits
    )
    return (stream << torch.arange(bits)).sum(-1).int()


def foreign(artifact: Path, out: Path) -> Path:
    """The artifact as another tool would have written it: without anything of ours."""
    import shutil

    shutil.copytree(artifact, out)
    for name in ("artifact.json", "recipe.yaml", "report.json", "report.md", "README.md"):
        (out / name).unlink()
    return out


def test_a25_skipped_layers_stay_as_they_are(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    model = tiny_model(num_hidden_layers=4)
    recipe = recipe_file(
        tmp_path, scheme="w4a16", method="rtn", group_size=32,
        overrides=[
            {"match": "*", "layers": [1], "scheme": "w8a16"},
            {"match": "*", "layers": [2, 3], "scheme": "dense", "method": "none"},
        ],
    )  # fmt: skip
    said = quantize("--recipe", recipe, "--model", model, "--out", "art")
    assert said.code == 0, said.err
    opened, source = open_artifact(tmp_path / "art"), load_file(model / WEIGHTS)
    bits = {0: 4, 1: 8, 2: None, 3: None}
    for module, scheme in opened.schemes().items():
        if module == "lm_head":
            assert scheme.is_dense
            continue
        wanted = bits[int(module.split(".")[2])]
        assert (None if scheme.weights is None else scheme.weights.num_bits) == wanted
        if wanted is None:
            assert torch.equal(opened.weight(module), source[f"{module}.weight"])
            assert f"{module}.weight_packed" not in opened.reader
    listed = {row["module"]: row["bytes"] for row in report_of(tmp_path / "art")["modules"]}
    for module, count in listed.items():
        on_disk = sum(
            opened.reader.stored(name).num_bytes
            for name in opened.reader.names
            if name.startswith(f"{module}.") and not name.endswith("_shape")
        )
        shapes = 16 if f"{module}.weight_shape" in opened.reader else 0
        assert count in (on_disk, on_disk + shapes), module


def test_a27_the_same_seed_gives_the_same_bytes(
    quantize: Quantize, forks: Nursery, tiny_model: Tiny, tmp_path: Path, calibration_file: Path
) -> None:
    """Twice, and with another number of threads: that may move bits, and it is said."""
    recipe = recipe_file(tmp_path, **GPTQ, calibration={"samples": 4, "max_tokens": 32})
    command = ["--recipe", recipe, "--calib", calibration_file, "--model", tiny_model()]
    for name, flags in (("one", ()), ("two", ()), ("threads", ("--threads", 2))):
        ended = forks.start([*map(str, (*command, *flags, "--out", tmp_path / name))]).wait()
        assert ended.code == 0, ended.output
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    manifest = open_artifact(tmp_path / "one").manifest
    other = open_artifact(tmp_path / "threads").manifest
    assert (manifest.tools["threads"], other.tools["threads"]) == ("1", "2"), "written down"
    assert manifest.calibration is not None
    assert manifest.calibration.digest
    assert {"torch", "transformers", "weighbridge", "python"} <= set(manifest.tools)
    said = quantize(*command, "--seed", 1, "--out", "seed")
    assert said.code == 0
    assert open_artifact(tmp_path / "seed").manifest.recipe.overrides == {"calibration.seed": 1}


def test_a29_what_looks_finished_is(quantize: Quantize, tiny_model: Tiny, tmp_path: Path) -> None:
    """A full disk, kills and signals: test_interruptions and test_kills. Here: an older artifact
    with more shards, the source as output, and what is staged is no model to anybody."""
    from runtime.api import LLM

    arguments = ("--recipe", "w4a16.yaml", "--method", "rtn")
    assert (
        quantize(*arguments, "--model", tiny_model(num_hidden_layers=4), "--out", "art").code == 0
    )
    assert len(list((tmp_path / "art").glob("*.safetensors"))) == 5
    said = quantize(*arguments, "--model", tiny_model(), "--out", "art", "--overwrite")
    assert said.code == 0, said.err
    assert len(list((tmp_path / "art").glob("*.safetensors"))) == 3, "no stale shard"
    assert verify(tmp_path / "art") == []
    model = changed_model(tiny_model(), tmp_path / "model")
    before = {p.name: p.stat().st_mtime_ns for p in model.iterdir()}
    for out in (model, model / "art"):
        said = quantize(*arguments, "--model", model, "--out", out, "--overwrite")
        assert said.code == 2
        assert "overlap" in said.error
    assert {p.name: p.stat().st_mtime_ns for p in model.iterdir()} == before
    assert not (tmp_path / "model.partial").exists()
    (tmp_path / "art" / "artifact.json").unlink()
    with pytest.raises(ConfigError, match=r"is not an artifact \(no artifact\.json\)"):
        LLM(tmp_path / "art")


def test_a31_quantized_models_are_refused(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    assert quantize("--recipe", "fp8.yaml", "--model", tiny_model(), "--out", "art").code == 0
    said = quantize("--recipe", "w4a16.yaml", "--method", "rtn", "--model", "art", "--out", "twice")
    assert said.code == 2
    assert (
        "already quantized (quant_method compressed-tensors, format float-quantized)" in said.error
    )
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    other = changed_model(tiny_model(), tmp_path / "gptq", quantization_config=section)
    said = quantize("--recipe", "w4a16.yaml", "--method", "rtn", "--model", other, "--out", "twice")
    assert said.code == 2
    assert "already quantized (quant_method gptq, bits 4, group_size 128)" in said.error
    assert "original float checkpoint" in said.error
    assert not (tmp_path / "twice").exists()


RARE = tuple('{"}:')


def loud(tokenizer: Any) -> Callable[[dict[str, Tensor]], None]:
    """Rare characters make keys and values of thousands; no text without them comes near 448."""
    ids = [i for token, i in tokenizer.get_vocab().items() if set(token) & set(RARE)]

    def change(tensors: dict[str, Tensor]) -> None:
        embeddings = tensors["model.embed_tokens.weight"]
        embeddings[:, 0] = 0
        embeddings[ids, 0] = 2 * embeddings.abs().max()
        for leaf in ("k_proj", "v_proj"):
            tensors[f"model.layers.0.self_attn.{leaf}.weight"][:, 0] *= 4000

    return change


def test_a33_static_scales_saturate_alike_and_the_gate_sees_it(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The only static scales here are the KV cache's. Calibrated on tame text they clamp what rare
    tokens do; the runtime clamps as the simulation did (the probe, whose prompts hold rare tokens,
    is checked at load), and a gate on the divergence rejects the artifact with the figure."""
    import eval.cli

    plain = tiny_model()
    tokenizer = open_source(str(plain)).tokenizer()
    model = changed_model(plain, tmp_path / "model", loud(tokenizer))
    tame = "".join(c for c in TRAINING_TEXT[0] if c not in RARE)
    recipe = recipe_file(
        tmp_path, scheme="w8a16", method="rtn", group_size=32, kv_cache="fp8",
        skip=["lm_head", "*.q_proj", "*.k_proj", "*.v_proj"],
    )  # fmt: skip
    calib = rows_file(tmp_path, [{"text": tame}])
    said = quantize("--recipe", recipe, "--calib", calib, "--model", model, "--out", "art")
    assert said.code == 0, said.err
    wild, quiet = tokenizer(TRAINING_TEXT[2])["input_ids"], tokenizer(tame)["input_ids"]
    off = {
        name: (served_nll(tmp_path / "art", ids) - reference_nll(model, ids)).abs().mean()
        for name, ids in (("wild", wild), ("quiet", quiet))
    }
    assert off["wild"] > 10 * off["quiet"], "the clamp bites"

    (tmp_path / "suite").mkdir()
    rows = [
        {"id": str(i), "source": "x", "lang": "en", "text": f"{i} {TRAINING_TEXT[2]}"}
        for i in range(6)
    ]
    rows_file(tmp_path / "suite", rows, "text")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    question = {
        "id": "q", "source": "x", "lang": "en", "schema": schema, "gold": {"a": 1},
        "critical": ["a"], "messages": [{"role": "user", "content": "a?"}],
    }  # fmt: skip
    rows_file(tmp_path / "suite", [question], "extraction")
    gates = recipe_file(
        tmp_path, "gates", version=1, metrics={"kl_mean": {"max": 0.05, "judge": "estimate"}}
    )
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path / "cache"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        eval.cli.main(
            [str(tmp_path / "art"), "--base", str(model), "--gates", str(gates), "--suite",
             str(tmp_path / "suite"), "--windows", "6", "--window-tokens", "48", "--no-stamp"]
        )  # fmt: skip
    shown, complaint = capsys.readouterr()
    assert ended.value.code == 1, complaint
    assert "REJECTED" in shown
    assert re.search(r"Mean KLD +0\.\d+.*FAIL", shown), "the delta is printed"


def test_a35_scales_do_not_depend_on_the_order_of_rows(tiny_model: Tiny, tmp_path: Path) -> None:
    """Observed over all windows first, fixed after: ascending, descending and shuffled rows give
    the same stored scales, and the same for the layers that follow."""
    model = changed_model(tiny_model(), tmp_path / "model", growing)
    source = open_source(str(model))
    recipe = Recipe.parse(
        "scheme: w8a8\nmethod: rtn\nkv_cache: fp8\ncalibration: {batch_tokens: 1}"
    )
    plan = make_plan(recipe, source.module_shapes, source.num_layers, source.config)
    windows = [[i + 3 * k for k in range(12)] for i in range(3, 240, 30)]  # of growing magnitude
    made = []
    for name, order in (
        ("up", windows),
        ("down", windows[::-1]),
        ("odd", windows[1:] + windows[:1]),
    ):
        run(source, plan, recipe, windows_from_token_lists(order), tmp_path / name)
        made.append(stored_tensors(tmp_path / name))
    scales = [name for name in made[0] if "scale" in name]
    assert any("layers.1.self_attn.k_scale" in name for name in scales)
    for other in made[1:]:
        for name in scales:
            assert torch.equal(other[name], made[0][name]), name


def growing(tensors: dict[str, Tensor]) -> None:
    """Embeddings grow with the id; the first norm lets their size through to keys and values."""
    rows = tensors["model.embed_tokens.weight"]
    rows *= torch.linspace(0.5, 8, len(rows))[:, None]
