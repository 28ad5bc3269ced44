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
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.api import carry_out, prepare
from quant.artifact.artifact import open_artifact
from quant.artifact.errors import ArtifactError, IntegrityError
from quant.artifact.layout import QuantizedWeight, dequantize
from quant.errors import AlreadyQuantizedError, QuantError, SourceError
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, bits: int) -> Tensor:
    """Unsigned codes [n, m] -> int32 words [n * bits / 32, m]: code i at bits [i b, (i + 1) b)."""
    stream = (codes[:, None, :] >> np.arange(bits)[:, None]) & 1
    stream = stream.reshape(-1, 32, codes.shape[1]).astype(np.uint64)
    packed = (stream << np.arange(32, dtype=np.uint64)[:, None]).sum(1)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def awq_words(codes: np.ndarray) -> Tensor:
    """Unsigned codes [n, m] -> int32 words [n, m / 8]."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for nibble, column in enumerate(NIBBLES):
        packed |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(packed.view(np.int32))


def rounded(weight: Tensor, bits: int, size: int, sym: bool) -> tuple[Any, Any, Tensor]:
    """Unsigned codes [in, out], zero points [G, out] and float16 scales [G, out]."""
    grouped = weight.float().T.reshape(-1, size, weight.shape[0])
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    top = 2**bits - 1
    scale = torch.maximum(-low, high) * 2 / top if sym else (high - low) / top
    scale = scale.half()
    zero = torch.full_like(low, 2 ** (bits - 1)) if sym else (-low / scale).round().clamp(1, top)
    codes = (grouped / scale.float()[:, None] + zero[:, None]).round().clamp(0, top)
    return codes.flatten(0, 1).int().numpy(), zero.int().numpy(), scale


def quantized_copy(
    model: Path, out: Path, *, method: str, bits: int = 4, size: int = 32, sym: bool = True,
    version: str = "gptq_v2", **settings: Any,
) -> tuple[Path, dict[str, Tensor]]:  # fmt: skip
    """A checkpoint as that tool writes it, and the dense weight of each module it stands for."""
    shutil.copytree(model, out)
    tensors, dense = {}, {}
    for name, value in load_file(model / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = value.half()
            continue
        module = name.removesuffix(".weight")
        codes, zero, scale = rounded(value, bits, size, sym)
        group = np.arange(codes.shape[0]) // size
        exact = torch.from_numpy(codes - zero[group]).half() * scale[torch.from_numpy(group)]
        dense[module] = exact.T.contiguous()
        if method == "awq":
            tensors[f"{module}.qweight"], tensors[f"{module}.qzeros"] = (
                awq_words(codes),
                awq_words(zero),
            )
        else:
            tensors[f"{module}.qweight"] = words(codes, bits)
            stored = zero - 1 if version == "gptq" else zero
            tensors[f"{module}.qzeros"] = words(stored.T, bits).T.contiguous()
            tensors[f"{module}.g_idx"] = torch.from_numpy(group).int()
        tensors[f"{module}.scales"] = scale
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    section: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": size}
    if method == "gptq":
        section |= {"sym": sym, "desc_act": False, "checkpoint_format": version}
    else:
        section |= {"zero_point": True, "version": "gemm"}
    section = {k: v for k, v in {**section, **settings}.items() if v is not None}
    set_config(out, quantization_config=section, dtype="float16")
    return out, dense


def set_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit(model: Path, **changes: Tensor | None) -> None:
    path = model / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, metadata={"format": "pt"})


def converted(model: Path, out: Path) -> Path:
    job = prepare(str(model), "none.yaml", out=out, overrides={}, keep_codes=True)
    return Path(carry_out(job).artifact)


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
        ("gptq", {"checkpoint_format": None}, "checkpoint_format is None, expected gptq"),
        ("gptq", {"checkpoint_format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        ("gptq", {"dynamic": {"-:x": {}}}, "dynamic"),
        ("gptq", {"group_size": 16}, "group_size 16"),
        ("gptq", {"bits": 5}, "bits"),
        ("gptq", {"bits": 8}, r"qweight has shape \[8, 64\]"),
        ("awq", {"version": None}, "AWQ version is None"),
        ("awq", {"version": "gemv"}, "AWQ version is 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point is False"),
        ("bitsandbytes", {}, "quant_method is 'bitsandbytes'"),
    ],
)
def test_what_is_not_known_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, method: str, settings: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    kind = "awq" if method == "awq" else "gptq"
    model, _ = quantized_copy(tiny_model(), tmp_path / "model", method=kind, sym=kind != "awq")
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    set_config(model, quantization_config={**section, "quant_method": method, **settings})
    with pytest.raises((QuantError, ArtifactError), match=message):
        converted(model, tmp_path / "art")
    assert not (tmp_path / "art").exists()


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


@pytest.mark.parametrize(
    "recipe",
    [
        {"scheme": "w4a16", "group_size": 32},
        {"scheme": "w4a16", "group_size": 32, "symmetric": False},
        {"scheme": "w8a8"},
        {"scheme": "fp8"},
        {"scheme": "w4a16", "group_size": 32, "method": "gptq", "kv_cache": "fp8"},
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
    assert open_artifact(path).kv_scales(0) == open_artifact(made).kv_scales(0)
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
