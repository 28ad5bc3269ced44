"""fp8-block: 128 by 128 blocks of e4m3 weights, inputs with a scale for each 128 channels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality import load_reference, make_candidate
from quant.api import prepare
from quant.artifact.artifact import open_artifact
from quant.artifact.errors import SchemeError
from quant.artifact.layout import (
    FP8,
    QuantizedWeight,
    dequantize,
    fake_quantize_activations,
    from_tensors,
    quantize_activations,
    to_tensors,
)
from quant.artifact.scheme import PRESETS, ActivationScheme, Scheme, WeightScheme
from quant.errors import PlanError, RecipeError
from quant.methods.gptq import GPTQSettings, gptq, relative_output_error
from quant.methods.rtn import rtn
from quant.plan_rows import PlanRow
from quant.recipe import Recipe
from quant.source import open_source
from quant.stored_size import row_bytes
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem
from runtime.kernels.linear import pack_quantized, reconstruct
from runtime.kernels.linear.reference import linear_reference
from runtime.model.linear import Linear

BLOCKS = PRESETS["fp8-block"]
# Rows of all that runs as one are whole blocks, and so are all columns.
EVEN: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 8,
}  # fmt: skip


def weight_of(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different size, so that a wrong scale shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=generator) * torch.rand(1, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator) * sizes


@pytest.mark.parametrize("rows", [1, 128, 200, 384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scale_is_the_largest_of_its_block(rows: int, dtype: torch.dtype) -> None:
    weight = weight_of(rows, 256)
    found = rtn(weight, BLOCKS, dtype)
    assert found.scale.shape == (-(-rows // 128), 2)
    for i in range(found.scale.shape[0]):
        for j in range(2):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            expected = (weight[block].abs().max() / 448).bfloat16().to(dtype)
            assert found.scale[i, j] == expected
            codes = (weight[block] / expected.float()).clamp(-448, 448).to(FP8)
            assert torch.equal(found.codes[block].float(), codes.float())
            assert torch.equal(dequantize(found)[block], codes.to(dtype) * expected)
    again = from_tensors(to_tensors(found), BLOCKS)
    assert torch.equal(dequantize(again), dequantize(found))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [128, 200, 384])
def test_compressed_tensors_makes_and_reads_the_same_codes(rows: int) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle import forward

    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    weight = weight_of(rows, 384)
    found = rtn(weight, BLOCKS, torch.float32)
    codes = forward.quantize(weight, found.scale, None, args, dtype=FP8)
    assert torch.equal(codes.float(), found.codes.float())
    theirs = forward.dequantize(found.codes, found.scale, None, args)
    assert torch.equal(theirs.float(), dequantize(found).float())


def test_inputs_have_a_scale_for_each_128_channels() -> None:
    x = weight_of(5, 384, seed=1).unflatten(0, (1, 5))
    act = BLOCKS.activations
    assert act is not None
    codes, scale = quantize_activations(x, act)
    assert codes.shape == x.shape
    assert scale.shape == (1, 5, 3)
    parts = [
        fake_quantize_activations(x[..., i : i + 128], ActivationScheme(kind="float"))
        for i in (0, 128, 256)
    ]
    assert torch.equal(fake_quantize_activations(x, act), torch.cat(parts, -1))


def test_what_no_engine_runs_is_no_scheme() -> None:
    block = BLOCKS.weights
    assert block is not None
    with pytest.raises(SchemeError, match="blocks are of fp8 weights"):
        WeightScheme(num_bits=8, kind="int", symmetric=True, strategy="block", group_size=128)
    with pytest.raises(SchemeError, match="scales for each 128 channels"):
        Scheme(layout="float-quantized", weights=block, activations=ActivationScheme(kind="float"))


def test_gptq_keeps_the_blocks_scales_and_loses_less() -> None:
    weight = weight_of(300, 256)
    inputs = weight_of(900, 256, seed=2) @ (torch.eye(256) + weight_of(256, 256, seed=3))
    hessian = inputs.T @ inputs
    plain = rtn(weight, BLOCKS, torch.float32)
    found, info = gptq(weight, hessian, BLOCKS, torch.float32, GPTQSettings())
    assert not info.fallback
    assert torch.equal(found.scale, plain.scale)
    better = relative_output_error(weight, found, hessian)
    assert better < 0.9 * relative_output_error(weight, plain, hessian)
    assert info.loss == pytest.approx(better, rel=1e-3)


def test_gptq_in_parts_of_the_rows_cuts_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = weight_of(300, 256), weight_of(900, 256, seed=2)
    settings, hessian = GPTQSettings(), inputs.T @ inputs
    whole, _ = gptq(weight, hessian, BLOCKS, torch.float32, settings)
    monkeypatch.setattr("quant.methods.gptq.CPU_VALUES", 1)
    parts, _ = gptq(weight, hessian, BLOCKS, torch.float32, settings)
    assert torch.equal(parts.scale, whole.scale)
    assert torch.equal(parts.codes.float(), whole.codes.float())


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_runtime_computes_what_the_artifact_stores(
    method: str, tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    """transformers in float32 over the dequantized weights, its inputs rounded in groups."""
    model = tiny_model("llama", **EVEN)
    path = artifact(model, scheme="fp8-block", method=method)
    stored = open_artifact(path)
    labels = [scheme.label for scheme in stored.schemes().values()]
    assert labels.count("fp8-block") == 14
    report = json.loads((path / "report.json").read_text())
    quantized = [m for m in report["modules"] if m["scheme"] == "fp8-block"]
    for module in quantized:
        row = PlanRow(
            module=module["module"], shape=tuple(module["shape"]), scheme=BLOCKS, method="rtn"
        )
        assert row_bytes(row, "float32") == module["bytes"]
    reference = make_candidate(load_reference(open_source(str(model)), "cpu"), stored)
    ids = torch.arange(5, 60)[None]
    with torch.inference_mode():
        logprobs = reference(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    expected = -logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    options = EngineConfig(max_model_len=64, num_gpu_blocks_override=16)
    engine = Engine.from_artifact(path, options)
    found = torch.tensor(engine.score([ScoreItem(token_ids=tuple(ids[0].tolist()))])[0].nll)
    assert (found - expected).abs().median() < 1e-5  # a last bit may move a code, and others
    assert "fp8-block" in engine.resolved.reasons["dtype"]


def test_modules_whose_blocks_would_overlap_fall_back_together(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path
) -> None:
    """32 rows of k beside 128 of q, 160 rows of gate and up; o alone is in blocks."""
    stored = open_artifact(artifact(tiny_model("llama", hidden_size=128), scheme="fp8-block"))
    schemes = stored.schemes()
    for leaf, label in {
        "self_attn.q_proj": "fp8-channel", "self_attn.k_proj": "fp8-channel",
        "self_attn.o_proj": "fp8-block", "mlp.up_proj": "fp8-channel",
        "mlp.down_proj": "fp8-channel",
    }.items():  # fmt: skip
        assert schemes[f"model.layers.0.{leaf}"].label == label, leaf
    modules = stored.manifest.modules
    assert modules["model.layers.0.self_attn.q_proj"].reason == (
        "128 does not divide 32 rows of what runs as one, so one scale per channel"
    )
    assert modules["model.layers.0.mlp.down_proj"].reason == (
        "128 does not divide 160 columns, so one scale per channel"
    )
    recipe = tmp_path / "r.yaml"
    recipe.write_text("scheme: fp8-block\nmethod: rtn\n")
    with pytest.raises(PlanError, match="--strict"):
        prepare(stored.manifest.source.path, recipe, strict=True, overrides={})


def test_shards_with_a_partial_block_are_stacked_by_what_they_stand_for() -> None:
    shards = [rtn(weight_of(rows, 256, seed=rows), BLOCKS, torch.float32) for rows in (200, 72)]
    fused = Linear.from_shards(shards, [None, None], torch.float32, torch.device("cpu"))
    x = weight_of(3, 256, seed=9)
    expected = torch.cat([linear_reference(x, shard) for shard in shards], 1)
    torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)
    for shard in shards:
        packed = pack_quantized(shard, torch.float32, torch.device("cpu"))
        assert torch.equal(reconstruct(packed), dequantize(shard))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("method: awq", "does not know blocks of rows"),
        ("method: rtn\ngroup_size: 64", "scales blocks of 128 by 128"),
        ("method: rtn\ngroup_size: channel", "scales blocks of 128 by 128"),
        ("method: rtn\nsymmetric: false", "is symmetric"),
        ("method: rtn\nrtn: {scale_search: weights}", "has min-max scales"),
    ],
)
def test_settings_that_do_not_fit_are_refused(more: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.parse(f"scheme: fp8-block\n{more}\n")


def test_a_scale_of_the_wrong_shape_is_refused() -> None:
    found = rtn(weight_of(200, 256), BLOCKS, torch.float32)
    wrong = QuantizedWeight(scheme=BLOCKS, codes=found.codes, scale=found.scale[:1])
    with pytest.raises(SchemeError, match=r"expected \[2, 2\]"):
        to_tensors(wrong)
