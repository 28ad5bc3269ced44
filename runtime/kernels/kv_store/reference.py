"""Storing keys and values, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_kv(x: Tensor, scale: float) -> Tensor:
    """x / scale as e4m3, saturating at +-448 (a plain cast would give NaN beyond)."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def store_kv_reference(
    pool: Tensor,
    slots_T: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write each token's K and V into its slot of `pool` [N, 2, K, block_size, D]."""
    block_size = pool.shape[3]
    for t, slot in enumerate(slots_T.tolist()):
        block, offset = divmod(slot, block_size)
        for side, x, scale in ((0, k_TKD, scales[0]), (1, v_TKD, scales[1])):
            stored = quantize_kv(x[t], scale) if pool.dtype == FP8 else x[t].to(pool.dtype)
            pool[block, side, :, offset] = stored
