"""Triton: one row of int8 codes times int8 weights, four products an instruction.

Everything else of W8A8 runs on the kernels of `runtime.kernels.dense.kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.dense.kernel import finish


@triton.jit
def dot4(a, b, acc, USE_PTX: tl.constexpr):
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
def gemv_int8(
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
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x` and `w` are int32 words of four codes; K counts codes, BLOCK_K words. A program owns
    BLOCK_N channels and walks all of K; the next tile is asked for before the one at hand is used,
    the first before anything is waited for."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_words = K // 4
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * num_words + k[None, :]
    w = tl.load(w_ptrs, mask=(k < num_words)[None, :], other=0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.int32)
    for start in tl.range(0, num_words, BLOCK_K, num_stages=1):
        x = tl.load(x_ptr + start + k, mask=start + k < num_words, other=0)
        left = num_words - start - BLOCK_K
        mask = (k < left)[None, :]
        w_next = tl.load(
            w_ptrs + (start + BLOCK_K), mask=mask, other=0, eviction_policy="evict_first"
        )
        acc = dot4(w, tl.broadcast_to(x[None, :], [BLOCK_N, BLOCK_K]), acc, USE_PTX)
        w = w_next
    m = tl.zeros([BLOCK_N], dtype=tl.int32)
    total = tl.sum(acc, axis=1)
    finish(total, n, m, N, 1, out_ptr, row_scale_ptr, channel_scale_ptr, bias_ptr)
