"""GPTQ, AWQ and compressed-tensors checkpoints of other tools, packed here bit by bit from the
formats' definitions; what they stand for is computed from the codes before they were packed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_checkpoints import converted, edit, quantized_copy, set_config
from safetensors.torch import load_file, save_file

from quant.api import prepare
from quant.artifact.artifact import open_artifact
from quant.artifact.errors import ArtifactError, IntegrityError
from quant.artifact.layout import QuantizedWeight, dequantize
from quant.errors import AlreadyQuantizedError, QuantError, SourceError
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem

GATE = "model.layers.0.mlp.gate_proj"
CASES: list[dict[str, Any]] = [
    {"method": "gptq", "version": "gptq"},
    {"method": "gptq", "version": "gptq_v2"},
    {"method": "gptq", "version": "gptq", "sym": False},
    {"method": "gptq", "version": "gptq_v2", "sym": False},
    {"method": "gptq", "version": "gptq", "bits": 8},
    {"method": "gptq", "version": "gptq_v2", "bits": 8, "sym": False},
    {"method": "gptq", "version": "gptq", "bits": 3, "sym": False},
    {"method": "awq", "sym": False},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_weights_are_bit_equal_and_the_runtime_runs_them(
    tiny_model: Callable[..., Path], tmp_path: Path, case: dict[str, Any]
) -> None:
    # Old packers wrote whole words only: 3 bits need output widths of 32.
    base = tiny_model(num_key_value_heads=4) if case.get("bits") == 3 else tiny_model()
    model, dense = quantized_copy(base, tmp_path / "model", **case)
    path = converted(model, tmp_path / "art")
    artifact = open_artifact(path, verify="full")
    assert artifact.manifest.dtype == "float16"
    stored = load_file(model / "model.safetensors")
    for module, expected in dense.items():
        weight = artifact.weight(module)
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.scale, stored[f"{module}.scales"].T)
        assert torch.equal(dequantize(weight), expected), module
    for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert torch.equal(artifact.reader.tensor(name), stored[name])
    if case["method"] == "gptq":
        name = "model.layers.0.mlp.up_proj"
        packed = artifact.reader.tensor(f"{name}.weight_packed")
        assert torch.equal(packed, stored[f"{name}.qweight"].T)
    config = EngineConfig(max_model_len=64, num_gpu_blocks_override=16)
    score = Engine.from_artifact(path, config).score([ScoreItem(token_ids=tuple(range(5, 40)))])
    assert all(np.isfinite(score[0].nll))


def test_both_versions_make_the_same_artifact_weights(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    tables = []
    for version in ("gptq", "gptq_v2"):
        model, _ = quantized_copy(
            tiny_model(), tmp_path / version, method="gptq", version=version, sym=False
        )
        tables.append(open_artifact(converted(model, tmp_path / f"art-{version}")).tensor_digests())
    assert tables[0] == tables[1]


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_an_unwritten_version_is_read_off_the_zero_points(
    tiny_model: Callable[..., Path], tmp_path: Path, version: str, sym: bool
) -> None:
    model, dense = quantized_copy(
        tiny_model(), tmp_path / "model", method="gptq", version=version, sym=sym,
        checkpoint_format=None,
    )  # fmt: skip
    if version == "gptq_v2" and not sym:  # tools that do not write it down wrote the first
        with pytest.raises(SourceError, match="not written down.*gptq_v2"):
            converted(model, tmp_path / "art")
        return
    job = prepare(str(model), "none.yaml", overrides={}, keep_codes=True)
    assert f"({version})" in " ".join(job.notes)
    artifact = open_artifact(converted(model, tmp_path / "art"))
    for module, expected in dense.items():
        weight = artifact.weight(module)
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(dequantize(weight), expected)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("size", [-1, 256, 512, 1024])
def test_groups_wider_than_ours_become_several_of_one_scale(
    tiny_model: Callable[..., Path], tmp_path: Path, method: str, size: int
) -> None:
    base = tiny_model(hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    model, dense = quantized_copy(
        base, tmp_path / "model", method=method, sym=method == "gptq",
        size=512 if size in (-1, 1024) else size, group_size=size, only="mlp",
    )  # fmt: skip
    if method == "gptq":
        assert max(load_file(model / "model.safetensors")[f"{next(iter(dense))}.g_idx"]) < 3
    artifact = open_artifact(converted(model, tmp_path / "art"))
    for module, expected in dense.items():
        weight = artifact.weight(module)
        assert isinstance(weight, QuantizedWeight)
        assert weight.scheme.label.startswith("w4a16-g128" if size in (256, 512) else "w4a16-chan")
        assert torch.equal(dequantize(weight), expected)


def test_compressed_tensors_with_wide_groups(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model(hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    made = artifact(base, scheme="w4a16", group_size=128, symmetric=False)
    model = shutil.copytree(made, tmp_path / "model")
    (model / "artifact.json").unlink()
    (model / "model.safetensors.index.json").unlink()
    tensors = {n: t for shard in model.glob("*.safetensors") for n, t in load_file(shard).items()}
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    for name in [n for n in tensors if n.endswith((".weight_scale", ".weight_zero_point"))]:
        tensors[name] = tensors[name][:, ::2].contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    for group in section["config_groups"].values():
        group["weights"]["group_size"] = 256
    set_config(model, quantization_config=section)
    found = open_artifact(converted(model, tmp_path / "art")).weight("model.layers.0.mlp.up_proj")
    assert isinstance(found, QuantizedWeight)
    scale = tensors["model.layers.0.mlp.up_proj.weight_scale"]
    assert torch.equal(found.scale[:, ::2], scale)
    assert torch.equal(found.scale[:, 1::2], scale)
    edit(model, **{"model.layers.0.mlp.up_proj.weight_scale": scale[:, :1].contiguous()})
    with pytest.raises(IntegrityError, match=r"up_proj: tensor weight_scale is .*\[512, 1\]"):
        converted(model, tmp_path / "other")


def test_settings_per_module_are_followed(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the first rule that matches counts."""
    model, dense = quantized_copy(
        tiny_model(), tmp_path / "model", method="gptq", sym=False, only=".mlp.",
        more_bits="down_proj",
        dynamic={"-:.*self_attn": {}, "+:.*\\.down_proj$": {"bits": 8}, ".*": {"bits": 4}},
    )  # fmt: skip
    artifact = open_artifact(converted(model, tmp_path / "art"))
    labels = {name.rpartition(".")[2]: s.label for name, s in artifact.schemes().items()}
    assert labels["q_proj"] == "dense"
    assert labels["up_proj"] == "w4a16-g32-asym"
    assert labels["down_proj"] == "w8a16-g32-asym"
    for module, expected in dense.items():
        weight = artifact.weight(module)
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(dequantize(weight), expected)


