"""Scales of a KV cache in other tools' checkpoints: carried over exactly, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from foreign_checkpoints import converted, edit, kv_checkpoint, set_config
from safetensors.torch import load_file
from torch import Tensor

from quant.artifact.artifact import open_artifact
from quant.artifact.errors import IntegrityError
from quant.errors import SourceError


@pytest.mark.parametrize(
    "leaves",
    [("k_proj.output_scale", "v_proj.output_scale"), ("k_proj.k_scale", "v_proj.v_scale")],
)
@pytest.mark.parametrize("kv_cache", ["fp8", "fp8-head"])
def test_kv_scales_under_other_names_are_carried_over(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path,
    leaves: tuple[str, str], kv_cache: str,
) -> None:  # fmt: skip
    model = kv_checkpoint(artifact, tiny_model, tmp_path / "model", kv_cache)
    old = {n: t for n, t in load_file(model / "model.safetensors").items()
           if n.endswith(("k_scale", "v_scale"))}  # fmt: skip
    values = {name: torch.full_like(t.float(), 0.3 + i) for i, (name, t) in enumerate(old.items())}
    renamed = {
        name.replace("k_scale", leaves[0]).replace("v_scale", leaves[1]): value.flatten()
        for name, value in values.items()
    }
    edit(model, **dict.fromkeys(old), **renamed)
    found = open_artifact(converted(model, tmp_path / "art"))
    for name, value in values.items():
        assert torch.equal(found.reader.tensor(name), value), "float32, unrounded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"self_attn.k_scale": torch.ones(3)}, r"k_scale is torch.float32 \[3\].*float \[1\]"),
        ({"self_attn.v_scale": torch.zeros(1)}, "v_scale holds NaN, Inf or values <= 0"),
        ({"self_attn.v_scale": torch.ones(1, dtype=torch.int32)}, "v_scale is torch.int32"),
        ({"self_attn.q_scale": torch.ones(1)}, "q_scale has no place.*attention itself"),
        ({"mlp.up_proj.input_scale": torch.ones(1)}, "input_scale has no place.*made at run time"),
        ({"mlp.up_proj.weight_g_idx": torch.ones(64)}, "weight_g_idx has no place.*act-order"),
    ],
)
def test_kv_scales_that_make_no_sense(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path,
    change: dict[str, Tensor], message: str,
) -> None:  # fmt: skip
    model = kv_checkpoint(artifact, tiny_model, tmp_path / "model", "fp8")
    edit(model, **{f"model.layers.1.{name}": value for name, value in change.items()})
    with pytest.raises((SourceError, IntegrityError), match=message):
        converted(model, tmp_path / "art")
    assert not (tmp_path / "art").exists()


def test_kv_scales_need_their_scheme(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path
) -> None:
    model = kv_checkpoint(artifact, tiny_model, tmp_path / "model", "fp8")
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    set_config(model, quantization_config={**section, "kv_cache_scheme": None})
    with pytest.raises(SourceError, match="k_scale has no place.*no kv_cache_scheme"):
        converted(model, tmp_path / "art")
    kv = {**section["kv_cache_scheme"], "type": "int"}
    set_config(model, quantization_config={**section, "kv_cache_scheme": kv})
    with pytest.raises(SourceError, match="kv_cache_scheme: only fp8"):
        converted(model, tmp_path / "art")
