"""RMSNorm, rotary embedding and the gated activation against their references."""

from __future__ import annotations

import pytest
import torch

from runtime.kernels.gate import gate
from runtime.kernels.gate.reference import gate_reference
from runtime.kernels.norm import add_rms_norm, rms_norm
from runtime.kernels.norm.reference import rms_norm_reference
from runtime.kernels.rope import rotate_
from runtime.kernels.rope.reference import rotate_reference


@pytest.mark.parametrize("width", [63, 576, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, width).to(dtype), torch.randn(width)
    before = x.clone()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found, rms_norm_reference(x, weight, 1e-5))
    residual = torch.randn(5, width).to(dtype)
    total, normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(normed, rms_norm_reference(residual + x, weight, 1e-5))
    assert torch.equal(x, before)


def test_rms_norm_of_tiny_and_huge_rows() -> None:
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e-20), torch.full((64,), 1e15)])
    found = rms_norm(x, torch.ones(64), 1e-6)
    assert bool(torch.isfinite(found).all())
    assert float(found[2].mean()) == pytest.approx(1.0)


@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
def test_rotation_in_place_on_a_strided_view(rotary_dim: int) -> None:
    fused = torch.randn(6, 5, 16)
    angles = torch.randn(6, 1, rotary_dim // 2)
    cos = torch.cat([angles.cos()] * 2, -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    wanted = rotate_reference(fused[:, :3], cos, sin)
    untouched = fused[:, 3:].clone()
    rotate_(fused[:, :3], cos, sin)
    torch.testing.assert_close(fused[:, :3], wanted)
    assert torch.equal(fused[:, 3:], untouched)
    torch.testing.assert_close(wanted.norm(dim=-1), fused[:, :3].norm(dim=-1))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [63, 576])
def test_gate(act: str, width: int) -> None:
    x = torch.randn(4, 2 * width) * 3
    before = x.clone()
    torch.testing.assert_close(gate(x, act), gate_reference(x, act), atol=1e-5, rtol=1e-5)  # type: ignore[arg-type]
    assert torch.equal(x, before)
