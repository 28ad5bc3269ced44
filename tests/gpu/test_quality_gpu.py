"""What the model computes on the GPU: against transformers in float32, and against our CPU run.

Weight-only schemes and an int8 KV cache compute on the GPU what they compute on the CPU, but for
bfloat16. Where inputs, or keys and values, are rounded to few bits on the way, a bfloat16 more or
less flips codes, and logits of single tokens move (docs/LOG.md, FP8 KV under other roundings).
There the ops are compared on identical inputs, the models by their distance from the dense one, and
FP8 KV in float16, whose finer rounding flips fewer codes, against the CPU itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import DEVICE, Reference, Window, agreement, engine_logprobs, transformers_logprobs
from torch import Tensor

from quant.artifact.artifact import open_artifact
from quant.artifact.layout import QuantizedWeight, dequantize, quantize_activations

pytestmark = pytest.mark.gpu
MakeEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def float32_reference(smollm2_gguf: Path) -> Reference:
    """The source's weights in transformers, float32, on the GPU."""
    from benchmarks.quality import load_reference
    from quant.source import open_source

    return transformers_logprobs(load_reference(open_source(str(smollm2_gguf)), DEVICE))


@pytest.fixture
def cpu_reference(engine_of: MakeEngine) -> Callable[..., Reference]:
    """`cpu_reference("w4a16", ...)` -> the same artifact in our engine on the CPU, float32."""

    def make(name: str, **config: Any) -> Reference:
        engine = engine_of(name, device="cpu", kv_cache_memory_bytes=256 * 2**20, **config)
        return lambda window: engine_logprobs(engine, window)

    return make


def test_dense_bfloat16_against_transformers(
    engine_of: MakeEngine,
    float32_reference: Reference,
    windows: Sequence[Window],
    tell: Callable[[str], None],
) -> None:
    found = agreement(engine_of("dense"), float32_reference, windows)
    tell(f"dense: {found}")
    assert found.num_tokens > 8000
    assert found.kl_mean <= 4e-3
    assert found.top1 >= 0.98


@pytest.mark.parametrize(
    ("name", "kv_dtype", "dtype"),
    [
        ("dense", "auto", "bfloat16"),
        ("w4a16", "auto", "bfloat16"),
        ("w4a16-asym", "auto", "bfloat16"),
        ("w8a16", "auto", "bfloat16"),
        ("dense", "int8", "bfloat16"),
        ("w4a16", "auto", "float16"),
        ("dense", "fp8", "float16"),
    ],
)
def test_weight_only_and_kv_against_the_cpu(
    engine_of: MakeEngine,
    cpu_reference: Callable[..., Reference],
    windows: Sequence[Window],
    tell: Callable[[str], None],
    name: str,
    kv_dtype: str,
    dtype: str,
) -> None:
    reference = cpu_reference(name, kv_cache_dtype=kv_dtype)
    engine = engine_of(name, kv_cache_dtype=kv_dtype, dtype=dtype)
    found = agreement(engine, reference, windows[::4])
    tell(f"{name}, KV {kv_dtype}, {dtype}: {found}")
    assert found.kl_mean < 5e-3
    assert found.top1 >= 0.96


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_quantized_inputs_lose_as_much_as_on_the_cpu(
    engine_of: MakeEngine,
    float32_reference: Reference,
    windows: Sequence[Window],
    tell: Callable[[str], None],
    name: str,
) -> None:
    texts = windows[::2]
    ours = agreement(engine_of(name), float32_reference, texts)
    cpu = engine_of(name, device="cpu", kv_cache_memory_bytes=256 * 2**20)
    expected = agreement(cpu, float32_reference, texts)
    tell(f"{name}: GPU {ours}; CPU {expected}")
    assert ours.kl_mean == pytest.approx(expected.kl_mean, rel=0.10)


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("dense", "fp8"), ("kv-fp8-head", "auto"), ("kv-fp8-kept", "auto")]
)
def test_fp8_kv_loses_as_much_as_on_the_cpu(
    engine_of: MakeEngine,
    float32_reference: Reference,
    windows: Sequence[Window],
    tell: Callable[[str], None],
    name: str,
    kv_dtype: str,
) -> None:
    """bfloat16 by itself costs something too, which is taken off. Scales of 1.0, calibrated ones of
    each head, and a cache that keeps some layers in bfloat16."""
    plain = agreement(engine_of("dense"), float32_reference, windows)
    ours = agreement(engine_of(name, kv_cache_dtype=kv_dtype), float32_reference, windows)
    cpu = engine_of(name, device="cpu", kv_cache_dtype=kv_dtype, kv_cache_memory_bytes=256 * 2**20)
    expected = agreement(cpu, float32_reference, windows)
    between = agreement(
        engine_of(name, kv_cache_dtype=kv_dtype), lambda w: engine_logprobs(cpu, w), windows[::4]
    )
    tell(f"{name}, KV fp8: GPU {ours}, of it bfloat16 {plain}; CPU {expected}; apart {between}")
    assert ours.kl_mean - plain.kl_mean == pytest.approx(expected.kl_mean, rel=0.10)


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
@pytest.mark.parametrize("rows", [1, 17, 256])
def test_quantized_inputs_op_by_op(smol: Callable[[str], Path], name: str, rows: int) -> None:
    """Codes of identical inputs are equal but at ties, and products are those of the codes."""
    from runtime.kernels.linear import linear, pack_quantized
    from runtime.kernels.quantize import quantize
    from runtime.kernels.workspace import KernelOptions, Workspace

    artifact, device = open_artifact(smol(name)), torch.device(DEVICE)
    options = KernelOptions(workspace=Workspace(device), deterministic=False)
    generator = torch.Generator(device).manual_seed(rows)
    chosen = [n for n, s in artifact.schemes().items() if not s.is_dense and ".7." in n]
    assert len(chosen) == 7
    for module in chosen:
        weight = artifact.weight(module)
        assert isinstance(weight, QuantizedWeight)
        x = torch.randn(rows, weight.shape[1], generator=generator, device=device)
        x = (x * (1 + 20 * torch.rand(rows, 1, generator=generator, device=device))).bfloat16()
        activations = weight.scheme.activations
        assert activations is not None
        given = quantize(x, activations)
        codes, scale = quantize_activations(x.cpu(), activations)
        assert_equal_but_at_ties(given.codes_TK.cpu(), codes, x.cpu().float() / scale)
        assert torch.allclose(given.scale_T.cpu(), scale.flatten(), rtol=1e-6)
        packed = pack_quantized(weight, torch.bfloat16, device, options)
        out = linear(given, packed).float().cpu()
        expected = (given.codes_TK.cpu().float() * scale) @ dequantize(weight).float().T
        assert float((out - expected).norm() / expected.norm()) < 3e-3, module


def assert_equal_but_at_ties(codes: Tensor, expected: Tensor, scaled: Tensor) -> None:
    """Where codes differ, `scaled` lies halfway between the two but for float32's last bits."""
    ours, theirs = codes.float(), expected.float()
    differs = ours != theirs
    distance = ((ours - scaled).abs() - (theirs - scaled).abs()).abs()
    assert bool((distance[differs] <= 1e-5 * scaled[differs].abs().clamp(min=1)).all())
    assert float(differs.float().mean()) < 1e-3
