"""Writing new keys and values into the paged pool, quantized where the pool is fp8 or int8.

A pool is [N, 2, K, block_size, D]: one head's tokens of a block lie together, K and V of a head at
a fixed distance, so that attention gathers whole [block_size, D] tiles.

Shape legend: T tokens, K key/value heads, D head_dim, N blocks of the pool.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from runtime.kernels.backend import KernelTarget
from runtime.kernels.kv_store.reference import FP8, FP8_MAX, token_scale

KVKind = Literal["plain", "fp8", "fp8_bits", "int8"]


def kv_kind(dtype: torch.dtype, target: KernelTarget) -> KVKind:
    """How a Triton kernel reads a pool; `fp8_bits` is e4m3 by integer arithmetic (sm_80, tests)."""
    if dtype == torch.int8:
        return "int8"
    if dtype != FP8:
        return "plain"
    return "fp8" if target.arch >= 89 else "fp8_bits"


def raw_pool(pool: Tensor) -> Tensor:
    """The pool as a kernel takes it: fp8 as plain bytes."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def slot_rows(slots_T: Tensor, kv_heads: int, block_size: int) -> Tensor:
    """Rows of `pool.view(-1, D)` that the tokens' heads go to: [T * 2 * K], V heads after K heads.

    The same for every layer of a step, so it is computed once.
    """
    sides = torch.arange(2 * kv_heads, device=slots_T.device)
    blocks_T = torch.div(slots_T, block_size, rounding_mode="floor")
    tiles = blocks_T[:, None] * (2 * kv_heads) + sides
    return (tiles * block_size + (slots_T % block_size)[:, None]).flatten()


def store_kv(
    pool: Tensor,
    rows: Tensor,
    kv: Tensor,
    kv_scales: tuple[float, float] | None = (1.0, 1.0),
    head_scales_2K: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> None:
    """Write `kv` [T, 2 * K, D] (key heads, then value heads) to `rows` (see `slot_rows`).

    An fp8 pool stores value / scale, saturated at +-448: `kv_scales` (k, v), or `head_scales_2K`
    where `kv_scales` is None. An int8 pool rounds value / (largest / 127) and keeps that scale of
    each token and head in `token_scales` [N, 2, K, block_size]. Others cast to the pool's dtype.
    """
    if pool.dtype == FP8:
        kv = _to_fp8(kv, kv_scales, head_scales_2K)
        pool = pool.view(torch.uint8)
    elif pool.dtype == torch.int8:
        assert token_scales is not None
        kv = kv.float()
        scales = token_scale(kv)
        token_scales.view(-1).index_copy_(0, rows, scales.flatten())
        kv = (kv / scales[..., None]).round_().to(torch.int8)
    elif kv.dtype != pool.dtype:
        kv = kv.to(pool.dtype)
    width = pool.shape[-1]
    pool.view(-1, width).index_copy_(0, rows, kv.reshape(-1, width))


def _to_fp8(
    kv: Tensor, kv_scales: tuple[float, float] | None, head_scales_2K: Tensor | None
) -> Tensor:
    if kv_scales is None:
        assert head_scales_2K is not None
        scaled = kv.float() / head_scales_2K.view(-1, 1)
    else:
        heads = kv.shape[1] // 2
        k, v = kv[:, :heads].float() / kv_scales[0], kv[:, heads:].float() / kv_scales[1]
        scaled = torch.cat((k, v), 1)
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
