"""Head norms, rotation and the write into the paged pool, in one pass over the fused projection.

A program holds one head of a few tokens. Everything between the load and the one store is float32,
so a value is rounded once: to the compute type (queries) or to what the pool holds (keys, values).
The two halves of a rotated head are two tensors of one layout: a thread owns both elements of each
pair it rotates, which makes rotating in place free of races.

Shape legend: T tokens of a program, F = half of the rotated dimensions, R dimensions behind them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _quotient(x, y):
    return tl.math.div_rn(x, y)


@triton.jit
def _clamped(x, LIMIT: tl.constexpr):
    """x within +-LIMIT; NaN stays NaN, so that a fault shows."""
    x = tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nearest(x):
    """Nearest integer, ties to even, for |x| < 2^22: the sum has no bits below one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _e4m3_bits(x):
    """e4m3 codes of |x| <= 448 by integer arithmetic, for cards without the type."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    magnitude = size.to(tl.float32, bitcast=True)
    is_nan = size > 0x7F800000
    subnormal = _nearest(tl.where(magnitude < 1.0, magnitude, 0.0) * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(is_nan, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _store(x, ptr, mask, scale, KV: tl.constexpr):
    """`scale` broadcasts against x: what the codes are multiplied by to give x."""
    if KV == "fp8":
        codes = _clamped(_quotient(x, scale), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif KV == "fp8_bits":
        codes = _e4m3_bits(_clamped(_quotient(x, scale), 448.0))
    elif KV == "int8":
        codes = _nearest(_clamped(_quotient(x, scale), 127.0)).to(tl.int8)
    else:
        codes = x.to(ptr.dtype.element_ty)
    tl.store(ptr, codes, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def rope_kv_kernel(
    heads_ptr,
    pool_ptr,
    head_scales_ptr,
    token_scales_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    q_norm_ptr,
    k_norm_ptr,
    num_tokens,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """heads [T, H + 2 K, D]: queries rotated in place, keys and values into the pool.

    WIDTH dimensions are handled as two halves (the rotated ones, or all where nothing rotates), the
    other HEAD_DIM - WIDTH pass through in a third part. table [positions, WIDTH]: cos, then sin.
    Positions and slots are read before the kernel ahead (the projection) has ended: who wrote them
    must have ended before that one began.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = WIDTH // 2
    head = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    f = tl.arange(0, BLOCK_F)
    is_t, is_f = t < num_tokens, f < HALF
    is_TF = is_t[:, None] & is_f[None, :]
    slot_T = tl.load(slots_ptr + t, mask=is_t, other=-1).to(tl.int64)
    if ROTATES:
        position_T = tl.load(positions_ptr + t, mask=is_t, other=0).to(tl.int64)
        angle_at_TF = position_T[:, None] * WIDTH + f[None, :]
        cos_TF = tl.load(table_ptr + angle_at_TF, mask=is_TF, other=0.0)
        sin_TF = tl.load(table_ptr + HALF + angle_at_TF, mask=is_TF, other=0.0)
    if NORMS:
        norm_ptr = tl.where(head < HEADS, q_norm_ptr, k_norm_ptr)
        low_weight_F = tl.load(norm_ptr + f, mask=is_f, other=0.0)
        high_weight_F = tl.load(norm_ptr + HALF + f, mask=is_f, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at_T = (t.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    at_TF = at_T[:, None] + f[None, :]
    low_TF = tl.load(heads_ptr + at_TF, mask=is_TF, other=0.0).to(tl.float32)
    high_TF = tl.load(heads_ptr + HALF + at_TF, mask=is_TF, other=0.0).to(tl.float32)
    if BLOCK_R:
        r = WIDTH + tl.arange(0, BLOCK_R)
        is_TR = is_t[:, None] & (r < HEAD_DIM)[None, :]
        at_TR = at_T[:, None] + r[None, :]
        rest_TR = tl.load(heads_ptr + at_TR, mask=is_TR, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMS:
            squares_T = tl.sum(low_TF * low_TF, 1) + tl.sum(high_TF * high_TF, 1)
            if BLOCK_R:
                squares_T += tl.sum(rest_TR * rest_TR, 1)
            factor_T = tl.rsqrt(squares_T / HEAD_DIM + eps)
            low_TF = low_TF * factor_T[:, None] * low_weight_F[None, :]
            high_TF = high_TF * factor_T[:, None] * high_weight_F[None, :]
            if BLOCK_R:
                weight_R = tl.load(norm_ptr + r, mask=r < HEAD_DIM, other=0.0)
                rest_TR = rest_TR * factor_T[:, None] * weight_R[None, :]
        if ROTATES:
            turned_TF = low_TF * cos_TF - high_TF * sin_TF
            high_TF = high_TF * cos_TF + low_TF * sin_TF
            low_TF = turned_TF
    if head < HEADS:
        tl.store(heads_ptr + at_TF, low_TF.to(heads_ptr.dtype.element_ty), mask=is_TF)
        tl.store(heads_ptr + HALF + at_TF, high_TF.to(heads_ptr.dtype.element_ty), mask=is_TF)
        if BLOCK_R and NORMS:
            tl.store(heads_ptr + at_TR, rest_TR.to(heads_ptr.dtype.element_ty), mask=is_TR)
    else:
        is_kept_T = slot_T >= 0
        side = head - HEADS
        block_T = slot_T // BLOCK_SIZE
        row_T = (block_T * (2 * KV_HEADS) + side) * BLOCK_SIZE + slot_T % BLOCK_SIZE
        scale_T = tl.full([BLOCK_T], 1.0, tl.float32)
        if KV == "fp8" or KV == "fp8_bits":
            scale_T *= tl.load(head_scales_ptr + side)
        if KV == "int8":
            largest_T = tl.maximum(tl.max(tl.abs(low_TF), 1), tl.max(tl.abs(high_TF), 1))
            if BLOCK_R:
                largest_T = tl.maximum(largest_T, tl.max(tl.abs(rest_TR), 1))
            scale_T = tl.maximum(_quotient(largest_T, 127.0), 1e-30)
            tl.store(token_scales_ptr + row_T, scale_T, mask=is_kept_T)
        is_TF = is_TF & is_kept_T[:, None]
        pool_at_TF = (row_T * HEAD_DIM)[:, None] + f[None, :]
        _store(low_TF, pool_ptr + pool_at_TF, is_TF, scale_T[:, None], KV)
        _store(high_TF, pool_ptr + HALF + pool_at_TF, is_TF, scale_T[:, None], KV)
        if BLOCK_R:
            rest_ptr = pool_ptr + (row_T * HEAD_DIM)[:, None] + r[None, :]
            _store(rest_TR, rest_ptr, is_TR & is_kept_T[:, None], scale_T[:, None], KV)
