"""A few rows of inputs times a 4-bit weight: from memory into registers, and there it stays.

Weights are operand A of `mma.m16n8k16` and inputs operand B, as in `kernel.py`, but nothing goes
through shared memory: a lane's sixteen bytes of one row of weights are its part of the operand
already, if the inputs are taken in the same order. `as_operand` says so in terms of shapes (the
four lanes of a row hold 8 words each; the instruction takes them two by two), and the compiler then
finds nothing to move. All words of a step are asked for before the first is used, in the first step
before the inputs exist.

The excess of the codes and the zero points leave by sums of inputs, one more product with ones
that a warp's rows share, or by a subtraction from every weight (CENTERED), which is cheaper than
that product from sixteen rows of inputs on.

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
    offset_of,
    unpack_plane,
    write_tile,
)


@triton.jit
def axes(WARPS: tl.constexpr, COUNT: tl.constexpr, STAGED: tl.constexpr):
    """(warp, row of COUNT) of a tile [8, WARPS, COUNT / 8, WIDTH], which the compiler loads with
    eight rows of four lanes to a warp; [WARPS, COUNT / 8, 8, WIDTH] for shared memory."""
    warp = tl.arange(0, WARPS)
    eight = tl.arange(0, 8)
    band = tl.arange(0, COUNT // 8)
    if STAGED:
        warp = warp[:, None, None, None]
        row = band[None, :, None, None] * 8 + eight[None, None, :, None]
    else:
        warp = warp[None, :, None, None]
        row = band[None, None, :, None] * 8 + eight[:, None, None, None]
    return warp, row


@triton.jit
def as_operand(tile, STAGED: tl.constexpr):
    """A tile by `axes` as [WARPS, COUNT, WIDTH], the columns in the order of an operand."""
    rows = tile if STAGED else tl.permute(tile, 1, 2, 0, 3)
    WARPS: tl.constexpr = rows.shape[0]
    COUNT: tl.constexpr = rows.shape[1] * 8
    WIDTH: tl.constexpr = rows.shape[3]
    lanes = tl.reshape(rows, [WARPS, COUNT, 4, WIDTH // 8, 2])
    return tl.reshape(tl.permute(lanes, 0, 1, 3, 2, 4), [WARPS, COUNT, WIDTH])


@triton.jit
def side_by_side(tiles, COUNT: tl.constexpr):
    """COUNT (1, 2 or 4) tiles [WARPS, 16, M] as [WARPS, 16 COUNT, M]."""
    WARPS: tl.constexpr = tiles[0].shape[0]
    BLOCK_M: tl.constexpr = tiles[0].shape[2]
    joined = tiles[0]
    if COUNT == 2:
        both = tl.permute(tl.join(tiles[0], tiles[1]), 0, 3, 1, 2)
        joined = tl.reshape(both, [WARPS, 32, BLOCK_M])
    if COUNT == 4:
        pairs = tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3]))
        joined = tl.reshape(tl.permute(pairs, 0, 4, 3, 1, 2), [WARPS, 64, BLOCK_M])
    return joined


@triton.jit
def sixteen_of(tile, i, N, ALL: tl.constexpr):
    """Which sixteen of N rows are the i-th of ALL of this program."""
    return tl.minimum(tile * ALL + i, tl.cdiv(N, ROWS) - 1).to(tl.int64)


@triton.jit
def pointers_of(
    pointers, tile, across, N, per_sixteen, TILES: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    """`pointers` moved to each of a warp's TILES sixteens."""
    moved = ()
    for r in tl.static_range(TILES):
        sixteen = sixteen_of(tile, across * TILES + r, N, TILES * ACROSS)
        moved = moved + (pointers + sixteen * per_sixteen,)
    return moved