def test_modules_that_awq_left_alone_stay_dense(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, dense = quantized_copy(
        tiny_model(), tmp_path / "model", method="awq", sym=False, only=".mlp.",
        modules_to_not_convert=["self_attn"],
    )  # fmt: skip
    schemes = open_artifact(converted(model, tmp_path / "art")).schemes()
    assert {name for name, scheme in schemes.items() if not scheme.is_dense} == set(dense)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_a_swapped_label_is_caught(
    tiny_model: Callable[..., Path], tmp_path: Path, version: str, sym: bool
) -> None:
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[version]
    model, _ = quantized_copy(
        tiny_model(), tmp_path / "model", method="gptq", version=version, sym=sym,
        checkpoint_format=other,
    )  # fmt: skip
    with pytest.raises((SourceError, IntegrityError), match="version"):
        converted(model, tmp_path / "art")
    assert not (tmp_path / "art").exists()


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gptq", {"checkpoint_format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        ("gptq", {"is_marlin_format": True}, "checkpoint_format is 'marlin'"),
        ("gptq", {"dynamic": {"-:.*up_proj": {}}}, "`dynamic` excludes model.layers.0.mlp.up_proj"),
        ("gptq", {"dynamic": {"+:(": {}}}, "no regular expression"),
        ("gptq", {"dynamic": {".*down": {"bits": 8}}}, r"layers.0.mlp.down_proj.qweight has shape"),
        ("gptq", {"dynamic": {".*down": {"bits": "8"}}}, "dynamic.*bits: Input should be a valid"),
        ("gptq", {"group_size": 16}, "group_size 16"),
        ("gptq", {"group_size": 0}, "group_size 0"),
        ("gptq", {"sym": "yes"}, "sym: Input should be a valid boolean"),
        ("gptq", {"bits": 2}, "integer weights have 3, 4 or 8 bits, not 2"),
        ("gptq", {"bits": 5}, "bits"),
        ("gptq", {"bits": 8}, r"qweight has shape \[8, 64\]"),
        ("awq", {"version": None}, "AWQ version is None"),
        ("awq", {"version": "gemv"}, "AWQ version is 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point is False"),
        ("bitsandbytes", {}, "quant_method is 'bitsandbytes'.*no integer grid.*start from"),
        ("gguf", {}, "quant_method is 'gguf': give the .gguf file itself"),
        ("hqq", {}, "quant_method is 'hqq'.*start from the float checkpoint"),
        (None, {}, "quant_method is None"),
    ],
)
def test_what_is_not_known_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, method: str | None,
    settings: dict[str, Any], message: str,
) -> None:  # fmt: skip
    kind = "awq" if method == "awq" else "gptq"
    model, _ = quantized_copy(tiny_model(), tmp_path / "model", method=kind, sym=kind != "awq")
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    set_config(model, quantization_config={**section, "quant_method": method, **settings})
    with pytest.raises((QuantError, ArtifactError), match=message):
        converted(model, tmp_path / "art")
    assert not (tmp_path / "art").exists()


