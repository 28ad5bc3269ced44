"""Smoothing: folds are exact in every family, the search never loses, and what is stored computes
what the run saw."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quant.api import prepare, quantize
from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.layout import QuantizedWeight, dequantize, fake_quantize_activations
from quant.artifact.scheme import DENSE, preset, with_group_size
from quant.calibration import windows_from_token_lists
from quant.capture import Stream, first_arguments, make_batches
from quant.errors import PipelineError
from quant.folds import MAPPINGS, FoldMapping, column_channels, fold, mappings_in, num_channels
from quant.methods.smoothing import (
    ExpectedError,
    Reader,
    Smoothing,
    measured_error,
    refine,
    search_scale,
    stack_readers,
    sum_at,
    sum_where,
)
from quant.modelling import FAMILIES as SUPPORTED
from quant.pipeline import run
from quant.plan import make_plan
from quant.recipe import Recipe
from quant.report import RunReport
from quant.smooth_samples import sample_inputs
from quant.source import open_source

W8A8 = preset("w8a8")
DENSE_MLP = [name for name in sorted(SUPPORTED) if SUPPORTED[name].mixture is None]
GROUPS = {"w4a16": 32, "w4a8": 32, "w8a16": None}
IDS = torch.arange(3, 51)[None]
GPTQ_DOWN = "{match: '*.down_proj', scheme: w8a16, method: gptq}"


def windows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 250, (40,), generator=generator).tolist() for _ in range(6)]


def make(model: Path, out: Path, text: str, calibrated: bool = True) -> RunReport:
    source, recipe = open_source(str(model)), Recipe.parse(text)
    plan = make_plan(recipe, source.module_shapes, source.num_layers, source.config)
    calibration = windows_from_token_lists(windows()) if calibrated else None
    return run(source, plan, recipe, calibration, out)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits.float()
    return logits


def folded(model: Path, out: Path, which: int | None, dtype: torch.dtype) -> int:
    """A copy of a checkpoint with random scales folded by one mapping of its family (None: by all),
    its linears in float32; how many layers had that mapping."""
    config = json.loads((model / "config.json").read_text())
    every = MAPPINGS[config["architectures"][0]]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(which or 0)
    count = 0
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        mappings = mappings_in(every if which is None else every[which : which + 1], layer)
        count += bool(mappings)
        for mapping in mappings:
            columns = layer[f"{mapping.readers[0]}.weight"].shape[1]
            number = num_channels(mapping, len(layer[f"{mapping.producer}.weight"]), columns)
            scale = torch.exp2(4 * torch.rand(number, generator=generator) - 2)
            channels = column_channels(mapping, number, columns, head_dim)
            fold_of = fold(mapping, layer, scale, channels, dtype)
            assert not torch.equal(fold_of.scale, torch.ones(number))
            layer.update(fold_of.tensors)
        tensors.update({prefix + n: t.contiguous() for n, t in layer.items()})
    out.mkdir()
    (out / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return count


MAPPINGS_OF = {name: MAPPINGS[SUPPORTED[name].architecture] for name in SUPPORTED}
EACH_FOLD = [
    (name, w) for name in sorted(SUPPORTED) for w in (*range(len(MAPPINGS_OF[name])), None)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "which"), EACH_FOLD, ids=str)
def test_each_fold_leaves_each_family_as_it_is(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, which: int | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """transformers' own forward is the judge; qwen2 has biases, qwen3 and gemma3 q/k norms, phi3
    fused linears, qwen3_moe a dense layer among those with experts."""
    extra = {"attention_bias": True} if family == "llama" else {}
    model = tiny_model(family, dtype, **extra)
    count = folded(model, tmp_path / "folded", which, dtype)
    if count == 0:  # mixtral has no dense MLP
        assert (family, which) in {("mixtral", 2), ("mixtral", 3)}
        return
    before, after = (
        logits_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
        for path in (model, tmp_path / "folded")
    )
    assert (after - before).abs().max() / before.abs().max() < 2e-5


def outliers(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [256, 64] with three channels 60 times the others, and a weight [96, 64]."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(256, 64, generator=generator)
    inputs[:, [3, 17, 40]] *= 60
    weight = torch.randn(96, 64, generator=generator)
    return inputs, weight


def bursts() -> tuple[Tensor, Tensor]:
    """Inputs whose channels differ in how rarely they are large: the largest says little."""
    inputs, weight = outliers()
    generator = torch.Generator().manual_seed(2)
    rare = torch.rand(256, 64, generator=generator) < torch.linspace(0.002, 0.2, 64)
    return torch.where(rare, 20 * inputs, inputs), weight


def expected_error(inputs: Tensor, readers: list[Reader]) -> ExpectedError:
    return ExpectedError(inputs, stack_readers(inputs, readers))


def measured(inputs: Tensor, weight: Tensor, scale: Tensor) -> float:
    """Relative output error of W8A8, from the formats' definition alone."""
    step = (weight * scale).abs().amax(1, keepdim=True) / 127.5
    step = step.bfloat16().float()
    rounded = ((weight * scale) / step).clamp(-128, 127).round() * step
    assert W8A8.activations is not None
    seen = fake_quantize_activations(inputs / scale, W8A8.activations)
    wanted = inputs @ weight.T
    return float((seen @ rounded.T - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("steps", [0, 60])
def test_planted_outliers_cost_less_by_a_factor_of_2_5(steps: int) -> None:
    inputs, weight = outliers()
    readers = [Reader(weight=weight, scheme=W8A8)]
    found = search_scale(inputs, readers, torch.arange(64), torch.float32, refine_steps=steps)
    assert found.error_before == pytest.approx(measured(inputs, weight, torch.ones(64)), rel=1e-3)
    assert found.error_after == pytest.approx(measured(inputs, weight, found.scale), rel=1e-3)
    assert found.error_after < 0.4 * found.error_before
    assert found.chosen != "none"


def test_refinement_lowers_the_expected_error_and_never_raises_the_measured_one() -> None:
    inputs, weight = bursts()
    readers, every = [Reader(weight=weight, scheme=W8A8)], torch.arange(64)
    grid = search_scale(inputs, readers, every, torch.float32, refine_steps=0)
    expected, alive = expected_error(inputs, readers), torch.ones(64, dtype=torch.bool)
    moved = refine(expected, every, grid.scale, alive, 100)
    before, after = (float(expected.at(s.log())[0]) for s in (grid.scale, moved))
    assert after < 0.96 * before
    for steps in (1, 30, 100):
        found = search_scale(inputs, readers, every, torch.float32, refine_steps=steps)
        assert found.error_after <= grid.error_after


@pytest.mark.parametrize("data", [outliers, bursts])
def test_the_expected_error_is_what_is_measured(data: Callable[[], tuple[Tensor, Tensor]]) -> None:
    inputs, weight = data()
    readers, every = [Reader(weight=weight, scheme=W8A8)], torch.arange(64)
    grid = search_scale(inputs, readers, every, torch.float32, refine_steps=0)
    for scale in (torch.ones(64), grid.scale):
        expected = float(expected_error(inputs, readers).at(scale.log())[0]) ** 0.5
        assert expected == pytest.approx(measured(inputs, weight, scale), rel=0.1)


@pytest.mark.parametrize("name", ["w8a8", "w4a16", "w8a16", "w4a8"])
def test_the_written_out_slope_is_that_of_finite_differences(name: str) -> None:
    inputs, weight = outliers()
    scheme = W8A8 if name == "w8a8" else with_group_size(preset(name), GROUPS[name])
    other = Reader(weight=2 * weight[:40] + 1, scheme=W8A8)  # a second stack, other energies
    expected = expected_error(inputs.double(), [Reader(weight=weight.double(), scheme=scheme),
        Reader(weight=weight[:32].double(), scheme=scheme),
        Reader(weight=other.weight.double(), scheme=other.scheme)])  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    logs = torch.randn(64, generator=generator, dtype=torch.float64) / 3
    _, slope = expected.at(logs)
    assert bool((slope != 0).all())
    for column in range(0, 64, 3):
        nudge = torch.zeros(64, dtype=torch.float64)
        nudge[column] = 1e-7
        up, down = (float(expected.at(logs + sign * nudge)[0]) for sign in (1, -1))
        assert (up - down) / 2e-7 == pytest.approx(float(slope[column]), rel=1e-4, abs=1e-9)


def test_weights_looked_at_in_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weight = bursts()
    readers = [Reader(weight=weight, scheme=with_group_size(preset("w4a8"), 32))]
    logs = torch.linspace(-1, 1, 64)
    whole, slope = expected_error(inputs, readers).at(logs)
    monkeypatch.setattr("quant.methods.smoothing.BLOCK", 64 * 7)
    value, parts = expected_error(inputs, readers).at(logs)
    assert float(value) == pytest.approx(float(whole), rel=1e-6)
    torch.testing.assert_close(parts, slope, rtol=1e-5, atol=1e-9)


def test_sums_at_places_are_those_of_a_gpu() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    places = torch.randint(0, 8, (50, 3), generator=generator)
    wanted = torch.zeros(3, 8, dtype=torch.float64)
    for row in range(50):
        for group in range(3):
            wanted[group, places[row, group]] += values[row, group]
    for found in (sum_at(values, places, 8), sum_where(values, places, torch.arange(8))):
        torch.testing.assert_close(found, wanted.flatten())


def test_readers_weigh_by_their_relative_error() -> None:
    """Stacked or not, in whatever order, a reader's own size does not matter."""
    inputs, weight = outliers()
    a, b = Reader(weight=weight, scheme=W8A8), Reader(weight=weight[:20] * 1000, scheme=W8A8)
    scale = torch.linspace(0.5, 2, 64)
    own = [measured(inputs, r.weight, scale) ** 2 for r in (a, b)]
    found = measured_error(inputs, stack_readers(inputs, [a, b]), scale, torch.float32)
    assert found == pytest.approx(sum(own) / 2, rel=1e-3)


def test_samples_are_valid_tokens_evenly_over_windows() -> None:
    """Of 40 windows of three lengths 16 are looked at, each from its beginning, never padding."""
    lengths = [5] * 10 + [20] * 10 + [900] * 20
    batches = make_batches([[7] * length for length in lengths], 4000)
    hidden = [
        torch.stack([
            torch.stack([torch.full((b.mask.shape[1],), float(s)), torch.arange(b.mask.shape[1])])
            for s in b.samples
        ]).transpose(1, 2).masked_fill(~b.mask[..., None], float("nan"))
        for b in batches
    ]  # fmt: skip
    layer = torch.nn.Sequential()
    layer.add_module("first", torch.nn.Linear(2, 2))
    stream = Stream(batches=batches, hidden=hidden)
    mapping = FoldMapping(producer="norm", readers=("first",), is_norm=True)
    (rows,) = sample_inputs(layer, [mapping], stream, lambda h, _: layer(h), 160)
    assert bool(torch.isfinite(rows).all())
    windows, tokens = torch.unique(rows[:, 0], return_counts=True)
    assert len(windows) == 16
    assert [lengths[int(w)] for w in windows].count(900) == 8
    assert tokens.tolist() == [min(10, lengths[int(w)]) for w in windows]
    long = rows[rows[:, 0] == windows[-1]][:, 1]
    assert long.tolist() == [float(8 * i) for i in range(10)]


def test_nothing_is_folded_where_nothing_helps() -> None:
    """Inputs and weights of one magnitude: rounding has nothing to gain from a scale."""
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (64, 32), generator=generator) * 2.0 - 1
    weight = torch.randint(0, 2, (16, 32), generator=generator) * 2.0 - 1
    readers = [Reader(weight=weight, scheme=W8A8)]
    found = search_scale(signs, readers, torch.arange(32), torch.float32, refine_steps=20)
    assert found.chosen == "none"
    assert torch.equal(found.scale, torch.ones(32))
    assert found.error_after == found.error_before


@pytest.mark.parametrize("where", ["inputs", "weights", "both"])
def test_dead_channels_keep_a_scale_of_one(where: str) -> None:
    inputs, weight = outliers()
    if where in ("inputs", "both"):
        inputs[:, 5] = 0
    if where in ("weights", "both"):
        weight[:, 5] = 0
    readers = [Reader(weight=weight, scheme=W8A8)]
    found = search_scale(inputs, readers, torch.arange(64), torch.float32, refine_steps=30)
    assert found.dead == 1
    assert float(found.scale[5]) == 1.0
    assert bool(torch.isfinite(found.scale).all() and (found.scale > 0).all())
    assert found.error_after < found.error_before


def test_all_zero_inputs_are_survived() -> None:
    inputs, weight = torch.zeros(16, 8), torch.zeros(4, 8)
    readers = [Reader(weight=weight, scheme=W8A8)]
    found = search_scale(inputs, readers, torch.arange(8), torch.float32, refine_steps=5)
    assert found.chosen == "none"


def test_columns_of_one_channel_get_one_scale() -> None:
    inputs, weight = outliers()
    channels = torch.arange(64) % 16
    readers = [Reader(weight=weight, scheme=W8A8)]
    start = torch.ones(16)
    alive = start > 0
    expected = expected_error(inputs, readers)
    assert refine(expected, channels, start, alive, 10).shape == (16,)
    found = search_scale(inputs, readers, channels, torch.float32, refine_steps=10)
    assert found.scale.shape == (16,)


def planted(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> Path:
    """A tiny model whose norms blow up some channels, which the readers take back."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    offset = 1.0 if family == "gemma3_text" else 0.0
    mlp_norm = MAPPINGS[type(model).__name__][2].producer
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = {
                "input_layernorm": (attention.q_proj, attention.k_proj, attention.v_proj),
                mlp_norm: (mlp.gate_proj, mlp.up_proj),
            }
            for name, linears in readers.items():
                norm = layer.get_submodule(name).weight
                norm[[3, 9]] = (norm[[3, 9]] + offset) * 50 - offset
                for linear in linears:
                    linear.weight[:, [3, 9]] /= 50
    out = tmp_path / f"planted-{family}"
    model.save_pretrained(out)
    for file in tiny_model(family).glob("token*"):
        (out / file.name).write_bytes(file.read_bytes())
    for file in tiny_model(family).glob("*.jinja"):
        (out / file.name).write_bytes(file.read_bytes())
    return out


def kl(model: Path, artifact: Path) -> float:
    """KL of the artifact's own forward, dense tensors included, against the model."""
    from tests.quant.test_pipeline import reconstructed

    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    first = logits_of(dense).log_softmax(-1)
    second = logits_of(reconstructed(model, open_artifact(artifact))).log_softmax(-1)
    return float((first.exp() * (first - second)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2"])
def test_w8a8_of_a_model_with_outliers_improves_fivefold(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    model = planted(tiny_model, tmp_path, family)
    make(model, tmp_path / "plain", "scheme: w8a8\nmethod: rtn\n", calibrated=False)
    report = make(model, tmp_path / "art", "scheme: w8a8\nmethod: rtn\nsmoothing: search\n")
    assert kl(model, tmp_path / "art") < 0.2 * kl(model, tmp_path / "plain")
    notes = [m.smoothing for m in report.modules if m.module.endswith("q_proj")]
    assert all("into input_layernorm" in note for note in notes)
    assert open_artifact(tmp_path / "art", verify="full")


def test_of_many_weights_every_so_many_th_row_judges(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seventh of gate|up and a quarter of q|k|v tell the same planted channels."""
    judged: list[int] = []

    def search(inputs: Tensor, readers: list[Reader], *args: Any, **settings: Any) -> Smoothing:
        judged.append(sum(reader.weight.numel() for reader in readers))
        return search_scale(inputs, readers, *args, **settings)

    monkeypatch.setattr("quant.smooth_layer.search_scale", search)
    monkeypatch.setattr("quant.smooth_layer.JUDGED_WEIGHTS", 3000)
    model = planted(tiny_model, tmp_path, "llama")
    make(model, tmp_path / "plain", "scheme: w8a8\nmethod: rtn\n", calibrated=False)
    make(model, tmp_path / "art", "scheme: w8a8\nmethod: rtn\nsmoothing: search\n")
    assert max(judged) <= 3000 + 64 * 3
    assert kl(model, tmp_path / "art") < 0.25 * kl(model, tmp_path / "plain")


@pytest.mark.parametrize("family", DENSE_MLP)
def test_the_probe_saw_what_the_artifact_stores(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    from tests.quant.test_pipeline import probe_difference

    text = "scheme: w8a8\nmethod: gptq\nsmoothing: search\ndtype: bfloat16\n"
    make(tiny_model(family), tmp_path / "art", text)
    assert probe_difference(tiny_model(family), open_artifact(tmp_path / "art")) < 2e-4


def test_smoothing_is_repeatable_to_the_bit(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = "scheme: w8a8\nmethod: rtn\nsmoothing: search\n"
    digests = []
    for name in ("one", "two"):
        make(tiny_model(), tmp_path / name, text)
        digests.append(open_artifact(tmp_path / name).tensor_digests())
    assert digests[0] == digests[1]


def test_modules_that_stay_dense_are_not_touched(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = (
        "scheme: w8a8\nmethod: rtn\nsmoothing: search\n"
        "skip: [lm_head, '*.self_attn.*', '*.down_proj']\n"
    )
    report = make(tiny_model(), tmp_path / "art", text)
    artifact, source = open_artifact(tmp_path / "art"), open_source(str(tiny_model()))
    for leaf in ("input_layernorm", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.0.{leaf}.weight"
        assert torch.equal(artifact.reader.tensor(name), source.tensor(name)), leaf
        assert artifact.manifest.modules.get(name) is None
    assert all(m.smoothing == "" for m in report.modules if m.scheme == DENSE.label)


def test_without_calibration_the_way_out_is_named(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = "scheme: w8a8\nmethod: rtn\nsmoothing: search\n"
    with pytest.raises(PipelineError, match="smoothing: none"):
        make(tiny_model(), tmp_path / "art", text, calibrated=False)
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(Exception, match="use --smoothing none"):
        quantize(str(tiny_model()), file, out=tmp_path / "art")


def test_an_architecture_without_mappings_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a family would be that the runtime learned to serve before its folds were written down."""
    monkeypatch.delitem(MAPPINGS, "MixtralForCausalLM")
    monkeypatch.delitem(MAPPINGS, "Phi3ForCausalLM")
    text = "scheme: w8a8\nmethod: rtn\nsmoothing: search\n"
    with pytest.raises(PipelineError, match="smoothing: none"):
        make(tiny_model("mixtral"), tmp_path / "art", text)
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(PipelineError, match="smoothing: none"):
        prepare(str(tiny_model("phi3")), file, overrides={})  # before anything is spent


def test_fused_linears_are_smoothed(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    text = "scheme: w8a8\nmethod: rtn\nsmoothing: search\n"
    report = make(tiny_model("phi3"), tmp_path / "art", text)
    notes = {m.module.removeprefix("model.layers.0."): m.smoothing for m in report.modules}
    assert "into input_layernorm," in notes["self_attn.qkv_proj"]
    assert "into self_attn.qkv_proj," in notes["self_attn.o_proj"]
    assert "into post_attention_layernorm," in notes["mlp.gate_up_proj"]
    assert "into mlp.gate_up_proj," in notes["mlp.down_proj"]


def planted_mixture(model: Path, out: Path, block: str) -> Path:
    """A copy whose norm before the experts blows up two channels; router and experts take it back,
    and each expert's up projection one more, which its down projection takes back."""
    copytree(model, out)
    up, down = ("up_proj", "down_proj") if block == "mlp" else ("w3", "w2")
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if not name.startswith("model.layers.0."):
            continue
        if name.endswith("post_attention_layernorm.weight"):
            tensor[[3, 9]] *= 64
        elif f".{block}.gate." in name or ".experts." in name and f".{down}." not in name:
            tensor[:, [3, 9]] /= 64
        if f".{up}." in name:
            tensor[5] *= 64
        elif f".{down}." in name:
            tensor[:, 5] /= 64
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def dequantized(artifact: Artifact, model: Path, out: Path) -> Path:
    """A plain checkpoint of what an artifact stores."""
    copytree(model, out)
    tensors = {n: artifact.reader.tensor(n) for n in load_file(model / "model.safetensors")
               if n in artifact.manifest.tensors}  # fmt: skip
    for name in artifact.schemes():
        weight = artifact.weight(name)
        if isinstance(weight, QuantizedWeight):
            tensors[f"{name}.weight"] = dequantize(weight).float()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("family", "block"), [("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")]
)
def test_experts_are_smoothed_and_the_router_routes_as_before(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, block: str
) -> None:
    model = planted_mixture(tiny_model(family, torch.bfloat16), tmp_path / "planted", block)
    text = "scheme: w8a16\ngroup_size: channel\nmethod: rtn\n"
    make(model, tmp_path / "plain", text, calibrated=False)
    report = make(model, tmp_path / "art", text + "smoothing: search\n")
    logits = {
        name: logits_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
        for name, path in {
            "dense": model,
            "plain": dequantized(open_artifact(tmp_path / "plain"), model, tmp_path / "p"),
            "smooth": dequantized(open_artifact(tmp_path / "art"), model, tmp_path / "s"),
        }.items()
    }
    lost = {
        k: float((v - logits["dense"]).norm() / logits["dense"].norm()) for k, v in logits.items()
    }
    assert lost["smooth"] < 0.5 * lost["plain"]
    artifact, name = open_artifact(tmp_path / "art"), f"model.layers.0.{block}.gate.weight"
    ratio = artifact.reader.tensor(name).float() / open_source(str(model)).tensor(name).float()
    assert torch.equal(ratio, torch.exp2(ratio[:1].log2().round()).expand_as(ratio))
    assert bool((ratio[0, [3, 9]] > 4).all())
    notes = {m.module.removeprefix(f"model.layers.0.{block}."): m.smoothing for m in report.modules}
    up, down = ("up_proj", "down_proj") if block == "mlp" else ("w3", "w2")
    assert "into post_attention_layernorm," in notes[f"experts.1.{up}"]
    assert f"into {block}.experts.1.{up}," in notes[f"experts.1.{down}"]


def test_scales_that_must_be_powers_of_two_are_judged_as_such() -> None:
    inputs, weight = bursts()
    readers, every = [Reader(weight=weight, scheme=W8A8)], torch.arange(64)
    found = search_scale(inputs, readers, every, torch.float32, refine_steps=20, is_binary=True)
    assert torch.equal(found.scale, torch.exp2(found.scale.log2().round()))
    assert found.error_after == pytest.approx(measured(inputs, weight, found.scale), rel=1e-3)
    free = search_scale(inputs, readers, every, torch.float32, refine_steps=20)
    assert free.error_after < found.error_after < found.error_before


def test_why_a_fold_is_impossible_is_said(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    text = (
        "scheme: w8a8\nmethod: rtn\nsmoothing: search\n"
        "skip: [lm_head, '*.self_attn.[qkv]_proj', '*.gate_proj', '*.up_proj']\n"
    )
    report = make(tiny_model(), tmp_path / "art", text)
    notes = {m.module.removeprefix("model.layers.1."): m.smoothing for m in report.modules}
    for leaf, dense in (("self_attn.o_proj", "self_attn.v_proj"), ("mlp.down_proj", "mlp.up_proj")):
        assert notes[leaf] == f"none: {dense}, which the same scale would change, stays dense"
    assert notes["self_attn.q_proj"] == notes["mlp.up_proj"] == ""


@pytest.mark.parametrize("number", [3, 40])
def test_an_expert_is_shown_what_its_router_sends_it(
    tiny_model: Callable[..., Path], number: int
) -> None:
    """A token is of the sample of its own experts; one that gets none sees all tokens taken."""
    source = open_source(str(tiny_model("mixtral")))
    skeleton = source.skeleton
    names = skeleton.layer_names(0)
    layer = skeleton.build_layer(0, {name: source.tensor(name) for name in names})
    generator = torch.Generator().manual_seed(1)
    batches = make_batches([[5] * number] * 4, 1000)
    hidden = [torch.randn(*b.mask.shape, 64, generator=generator) for b in batches]
    stream = Stream(batches=batches, hidden=hidden)
    leaves = {n.removeprefix(skeleton.layer_prefix(0)) for n in names}
    mapping = mappings_in(MAPPINGS_OF["mixtral"], leaves)[-1]
    assert mapping.producer == "block_sparse_moe.experts.3.w3"

    def run_layer(states: Tensor, mask: Tensor) -> Tensor:
        return skeleton.run_layer(0, layer, states, mask)

    (rows,) = sample_inputs(layer, [mapping], stream, run_layer, 4 * number)
    experts = layer.get_submodule("block_sparse_moe.experts")
    inputs, chosen, _ = first_arguments(experts, lambda: run_layer(hidden[0], batches[0].mask))
    sent = (chosen == 3).any(-1)
    assert (int(sent.sum()) >= 16) == (number == 40)
    wanted = experts[3].inner(inputs[sent] if number == 40 else inputs)
    torch.testing.assert_close(rows, wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("scheme: w4a16\nmethod: gptq\n", "search"),
        ("scheme: w8a8\nmethod: gptq\n", "search"),
        ("scheme: w4a16\nmethod: rtn\n", "none"),
        ("scheme: fp8\nmethod: gptq\n", "none"),
        ("scheme: fp8\nmethod: rtn\noverrides: [" + GPTQ_DOWN + "]\n", "search"),
    ],
)
def test_auto_smooths_before_gptq_makes_integers(
    tiny_model: Callable[..., Path], text: str, wanted: str
) -> None:
    source, recipe = open_source(str(tiny_model())), Recipe.parse(text + "smoothing: auto\n")
    plan = make_plan(recipe, source.module_shapes, source.num_layers, source.config)
    assert plan.smoothing == wanted
    assert plan.needs_calibration == recipe.needs_calibration == ("gptq" in text)
