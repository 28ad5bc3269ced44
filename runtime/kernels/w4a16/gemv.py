"""One row of inputs times a 4-bit weight, without tensor cores: bytes are what it costs.

A program owns sixteen rows of weights and all of K, in memory one run of bytes; so its sums stay in
registers and meet once, at the end. Two neighbouring words of `pack.py`'s order are read as one of
32 bits, in which a code is five instructions from a product: shifted to bits 16..19 and or-ed into
the float32 128.0 it *is* 128 + code, exactly. The excess is the same for every code of a group, so
it leaves by the group's sum of inputs, once per program.

Imports triton; `runtime.kernels.w4a16.launch` imports this only where it launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.kernels.w4a16.kernel import ROWS, prefetch_l2

EXCESS = tl.constexpr(128)


@triton.jit
def plus_excess(words, LEFT: tl.constexpr):
    """The code that `LEFT` bits of shifting (right if negative) bring to bit 16, + EXCESS."""
    shifted = words << LEFT if LEFT > 0 else words >> (0 - LEFT)
    return ((shifted & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


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
def sum_of_inputs(x_ptr, K, num_kb, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr):
    """Of all K inputs, float32."""
    sums = tl.zeros([CHUNK], tl.float32)
    for first in tl.range(0, num_kb, CHUNK, num_stages=1):
        at = (first + tl.arange(0, CHUNK))[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        sums += tl.sum(tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32), axis=1)
    return tl.sum(sums, axis=0)


@triton.jit
def excess_of_groups(
    x_ptr, scales, zeros, K, num_groups, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """[ROWS] float32: what EXCESS and zero points add up to, over all groups of the inputs."""
    row = tl.arange(0, ROWS)
    k = tl.arange(0, GROUP)
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, num_groups, CHUNK, num_stages=1):
        g = first + tl.arange(0, CHUNK)
        at = g[:, None] * GROUP + k[None, :]
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        sums = tl.sum(x, axis=1)
        at = g[:, None] * ROWS + row[None, :]
        there = (g < num_groups)[:, None]
        s = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
        offset = tl.full([CHUNK, ROWS], EXCESS + 8, tl.float32)
        if not SYMMETRIC:
            offset = tl.load(zeros + at, mask=there, other=0).to(tl.float32) + EXCESS
        total += tl.sum(s * offset * sums[:, None], axis=0)
    return total


@triton.jit
def load_pairs(pairs_ptr, kb, u, K, num_kb, WIDTH: tl.constexpr, EVEN_K: tl.constexpr):
    """Inputs [KBS, WIDTH] of each plane of these K-blocks, two in a word; zeros behind the last."""
    at = (kb + u)[:, None] * (4 * WIDTH) + tl.arange(0, WIDTH)[None, :]
    values = (load_plane(pairs_ptr, at, kb + u, K, num_kb, EVEN_K),)
    for p in tl.static_range(1, 4):
        values = values + (load_plane(pairs_ptr, at + p * WIDTH, kb + u, K, num_kb, EVEN_K),)
    return values


@triton.jit
def load_plane(pairs_ptr, at, block, K, num_kb, EVEN_K: tl.constexpr):
    """A mask that is the same for a whole K-block leaves loads 16 bytes wide."""
    if EVEN_K:
        pairs = tl.load(pairs_ptr + at, mask=(block < num_kb)[:, None], other=0)
    else:
        pairs = tl.load(pairs_ptr + at, mask=at * 2 < K, other=0)
    return pairs


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
    BLOCK_K: tl.constexpr,
    KBS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [N] = w x + bias. Grid: one program for each ROWS rows of weights.

    codes_ptr points to 32-bit words [R, num_kb, ROWS, BLOCK_K / 8]. KBS: K-blocks a step. GROUPS:
    scales per K-block, 0 for one per row. CHUNK: groups whose inputs are summed at once. EVEN_K:
    BLOCK_K divides K. STAGES: steps whose loads are under way, through shared memory: ptxas moves
    loads into registers behind the products that should hide them. PREFETCH: ask all codes and
    scales into L2 before waiting.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_K // 8
    PER_BLOCK: tl.constexpr = GROUPS if GROUPS > 0 else 1
    PLANES: tl.constexpr = 4 // PER_BLOCK
    SYMMETRIC: tl.constexpr = zero_ptr is None
    block = tl.program_id(0).to(tl.int64)
    u = tl.arange(0, KBS)
    row = tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    inner = u[:, None, None] * (ROWS * WIDTH) + row[None, :, None] * WIDTH + c[None, None, :]
    codes = codes_ptr + block * num_kb * (ROWS * WIDTH)
    num_groups = num_kb * GROUPS if GROUPS > 0 else 1
    scales = scale_ptr + block * num_groups * ROWS
    zeros = scales if SYMMETRIC else zero_ptr + block * num_groups * ROWS
    if PREFETCH:
        prefetch_l2(codes, num_kb * (ROWS * WIDTH * 4))
        prefetch_l2(
            scales, num_groups * (ROWS * scale_ptr.dtype.element_ty.primitive_bitwidth // 8)
        )
    if PDL:
        gdc_wait()
    pairs_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    if GROUPS > 0:
        excess = excess_of_groups(
            x_ptr, scales, zeros, K, num_groups, BLOCK_K // PER_BLOCK, CHUNK, SYMMETRIC
        )
    else:
        inputs = sum_of_inputs(x_ptr, K, num_kb, BLOCK_K, CHUNK)
    acc = tl.zeros([KBS, ROWS, WIDTH], tl.float32)
    for kb in tl.range(0, num_kb, KBS, num_stages=STAGES):
        there = (kb + u < num_kb)[:, None, None]
        words = tl.load(codes + kb * (ROWS * WIDTH) + inner, mask=there, other=0)
        pairs = load_pairs(pairs_ptr, kb, u, K, num_kb, WIDTH, EVEN_K)
        for g in tl.static_range(PER_BLOCK):
            part = tl.zeros([KBS, ROWS, WIDTH], tl.float32)
            for p in tl.static_range(PLANES):
                low, high = halves(pairs[g * PLANES + p], dtype)
                part += plus_excess(words, 16 - 4 * (g * PLANES + p)) * low[:, None, :]
                part += plus_excess(words, 0 - 4 * (g * PLANES + p)) * high[:, None, :]
            if GROUPS > 0:
                at = (kb + u)[:, None] * (GROUPS * ROWS) + g * ROWS + row[None, :]
                s = tl.load(scales + at, mask=(kb + u < num_kb)[:, None], other=0.0)
                acc += s.to(tl.float32)[:, :, None] * part
            else:
                acc += part
    y = tl.sum(tl.sum(acc, axis=2), axis=0)
    n = block * ROWS + row
    if GROUPS > 0:
        y -= excess
    else:
        offset = tl.full([ROWS], EXCESS + 8, tl.float32)
        if not SYMMETRIC:
            offset = tl.load(zeros + row).to(tl.float32) + EXCESS
        y = tl.load(scales + row).to(tl.float32) * (y - offset * inputs)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
