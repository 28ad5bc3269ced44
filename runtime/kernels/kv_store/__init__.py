"""Writing new keys and values into the paged pool, quantized to fp8 where the pool is fp8.

A pool is [N, 2, K, block_size, D]: one head's tokens of a block lie together, K and V of a head at
a fixed distance, so that attention gathers whole [block_size, D] tiles.

Shape legend: T tokens, K key/value heads, D head_dim, N blocks of the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.kv_store.reference import FP8, FP8_MAX


def slot_rows(slots_T: Tensor, kv_heads: int, block_size: int) -> Tensor:
    """Rows of `pool.view(-1, D)` that the tokens' heads go to: [T * 2 * K], V heads after K heads.

    The same for every layer of a step, so it is computed once.
    """
    sides = torch.arange(2 * kv_heads, device=slots_T.device)
    blocks_T = torch.div(slots_T, block_size, rounding_mode="floor")
    tiles = blocks_T[:, None] * (2 * kv_heads) + sides
    return (tiles * block_size + (slots_T % block_size)[:, None]).flatten()


def store_kv(pool: Tensor, rows: Tensor, kv: Tensor, scales: tuple[float, float]) -> None:
    """Write `kv` [T, 2 * K, D] (key heads, then value heads) to `rows` (see `slot_rows`).

    `scales` (k, v) divide the values of an fp8 pool, which saturates at +-448; they are ignored
    by the others, where values are cast to the pool's dtype.
    """
    if pool.dtype == FP8:
        kv = _quantize(kv, scales)
        pool = pool.view(torch.uint8)
    elif kv.dtype != pool.dtype:
        kv = kv.to(pool.dtype)
    width = pool.shape[-1]
    pool.view(-1, width).index_copy_(0, rows, kv.reshape(-1, width))


def _quantize(kv: Tensor, scales: tuple[float, float]) -> Tensor:
    heads = kv.shape[1] // 2
    scaled = torch.cat((kv[:, :heads].float() / scales[0], kv[:, heads:].float() / scales[1]), 1)
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
