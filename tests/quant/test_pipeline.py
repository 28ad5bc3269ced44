"""The pipeline through its front door: what is stored, what it computes, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quant.artifact.artifact import Artifact, open_artifact, verify
from quant.artifact.errors import SchemeError, StorageError
from quant.artifact.layout import (
    QuantizedWeight,
    dequantize,
    fake_quantize_activations,
    min_max_qparams,
    tensor_names,
)
from quant.calibration import Calibration, windows_from_token_lists
from quant.errors import NonFiniteError, PipelineError, SourceError
from quant.kv_scales import scale_for
from quant.modelling import FAMILIES
from quant.pipeline import run
from quant.plan import make_plan
from quant.recipe import Recipe
from quant.report import RunReport
from quant.source import open_source

RTN4 = "scheme: w4a16\nmethod: rtn\ngroup_size: 32\n"
GPTQ4 = "scheme: w4a16\nmethod: gptq\ngroup_size: 32\n"


def calibration(count: int = 12, seed: int = 0) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 120, (count,), generator=generator).tolist()
    return windows_from_token_lists(
        torch.randint(3, 290, (length,), generator=generator).tolist() for length in lengths
    )


def make(
    model: Path, out: Path, text: str, windows: Calibration | None = None, **options: bool
) -> RunReport:
    source, recipe = open_source(str(model)), Recipe.parse(text)
    plan = make_plan(
        recipe, source.module_shapes, source.num_layers, source.config,
        source_dtype=str(source.dtype).removeprefix("torch."),
    )  # fmt: skip
    return run(source, plan, recipe, windows, out, **options)


def reconstructed(model: Path, artifact: Artifact) -> torch.nn.Module:
    """The transformers model that computes with what is stored."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stored = {name: artifact.reader.tensor(name) for name in artifact.reader.names}
    for name, parameter in loaded.named_parameters():
        if name in stored:
            parameter.data = stored[name].float()
    for name, scheme in artifact.schemes().items():
        weight = artifact.weight(name)
        if isinstance(weight, QuantizedWeight):
            linear = loaded.get_submodule(name)
            linear.weight.data = dequantize(weight).float()
            if scheme.activations:
                linear.register_forward_pre_hook(
                    lambda _, args, act=scheme.activations: fake_quantize_activations(args[0], act)
                )
    return loaded.eval()


