"""RMSNorm in Triton's interpreter, with and without residual and quantization."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quant.artifact.scheme import ActivationScheme
from runtime.kernels.backend import INTERPRETER
from runtime.kernels.norm import add_rms_norm, rms_norm
from runtime.kernels.norm.reference import rms_norm_reference
from runtime.kernels.quantize import QuantizedActivations
from runtime.kernels.quantize.reference import quantize_reference

pytest.importorskip("triton")
EPS = 1e-5


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *, is_quantized: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(out, new residual, scales)."""
    from runtime.kernels.norm.kernel import launch_rms_norm

    out = torch.empty(x.shape, dtype=torch.int8 if is_quantized else x.dtype)
    residual_out = None if residual is None else torch.empty(x.shape, dtype=x.dtype)
    scale = torch.empty(x.shape[0]) if is_quantized else None
    launch_rms_norm(x, residual, weight, EPS, out, residual_out, scale, INTERPRETER)
    return out, residual_out, scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 63), (3, 576), (2, 1000)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_against_the_reference(
    rows: int, width: int, dtype: torch.dtype, has_residual: bool
) -> None:
    x = torch.randn(rows, width).to(dtype)
    residual = torch.randn(rows, width).to(dtype) if has_residual else None
    weight = torch.rand(width) + 0.5
    out, residual_out, _ = run(x, residual, weight, is_quantized=False)
    total = x if residual is None else residual + x
    if residual_out is not None:
        assert torch.equal(residual_out, total)
    expected = rms_norm_reference(total, weight, EPS)
    torch.testing.assert_close(
        out, expected, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-6
    )


def test_quantized_is_the_rounded_norm_quantized() -> None:
    x, residual = torch.randn(3, 576).half(), torch.randn(3, 576).half()
    weight = torch.rand(576) + 0.5
    normed, *_ = run(x, residual, weight, is_quantized=False)
    codes, _, scale = run(x, residual, weight, is_quantized=True)
    expected_codes, expected_scale = quantize_reference(normed, ActivationScheme())
    assert scale is not None
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected_codes)


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(4, 3 * 64)
    weight = torch.rand(64)
    out, *_ = run(wide[:, 64:128], None, weight, is_quantized=False)
    torch.testing.assert_close(out, rms_norm_reference(wide[:, 64:128], weight, EPS))


def test_a_bad_row_is_seen_and_alone() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    codes, _, scale = run(x, None, torch.ones(64), is_quantized=True)
    assert scale is not None
    assert scale.isfinite().tolist() == [True, False, True]


def test_front_door_without_triton() -> None:
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.rand(64)
    scheme = ActivationScheme()
    total, normed = add_rms_norm(x, residual, weight, EPS)
    same, quantized = add_rms_norm(x, residual, weight, EPS, scheme)
    assert torch.equal(total, same)
    assert isinstance(quantized, QuantizedActivations)
    assert torch.equal(quantized.codes_TK, quantize_reference(normed, scheme)[0])
    alone = rms_norm(total, weight, EPS, scheme)
    assert isinstance(alone, QuantizedActivations)
    assert torch.equal(alone.codes_TK, quantized.codes_TK)
