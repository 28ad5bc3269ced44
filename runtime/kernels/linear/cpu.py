"""torch's packed CPU matmuls, and when each may be used.

Nothing here is our own kernel; what is ours is knowing where torch's are right. int8: without VNNI
or AMX oneDNN adds pairs of products in 16 bits and saturates in silence, so the integer path is
taken only where the CPU has the instructions *and* the worst case comes out exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.artifact.layout import QuantizedWeight, pack, unpack
from runtime.kernels.linear.weights import PackedInt4Weight

INT4_GROUPS = (32, 64, 128)
_INT4_ROWS = 16  # the kernel's tile along `out`
_INT4_INNER_K = 2  # ignored by the CPU kernel; the operator asks for it
# Up to here the packed kernel beats unpacking to bfloat16 first (measured on AVX-512 with AMX).
INT4_MAX_TOKENS = 32


def has_exact_int8() -> bool:
    """True where `torch._int_mm` on the CPU sums int8 products exactly."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    if not (vnni or amx):
        return False
    low = torch.full((16, 64), -128, dtype=torch.int8)
    high = torch.full((16, 64), 127, dtype=torch.int8)
    return all(
        bool((torch._int_mm(a, b.T) == int(a[0, 0]) * int(b[0, 0]) * 64).all())
        for a in (low, high)
        for b in (low, high)
    )


def can_pack_int4(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True where torch's int4 kernel computes with exactly this weight.

    It rounds inputs and outputs to bfloat16, so it serves that compute type only. Zero points are
    products with the scale there, which bfloat16 does not hold exactly: symmetric weights only.
    """
    weights = weight.scheme.weights
    assert weights is not None
    if dtype != torch.bfloat16 or weights.num_bits != 4 or not weights.symmetric:
        return False
    rows, width = weight.shape
    if rows % _INT4_ROWS or _int4_group(weight) is None:
        return False
    return bool((weight.scale.bfloat16().float() == weight.scale.float()).all())


def _int4_group(weight: QuantizedWeight) -> int | None:
    """The kernel's group size: the weight's, or one that divides a whole row (per channel)."""
    width = weight.codes.shape[1]
    group = width // weight.scale.shape[1]
    return next((g for g in reversed(INT4_GROUPS) if group % g == 0), None)


def pack_int4(weight: QuantizedWeight) -> PackedInt4Weight:
    """Repack for torch's int4 kernel; `can_pack_int4` must have said yes."""
    group = _int4_group(weight)
    assert group is not None
    width = weight.codes.shape[1]
    repeats = width // group // weight.scale.shape[1]
    scale_GN = weight.scale.bfloat16().repeat_interleave(repeats, dim=1).T
    unsigned = weight.codes.to(torch.int32) + 8
    return PackedInt4Weight(
        tiles=torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, _INT4_INNER_K),
        scale_zeros=torch.stack((scale_GN, torch.zeros_like(scale_GN)), dim=-1).contiguous(),
        words=pack(weight.codes, 4),
        scale=weight.scale.clone(),
        group_size=group,
    )


def int4_linear(x: Tensor, weight: PackedInt4Weight) -> Tensor:
    """[T, in] bfloat16 -> [T, out] bfloat16."""
    if x.shape[0] > INT4_MAX_TOKENS:
        return torch.nn.functional.linear(x, unpack_int4(weight).to(x.dtype))
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.contiguous(), weight.tiles, weight.group_size, weight.scale_zeros
    )
    return y


def unpack_int4(weight: PackedInt4Weight) -> Tensor:
    """The matrix [out, in] in the scale's type; a transient, dropped after the call."""
    rows, groups = weight.scale.shape
    codes = unpack(weight.words, 4, weight.words.shape[1] * 8)
    values = codes.to(weight.scale.dtype).view(rows, groups, -1)
    return values.mul_(weight.scale.unsqueeze(-1)).view(rows, -1)
