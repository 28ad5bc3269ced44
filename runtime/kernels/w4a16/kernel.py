"""W4A16 in Triton: y[M, N] = x[M, K] @ w[N, K].T with 4-bit codes that are unpacked in registers.

Weights are operand A of the matrix instruction and inputs operand B (y.T = w @ x.T): a warpgroup
multiplies 64 rows of weights, from registers, with as few as 8 rows of inputs. The order of the
codes is `pack.py`'s: one 16-bit word holds a code of each of four planes, and a plane is a run of
BLOCK_K / 4 inputs, so that a shifted and masked word *is* an operand and nothing is interleaved.

A code n becomes the 16-bit float 128 + n (bfloat16) or 1024 + n (float16) by one `lop3`: the
nibble is or-ed into the low bits of that power of two. The excess and the zero point leave in one
of three ways, SCALING: "sums" by the sum of the inputs, one more product with ones; "centered" by
an exact subtraction from every weight; "weights" likewise, and the weight is scaled, too, so that
the product is the library's. The first two scale sums of a group, in float32.

Imports triton; `runtime.kernels.w4a16.launch` imports this only where it launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.kernels.w4a16.kernel_parts import (
    ROWS,
    add_splits,
    excess,
    load_groups,
    load_staged_groups,
    offset_of,
    prefetch_rows,
    unpack_plane,
    unpack_run,
    write_tile,
)


@triton.jit(do_not_specialize=["M", "num_m_tiles", "num_whole"])
def tile_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    num_kb,
    num_m_tiles,
    num_whole,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALING: tl.constexpr,
    JOIN: tl.constexpr,
    STAGED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_KB: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile [BLOCK_N, BLOCK_M] of y.T over a part of K, all warps in step.

    Grid: tiles, M fastest so that neighbours share weights in L2; tiles from `num_whole` on take
    SPLIT_K programs each. GROUPS: scales per K-block, 0 for one per row. PREFETCH_KB: K-blocks
    asked into L2 before waiting for the inputs.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    EXCESS: tl.constexpr = excess(dtype == tl.bfloat16, USE_PTX)
    WIDTH: tl.constexpr = BLOCK_K // 4
    PER_BLOCK: tl.constexpr = GROUPS if GROUPS > 0 else 1
    PLANES: tl.constexpr = 4 // PER_BLOCK
    RUN: tl.constexpr = min(JOIN, PLANES)
    tile = tl.program_id(0)
    split = 0
    kb_begin = 0
    kb_end = num_kb
    late = tile - num_whole
    if SPLIT_K > 1:  # noqa: SIM102 - the outer condition is decided when compiling
        if late >= 0:
            split = late % SPLIT_K
            late = late // SPLIT_K
            tile = num_whole + late
            kb_begin = split * num_kb // SPLIT_K
            kb_end = (split + 1) * num_kb // SPLIT_K

    rows = tile // num_m_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tile % num_m_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, WIDTH)
    stored_rows = tl.cdiv(N, ROWS) * ROWS
    row_ok = rows < stored_rows
    block = (rows // ROWS).to(tl.int64)
    inner = (rows % ROWS)[:, None] * WIDTH + k[None, :]
    codes = codes_ptr + (block * num_kb)[:, None] * (ROWS * WIDTH) + inner
    num_groups = num_kb * GROUPS if GROUPS > 0 else 1
    scales = scale_ptr + block * num_groups * ROWS + rows % ROWS
    SYMMETRIC: tl.constexpr = zero_ptr is None
    if not SYMMETRIC:
        zeros = zero_ptr + block * num_groups * ROWS + rows % ROWS
    if PREFETCH_KB > 0:
        n_tile = tile // num_m_tiles
        prefetch_rows(
            codes_ptr,
            scale_ptr,
            zero_ptr,
            n_tile,
            kb_begin,
            kb_end,
            num_kb,
            N,
            BLOCK_N,
            WIDTH,
            GROUPS,
            PREFETCH_KB,
        )
    k_run = tl.arange(0, RUN * WIDTH)
    x = x_ptr + m.to(tl.int64)[:, None] * K + k_run[None, :]
    m_ok = (m < M)[:, None]

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ones = tl.full([BLOCK_N, RUN * WIDTH], 1.0, dtype)
    s = load_groups(scales, kb_begin, PER_BLOCK, GROUPS, row_ok)
    z = s if SYMMETRIC else load_groups(zeros, kb_begin, PER_BLOCK, GROUPS, row_ok)
    if PDL:
        gdc_wait()
    for kb in tl.range(kb_begin, kb_end, num_stages=STAGES):
        # What meets weights before the product must be loaded in this iteration, or the compiler
        # unpacks in the layout of the load and carries whole weights through shared memory. It
        # comes first: the last product of the iteration before still runs.
        ahead = tl.minimum(kb + 1, kb_end - 1)
        if GROUPS > 0 and SCALING == "weights" and STAGED:
            s = load_staged_groups(scales, rows, kb, PER_BLOCK, GROUPS, row_ok)
        elif GROUPS > 0 and SCALING == "weights":
            s = load_groups(scales, kb, PER_BLOCK, GROUPS, row_ok)
        next_s = s
        if GROUPS > 0 and SCALING != "weights":
            next_s = load_groups(scales, ahead, PER_BLOCK, GROUPS, row_ok)
        if GROUPS > 0 and SCALING != "sums" and not SYMMETRIC:
            z = load_groups(zeros, kb, PER_BLOCK, GROUPS, row_ok)
        next_z = z
        if GROUPS > 0 and SCALING == "sums" and not SYMMETRIC:
            next_z = load_groups(zeros, ahead, PER_BLOCK, GROUPS, row_ok)
        if EVEN_N:
            words = tl.load(codes + kb * (ROWS * WIDTH))
        else:
            words = tl.load(codes + kb * (ROWS * WIDTH), mask=row_ok[:, None], other=0)
        for g in tl.static_range(PER_BLOCK):
            offset = offset_of(z[g], SYMMETRIC, EXCESS)[:, None]
            if GROUPS > 0 and SCALING != "weights":
                part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            else:
                part = acc
            if GROUPS > 0 and SCALING == "sums":
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for p in tl.static_range(0, PLANES, RUN):
                start = kb * BLOCK_K + (g * PLANES + p) * WIDTH
                if EVEN_K:
                    x_run = tl.load(x + start, mask=m_ok, other=0.0).T
                else:
                    k_ok = (start + k_run < K)[None, :]
                    x_run = tl.load(x + start, mask=m_ok & k_ok, other=0.0).T
                w = unpack_run(
                    words,
                    offset.to(dtype),
                    s[g][:, None],
                    g * PLANES + p,
                    RUN,
                    dtype,
                    SCALING,
                    USE_PTX,
                )
                part = tl.dot(w, x_run, part)
                if SCALING == "sums":
                    sums = tl.dot(ones, x_run, sums)
            if GROUPS == 0 or SCALING == "weights":
                acc = part
            elif SCALING == "sums":
                acc += s[g].to(tl.float32)[:, None] * (part - offset * sums)
            else:
                acc += s[g].to(tl.float32)[:, None] * part
        s = next_s
        z = next_z
    if GROUPS == 0 and SCALING == "sums":
        acc -= offset_of(z[0], SYMMETRIC, EXCESS)[:, None] * sums
    if GROUPS == 0 and SCALING != "weights":
        acc *= s[0].to(tl.float32)[:, None]
    if SPLIT_K == 1:
        write_tile(acc, bias_ptr, out_ptr, rows, m, M, N)
    else:
        is_last = late < 0
        if late >= 0:
            acc, is_last = add_splits(acc, partials_ptr, counters_ptr, late, split, SPLIT_K)
        if is_last:
            write_tile(acc, bias_ptr, out_ptr, rows, m, M, N)


@triton.jit(do_not_specialize=["M"])
def warp_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    num_kb,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_KB: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile [BLOCK_N, BLOCK_M] of y.T whose K-blocks go round among the program's warps.

    For few rows of inputs: a program is narrow enough (16 or 32 rows of weights) that all of K
    fits one wave of programs, and the warps' sums meet once, at the end. A batched product gives
    each warp its own K-block. EVEN_K: K-blocks divide evenly among splits and warps.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    EXCESS: tl.constexpr = excess(dtype == tl.bfloat16, USE_PTX)
    WIDTH: tl.constexpr = BLOCK_K // 4
    PER_BLOCK: tl.constexpr = GROUPS if GROUPS > 0 else 1
    PLANES: tl.constexpr = 4 // PER_BLOCK
    tile = tl.program_id(0)
    split = tl.program_id(1)
    kb_begin = split * num_kb // SPLIT_K
    kb_end = (split + 1) * num_kb // SPLIT_K

    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, WIDTH)
    warp = tl.arange(0, WARPS)
    stored_rows = tl.cdiv(N, ROWS) * ROWS
    row_ok = (rows < stored_rows)[None, :]
    block = (rows // ROWS).to(tl.int64)
    codes = codes_ptr + (block * num_kb)[None, :, None] * (ROWS * WIDTH)
    codes += warp[:, None, None] * (ROWS * WIDTH)
    codes += (rows % ROWS)[None, :, None] * WIDTH + k[None, None, :]
    num_groups = num_kb * GROUPS if GROUPS > 0 else 1
    group = (block * num_groups * ROWS + rows % ROWS)[None, :]
    group += warp[:, None] * (GROUPS * ROWS)
    scales = scale_ptr + group
    SYMMETRIC: tl.constexpr = zero_ptr is None
    if not SYMMETRIC:
        zeros = zero_ptr + group
    if PREFETCH_KB > 0:
        prefetch_rows(
            codes_ptr,
            scale_ptr,
            zero_ptr,
            tile,
            kb_begin,
            kb_end,
            num_kb,
            N,
            BLOCK_N,
            WIDTH,
            GROUPS,
            PREFETCH_KB,
        )
    x = x_ptr + m.to(tl.int64)[None, :, None] * K + k[None, None, :]
    x += warp[:, None, None] * BLOCK_K
    m_ok = (m < M)[None, :, None]

    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    total = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    ones = tl.full([WARPS, BLOCK_N, WIDTH], 1.0, dtype)
    here = row_ok & (kb_begin + warp < kb_end)[:, None]
    s = load_groups(scales, kb_begin, PER_BLOCK, GROUPS, here)
    z = s if SYMMETRIC else load_groups(zeros, kb_begin, PER_BLOCK, GROUPS, here)
    if PDL:
        gdc_wait()
    for kb in tl.range(kb_begin, kb_end, WARPS, num_stages=STAGES):
        if EVEN_N and EVEN_K:
            words = tl.load(codes + kb * (ROWS * WIDTH))
        else:
            here = row_ok & (kb + warp < kb_end)[:, None]
            words = tl.load(codes + kb * (ROWS * WIDTH), mask=here[:, :, None], other=0)
        next_s = s
        next_z = z
        if GROUPS > 0:
            there = row_ok & (kb + WARPS + warp < kb_end)[:, None]
            next_s = load_groups(scales, kb + WARPS, PER_BLOCK, GROUPS, there)
            next_z = next_s
            if not SYMMETRIC:
                next_z = load_groups(zeros, kb + WARPS, PER_BLOCK, GROUPS, there)
        for g in tl.static_range(PER_BLOCK):
            if GROUPS > 0:
                part = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
                sums = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
            for p in tl.static_range(PLANES):
                start = kb * BLOCK_K + (g * PLANES + p) * WIDTH
                if EVEN_K:
                    x_plane = tl.load(x + start, mask=m_ok, other=0.0)
                else:
                    inputs = start + warp[:, None, None] * BLOCK_K + k[None, None, :]
                    k_ok = (inputs < K) & (kb + warp < kb_end)[:, None, None]
                    x_plane = tl.load(x + start, mask=m_ok & k_ok, other=0.0)
                x_plane = tl.permute(x_plane, 0, 2, 1)
                w = unpack_plane(words, g * PLANES + p, dtype, USE_PTX)
                if GROUPS > 0:
                    part = tl.dot(w, x_plane, part)
                    sums = tl.dot(ones, x_plane, sums)
                else:
                    acc = tl.dot(w, x_plane, acc)
                    total = tl.dot(ones, x_plane, total)
            if GROUPS > 0:
                offset = offset_of(z[g], SYMMETRIC, EXCESS)[:, :, None]
                acc += s[g].to(tl.float32)[:, :, None] * (part - offset * sums)
        s = next_s
        z = next_z
    if GROUPS == 0:
        offset = offset_of(z[0], SYMMETRIC, EXCESS)[:, :, None]
        acc = s[0].to(tl.float32)[:, :, None] * (acc - offset * total)
    y = tl.sum(acc, axis=0)
    if SPLIT_K == 1:
        write_tile(y, bias_ptr, out_ptr, rows, m, M, N)
    else:
        y, is_last = add_splits(y, partials_ptr, counters_ptr, tile, split, SPLIT_K)
        if is_last:
            write_tile(y, bias_ptr, out_ptr, rows, m, M, N)
