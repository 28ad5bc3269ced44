"""Triton: one row of 8-bit codes times 8-bit weights, four products a step.

Everything else of W8A8 runs on the kernels of `runtime.kernels.dense.kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.dense.kernel import finish

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
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x` and `w` are int32 words of four codes, e4m3 where IS_FLOAT (needs USE_PTX). K counts
    codes, BLOCK_K words. A program owns BLOCK_N channels and walks all of K; the next tile is
    asked for before the one at hand is used, the first before anything is waited for."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_words = K // 4
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * num_words + k[None, :]
    w = tl.load(w_ptrs, mask=(k < num_words)[None, :], other=0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
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
    m = tl.zeros([BLOCK_N], dtype=tl.int32)
    finish(total, n, m, N, 1, out_ptr, row_scale_ptr, channel_scale_ptr, bias_ptr)
