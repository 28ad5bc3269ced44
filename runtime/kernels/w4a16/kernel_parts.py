"""What the W4A16 kernels share: unpacking, scales, prefetching, adding splits, writing tiles.

Imports triton, so only kernels import this.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)
"""Rows of weights whose words lie together; `pack.ROWS`."""


@triton.constexpr_function
def _unpack_asm(plane, is_bf16):
    magic = "0x43004300" if is_bf16 else "0x64006400"
    lop3 = f"lop3.b32 $0, {{}}, 0x000f000f, {magic}, 0xea;"
    if plane == 0:
        return lop3.format("$1")
    return f"{{ .reg .b32 t; shr.u32 t, $1, {4 * plane}; {lop3.format('t')} }}"


@triton.constexpr_function
def excess(is_bf16, use_ptx):
    """What `unpack_plane` adds to a code."""
    if not use_ptx:
        return 0
    return 128 if is_bf16 else 1024


@triton.jit
def unpack_plane(words, PLANE: tl.constexpr, dtype: tl.constexpr, USE_PTX: tl.constexpr):
    """Codes 0..15 of one plane, plus `excess`, as 16-bit floats of `dtype`."""
    asm: tl.constexpr = _unpack_asm(PLANE, dtype == tl.bfloat16)
    if not USE_PTX:
        values = ((words >> (4 * PLANE)) & 15).to(dtype)
    elif dtype == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            asm, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        values = tl.inline_asm_elementwise(
            asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    return values


@triton.jit
def unpack_run(
    words,
    offset,
    scale,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    dtype: tl.constexpr,
    SCALING: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """COUNT planes (1, 2 or 4) from FIRST on, side by side along the last dimension: weights of
    COUNT * WIDTH consecutive inputs. Registers are renamed, nothing moves."""
    if COUNT == 1:
        run = unpack_plane(words, FIRST, dtype, USE_PTX)
        if SCALING != "sums":
            run -= offset
        if SCALING == "weights":
            run = scaled(run, scale)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = unpack_run(words, offset, scale, FIRST, HALF, dtype, SCALING, USE_PTX)
        high = unpack_run(words, offset, scale, FIRST + HALF, HALF, dtype, SCALING, USE_PTX)
        run = beside(low, high)
    return run


@triton.jit
def beside(low, high):
    """[..., W] and [..., W] as [..., 2 W]."""
    both = tl.join(low, high)
    if len(low.shape) == 2:
        run = tl.reshape(tl.permute(both, 0, 2, 1), [low.shape[0], 2 * low.shape[1]])
    else:
        run = tl.reshape(
            tl.permute(both, 0, 1, 3, 2), [low.shape[0], low.shape[1], 2 * low.shape[2]]
        )
    return run


@triton.jit
def scaled(w, scale):
    """w * scale in w's dtype, rounded once, as `dequantize` does."""
    if scale.dtype == w.dtype:
        product = w * scale
    else:
        product = (w.to(tl.float32) * scale.to(tl.float32)).to(w.dtype)
    return product


@triton.jit
def prefetch_l2(pointer, num_bytes):
    """Ask for `num_bytes` (a multiple of 16) at `pointer`, once per program."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointer.to(tl.uint64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    n_tile,
    kb_begin,
    kb_end,
    num_kb,
    N,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Ask the first LIMIT K-blocks of a tile's codes into L2, and all its scales, which are read
    a few bytes at a time with little ahead."""
    SCALE_BYTES: tl.constexpr = GROUPS * ROWS * scale_ptr.dtype.element_ty.primitive_bitwidth // 8
    num_bytes = tl.minimum(kb_end - kb_begin, LIMIT) * (ROWS * WIDTH * 2)
    for i in tl.static_range(BLOCK_N // ROWS):
        block = tl.minimum(n_tile * (BLOCK_N // ROWS) + i, tl.cdiv(N, ROWS) - 1)
        at = block.to(tl.int64) * num_kb + kb_begin
        if GROUPS > 0:
            group = at * (GROUPS * ROWS)
            prefetch_l2(scale_ptr + group, (kb_end - kb_begin) * SCALE_BYTES)
            if zero_ptr is not None:
                prefetch_l2(zero_ptr + group, (kb_end - kb_begin) * (GROUPS * ROWS))
        prefetch_l2(codes_ptr + at * (ROWS * WIDTH), num_bytes)


@triton.jit
def load_group(pointers, kb, g: tl.constexpr, GROUPS: tl.constexpr, in_range):
    """Scales (or zero points) of group `g` of K-block `kb`; of the only group where GROUPS is 0."""
    at = kb * GROUPS + g
    return tl.load(pointers + at * ROWS, mask=in_range, other=0)


@triton.jit
def load_groups(pointers, kb, PER_BLOCK: tl.constexpr, GROUPS: tl.constexpr, in_range):
    """`load_group` of every group of a K-block."""
    values = (load_group(pointers, kb, 0, GROUPS, in_range),)
    for g in tl.static_range(1, PER_BLOCK):
        values = values + (load_group(pointers, kb, g, GROUPS, in_range),)
    return values


@triton.jit
def load_staged(pointers, rows, kb, g: tl.constexpr, GROUPS: tl.constexpr, in_range):
    """`load_group` of 16-bit scales through shared memory, stages ahead. Copies into it take at
    least four bytes: a scale comes with its neighbour, for both of their rows."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    words = (pointers - rows % 2).to(tl.pointer_type(tl.int32))
    pairs = tl.load(words + (kb * GROUPS + g) * (ROWS // 2), mask=in_range, other=0)
    return (pairs >> (rows % 2 * 16)).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def load_staged_groups(pointers, rows, kb, PER_BLOCK: tl.constexpr, GROUPS: tl.constexpr, ok):
    """`load_staged` of every group of a K-block."""
    values = (load_staged(pointers, rows, kb, 0, GROUPS, ok),)
    for g in tl.static_range(1, PER_BLOCK):
        values = values + (load_staged(pointers, rows, kb, g, GROUPS, ok),)
    return values


@triton.jit
def offset_of(zero_point, SYMMETRIC: tl.constexpr, EXCESS: tl.constexpr):
    """Zero point + excess as float32; 8 + excess for symmetric weights, whatever is given."""
    if SYMMETRIC:
        offset = tl.full(zero_point.shape, 8 + EXCESS, tl.float32)
    else:
        offset = zero_point.to(tl.float32) + EXCESS
    return offset


@triton.jit
def write_tile(acc, bias_ptr, out_ptr, rows, m, M, N):
    """acc [BLOCK_N, BLOCK_M] + bias to out [M, N]."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * N + rows[:, None]
    mask = (rows < N)[:, None] & (m < M)[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_splits(acc, partials_ptr, counters_ptr, tile, split, SPLIT_K: tl.constexpr):
    """This program's part of a tile goes to scratch memory; whoever comes last adds all parts in
    the order of the splits, so that arrival decides nothing. Returns (sum, is last)."""
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    at = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
    first = partials_ptr + (tile * SPLIT_K).to(tl.int64) * (BLOCK_N * BLOCK_M) + at
    tl.store(first + split * (BLOCK_N * BLOCK_M), acc, cache_modifier=".cg")
    tl.debug_barrier()
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
    if is_last:
        acc = tl.load(first, cache_modifier=".cg")
        for other in range(1, SPLIT_K):
            acc += tl.load(first + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return acc, is_last
