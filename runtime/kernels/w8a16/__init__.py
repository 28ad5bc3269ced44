"""8-bit weights with 16-bit inputs: int8 codes, a scale per channel or group, maybe zero points.

The weights stay as codes at a byte each, [out, in]. Up to MANY_ROWS rows they are widened in the
kernel's registers; beyond, multiplying costs more than reading, and they are dequantized for the
library's product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quant.artifact.layout import QuantizedWeight
from runtime.kernels.backend import KernelTarget, target_of
from runtime.kernels.dense.product import Tile
from runtime.kernels.w8a16.choose import choose_tile
from runtime.kernels.workspace import KernelOptions

__all__ = ["W8A16Weight", "can_pack_w8a16", "pack_w8a16", "unpack_w8a16", "w8a16_linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A16Weight:
    """codes [out, in] int8; scale [out, G] as stored; zero_point [out, G] int8 or None.

    group: columns that share a scale, 0 where the whole channel does.
    """

    codes_NK: Tensor
    scale_NG: Tensor
    zero_point_NG: Tensor | None
    group: int
    dtype: torch.dtype
    options: KernelOptions


def can_pack_w8a16(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True where the kernels serve this weight: int8 codes, 16-bit inputs and compute type."""
    scheme = weight.scheme.weights
    return (
        scheme is not None
        and weight.scheme.activations is None
        and scheme.kind == "int"
        and scheme.num_bits == 8
        and weight.shape[1] % 16 == 0
        and dtype in (torch.bfloat16, torch.float16)
    )


def pack_w8a16(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, options: KernelOptions
) -> W8A16Weight:
    """The weight on the device; `dtype` is the compute type."""
    assert weight.scheme.weights is not None
    zero_point = weight.zero_point
    return W8A16Weight(
        codes_NK=weight.codes.to(device=device, copy=True).contiguous(),
        scale_NG=weight.scale.to(device=device, copy=True).contiguous(),
        zero_point_NG=None
        if zero_point is None
        else zero_point.to(device=device, copy=True).contiguous(),
        group=weight.scheme.weights.group_size or 0,
        dtype=dtype,
        options=options,
    )


def unpack_w8a16(weight: W8A16Weight) -> Tensor:
    """The matrix [out, in] float32 that the kernels multiply with."""
    num_channels, num_groups = weight.scale_NG.shape
    values = weight.codes_NK.float().reshape(num_channels, num_groups, -1)
    if weight.zero_point_NG is not None:
        values = values - weight.zero_point_NG.float().unsqueeze(-1)
    return (values * weight.scale_NG.float().unsqueeze(-1)).flatten(1)


def w8a16_linear(x_TK: Tensor, weight: W8A16Weight, bias_N: Tensor | None = None) -> Tensor:
    """`x` [T, in] -> [T, out], both in the compute type."""
    from runtime.kernels.w8a16.launch import dequantize, launch

    target = target_of(x_TK.device)
    tile = tile_for(x_TK, weight, target)
    if tile.kernel == "torch":
        return functional.linear(x_TK, dequantize(weight), bias_N)
    return launch(x_TK.contiguous(), weight, bias_N, tile, target)


def tile_for(x_TK: Tensor, weight: W8A16Weight, target: KernelTarget) -> Tile:
    num_channels, width = weight.codes_NK.shape
    shape = (x_TK.shape[0], num_channels, width)
    return choose_tile(
        shape,
        weight.group,
        weight.zero_point_NG is not None,
        weight.options.deterministic,
        target,
    )
