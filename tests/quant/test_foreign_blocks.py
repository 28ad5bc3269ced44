"""fp8 checkpoints in blocks of 128 by 128, as DeepSeek and Qwen publish them, become artifacts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import converted, edit, set_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.artifact.artifact import open_artifact
from quant.artifact.errors import IntegrityError
from quant.artifact.layout import QuantizedWeight, dequantize
from quant.errors import SourceError
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem

SECTION = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


@pytest.fixture
def published(tiny_model: Callable[..., Path], tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint and what its weights stand for. q, k and v have ragged rows."""
    model = shutil.copytree(
        tiny_model(hidden_size=128, intermediate_size=256, dtype=torch.bfloat16),
        tmp_path / "model",
    )
    tensors, dense = load_file(model / "model.safetensors"), {}
    for name in list(tensors):
        if ".layers." not in name or not name.endswith("_proj.weight"):
            continue
        module, weight = name.removesuffix(".weight"), tensors[name].float()
        rows = -(-weight.shape[0] // 128)
        scale = torch.empty(rows, weight.shape[1] // 128)
        codes = torch.empty_like(weight).to(torch.float8_e4m3fn)
        dense[module] = torch.empty_like(weight)
        for i in range(rows):
            for j in range(scale.shape[1]):
                part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scale[i, j] = weight[part].abs().max() / 448 * 1.0001
                codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                dense[module][part] = codes[part].float() * scale[i, j]
        tensors[name], tensors[f"{module}.weight_scale_inv"] = codes, scale
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    set_config(model, quantization_config=SECTION)
    return model, dense


def test_weights_are_bit_equal_and_the_runtime_runs_them(
    published: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    model, dense = published
    path = converted(model, tmp_path / "art")
    artifact = open_artifact(path, verify="full")
    stored = load_file(model / "model.safetensors")
    assert len(dense) == 14
    for module, expected in dense.items():
        weight = artifact.weight(module)
        assert isinstance(weight, QuantizedWeight)
        assert weight.scheme.label == "fp8-block"
        assert torch.equal(weight.scale, stored[f"{module}.weight_scale_inv"])
        assert torch.equal(dequantize(weight), expected), module
    for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert torch.equal(artifact.reader.tensor(name), stored[name])
    group = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]
    assert group["group_00"]["weights"]["block_structure"] == [128, 128]
    config = EngineConfig(max_model_len=64, num_gpu_blocks_override=16)
    score = Engine.from_artifact(path, config).score([ScoreItem(token_ids=tuple(range(5, 40)))])
    assert torch.isfinite(torch.tensor(score[0].nll)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
    ],
)
def test_other_fp8_checkpoints_are_refused(
    published: tuple[Path, dict[str, Tensor]], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    set_config(published[0], quantization_config={**SECTION, **changes})
    with pytest.raises(SourceError, match=message):
        converted(published[0], tmp_path / "art")
    assert not (tmp_path / "art").exists()


def test_missing_and_misshapen_scales_are_named(
    published: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    edit(published[0], **{name: None})
    with pytest.raises(IntegrityError, match=r"down_proj\.weight_scale_inv is missing"):
        converted(published[0], tmp_path / "art")
    edit(published[0], **{name: torch.ones(1, 1)})
    with pytest.raises(IntegrityError, match=r"down_proj: tensor weight_scale .* expected"):
        converted(published[0], tmp_path / "art")
