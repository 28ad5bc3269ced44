"""Storing keys and values, one token at a time, and reading them back."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
# A head of zeros gets this scale, so that 0 / scale is 0.
SMALLEST_SCALE = 1e-30


def quantize_kv(x: Tensor, scale: float | Tensor) -> Tensor:
    """x / scale as e4m3, saturating at +-448 (a plain cast would give NaN beyond)."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def token_scale(x: Tensor) -> Tensor:
    """The int8 scale of each row of x [..., D]: largest magnitude / 127, float32."""
    return (x.float().abs().amax(-1) / INT8_MAX).clamp(min=SMALLEST_SCALE)


def store_kv_reference(
    pool: Tensor,
    slots_T: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    head_scales_2K: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> None:
    """Write each token's K and V into its slot of `pool` [N, 2, K, block_size, D]; -1 has none.

    `head_scales_2K` belong to an fp8 pool (None: 1), `token_scales` [N, 2, K, block_size] to an
    int8 pool.
    """
    block_size = pool.shape[3]
    for t, slot in enumerate(slots_T.tolist()):
        block, offset = divmod(slot, block_size)
        for side, x in enumerate((k_TKD[t], v_TKD[t])):
            if slot < 0:
                continue
            if token_scales is not None:
                scale_K = token_scale(x)
                token_scales[block, side, :, offset] = scale_K
                stored = (x.float() / scale_K[:, None]).round().to(torch.int8)
            elif pool.dtype == FP8:
                scale = 1.0 if head_scales_2K is None else head_scales_2K[side, :, None]
                stored = quantize_kv(x, scale)
            else:
                stored = x.to(pool.dtype)
            pool[block, side, :, offset] = stored


def stored_kv(
    pool: Tensor, head_scales_2K: Tensor | None = None, token_scales: Tensor | None = None
) -> Tensor:
    """What the pool's codes stand for: float32, the pool's shape."""
    values = pool.float()
    if token_scales is not None:
        return values * token_scales[..., None]
    return values if head_scales_2K is None else values * head_scales_2K[:, :, None, None]
