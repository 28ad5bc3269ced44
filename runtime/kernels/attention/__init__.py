"""Paged attention: gather the blocks a step needs, then one fused attention per group of spans.

Every path reads what the pool holds, so a chunk sees its own keys as they were stored: with an fp8
pool, prompts cut or cached anywhere give the same result.

Shape legend: T tokens, S spans, H heads, K key/value heads, G = H / K, L gathered keys, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.kernels.attention.plan import (
    AttentionPlan,
    DecodeGroup,
    LongSpan,
    PagedBatch,
    QueryTile,
    plan_attention,
)

__all__ = ["AttentionPlan", "PagedBatch", "attention", "plan_attention"]

_FP8 = torch.float8_e4m3fn
# e4m3 read as the upper bits of a float16 is 2^8 too small: the exponents' biases are 7 and 15.
_FP8_AS_FP16 = 256.0


def attention(
    q_THD: Tensor,
    pool: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Causal (windowed) attention of every query over its sequence's stored keys: [T, H * D].

    `pool` [N, 2, K, block_size, D]; `plan` comes from `plan_attention` for this step and window.
    `scale` multiplies the scores; `kv_scales` (k, v) undo the scales of an fp8 pool.
    """
    if pool.dtype == _FP8:
        gain = _FP8_AS_FP16 if pool.device.type == "cpu" else 1.0
        out = _attend(q_THD, pool, plan, scale * kv_scales[0] * gain)
        return out.mul_(kv_scales[1] * gain)
    return _attend(q_THD, pool, plan, scale)


def _attend(q_THD: Tensor, pool: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    if len(plan.groups) == 1 and not plan.spans and plan.groups[0].tokens is None:
        return _decode(q_THD, pool, plan.groups[0], scale)
    out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1] * q_THD.shape[2])
    for group in plan.groups:
        assert group.tokens is not None
        out[group.tokens] = _decode(q_THD[group.tokens], pool, group, scale)
    for span in plan.spans:
        _answer_span(q_THD, pool, span, scale, out)
    return out


def _decode(q_SHD: Tensor, pool: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    kv_heads, head_dim = pool.shape[2], pool.shape[4]
    kv = _gather(pool, group.tiles, q_SHD.dtype)
    if group.blanks is not None:
        kv.view(-1, head_dim).index_fill_(0, group.blanks, 0.0)
    k_SKLD, v_SKLD = kv.view(2, group.num_spans, kv_heads, -1, head_dim)
    q_SKGD = q_SHD.reshape(group.num_spans, kv_heads, -1, head_dim)
    out = scaled_dot_product_attention(q_SKGD, k_SKLD, v_SKLD, attn_mask=group.mask, scale=scale)
    return out.reshape(group.num_spans, -1)


def _answer_span(q_THD: Tensor, pool: Tensor, span: LongSpan, scale: float, out: Tensor) -> None:
    kv_heads, head_dim = pool.shape[2], pool.shape[4]
    kv_2KLD = _gather(pool, span.tiles, q_THD.dtype).view(2, kv_heads, -1, head_dim)
    for tile in span.query_tiles:
        out[tile.start : tile.stop] = _answer_tile(q_THD, kv_2KLD, tile, scale)


def _answer_tile(q_THD: Tensor, kv_2KLD: Tensor, tile: QueryTile, scale: float) -> Tensor:
    num_queries, kv_heads, head_dim = tile.stop - tile.start, kv_2KLD.shape[1], kv_2KLD.shape[3]
    q_TKGD = q_THD[tile.start : tile.stop].view(num_queries, kv_heads, -1, head_dim)
    q_KGTD = q_TKGD.permute(1, 2, 0, 3)
    # A stride of 0 along G lets the heads of a group share keys without copying them.
    k_KGLD, v_KGLD = kv_2KLD[:, :, None, tile.first_key : tile.last_key].expand(
        -1, -1, q_KGTD.shape[1], -1, -1
    )
    out_KGTD = scaled_dot_product_attention(
        q_KGTD, k_KGLD, v_KGLD, attn_mask=tile.mask, is_causal=tile.mask is None, scale=scale
    )
    return out_KGTD.permute(2, 0, 1, 3).reshape(num_queries, -1)


def _gather(pool: Tensor, tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """The tiles [num_tiles, block_size * D] in the compute type (fp8 on the CPU: / 256)."""
    width = pool.shape[3] * pool.shape[4]
    if pool.dtype != _FP8:
        return pool.view(-1, width).index_select(0, tiles).to(dtype)
    codes = pool.view(torch.int8).view(-1, width).index_select(0, tiles)
    if pool.device.type != "cpu":
        return codes.view(_FP8).to(dtype)
    # Six times as fast as torch's cast. Sign extension also sets bit 14; the mask clears it. (The
    # NaN code becomes a number; a request whose keys are NaN has NaN logits in the same step.)
    bits = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).to(dtype)
