"""Scales of an FP8 KV cache: a scale below 1 is never worse, and heads may differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quant.artifact.artifact import open_artifact
from quant.kv_scales import fake_quantize_kv, scale_for
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem


@given(absmax=st.floats(1e-6, 224) | st.floats(1e-4, 0.2), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=100, deadline=None)
def test_no_value_in_the_calibrated_range_is_rounded_worse_than_by_a_scale_of_one(
    absmax: float, seed: int
) -> None:
    draw = torch.rand(200, generator=torch.Generator().manual_seed(seed)) ** 8
    values = torch.cat([draw, -draw, torch.ones(1)]) * absmax
    scales = (torch.tensor([scale_for(absmax)]), torch.ones(1))
    chosen, plain = (fake_quantize_kv(s, s)(values, values)[0] for s in scales)
    assert bool(((chosen - values).abs() <= (plain - values).abs()).all())


def test_heads_have_scales_of_their_own_where_asked(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path
) -> None:
    """One head's keys a thousandfold: its queries by as much less, so that nothing else changes."""
    model = shutil.copytree(tiny_model("llama"), tmp_path / "outliers")
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    name = "model.layers.0.self_attn.{}_proj.weight"
    rows = len(tensors[name.format("k")]) // kv_heads
    tensors[name.format("k")][:rows] *= 2.0**12
    tensors[name.format("q")][: rows * heads // kv_heads] /= 2.0**12
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    plain = artifact(model, scheme="dense", method="none")
    head = artifact(model, scheme="dense", method="none", kv_cache="fp8-head")
    opened = open_artifact(head)
    assert opened.config["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"
    scales = opened.kv_scales(0)
    assert isinstance(scales, torch.Tensor)
    assert scales.shape == (2, kv_heads)
    assert scales[0, 0] > 8 > scales[0, 1]
    ids = tuple(range(5, 60))
    options = EngineConfig(max_model_len=64, num_gpu_blocks_override=16)
    reference = Engine.from_artifact(plain, options)
    exact = reference.score([ScoreItem(token_ids=ids)])[0].nll
    by_head = Engine.from_artifact(head, options)
    assert by_head.resolved.kv_cache_dtype == "fp8"
    unscaled = replace(options, kv_cache_dtype="fp8")
    errors = [
        (torch.tensor(engine.score([ScoreItem(token_ids=ids)])[0].nll) - torch.tensor(exact)).norm()
        for engine in (by_head, Engine.from_artifact(plain, unscaled))
    ]
    assert errors[0] < 0.3 * errors[1]
