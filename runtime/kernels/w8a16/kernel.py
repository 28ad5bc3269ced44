"""Triton: int8 weights [out, in] times 16-bit inputs, the codes widened in registers.

Legend as in `runtime.kernels.dense.kernel`. A row of weights is a row of 16-bit words (`pack.py`):
word i of a block of BLOCK codes has code i in its low and code i + BLOCK / 2 in its high byte, so
that a shifted and masked word is an operand of the tensor cores as it stands.

One scale per channel is applied to the finished sums; one per group of columns to the group's sums,
in float32: what is multiplied is exactly (code - zero point) * scale. Codes and their differences
with zero points are integers up to 256, which bfloat16 and float16 hold exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.dense.kernel import finish, load_scale, prefetch_rows, sum_splits


@triton.constexpr_function
def _plane_asm(plane, is_bf16):
    """Two words to two 16-bit floats. bfloat16 0x43LL is 128 + LL for the seven low bits of a code,
    and 0xC300 or 0xC380 takes away 128, or 256 where its sign bit is set. float16 0x64UU is
    1024 + UU, and with the sign bit flipped UU is the code + 128."""
    shift = f"shr.u32 word, $1, {8 * plane};"
    if is_bf16:
        return f"""{{ .reg .b32 word, value, offset, one;
            {shift} mov.b32 one, 0x3F803F80;
            lop3.b32 value, word, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 offset, word, 0x00800080, 0xC300C300, 0xEA;
            fma.rn.bf16x2 $0, value, one, offset; }}"""
    return f"""{{ .reg .b32 word, offset;
        {shift} mov.b32 offset, 0x64806480;
        lop3.b32 word, word, 0x00FF00FF, 0x64806480, 0x6A;
        sub.f16x2 $0, word, offset; }}"""


@triton.jit
def widen(words, PLANE: tl.constexpr, dtype: tl.constexpr, USE_PTX: tl.constexpr):
    """The codes of one plane of 16-bit words as dtype, exactly."""
    asm: tl.constexpr = _plane_asm(PLANE, dtype == tl.bfloat16)
    if USE_PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            asm, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    if USE_PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    return ((words << (8 - 8 * PLANE)) >> 8).to(dtype)


@triton.jit
def load_column(ptr, rows, num_groups, k, GROUP: tl.constexpr):
    """What the group of column `k` has in each row: scales or zero points."""
    at = rows * num_groups
    if GROUP > 0:
        at += k // GROUP
    return tl.load(ptr + at)


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
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: a program owns BLOCK_N channels and walks all of K, the next tile asked for before
    the one at hand is used. GROUP columns share a scale (0: the whole row does)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = BLOCK // 2
    WORDS: tl.constexpr = BLOCK_K // 2
    NUM: tl.constexpr = BLOCK_K // BLOCK
    num_words = K // 2
    num_groups = K // GROUP if GROUP > 0 else 1
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    i = tl.arange(0, WORDS)
    k = (i // HALF) * BLOCK + i % HALF
    w_ptrs = w_ptr + rows[:, None] * num_words + i[None, :]
    words = tl.load(w_ptrs, mask=(i < num_words)[None, :], other=0, eviction_policy="evict_first")
    channel_scale = load_scale(scale_ptr if GROUP == 0 else None, n, N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, num_words, WORDS, num_stages=1):
        left = num_words - start - WORDS
        words_next = tl.load(
            w_ptrs + (start + WORDS),
            mask=(i < left)[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        for plane in tl.static_range(2):
            first = 2 * start + plane * HALF
            x = tl.load(x_ptr + first + k, mask=first + k < K, other=0.0)
            w = widen(words, plane, x.dtype, USE_PTX).to(tl.float32)
            products = w * x.to(tl.float32)[None, :]
            if GROUP == 0 and zero_ptr is None:
                acc += tl.sum(products, axis=1)
            else:
                sums = tl.sum(tl.reshape(products, [BLOCK_N, NUM, HALF]), axis=2)
                columns = first + tl.arange(0, NUM) * BLOCK
                at = rows[:, None] * num_groups + tl.zeros([1, NUM], dtype=tl.int32)
                if GROUP > 0:
                    at += (columns // GROUP)[None, :]
                is_there = (columns < K)[None, :]
                if zero_ptr is not None:
                    zero = tl.load(zero_ptr + at, mask=is_there, other=0).to(tl.float32)
                    x_sums = tl.sum(tl.reshape(x.to(tl.float32), [NUM, HALF]), axis=1)
                    sums -= zero * x_sums[None, :]
                if GROUP > 0:
                    sums *= tl.load(scale_ptr + at, mask=is_there, other=0.0).to(tl.float32)
                acc += tl.sum(sums, axis=1)
        words = words_next
    m = tl.zeros([BLOCK_N], dtype=tl.int32)
    finish(acc, n, m, N, 1, out_ptr, None, channel_scale, bias_ptr)


@triton.jit(do_not_specialize=["M"])
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
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile [BLOCK_N, BLOCK_M] of W x^T over columns [split * split_k, + split_k) of K.

    Weights are the left operand, straight from registers. GROUP columns share a scale (0: the whole
    row does). Scales meet sums, an iteration after they are asked for; zero points meet weights,
    and must be loaded in their own iteration, or weights would travel through shared memory.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK // 2
    IS_ONE: tl.constexpr = GROUP >= BLOCK
    num_groups = K // GROUP if GROUP > 0 else 1
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    tile = pid % (num_m * num_n)
    split = pid // (num_m * num_n)
    n = (tile // num_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tile % num_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, HALF)
    first = split * split_k
    end = tl.minimum(K, first + split_k)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    w_rows = w_ptr + rows * (K // 2) + first // 2
    channel_scale = load_scale(scale_ptr if GROUP == 0 else None, n[:, None], N)
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(w_rows, tl.minimum(end - first, PREFETCH))
        tl.extra.cuda.gdc_wait()
    w_ptrs = w_rows[:, None] + i[None, :]
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K + first + i[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if GROUP > 0:
        low = load_column(scale_ptr, rows, num_groups, first, GROUP)
        high = load_column(scale_ptr, rows, num_groups, first + HALF, GROUP)
    for start in range(first, end, BLOCK):
        words = tl.load(w_ptrs)
        w_low = widen(words, 0, DTYPE, USE_PTX)
        w_high = widen(words, 1, DTYPE, USE_PTX)
        if zero_ptr is not None:
            zero = load_column(zero_ptr, rows, num_groups, start, GROUP)
            w_low -= zero.to(DTYPE)[:, None]
            if GROUP > 0 and not IS_ONE:
                zero = load_column(zero_ptr, rows, num_groups, start + HALF, GROUP)
            w_high -= zero.to(DTYPE)[:, None]
        x_low = tl.load(x_ptrs)
        x_high = tl.load(x_ptrs + HALF)
        if GROUP == 0:
            acc = tl.dot(w_low, x_low, acc, input_precision="ieee")
            acc = tl.dot(w_high, x_high, acc, input_precision="ieee")
        else:
            ahead = tl.minimum(start + BLOCK, K - BLOCK)
            low_next = load_column(scale_ptr, rows, num_groups, ahead, GROUP)
            part = tl.dot(w_low, x_low, input_precision="ieee")
            if IS_ONE:
                part = tl.dot(w_high, x_high, part, input_precision="ieee")
                acc += part * low.to(tl.float32)[:, None]
            else:
                high_next = load_column(scale_ptr, rows, num_groups, ahead + HALF, GROUP)
                acc += part * low.to(tl.float32)[:, None]
                part = tl.dot(w_high, x_high, input_precision="ieee")
                acc += part * high.to(tl.float32)[:, None]
                high = high_next
            low = low_next
        w_ptrs += HALF
        x_ptrs += BLOCK
    if SPLITS == 1:
        finish(acc, n[:, None], m[None, :], N, M, out_ptr, None, channel_scale, bias_ptr)
    else:
        total, is_last = sum_splits(acc, partials_ptr, counters_ptr, tile, split, SPLITS)
        if is_last:
            finish(total, n[:, None], m[None, :], N, M, out_ptr, None, channel_scale, bias_ptr)


@triton.jit
def dequantize_w8a16(
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    K,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """(code - zero point) * scale of WORDS words of one channel, rounded to out's type."""
    HALF: tl.constexpr = BLOCK // 2
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = i < K // 2
    words = tl.load(w_ptr + row * (K // 2) + i, mask=mask, other=0)
    for plane in tl.static_range(2):
        k = (i // HALF) * BLOCK + plane * HALF + i % HALF
        group = row * (K // GROUP) + k // GROUP if GROUP > 0 else row + k * 0
        values = widen(words, plane, tl.float32, False)
        if zero_ptr is not None:
            values -= tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
        values *= tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * K + k, values.to(out_ptr.dtype.element_ty), mask=mask)
