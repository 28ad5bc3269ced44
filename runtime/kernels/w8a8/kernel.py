"""Triton: one row of 8-bit codes times 8-bit weights, four products a step; and gate | up with the
activation in the product's epilogue.

Everything else of W8A8 runs on the kernels of `runtime.kernels.dense.kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.dense.kernel import finish, load_scale, prefetch_rows, sum_products
from runtime.kernels.gate.kernel import activate

E4M3_SHIFT = tl.constexpr(64.0)
"""What `to_halves` divides by, so that sums of products of e4m3 (at most 448 x 448) fit float16."""


@triton.jit
def dot4_int8(a, b, acc, USE_PTX: tl.constexpr):
    """acc + the dot product of four int8 with four int8, each four in an int32."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    for shift in tl.static_range(0, 32, 8):
        acc += ((a << (24 - shift)) >> 24) * ((b << (24 - shift)) >> 24)
    return acc


@triton.jit
def to_halves(codes):
    """Four e4m3 in an int32 as two int32 of two float16 each, divided by E4M3_SHIFT: exactly, for
    the smallest e4m3 is 2^-9 and the smallest float16 2^-24."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high; .reg .b32 shift; mov.b32 shift, 0x24002400;
             mov.b32 {low, high}, $2;
             cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;
             mul.rn.f16x2 $0, $0, shift; mul.rn.f16x2 $1, $1, shift; }""",
        "=r,=r,r",
        [codes],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def dot4_e4m3(codes, x_low, x_high, acc):
    """acc + the dot product of four e4m3 in an int32 with the four float16 of `to_halves`.

    A product of two e4m3 is exact in float16. Two are added there, which rounds once to 11 bits
    (the tensor cores keep 14 over many more); everything else is float32.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high; .reg .b32 first, second; .reg .f32 sum, other;
             mov.b32 {low, high}, $1;
             cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;
             mul.rn.f16x2 first, first, $2; fma.rn.f16x2 first, second, $3, first;
             mov.b32 {low, high}, first;
             cvt.f32.f16 sum, low; cvt.f32.f16 other, high;
             add.f32 sum, sum, $4; add.f32 $0, sum, other; }""",
        "=f,r,r,r,f",
        [codes, x_low, x_high, acc],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def dot_words(x_ptr, w_ptrs, w, num_words, k, IS_FLOAT: tl.constexpr, USE_PTX: tl.constexpr):
    """Sums of one row of words times rows of words, of which `w` [n, k] are the first: the next
    ones are asked for before those at hand are used."""
    BLOCK_N: tl.constexpr = w.shape[0]
    BLOCK_K: tl.constexpr = w.shape[1]
    ACC: tl.constexpr = tl.float32 if IS_FLOAT else tl.int32
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=ACC)
    for start in tl.range(0, num_words, BLOCK_K, num_stages=1):
        x = tl.load(x_ptr + start + k, mask=start + k < num_words, other=0)
        left = num_words - start - BLOCK_K
        mask = (k < left)[None, :]
        w_next = tl.load(
            w_ptrs + (start + BLOCK_K), mask=mask, other=0, eviction_policy="evict_first"
        )
        if IS_FLOAT:
            x_low, x_high = to_halves(x)
            x_low = tl.broadcast_to(x_low[None, :], [BLOCK_N, BLOCK_K])
            x_high = tl.broadcast_to(x_high[None, :], [BLOCK_N, BLOCK_K])
            acc = dot4_e4m3(w, x_low, x_high, acc)
        else:
            x_words = tl.broadcast_to(x[None, :], [BLOCK_N, BLOCK_K])
            acc = dot4_int8(w, x_words, acc, USE_PTX)
        w = w_next
    total = tl.sum(acc, axis=1)
    if IS_FLOAT:
        total *= E4M3_SHIFT
    return total


