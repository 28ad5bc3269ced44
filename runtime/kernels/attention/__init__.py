"""Paged attention over the stored keys of each sequence.

With Triton: one launch for the decodes of a step, one for its longer spans. Elsewhere: gather the
blocks a step needs, then one fused attention per group of spans. Every path reads what the pool
holds, so a chunk sees its own keys as they were stored: with a quantized pool, prompts cut or
cached anywhere give the same result.

Shape legend: T tokens, S spans, H heads, K key/value heads, G = H / K, L gathered keys, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.kernels.attention.plan import (
    AttentionPlan,
    DecodeGroup,
    LongSpan,
    PagedBatch,
    QueryTile,
    plan_gathers,
)
from runtime.kernels.attention.triton_plan import TritonPlan, attend, plan_for_triton
from runtime.kernels.backend import uses_triton

__all__ = ["AttentionPlan", "PagedBatch", "TritonPlan", "attention", "plan_attention"]

_FP8 = torch.float8_e4m3fn
# e4m3 read as the upper bits of a float16 is 2^8 too small: the exponents' biases are 7 and 15.
_FP8_AS_FP16 = 256.0


def plan_attention(batch: PagedBatch, window: int | None) -> AttentionPlan | TritonPlan:
    """The plan of a step for layers that see `window` tokens (None: all)."""
    if batch.seq_lens_S is not None and uses_triton(batch.seq_lens_S.device):
        return plan_for_triton(batch, window)
    return plan_gathers(batch, window)


def attention(
    q_THD: Tensor,
    pool: Tensor,
    plan: AttentionPlan | TritonPlan,
    *,
    scale: float,
    kv_scales: tuple[float, float] | None = (1.0, 1.0),
    head_scales_2K: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> Tensor:
    """Causal (windowed) attention of every query over its sequence's stored keys: [T, H * D].

    `pool` [N, 2, K, block_size, D]; `plan` comes from `plan_attention` for this step and window.
    `scale` multiplies the scores. What undoes a quantized pool's scales: for int8 `token_scales`
    [N, 2, K, block_size]; for fp8 `head_scales_2K` float32, or on devices without Triton the pair
    `kv_scales` (k, v) where it is not None.
    """
    if isinstance(plan, TritonPlan):
        return attend(
            q_THD, pool, plan,
            scale=scale, head_scales_2K=head_scales_2K, token_scales=token_scales,
        )  # fmt: skip
    if pool.dtype != _FP8:
        return _attend(q_THD, _Stored(pool, token_scales), plan, scale)
    gain = _FP8_AS_FP16 if pool.device.type == "cpu" else 1.0
    if kv_scales is not None:
        out = _attend(q_THD, _Stored(pool), plan, scale * kv_scales[0] * gain)
        return out.mul_(kv_scales[1] * gain)
    assert head_scales_2K is not None
    heads_2H = head_scales_2K.repeat_interleave(q_THD.shape[1] // pool.shape[2], 1) * gain
    out = _attend((q_THD * heads_2H[0, :, None]).to(q_THD.dtype), _Stored(pool), plan, scale)
    return (out.view(q_THD.shape) * heads_2H[1, :, None]).to(q_THD.dtype).flatten(1)


class _Stored(NamedTuple):
    """A pool and, for int8, the scale of each of its rows."""

    pool: Tensor
    token_scales: Tensor | None = None


def _attend(q_THD: Tensor, stored: _Stored, plan: AttentionPlan, scale: float) -> Tensor:
    if len(plan.groups) == 1 and not plan.spans and plan.groups[0].tokens is None:
        return _decode(q_THD, stored, plan.groups[0], scale)
    out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1] * q_THD.shape[2])
    for group in plan.groups:
        assert group.tokens is not None
        out[group.tokens] = _decode(q_THD[group.tokens], stored, group, scale)
    for span in plan.spans:
        _answer_span(q_THD, stored, span, scale, out)
    return out


def _decode(q_SHD: Tensor, stored: _Stored, group: DecodeGroup, scale: float) -> Tensor:
    kv_heads, head_dim = stored.pool.shape[2], stored.pool.shape[4]
    kv = _gather(stored, group.tiles, q_SHD.dtype)
    if group.blanks is not None:
        kv.view(-1, head_dim).index_fill_(0, group.blanks, 0.0)
    k_SKLD, v_SKLD = kv.view(2, group.num_spans, kv_heads, -1, head_dim)
    q_SKGD = q_SHD.reshape(group.num_spans, kv_heads, -1, head_dim)
    out = scaled_dot_product_attention(q_SKGD, k_SKLD, v_SKLD, attn_mask=group.mask, scale=scale)
    return out.reshape(group.num_spans, -1)


def _answer_span(q_THD: Tensor, stored: _Stored, span: LongSpan, scale: float, out: Tensor) -> None:
    kv_heads, head_dim = stored.pool.shape[2], stored.pool.shape[4]
    kv_2KLD = _gather(stored, span.tiles, q_THD.dtype).view(2, kv_heads, -1, head_dim)
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


def _gather(stored: _Stored, tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """The tiles [num_tiles, block_size * D] in the compute type (fp8 on the CPU: / 256)."""
    pool, token_scales = stored
    width = pool.shape[3] * pool.shape[4]
    if token_scales is not None:
        codes = pool.view(-1, *pool.shape[3:]).index_select(0, tiles)
        scales = token_scales.view(-1, pool.shape[3], 1).index_select(0, tiles)
        return (codes * scales).to(dtype).flatten(1)
    if pool.dtype != _FP8:
        return pool.view(-1, width).index_select(0, tiles).to(dtype)
    codes = pool.view(torch.int8).view(-1, width).index_select(0, tiles)
    if pool.device.type != "cpu":
        return codes.view(_FP8).to(dtype)
    # Six times as fast as torch's cast. Sign extension also sets bit 14; the mask clears it. (The
    # NaN code becomes a number; a request whose keys are NaN has NaN logits in the same step.)
    bits = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).to(dtype)
