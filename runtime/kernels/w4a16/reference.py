"""What a W4A16 linear computes: the inputs times the unpacked weight, in the compute type."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from runtime.kernels.w4a16.pack import W4A16Weight, unpack_w4a16


def w4a16_linear_reference(x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None) -> Tensor:
    """[T, in] -> [T, out]."""
    return functional.linear(x_TK, unpack_w4a16(weight), bias)
