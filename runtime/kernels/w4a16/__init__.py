"""A linear with 4-bit weights and 16-bit inputs: repacked once at load, unpacked in registers."""

from __future__ import annotations

from torch import Tensor

from runtime.kernels.backend import target_of, uses_triton
from runtime.kernels.w4a16.launch import launch
from runtime.kernels.w4a16.pack import (
    HALF_DTYPES,
    W4A16Weight,
    can_pack_w4a16,
    pack_w4a16,
    unpack_w4a16,
)
from runtime.kernels.w4a16.reference import w4a16_linear_reference
from runtime.kernels.w4a16.tile import choose

__all__ = ["W4A16Weight", "can_pack_w4a16", "pack_w4a16", "unpack_w4a16", "w4a16_linear"]


def w4a16_linear(x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None = None) -> Tensor:
    """x_TK [T, in] in the weight's compute type -> [T, out] in the same, float32 sums.

    Triton kernels by T on a GPU, the reference elsewhere and for float32. Capturable in a graph
    once a call of the same T has grown the workspace. Same inputs, same bits; with
    `options.deterministic` a row's bits do not depend on the other rows either.
    """
    if not uses_triton(x_TK.device) or x_TK.dtype not in HALF_DTYPES:
        return w4a16_linear_reference(x_TK, weight, bias)
    if x_TK.shape[0] == 0:
        return x_TK.new_empty(0, weight.shape[0])
    tile = choose(
        x_TK.shape[0],
        weight.shape,
        weight.group_size,
        target_of(x_TK.device),
        weight.options.deterministic,
    )
    return launch(x_TK.contiguous(), weight, bias, tile)