def test_a_head_with_codes_is_not_tied(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Refused before the work: which of the two is the head is not ours to say."""
    base = tiny_model(tie_word_embeddings=True, vocab_size=320)
    model, _ = quantized_copy(base, tmp_path / "model", method="gptq")
    codes = {
        f"lm_head.{part}": load_file(model / "model.safetensors")[f"{GATE}.{part}"].repeat(1, 2)
        for part in ("qweight", "qzeros", "scales")
    }
    edit(model, **codes)
    with pytest.raises(SourceError, match=r"lm_head has codes of its own.*tie_word_embeddings"):
        converted(model, tmp_path / "art")
    set_config(model, tie_word_embeddings=False)
    assert not open_artifact(converted(model, tmp_path / "art")).schemes()["lm_head"].is_dense


def test_act_order_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, _ = quantized_copy(tiny_model(), tmp_path / "model", method="gptq", desc_act=True)
    assert converted(model, tmp_path / "static").is_dir()
    name = "model.layers.1.mlp.down_proj.g_idx"
    g_idx = load_file(model / "model.safetensors")[name]
    edit(model, **{name: g_idx.flip(0)})
    with pytest.raises(SourceError, match="out of order"):
        converted(model, tmp_path / "art")
    edit(model, **{name: None})
    with pytest.raises(SourceError, match="desc_act is true, but .* is missing"):
        converted(model, tmp_path / "art")


@pytest.mark.parametrize("leaf", ["scales", "qzeros", "qweight"])
def test_a_missing_tensor_is_named(
    tiny_model: Callable[..., Path], tmp_path: Path, leaf: str
) -> None:
    model, _ = quantized_copy(tiny_model(), tmp_path / "model", method="awq", sym=False)
    edit(model, **{f"model.layers.1.mlp.up_proj.{leaf}": None})
    with pytest.raises((SourceError, ArtifactError), match=r"layers\.1\.mlp\.up_proj"):
        converted(model, tmp_path / "art")


def test_codes_that_nothing_describes_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, _ = quantized_copy(tiny_model(), tmp_path / "model", method="awq", sym=False)
    name = "model.layers.1.input_layernorm.weight"
    edit(model, **{name: load_file(model / "model.safetensors")[name].to(torch.int8)})
    with pytest.raises(IntegrityError, match=r"layernorm.weight is int8, and nothing says"):
        converted(model, tmp_path / "art")


def test_truncated_and_garbled_files(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, _ = quantized_copy(tiny_model(), tmp_path / "model", method="gptq")
    scales = "model.layers.0.mlp.up_proj.scales"
    bad = load_file(model / "model.safetensors")[scales]
    bad[1, 2] = float("nan")
    edit(model, **{scales: bad})
    with pytest.raises(IntegrityError, match="scales hold NaN"):
        converted(model, tmp_path / "art")
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(IntegrityError, match="truncated"):
        converted(model, tmp_path / "art")
    assert not (tmp_path / "art").exists()


def test_quantizing_them_stays_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, _ = quantized_copy(tiny_model(), tmp_path / "model", method="gptq")
    with pytest.raises(AlreadyQuantizedError, match="already quantized.*quantize convert"):
        prepare(str(model), "w4a16.yaml", overrides={"method": "rtn"})
    made = converted(model, tmp_path / "art")
    with pytest.raises(AlreadyQuantizedError, match="serve it as it is: it is an artifact$"):
        prepare(str(made), "none.yaml", overrides={}, keep_codes=True)


@pytest.mark.parametrize(
    "recipe",
    [
        {"scheme": "w4a16", "group_size": 32},
        {"scheme": "w4a16", "group_size": 32, "symmetric": False},
        {"scheme": "w8a8"},
        {"scheme": "fp8"},
        {"scheme": "w4a16", "group_size": 32, "method": "gptq", "kv_cache": "fp8"},
        {"scheme": "w4a16", "group_size": 32, "method": "gptq", "kv_cache": "fp8-head"},
    ],
)
def test_compressed_tensors_of_others(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path,
    recipe: dict[str, Any],
) -> None:  # fmt: skip
    """A directory with nothing of ours but the dialect: every tensor comes through as it is."""
    made = artifact(tiny_model(), **recipe)
    model = shutil.copytree(made, tmp_path / "model")
    for name in ("artifact.json", "recipe.yaml", "report.json", "report.md", "README.md"):
        (model / name).unlink()
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    for group in section["config_groups"].values():  # as releases before 0.12 wrote it
        del group["format"]
    section["sparsity_config"] = {"format": "dense", "global_sparsity": 0.1, "targets": []}
    set_config(model, quantization_config=section)
    path = converted(model, tmp_path / "art")
    assert open_artifact(path).manifest.kv_cache == open_artifact(made).manifest.kv_cache
    assert open_artifact(path).tensor_digests() == open_artifact(made).tensor_digests()


@pytest.mark.parametrize("leaf", ["self_attn.k_scale", "mlp.up_proj.weight_scale"])
def test_a_missing_scale_of_compressed_tensors_is_named(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path, leaf: str
) -> None:
    made = artifact(tiny_model(), scheme="w4a16", group_size=32, method="gptq", kv_cache="fp8")
    model = shutil.copytree(made, tmp_path / "model")
    (model / "artifact.json").unlink()
    index = json.loads((model / "model.safetensors.index.json").read_text())
    name = f"model.layers.1.{leaf}"
    shard = model / index["weight_map"].pop(name)
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = {key: value for key, value in load_file(shard).items() if key != name}
    save_file(tensors, shard)
    with pytest.raises(IntegrityError, match=leaf):
        converted(model, tmp_path / "art")