@triton.jit
def gemv_words(
    x_ptr,
    w_ptr,
    out_ptr,
    row_scale_ptr,
    channel_scale_ptr,
    bias_ptr,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    ACT: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x` and `w` are int32 words of four codes, e4m3 where IS_FLOAT (needs USE_PTX). K counts
    codes, BLOCK_K words. A program owns BLOCK_N channels and walks all of K; its first weights are
    asked for before anything is waited for.

    With ACT `w` is gate | up, N even, and out [N / 2] = act(gate) * up.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_words = K // 4
    r = tl.arange(0, BLOCK_N)
    if ACT is None:
        n = tl.program_id(0) * BLOCK_N + r
    else:
        n = tl.program_id(0) * (BLOCK_N // 2) + r // 2 + r % 2 * (N // 2)
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * num_words + k[None, :]
    w = tl.load(w_ptrs, mask=(k < num_words)[None, :], other=0, eviction_policy="evict_first")
    channel_scale = load_scale(channel_scale_ptr, n, N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.zeros([BLOCK_N], dtype=tl.int32)
    row_scale = load_scale(row_scale_ptr, m, 1)
    total = dot_words(x_ptr, w_ptrs, w, num_words, k, IS_FLOAT, USE_PTX)
    if ACT is None:
        finish(total, n, m, N, 1, out_ptr, row_scale, channel_scale, bias_ptr)
    else:
        DTYPE: tl.constexpr = out_ptr.dtype.element_ty
        y = (total.to(tl.float32) * row_scale * channel_scale).to(DTYPE)
        gated = gate_pairs(tl.reshape(y, [BLOCK_N // 2, 2]), ACT, USE_PTX)
        out_n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out_ptr + out_n, gated, mask=out_n < N // 2)


@triton.jit
def gate_pairs(pairs, ACT: tl.constexpr, USE_PTX: tl.constexpr):
    """act(gate) * up of gate and up in the last dimension, which have been rounded as if stored."""
    gate, up = tl.split(pairs)
    return (activate(gate.to(tl.float32), ACT, USE_PTX) * up.to(tl.float32)).to(pairs.dtype)


@triton.jit(do_not_specialize=["M"])
def gemm_gate_up(
    x_ptr,
    w_ptr,
    out_ptr,
    maxima_ptr,
    row_scale_ptr,
    channel_scale_ptr,
    M,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT_EVERY: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACT: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [M, N / 2] = act(gate) * up of a weight gate | up [N, K], and maxima [M, tiles]: the bits
    of the largest magnitude that each token has in each tile.

    A tile takes eight rows of gate and eight of up by turns, so that on Hopper one thread holds
    both sums of a pair. gate and up are rounded to out's type first, as if they had been stored.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = BLOCK_N // 2
    num_m = tl.cdiv(M, BLOCK_M)
    num_tiles = N // BLOCK_N
    tile = tl.program_id(0) // num_m
    r = tl.arange(0, BLOCK_N)
    n = tile * HALF + r // 16 * 8 + r % 8 + r // 8 % 2 * (N // 2)
    m = tl.program_id(0) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + n.to(tl.int64) * K
    channel_scale = load_scale(channel_scale_ptr, n[:, None], N)
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(w_rows, tl.minimum(K, PREFETCH))
        tl.extra.cuda.gdc_wait()
    row_scale = load_scale(row_scale_ptr, m[None, :], M)
    w_ptrs = w_rows[:, None] + k[None, :]
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = sum_products(w_ptrs, x_ptrs, 0, K, K, EXACT_EVERY, EVEN_K)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    y = (acc.to(tl.float32) * row_scale * channel_scale).to(DTYPE)
    pairs = tl.permute(tl.reshape(y, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1])
    gated = tl.reshape(gate_pairs(pairs, ACT, USE_PTX), [HALF, BLOCK_M])
    magnitude = tl.abs(gated.to(tl.float32)).to(tl.int32, bitcast=True)
    tl.store(maxima_ptr + m * num_tiles + tile, tl.max(magnitude, axis=0), mask=m < M)
    out_n = tile * HALF + tl.arange(0, HALF)
    at = out_ptr + m[None, :].to(tl.int64) * (N // 2) + out_n[:, None]
    tl.store(at, gated, mask=(m < M)[None, :])
