"""Triton: int8 weights [out, in] times 16-bit inputs, the codes widened in registers.

Legend as in `runtime.kernels.dense.kernel`. One scale per channel is applied to the finished sums;
one per group of columns to the group's sums, in float32: what is multiplied is exactly
(code - zero point) * scale. Codes and their differences with zero points are integers up to 256,
which bfloat16 and float16 hold exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.dense.kernel import finish, prefetch_rows, sum_splits

# Bytes are spread to 16 bits; bfloat16 0x43LL is 128 + LL for the seven low bits, and 0xC300 or
# 0xC380 takes away 128, or 256 where the sign bit is set.
TO_BF16 = tl.constexpr("""
{
    .reg .b32 low, high, value, offset, one;
    mov.b32 one, 0x3F803F80;
    prmt.b32 low, $2, 0, 0x4140;
    prmt.b32 high, $2, 0, 0x4342;
    lop3.b32 value, low, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 offset, low, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $0, value, one, offset;
    lop3.b32 value, high, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 offset, high, 0x00800080, 0xC300C300, 0xEA;
    fma.rn.bf16x2 $1, value, one, offset;
}
""")
# float16 0x64UU is 1024 + UU; with the sign bit flipped UU is the code + 128.
TO_FP16 = tl.constexpr("""
{
    .reg .b32 flipped, low, high, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 flipped, $2, 0x80808080;
    prmt.b32 low, flipped, 0x64646464, 0x4140;
    prmt.b32 high, flipped, 0x64646464, 0x4342;
    sub.f16x2 $0, low, offset;
    sub.f16x2 $1, high, offset;
}
""")


@triton.jit
def widen(codes, DTYPE: tl.constexpr, USE_PTX: tl.constexpr):
    """int8 codes as DTYPE, exactly."""
    if USE_PTX:
        if tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(
                TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        if tl.float16 == DTYPE:
            return tl.inline_asm_elementwise(
                TO_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
            )
    return codes.to(DTYPE)


@triton.jit
def gemv_w8a16(
    x_ptr,
    w_ptr,
    out_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: a program owns BLOCK_N channels and walks all of K, the next tile asked for before
    the one at hand is used. GROUP columns share a scale (0: the whole row does); it divides
    BLOCK_K."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows[:, None] * K + k[None, :]
    w = tl.load(w_ptrs, mask=(k < K)[None, :], other=0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        left = K - start - BLOCK_K
        mask = (k < left)[None, :]
        w_next = tl.load(
            w_ptrs + (start + BLOCK_K), mask=mask, other=0, eviction_policy="evict_first"
        )
        products = w.to(tl.float32) * x[None, :]
        if GROUP == 0:
            acc += tl.sum(products, axis=1)
        else:
            NUM: tl.constexpr = BLOCK_K // GROUP
            g = start // GROUP + tl.arange(0, NUM)
            at = rows[:, None] * (K // GROUP) + g[None, :]
            is_there = (g < K // GROUP)[None, :]
            sums = tl.sum(tl.reshape(products, [BLOCK_N, NUM, GROUP]), axis=2)
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + at, mask=is_there, other=0).to(tl.float32)
                sums -= zero * tl.sum(tl.reshape(x, [NUM, GROUP]), axis=1)[None, :]
            scale = tl.load(scale_ptr + at, mask=is_there, other=0.0).to(tl.float32)
            acc += tl.sum(sums * scale, axis=1)
        w = w_next
    m = tl.zeros([BLOCK_N], dtype=tl.int32)
    finish(acc, n, m, N, 1, out_ptr, None, scale_ptr if GROUP == 0 else None, bias_ptr)


@triton.jit
def gemm_w8a16(
    x_ptr,
    w_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    M,
    N,
    K,
    split_k,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVEN_K: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile [BLOCK_N, BLOCK_M] of W x^T over columns [split * split_k, + split_k) of K.

    GROUP columns share a scale (0: the whole row does); BLOCK_K divides it. Weights are the left
    operand, straight from registers. The rest as in `dense.kernel.gemm`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    tile = pid % (num_m * num_n)
    split = pid // (num_m * num_n)
    n = (tile // num_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tile % num_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = split * split_k
    end = tl.minimum(K, first + split_k)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(w_ptr + rows * K + first, tl.minimum(end - first, PREFETCH))
        tl.extra.cuda.gdc_wait()
    w_ptrs = w_ptr + rows[:, None] * K + first + k[None, :]
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K + first + k[:, None]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        if EVEN_K:
            codes = tl.load(w_ptrs)
            x = tl.load(x_ptrs)
        else:
            codes = tl.load(w_ptrs, mask=(start + k < K)[None, :], other=0)
            x = tl.load(x_ptrs, mask=(start + k < K)[:, None], other=0.0)
        w = widen(codes, DTYPE, USE_PTX)
        if zero_ptr is not None:
            g = start // GROUP if GROUP > 0 else 0
            zero = tl.load(zero_ptr + rows * (K // GROUP if GROUP > 0 else 1) + g)
            w = w - zero.to(DTYPE)[:, None]
        if GROUP == 0:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        else:
            scale = tl.load(scale_ptr + rows * (K // GROUP) + start // GROUP).to(tl.float32)
            acc += tl.dot(w, x, input_precision="ieee") * scale[:, None]
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    channel_scale_ptr = scale_ptr if GROUP == 0 else None
    if SPLITS == 1:
        finish(acc, n[:, None], m[None, :], N, M, out_ptr, None, channel_scale_ptr, bias_ptr)
    else:
        total, is_last = sum_splits(acc, partials_ptr, counters_ptr, tile, split, SPLITS)
        if is_last:
            finish(total, n[:, None], m[None, :], N, M, out_ptr, None, channel_scale_ptr, bias_ptr)


@triton.jit
def dequantize_w8a16(
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    K,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """(code - zero point) * scale of a piece of one channel, rounded to out's type."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = k < K
    values = tl.load(w_ptr + row * K + k, mask=mask, other=0).to(tl.float32)
    group = row * (K // GROUP) + k // GROUP if GROUP > 0 else row + k * 0
    if zero_ptr is not None:
        values -= tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
    values *= tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * K + k, values.to(out_ptr.dtype.element_ty), mask=mask)
