"""Through the front door: artifacts that `quantize` made, opened and loaded from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_oracle import hf_logits, random_ids, run_alone

from quant.artifact.artifact import open_artifact
from runtime.model.decoder import Decoder
from runtime.model.kv_cache import KVCache
from runtime.model.loader import load_decoder

Make = Callable[..., Path]


def decoder_of(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(open_artifact(path), device="cpu", dtype=dtype)


def hf(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_dense_artifacts_equal_transformers(
    family: str, tiny_model: Make, dense_artifact: Make
) -> None:
    directory = tiny_model(family)
    model, decoder = hf(directory), decoder_of(dense_artifact(directory))
    ids = random_ids(70, vocab=decoder.spec.vocab)
    found = run_alone(decoder, ids, [40, 29, 1])
    assert float((found - hf_logits(model, ids)).abs().max()) < 1e-3


def test_a_bfloat16_checkpoint_in_float32_compute(tiny_model: Make, dense_artifact: Make) -> None:
    directory = tiny_model("llama", dtype=torch.bfloat16)
    model, decoder = hf(directory), decoder_of(dense_artifact(directory))
    assert decoder.dtype == torch.float32
    ids = random_ids(40, vocab=decoder.spec.vocab)
    assert float((run_alone(decoder, ids, [40]) - hf_logits(model, ids)).abs().max()) < 1e-3


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w8a8", "fp8"])
def test_quantized_artifacts_multiply_with_what_they_store(
    scheme: str, tiny_model: Make, artifact: Make
) -> None:
    group = {"group_size": 32} if scheme.endswith("a16") else {}
    path = artifact(tiny_model("llama"), scheme=scheme, method="rtn", **group)
    opened = open_artifact(path)
    decoder = load_decoder(opened, device="cpu", dtype=torch.float32)
    for i, layer in enumerate(decoder.layers):
        assert layer.qkv.label.startswith(scheme)
        stored = [
            opened.weight(f"model.layers.{i}.self_attn.{name}_proj") for name in ("q", "k", "v")
        ]
        wanted = [qw.codes.float() * qw.scale.float().repeat_interleave(
            qw.codes.shape[1] // qw.scale.shape[1], dim=1) for qw in stored
            if not isinstance(qw, torch.Tensor)]  # fmt: skip
        torch.testing.assert_close(layer.qkv.reconstruct(), torch.cat(wanted), rtol=1e-6, atol=0)
    logits = run_alone(decoder, random_ids(30, vocab=decoder.spec.vocab), [29, 1])
    assert bool(torch.isfinite(logits).all())


def test_kv_scales_of_an_artifact_reach_the_cache(tiny_model: Make, artifact: Make) -> None:
    path = artifact(tiny_model("llama"), method="gptq", scheme="w8a16", kv_cache="fp8")
    decoder = decoder_of(path)
    assert all(pair is not None and min(pair) > 0 for pair in decoder.kv_scales)
    kv = KVCache(decoder.spec, 2, 16, "fp8", scales=decoder.kv_scales)
    assert kv.scales == decoder.kv_scales
    ids = random_ids(40, vocab=decoder.spec.vocab)
    exact, stored = (run_alone(decoder, ids, [30, 10], kv_dtype=d) for d in ("float32", "fp8"))
    assert 0 < float((stored - exact).norm() / exact.norm()) < 0.1
