"""The order an 8-bit weight is kept in for the kernels, and the way there and back.

The columns of a row go in blocks of 128, 64 or 32. A 16-bit word holds two codes that lie half a
block apart: word i of a block has code i in its low byte and code i + block / 2 in its high one. A
row is as long as before, so this is a permutation of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quant.artifact.layout import QuantizedWeight
from runtime.kernels.backend import target_of, uses_triton
from runtime.kernels.dense.choose import reserve
from runtime.kernels.w8a16.choose import choose_tile
from runtime.kernels.workspace import KernelOptions

BLOCKS = (128, 64, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A16Weight:
    """An 8-bit weight [out, in] in the kernels' order.

    Attributes:
        words: [out, in / 2] int16, two codes a word.
        scale: [out, G], of the type it was stored in.
        zero_point: [out, G] int8, None for symmetric weights.
        block: columns whose words lie together.
        group: columns that share a scale, 0 where the whole channel does; half a block divides it.
        dtype: the compute type.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    block: int
    group: int
    dtype: torch.dtype
    options: KernelOptions = field(default_factory=KernelOptions)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.words.shape[0], 2 * self.words.shape[1]


def can_pack_w8a16(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True where the kernels serve this weight: int8 codes, 16-bit inputs and compute type."""
    scheme = weight.scheme.weights
    return (
        scheme is not None
        and weight.scheme.activations is None
        and scheme.kind == "int"
        and scheme.num_bits == 8
        and weight.shape[1] % BLOCKS[-1] == 0
        and dtype in (torch.bfloat16, torch.float16)
    )


def pack_w8a16(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, options: KernelOptions
) -> W8A16Weight:
    """The weight on the device, reordered there; `dtype` is the compute type."""
    assert weight.scheme.weights is not None
    group = weight.scheme.weights.group_size or 0
    if uses_triton(device):
        target, deterministic = target_of(device), options.deterministic
        reserve(
            options.workspace,
            weight.shape,
            lambda shape: choose_tile(shape, group, deterministic, target),
        )
    block = next(size for size in BLOCKS if _fits(size, weight.shape[1], group))
    zero_point = weight.zero_point
    if zero_point is not None:
        zero_point = zero_point.to(device=device, copy=True).contiguous()
    return W8A16Weight(
        words=_interleave(weight.codes.to(device), block),
        scale=weight.scale.to(device=device, copy=True).contiguous(),
        zero_point=zero_point,
        block=block,
        group=group,
        dtype=dtype,
        options=options,
    )


def _fits(block: int, width: int, group: int) -> bool:
    return width % block == 0 and (group == 0 or group % (block // 2) == 0)


def _interleave(codes: Tensor, block: int) -> Tensor:
    """Codes [out, in] int8 as words [out, in / 2] int16."""
    halves = codes.reshape(codes.shape[0], -1, 2, block // 2)
    return halves.transpose(2, 3).contiguous().view(torch.int16).reshape(codes.shape[0], -1)


def codes_of(weight: W8A16Weight) -> Tensor:
    """The codes [out, in] int8 in the order of the artifact."""
    pairs = weight.words.view(torch.int8).reshape(weight.shape[0], -1, weight.block // 2, 2)
    return pairs.transpose(2, 3).reshape(weight.shape)


def unpack_w8a16(weight: W8A16Weight) -> Tensor:
    """The matrix [out, in] float32 that the kernels multiply with."""
    num_channels, num_groups = weight.scale.shape
    values = codes_of(weight).float().reshape(num_channels, num_groups, -1)
    if weight.zero_point is not None:
        values = values - weight.zero_point.float().unsqueeze(-1)
    return (values * weight.scale.float().unsqueeze(-1)).flatten(1)
