"""8-bit weights with 16-bit inputs: int8 codes, a scale per channel or group, maybe zero points.

The weights stay as codes at a byte each. Up to MANY_ROWS rows they are widened in the
kernel's registers; beyond, multiplying costs more than reading, and they are dequantized for the
library's product.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from runtime.kernels.backend import KernelTarget, target_of
from runtime.kernels.dense.product import Tile
from runtime.kernels.w8a16.choose import choose_tile
from runtime.kernels.w8a16.pack import (
    W8A16Weight,
    can_pack_w8a16,
    pack_w8a16,
    unpack_w8a16,
)

__all__ = ["W8A16Weight", "can_pack_w8a16", "pack_w8a16", "unpack_w8a16", "w8a16_linear"]


def w8a16_linear(x_TK: Tensor, weight: W8A16Weight, bias_N: Tensor | None = None) -> Tensor:
    """`x` [T, in] -> [T, out], both in the compute type."""
    from runtime.kernels.w8a16.launch import dequantize, launch

    target = target_of(x_TK.device)
    tile = tile_for(x_TK, weight, target)
    if tile.kernel == "torch":
        return functional.linear(x_TK, dequantize(weight), bias_N)
    return launch(x_TK.contiguous(), weight, bias_N, tile, target)


def tile_for(x_TK: Tensor, weight: W8A16Weight, target: KernelTarget) -> Tile:
    shape = (x_TK.shape[0], *weight.shape)
    return choose_tile(shape, weight.group, weight.options.deterministic, target)
