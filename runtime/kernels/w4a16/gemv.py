"""One row of inputs times a 4-bit weight, without tensor cores: bytes should be what it costs.

A program owns a few rows of weights and all of K; a thread holds the same inputs for each of its
rows. Programs are many and short: loads of the next ones hide behind the products of these, and the
first weights are in registers before the inputs exist. Two neighbouring words of `pack.py`'s order
are read as one of 32 bits; a code shifted to bits 16..19 and or-ed into the float32 128.0 *is*
128 + code, exactly, and the excess leaves by the sum of the inputs.

Imports triton; `runtime.kernels.w4a16.launch` imports this only where it launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.kernels.w4a16.kernel_parts import ROWS

EXCESS = tl.constexpr(128)


@triton.jit
def plus_excess(words, magic, LEFT: tl.constexpr, USE_PTX: tl.constexpr):
    """The code that `LEFT` bits of shifting (right if negative) bring to bit 16, + EXCESS.

    `magic`: the bits of float32 EXCESS. One `lop3` can hold one of the two constants; with both
    written out the assembler makes it two.
    """
    shifted = words << LEFT if LEFT > 0 else words >> (0 - LEFT)
    if USE_PTX:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f0000, $2, 0xea;", "=r,r,r", [shifted, magic],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = (shifted & 0x000F0000) | magic
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def halves(pairs, dtype: tl.constexpr):
    """Two 16-bit floats of `dtype` in each 32-bit word, as float32: the low one, the high one."""
    if dtype == tl.bfloat16:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low = (pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def load_plane(pairs_ptr, at, block, K, num_kb, EVEN_K: tl.constexpr):
    """A mask that is the same for a whole K-block leaves loads 16 bytes wide."""
    if EVEN_K:
        pairs = tl.load(pairs_ptr + at, mask=(block < num_kb)[:, None], other=0)
    else:
        pairs = tl.load(pairs_ptr + at, mask=at * 2 < K, other=0)
    return pairs


@triton.jit
def load_groups(pointers, block, num_kb, PER_BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Scales (or zero points) [KBS, BLOCK_N] of each group of these K-blocks."""
    there = (block < num_kb)[:, None]
    at = pointers + block[:, None] * (GROUPS * ROWS)
    values = (tl.load(at, mask=there, other=0),)
    for g in tl.static_range(1, PER_BLOCK):
        values = values + (tl.load(at + g * ROWS, mask=there, other=0),)
    return values


@triton.jit
def offset_of(zeros, g: tl.constexpr, SYMMETRIC: tl.constexpr):
    """EXCESS + zero point."""
    offset = tl.full(zeros[g].shape, EXCESS + 8, tl.float32)
    if not SYMMETRIC:
        offset = zeros[g].to(tl.float32) + EXCESS
    return offset


@triton.jit
def add_products(
    acc, words, s, z, pairs_ptr, block, K, num_kb, dtype: tl.constexpr, PER_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, EVEN_K: tl.constexpr, SYMMETRIC: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """acc [KBS, BLOCK_N, WIDTH] + scale * (code - zero point) * input, of these K-blocks."""
    WIDTH: tl.constexpr = words.shape[2]
    PLANES: tl.constexpr = 4 // PER_BLOCK
    magic = tl.full([1, 1, 1], 0x43000000, tl.int32)
    first = block[:, None] * (4 * WIDTH) + tl.arange(0, WIDTH)[None, :]
    for g in tl.static_range(PER_BLOCK):
        part = tl.zeros(words.shape, tl.float32)
        inputs = tl.zeros([words.shape[0], WIDTH], tl.float32)
        for p in tl.static_range(PLANES):
            at = first + (g * PLANES + p) * WIDTH
            low, high = halves(load_plane(pairs_ptr, at, block, K, num_kb, EVEN_K), dtype)
            inputs += low + high
            at_16 = plus_excess(words, magic, 16 - 4 * (g * PLANES + p), USE_PTX)
            part += at_16 * low[:, None, :]
            at_16 = plus_excess(words, magic, 0 - 4 * (g * PLANES + p), USE_PTX)
            part += at_16 * high[:, None, :]
        part -= offset_of(z, g, SYMMETRIC)[:, :, None] * inputs[:, None, :]
        if GROUPS > 0:
            acc += s[g].to(tl.float32)[:, :, None] * part
        else:
            acc += part
    return acc


@triton.jit
def gemv_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    num_kb,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KBS: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [N] = w x + bias. Grid: one program for each BLOCK_N (at most ROWS) rows of weights.

    codes_ptr points to 32-bit words [R, num_kb, ROWS, BLOCK_K / 8]. KBS: K-blocks a step. GROUPS:
    scales per K-block, 0 for one per row. EVEN_K: BLOCK_K divides K.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_K // 8
    PER_BLOCK: tl.constexpr = GROUPS if GROUPS > 0 else 1
    SYMMETRIC: tl.constexpr = zero_ptr is None
    SHARES: tl.constexpr = ROWS // BLOCK_N
    sixteen = (tl.program_id(0) // SHARES).to(tl.int64)
    row = tl.program_id(0) % SHARES * BLOCK_N + tl.arange(0, BLOCK_N)
    u = tl.arange(0, KBS)
    c = tl.arange(0, WIDTH)
    inner = u[:, None, None] * (ROWS * WIDTH) + row[None, :, None] * WIDTH + c[None, None, :]
    codes = codes_ptr + sixteen * num_kb * (ROWS * WIDTH)
    num_groups = num_kb * GROUPS if GROUPS > 0 else 1
    scales = scale_ptr + sixteen * num_groups * ROWS + row[None, :]
    zeros = scales if SYMMETRIC else zero_ptr + sixteen * num_groups * ROWS + row[None, :]
    words = tl.load(codes + inner, mask=(u < num_kb)[:, None, None], other=0)
    s = load_groups(scales, u, num_kb, PER_BLOCK, GROUPS)
    z = s if SYMMETRIC else load_groups(zeros, u, num_kb, PER_BLOCK, GROUPS)
    if PDL:
        gdc_wait()
    pairs_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    acc = tl.zeros([KBS, BLOCK_N, WIDTH], tl.float32)
    acc = add_products(
        acc, words, s, z, pairs_ptr, u, K, num_kb, dtype, PER_BLOCK, GROUPS, EVEN_K, SYMMETRIC,
        USE_PTX,
    )  # fmt: skip
    for kb in tl.range(KBS, num_kb, KBS, num_stages=1):
        block = kb + u
        there = (block < num_kb)[:, None, None]
        words = tl.load(codes + kb * (ROWS * WIDTH) + inner, mask=there, other=0)
        s = load_groups(scales, block, num_kb, PER_BLOCK, GROUPS)
        z = s if SYMMETRIC else load_groups(zeros, block, num_kb, PER_BLOCK, GROUPS)
        acc = add_products(
            acc, words, s, z, pairs_ptr, block, K, num_kb, dtype, PER_BLOCK, GROUPS, EVEN_K,
            SYMMETRIC, USE_PTX,
        )  # fmt: skip
    y = tl.sum(tl.sum(acc, axis=2), axis=0)
    n = (sixteen * ROWS + row).to(tl.int32)
    if GROUPS == 0:
        y *= tl.load(scale_ptr + n).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
