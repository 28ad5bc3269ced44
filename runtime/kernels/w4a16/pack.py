"""The order a 4-bit weight is kept in for the kernels, and the way there and back.

Rows go in sixteens and inputs in K-blocks of 128 (64 where 128 does not divide them; the tail of
the last block is zeros). A 16-bit word holds the codes 0..15 of four inputs that lie a quarter of
a block apart: word i of a row has input `plane * BLOCK_K / 4 + i` at bit `4 * plane`. So one plane
of consecutive words is a run of consecutive inputs, and a plane never straddles two groups.
All words of sixteen rows and one block lie together (1 KB for 128), blocks of the same rows follow
one another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from quant.artifact.layout import QuantizedWeight
from runtime.kernels.backend import target_of, uses_triton
from runtime.kernels.w4a16.tile import scratch_of
from runtime.kernels.workspace import KernelOptions

ROWS = 16
HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A16Weight:
    """A 4-bit weight [out, in] in the kernels' order. R = ceil(out / 16), B = K-blocks.

    Attributes:
        codes: [R, B, 16, block_k / 4] int16, four codes a word.
        scale: [R, G, 16], groups of all blocks in order, or G = 1; float32, bfloat16 or float16.
        zero_point: [R, G, 16] uint8 in 0..15, None for symmetric weights (8 everywhere).
        shape: (out, in) before padding.
        groups_per_block: 1, 2 or 4; 0 for one scale per row.
        dtype: the compute type: of inputs, outputs and unpacked weights.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    shape: tuple[int, int]
    groups_per_block: int
    dtype: torch.dtype
    options: KernelOptions = field(default_factory=KernelOptions)

    @property
    def block_k(self) -> int:
        return 4 * self.codes.shape[3]

    @property
    def num_blocks(self) -> int:
        return self.codes.shape[1]

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale; None for one scale per row."""
        return self.block_k // self.groups_per_block if self.groups_per_block else None

    @property
    def num_bytes(self) -> int:
        zeros = 0 if self.zero_point is None else self.zero_point.nbytes
        return self.codes.nbytes + self.scale.nbytes + zeros


def can_pack_w4a16(weight: QuantizedWeight) -> bool:
    """True for 4-bit integer codes with full-precision inputs; every shape and group is served."""
    weights = weight.scheme.weights
    return (
        weights is not None
        and weights.kind == "int"
        and weights.num_bits == 4
        and weight.scheme.activations is None
    )


def pack_w4a16(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, options: KernelOptions
) -> W4A16Weight:
    """Repack `weight` on its way to `device`: the work is done there, in a few passes. Grows the
    workspace to all that this weight will ever need, so that graphs may be captured at any time.

    dtype: bfloat16 or float16 (float32 only for the reference and the interpreter). Scales keep
    their own type where `dtype` cannot hold them exactly.
    """
    assert can_pack_w4a16(weight)
    group_size = weight.scheme.weights.group_size if weight.scheme.weights else None
    _reserve(weight.shape, group_size, device, options)
    out, width = weight.shape
    block_k = 128 if width % 128 == 0 else 64
    scale = _scale_in(weight.scale.to(device), dtype)
    zero_point = weight.zero_point
    if zero_point is not None:
        zero_point = (zero_point.to(device) + 8).to(torch.uint8)
    num_groups = 1 if group_size is None else -(-width // block_k) * block_k // group_size
    return W4A16Weight(
        codes=_interleave(weight.codes.to(device), block_k),
        scale=_by_sixteens(scale, num_groups),
        zero_point=None if zero_point is None else _by_sixteens(zero_point, num_groups),
        shape=(out, width),
        groups_per_block=0 if group_size is None else block_k // group_size,
        dtype=dtype,
        options=options,
    )


def _reserve(
    shape: tuple[int, int], group_size: int | None, device: torch.device, options: KernelOptions
) -> None:
    if uses_triton(device):
        sums, counters = scratch_of(shape, group_size, target_of(device), options.deterministic)
        options.workspace.partials(sums)
        options.workspace.counters(counters)


def _scale_in(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale` in `dtype` where that changes no value, else as it is."""
    converted = scale.to(dtype)
    return converted if bool((converted.to(scale.dtype) == scale).all()) else scale


def _interleave(codes: Tensor, block_k: int) -> Tensor:
    """Codes [out, in] int8 in -8..7 as words [R, B, 16, block_k / 4] int16."""
    out, width = codes.shape
    padding = (0, -width % block_k, 0, -out % ROWS)
    nibbles = functional.pad(codes, padding).view(torch.uint8) + 8 & 15
    planes = nibbles.view(-1, ROWS, nibbles.shape[1] // block_k, 4, block_k // 4)
    low = planes[:, :, :, 0] | planes[:, :, :, 1] << 4
    high = planes[:, :, :, 2] | planes[:, :, :, 3] << 4
    words = torch.stack((low, high), dim=-1).view(torch.int16).squeeze(-1)
    return words.transpose(1, 2).contiguous()


def _by_sixteens(values: Tensor, num_groups: int) -> Tensor:
    """[out, G] as [R, num_groups, 16], zeros where nothing was."""
    padding = (0, num_groups - values.shape[1], 0, -values.shape[0] % ROWS)
    return functional.pad(values, padding).view(-1, ROWS, num_groups).transpose(1, 2).contiguous()


def unpack_w4a16(weight: W4A16Weight) -> Tensor:
    """The matrix [out, in] in the compute type: (code - zero point) * scale, rounded once.

    What a product of many rows multiplies with, bit for bit. For few rows the kernels apply the
    scale to sums in float32, that is to weights before this rounding.
    """
    out, width = weight.shape
    centered = _codes(weight).float()
    groups = weight.scale.shape[1]
    zero_point = 8.0 if weight.zero_point is None else _by_rows(weight.zero_point).float()
    grouped = centered.view(centered.shape[0], groups, -1) - zero_point
    matrix = (grouped * _by_rows(weight.scale).float()).to(weight.dtype)
    return matrix.flatten(1)[:out, :width].contiguous()


def _codes(weight: W4A16Weight) -> Tensor:
    """Codes 0..15 [16 R, B * block_k] int16."""
    planes = torch.stack([weight.codes >> 4 * plane & 15 for plane in range(4)], dim=3)
    return planes.transpose(1, 2).reshape(planes.shape[0] * ROWS, -1)


def _by_rows(values: Tensor) -> Tensor:
    """[R, G, 16] as [16 R, G, 1]."""
    return values.transpose(1, 2).reshape(-1, values.shape[1], 1)