def probe_difference(model: Path, artifact: Artifact) -> float:
    """Largest difference between the probe on record and the reconstructed model's forward."""
    loaded, worst = reconstructed(model, artifact), 0.0
    assert artifact.manifest.probe is not None
    for prompt in artifact.manifest.probe.prompts:
        with torch.no_grad():
            logits = loaded(input_ids=torch.tensor([prompt.token_ids])).logits[0, -1]
        expected = logits.log_softmax(-1)[list(prompt.top_ids)]
        worst = max(worst, float((expected - torch.tensor(prompt.top_logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize("family", sorted(n for n, f in FAMILIES.items() if f.mixture is None))
@pytest.mark.parametrize(
    ("text", "needs_windows"),
    [
        ("scheme: dense\nmethod: none\nskip: []\n", False),
        (GPTQ4 + "symmetric: false\n", True),
        ("scheme: w8a8\nmethod: rtn\n", False),
    ],
)
def test_every_family_is_stored_whole_and_computes_what_the_probe_says(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, text: str, needs_windows: bool
) -> None:
    model, out = tiny_model(family), tmp_path / "art"
    make(model, out, text, calibration() if needs_windows else None)
    artifact = open_artifact(out, verify="full")
    assert verify(out) == []
    assert probe_difference(model, artifact) < 1e-4
    source = open_source(str(model))
    accounted = set(source.dropped())
    for name in source.names:
        module = name.removesuffix(".weight")
        scheme = artifact.schemes().get(module)
        if name in artifact.reader and (scheme is None or scheme.is_dense):
            assert torch.equal(artifact.reader.tensor(name), source.tensor(name))
            accounted.add(name)
        elif scheme is not None and not scheme.is_dense:
            assert all(f"{module}.{leaf}" in artifact.reader for leaf in tensor_names(scheme))
            accounted.add(name)
    assert accounted == set(source.names)
    for name, data in source.files().items():
        assert (out / name).read_bytes() == data


def test_rtn_needs_no_calibration_and_is_plain(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    report = make(tiny_model(), tmp_path / "art", RTN4)
    artifact, source = open_artifact(tmp_path / "art"), open_source(str(tiny_model()))
    name = "model.layers.1.mlp.down_proj"
    weight = artifact.weight(name)
    assert isinstance(weight, QuantizedWeight)
    assert weight.scheme.weights is not None
    original = source.tensor(f"{name}.weight")
    scale, _ = min_max_qparams(original, weight.scheme.weights, torch.float32)
    assert torch.equal(weight.scale, scale)
    error = (dequantize(weight) - original).norm() / original.norm()
    row = next(m for m in report.modules if m.module == name)
    assert row.rel_error == pytest.approx(float(error), rel=1e-4)
    assert row.error_of == "weights"


def test_gptq_beats_rtn_on_the_outputs(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    windows = calibration(24)
    make(tiny_model(), tmp_path / "rtn", RTN4)
    report = make(tiny_model(), tmp_path / "gptq", GPTQ4, windows)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)

    def divergence(out: Path) -> float:
        model, total, count = reconstructed(tiny_model(), open_artifact(out)), 0.0, 0
        for ids in calibration(8, seed=1).samples:
            with torch.no_grad():
                exact, found = (
                    m(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                    for m in (reference, model)
                )
            total += float((exact.exp() * (exact - found)).sum())
            count += len(ids)
        return total / count

    assert divergence(tmp_path / "gptq") < 0.8 * divergence(tmp_path / "rtn")
    assert {m.error_of for m in report.quantized} == {"outputs"}
    assert {m.damping for m in report.quantized} == {0.1}
    assert not report.fallbacks


def test_mixed_precision_is_what_was_asked_for(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Layer 0 W4, layer 1 W8, layers 2 and 3 float: and stored so, not as empty codes."""
    model = tiny_model(num_hidden_layers=4)
    text = RTN4 + (
        "skip: [lm_head, 're:model.layers.[23]..*']\n"
        "overrides: [{match: 'model.layers.1.*', scheme: w8a16}]\n"
    )
    make(model, tmp_path / "art", text)
    artifact, source = open_artifact(tmp_path / "art"), open_source(str(model))
    labels = [artifact.scheme(f"model.layers.{i}.mlp.up_proj").label for i in range(4)]
    assert labels == ["w4a16-g32", "w8a16-g32", "dense", "dense"]
    for name in source.layer_prefix(2), source.layer_prefix(3):
        stored = artifact.weight(f"{name}self_attn.q_proj")
        assert isinstance(stored, torch.Tensor)
        assert torch.equal(stored, source.tensor(f"{name}self_attn.q_proj.weight"))


@pytest.mark.parametrize(
    ("key", "label"), [("skip: []", "w4a16-g32"), ("lm_head: w8a16", "w8a16-channel")]
)
def test_lm_head_can_be_quantized(
    key: str, label: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    make(tiny_model(), tmp_path / "art", f"{GPTQ4}{key}\n", calibration())
    artifact = open_artifact(tmp_path / "art")
    assert artifact.scheme("lm_head").label == label
    assert probe_difference(tiny_model(), artifact) < 1e-4


def test_batch_of_one_and_of_many_give_the_same_artifact_to_rounding(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    for batch in (1, 960):
        text = f"{GPTQ4}calibration: {{batch_tokens: {batch}}}\n"
        make(tiny_model(), tmp_path / str(batch), text, calibration(8))
    one, many = (open_artifact(tmp_path / str(batch)) for batch in (1, 960))
    for name in one.schemes():
        left, right = one.weight(name), many.weight(name)
        if isinstance(left, QuantizedWeight):
            assert isinstance(right, QuantizedWeight)
            same = (left.codes == right.codes).float().mean()
            assert float(same) > 0.99, name
            torch.testing.assert_close(left.scale, right.scale, rtol=0.02, atol=0)


def test_the_same_job_gives_the_same_bytes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    first = make(tiny_model(), tmp_path / "a", GPTQ4, calibration())
    second = make(tiny_model(), tmp_path / "b", GPTQ4, calibration())
    assert first.artifact_digest == second.artifact_digest
    other = make(tiny_model(), tmp_path / "c", GPTQ4, calibration(seed=5))
    assert other.artifact_digest != first.artifact_digest


@pytest.mark.parametrize("windows", [[[5, 6, 7, 8, 9, 10, 11, 12]], [[5, 6, 7]] * 64])
def test_too_little_calibration_is_damped_not_fatal(
    tiny_model: Callable[..., Path], tmp_path: Path, windows: list[list[int]]
) -> None:
    report = make(tiny_model(), tmp_path / "art", GPTQ4, windows_from_token_lists(windows))
    assert all(m.damping is not None or m.fallback for m in report.quantized)
    assert probe_difference(tiny_model(), open_artifact(tmp_path / "art")) < 1e-4


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
def test_dead_channels_give_finite_scales_and_exact_zeros(
    tiny_model: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    """A norm channel, a weight column, a weight row and a whole group that are always zero."""
    model = shutil.copytree(tiny_model(), tmp_path / "dead")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][7] = 0
    tensors["model.layers.0.mlp.up_proj.weight"][:, 9] = 0
    tensors["model.layers.0.mlp.up_proj.weight"][4] = 0
    tensors["model.layers.1.mlp.gate_proj.weight"][:, 32:64] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    method = "rtn" if scheme == "fp8" else "gptq"
    group = "group_size: 32\n" if scheme == "w4a16" else ""
    text = f"scheme: {scheme}\nmethod: {method}\n{group}"
    report = make(model, tmp_path / "art", text, calibration())
    artifact = open_artifact(tmp_path / "art")
    for name in artifact.reader.names:
        tensor = artifact.reader.tensor(name).float()
        assert bool(torch.isfinite(tensor).all()), name
        assert not name.endswith("weight_scale") or bool((tensor > 0).all()), name
    up, gate = (artifact.weight(f"model.layers.{i}") for i in ("0.mlp.up_proj", "1.mlp.gate_proj"))
    assert isinstance(up, QuantizedWeight)
    assert isinstance(gate, QuantizedWeight)
    assert not dequantize(up)[4].float().any()
    if scheme == "w4a16":  # elsewhere it is part of a group, and may carry others' errors
        assert not dequantize(gate)[:, 32:64].float().any()
    assert probe_difference(model, artifact) < 1e-3
    dead = {m.module: m.dead_columns for m in report.modules if m.dead_columns}
    leaves = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    assert method == "rtn" or dead == {f"model.layers.0.{leaf}": 1 for leaf in leaves}


def test_fp8_kv_scales_follow_the_calibrated_range(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "outliers")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1000
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text = RTN4 + "kv_cache: fp8\n"
    make(model, tmp_path / "art", text, calibration())
    artifact = open_artifact(tmp_path / "art")
    small, (key, value) = artifact.kv_scales(0), artifact.kv_scales(1)
    assert max(*small, key) < 2.0 < 4.0 < value
    assert artifact.config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


def test_kv_scale_rule() -> None:
    assert [scale_for(x) for x in (0.0, 224.0, 225.0, 448.0, 449.0)] == [1, 1, 2, 2, 4]
    assert [scale_for(x) for x in (28.0, 0.125, 0.124, 7e-3, 1e-3)] == [
        1, 1, 2.0**-7, 2.0**-11, 2.0**-14,
    ]  # fmt: skip


def test_bf16_sources_keep_bf16_and_weights_beyond_fp16_are_named(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(dtype=torch.bfloat16), tmp_path / "bf16")
    make(model, tmp_path / "art", RTN4)
    artifact = open_artifact(tmp_path / "art")
    weight = artifact.weight("model.layers.0.mlp.up_proj")
    assert isinstance(weight, QuantizedWeight)
    assert weight.scale.dtype == torch.bfloat16
    assert artifact.config["dtype"] == "bfloat16"
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    make(model, tmp_path / "fine", RTN4)
    with pytest.raises(SchemeError, match=r"model\.layers\.1\.mlp\.up_proj.* overflows float16"):
        make(model, tmp_path / "bad", RTN4 + "dtype: float16\n")
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .* not fit"):
        make(model, tmp_path / "bad", "scheme: dense\nmethod: none\nskip: []\ndtype: float16\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["art", "bf16", "fine"]


def test_nan_weights_leave_nothing_behind(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "nan")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][1, 1] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"layers\.1\.self_attn\.o_proj\.weight"):
        make(model, tmp_path / "art", RTN4)
    assert [p.name for p in tmp_path.iterdir()] == ["nan"]


def test_overflowing_activations_name_layer_and_sample(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "hot")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] *= 1e38
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"model\.layers\.0.* sample"):
        make(model, tmp_path / "art", GPTQ4, calibration())


def test_refusals(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="gptq needs calibration text"):
        make(tiny_model(), tmp_path / "art", GPTQ4)
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    with pytest.raises(StorageError, match="overlap"):
        make(model, model, RTN4)
    make(model, tmp_path / "art", RTN4)
    with pytest.raises(StorageError, match="already holds an artifact"):
        make(model, tmp_path / "art", RTN4)
    make(model, tmp_path / "art", "scheme: fp8\nmethod: rtn\n", overwrite=True)
    assert open_artifact(tmp_path / "art").scheme("model.layers.0.mlp.up_proj").label[:3] == "fp8"


def test_manifest_says_where_everything_came_from(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    windows = calibration()
    make(tiny_model(), tmp_path / "art", GPTQ4, windows)
    manifest = open_artifact(tmp_path / "art").manifest
    assert manifest.source.path == str(tiny_model().resolve())
    assert manifest.source.digest == open_source(str(tiny_model())).digest
    assert manifest.recipe.text == GPTQ4
    assert manifest.calibration is not None
    assert manifest.calibration.digest == windows.digest
    assert manifest.tools["torch"] == torch.__version__
    assert manifest.tools["threads"] == str(torch.get_num_threads())
    assert (tmp_path / "art" / "recipe.yaml").read_text() == GPTQ4
    assert "seconds" not in json.dumps(manifest.model_dump(mode="json"))