@triton.jit
def prefetch_step(
    codes_ptr, tile, kb, kb_end, num_kb, N, STEP: tl.constexpr, TILES: tl.constexpr,
    WARPS: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Ask the words that `load_words` will load at `kb` into L2, a line of 128 bytes at a time."""
    BLOCK: tl.constexpr = ROWS * WIDTH
    warp = tl.arange(0, WARPS)[:, None, None]
    i = warp % ACROSS * TILES + tl.arange(0, TILES)[None, :, None]
    line = tl.arange(0, BLOCK // 64)[None, None, :] * 64
    at = codes_ptr + sixteen_of(tile, i, N, TILES * ACROSS) * num_kb * BLOCK + line
    for j in tl.static_range(STEP):
        block = tl.minimum(kb + j * (WARPS // ACROSS) + warp // ACROSS, kb_end - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(at + block * BLOCK).to(tl.uint64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_words(
    codes, kb, kb_end, along, STEP: tl.constexpr, TILES: tl.constexpr, DEEP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Words by `axes` of STEP K-blocks x TILES sixteens, STEP outermost."""
    BLOCK: tl.constexpr = ROWS * codes[0].shape[3]
    words = ()
    for i in tl.static_range(STEP):
        for r in tl.static_range(TILES):
            at = codes[r] + kb * BLOCK + i * DEEP * BLOCK
            if WHOLE:
                words = words + (tl.load(at, eviction_policy="evict_first"),)
            else:
                there = kb + i * DEEP + along < kb_end
                words = words + (tl.load(at, mask=there, other=0, eviction_policy="evict_first"),)
    return words


@triton.jit
def load_scales(
    scales, kb, kb_end, along, STEP: tl.constexpr, TILES: tl.constexpr, DEEP: tl.constexpr,
    GROUPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Scales (or zero points) [WARPS, 16] of STEP K-blocks x TILES sixteens x groups."""
    PER_BLOCK: tl.constexpr = GROUPS if GROUPS > 0 else 1
    values = ()
    for i in tl.static_range(STEP):
        for r in tl.static_range(TILES):
            for g in tl.static_range(PER_BLOCK):
                at = scales[r] + kb * (GROUPS * ROWS) + (i * DEEP * GROUPS + g) * ROWS
                if WHOLE or GROUPS == 0:
                    values = values + (tl.load(at),)
                else:
                    there = kb + i * DEEP + along < kb_end
                    values = values + (tl.load(at, mask=there, other=0),)
    return values


@triton.jit
def load_plane(
    x, kb, kb_end, along, K, PLANE: tl.constexpr, EVEN_K: tl.constexpr, WHOLE: tl.constexpr
):
    """Inputs by `axes` of a plane; a mask of whole K-blocks leaves loads wide."""
    WIDTH: tl.constexpr = x.shape[3]
    at = x + kb * (4 * WIDTH) + PLANE * WIDTH
    if WHOLE and EVEN_K:
        return tl.load(at)
    ok = kb + along < kb_end
    if not EVEN_K:
        first = (kb + along) * (4 * WIDTH) + PLANE * WIDTH
        ok = ok & (first + tl.arange(0, WIDTH)[None, None, None, :] < K)
    return tl.load(at, mask=ok, other=0.0)


@triton.jit
def add_step(
    acc, total, words, s, z, x, kb, kb_end, along, K, STEP: tl.constexpr,
    TILES: tl.constexpr, DEEP: tl.constexpr, GROUPS: tl.constexpr, CENTERED: tl.constexpr,
    SYMMETRIC: tl.constexpr, EVEN_K: tl.constexpr, WHOLE: tl.constexpr, STAGED: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """Sums [WARPS, 16, M] of each sixteen, and of the inputs, + those of one step."""
    dtype: tl.constexpr = x.dtype.element_ty
    EXCESS: tl.constexpr = excess(dtype == tl.bfloat16, USE_PTX)
    WARPS: tl.constexpr = total.shape[0]
    WIDTH: tl.constexpr = x.shape[3]
    PER_BLOCK: tl.constexpr = GROUPS if GROUPS > 0 else 1
    PLANES: tl.constexpr = 4 // PER_BLOCK
    ones = tl.full([WARPS, 16, WIDTH], 1.0, dtype)
    nothing = tl.zeros(total.shape, tl.float32)
    for i in tl.static_range(STEP):
        for g in tl.static_range(PER_BLOCK):
            sums = total if GROUPS == 0 else nothing
            parts = acc
            if GROUPS > 0:
                parts = (nothing,)
                for _ in tl.static_range(1, TILES):
                    parts = parts + (nothing,)
            for p in tl.static_range(PLANES):
                inputs = load_plane(
                    x, kb + i * DEEP, kb_end, along, K, g * PLANES + p, EVEN_K, WHOLE
                )
                inputs = tl.permute(as_operand(inputs, STAGED), 0, 2, 1)
                if not CENTERED:
                    sums = tl.dot(ones, inputs, sums)
                products = ()
                for r in tl.static_range(TILES):
                    held = as_operand(words[i * TILES + r], STAGED)
                    w = unpack_plane(held, g * PLANES + p, dtype, USE_PTX)
                    if CENTERED:
                        zero = z[(i * TILES + r) * PER_BLOCK + g]
                        w -= offset_of(zero, SYMMETRIC, EXCESS)[:, :, None].to(dtype)
                    products = products + (tl.dot(w, inputs, parts[r]),)
                parts = products
            if GROUPS == 0:
                acc = parts
                total = sums
            else:
                scaled = ()
                for r in tl.static_range(TILES):
                    scale = s[(i * TILES + r) * PER_BLOCK + g].to(tl.float32)[:, :, None]
                    part = parts[r]
                    if not CENTERED:
                        zero = z[(i * TILES + r) * PER_BLOCK + g]
                        part -= offset_of(zero, SYMMETRIC, EXCESS)[:, :, None] * sums
                    scaled = scaled + (acc[r] + scale * part,)
                acc = scaled
    return acc, total


@triton.jit(do_not_specialize=["M"])
def few_rows(
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
    TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    ACROSS: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPS: tl.constexpr,
    CENTERED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WHOLE: tl.constexpr,
    ONCE: tl.constexpr,
    PREFETCH: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile [16 TILES ACROSS, BLOCK_M] of y.T. ACROSS warps share out its rows, a team, and its
    K-blocks go round among the teams: warp = team * ACROSS + share of rows.

    STEP: K-blocks that a warp asks for at a time. AHEAD: one step ahead, into registers. STAGES:
    if more than 1, STAGES - 1 steps ahead, into shared memory. EVEN_K: BLOCK_K divides K.
    WHOLE: every warp has a K-block in every turn. ONCE: one step is all. PREFETCH: how many steps
    before they are loaded words are asked into L2.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    EXCESS: tl.constexpr = excess(dtype == tl.bfloat16, USE_PTX)
    WIDTH: tl.constexpr = BLOCK_K // 4
    DEEP: tl.constexpr = WARPS // ACROSS
    TURN: tl.constexpr = STEP * DEEP
    STAGED: tl.constexpr = STAGES > 1 and not ONCE
    SYMMETRIC: tl.constexpr = zero_ptr is None
    tile = tl.program_id(0)
    split = tl.program_id(1)
    kb_begin = split * num_kb // SPLIT_K
    kb_end = (split + 1) * num_kb // SPLIT_K

    k = tl.arange(0, WIDTH)[None, None, None, :]
    warp, row = axes(WARPS, 16, STAGED)
    along = warp // ACROSS
    codes = codes_ptr + (along * (ROWS * WIDTH) + row * WIDTH + k)
    across = warp % ACROSS if ACROSS > 1 else 0
    codes = pointers_of(codes, tile, across, N, num_kb * (ROWS * WIDTH), TILES, ACROSS)
    _, m = axes(WARPS, BLOCK_M, STAGED)
    m = tl.minimum(m, M - 1)  # sums of rows that are not there are not stored
    x = x_ptr + (m.to(tl.int64) * K + along * BLOCK_K + k)
    team = (tl.arange(0, WARPS) // ACROSS)[:, None]
    group = team * (GROUPS * ROWS) + tl.arange(0, 16)[None, :]
    across = (tl.arange(0, WARPS) % ACROSS)[:, None] if ACROSS > 1 else 0
    per_sixteen = (num_kb * GROUPS if GROUPS > 0 else 1) * ROWS
    scales = pointers_of(scale_ptr + group, tile, across, N, per_sixteen, TILES, ACROSS)
    zeros = scales
    if not SYMMETRIC:
        zeros = pointers_of(zero_ptr + group, tile, across, N, per_sixteen, TILES, ACROSS)

    words = ()
    if not STAGED:
        words = load_words(codes, kb_begin, kb_end, along, STEP, TILES, DEEP, WHOLE)
    s = load_scales(scales, kb_begin, kb_end, team, STEP, TILES, DEEP, GROUPS, WHOLE)
    z = s
    if not SYMMETRIC:
        z = load_scales(zeros, kb_begin, kb_end, team, STEP, TILES, DEEP, GROUPS, WHOLE)
    total = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)
    acc = (total,)
    for _ in tl.static_range(1, TILES):
        acc = acc + (total,)
    if not ONCE:
        for turn in tl.static_range(PREFETCH):
            here = kb_begin + (turn if STAGED else turn + 1) * TURN
            prefetch_step(
                codes_ptr, tile, here, kb_end, num_kb, N, STEP, TILES, WARPS, ACROSS, WIDTH
            )
    if PDL:
        gdc_wait()
    if not STAGED and (ONCE or not AHEAD):
        acc, total = add_step(
            acc, total, words, s, z, x, kb_begin, kb_end, along, K, STEP, TILES, DEEP, GROUPS,
            CENTERED, SYMMETRIC, EVEN_K, WHOLE, STAGED, USE_PTX,
        )  # fmt: skip
    if not ONCE:
        first = kb_begin if AHEAD or STAGED else kb_begin + TURN
        for kb in tl.range(first, kb_end, TURN, num_stages=STAGES):
            then = kb + TURN if AHEAD else kb
            there: tl.constexpr = WHOLE and not AHEAD
            next_words = load_words(codes, then, kb_end, along, STEP, TILES, DEEP, there)
            soon = kb + TURN if STAGED else then
            near: tl.constexpr = there and not STAGED
            next_s = load_scales(scales, soon, kb_end, team, STEP, TILES, DEEP, GROUPS, near)
            next_z = next_s
            if not SYMMETRIC:
                next_z = load_scales(zeros, soon, kb_end, team, STEP, TILES, DEEP, GROUPS, near)
            if PREFETCH > 0 and not STAGED:
                prefetch_step(
                    codes_ptr, tile, then + PREFETCH * TURN, kb_end, num_kb, N, STEP, TILES, WARPS,
                    ACROSS, WIDTH,
                )  # fmt: skip
            if AHEAD:
                now, now_s, now_z = words, s, z
            elif STAGED:
                now, now_s, now_z = next_words, s, z
            else:
                now, now_s, now_z = next_words, next_s, next_z
            acc, total = add_step(
                acc, total, now, now_s, now_z, x, kb, kb_end, along, K, STEP, TILES, DEEP, GROUPS,
                CENTERED, SYMMETRIC, EVEN_K, WHOLE, STAGED, USE_PTX,
            )  # fmt: skip
            if AHEAD:
                words = next_words
            if AHEAD or STAGED or GROUPS == 0:
                s = next_s
                z = next_z
    if GROUPS == 0:
        scaled = ()
        for r in tl.static_range(TILES):
            part = acc[r]
            if not CENTERED:
                part -= offset_of(z[r], SYMMETRIC, EXCESS)[:, :, None] * total
            scaled = scaled + (s[r].to(tl.float32)[:, :, None] * part,)
        acc = scaled
    ROWS_HERE: tl.constexpr = 16 * TILES * ACROSS
    y = tl.reshape(side_by_side(acc, TILES), [DEEP, ROWS_HERE, BLOCK_M])
    y = tl.sum(y, axis=0)
    rows = tile * ROWS_HERE + tl.arange(0, ROWS_HERE)
    m = tl.arange(0, BLOCK_M)
    if SPLIT_K == 1:
        write_tile(y, bias_ptr, out_ptr, rows, m, M, N)
    else:
        y, is_last = add_splits(y, partials_ptr, counters_ptr, tile, split, SPLIT_K)
        if is_last:
            write_tile(y, bias_ptr, out_ptr, rows, m, M, N)
