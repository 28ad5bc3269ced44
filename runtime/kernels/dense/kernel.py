"""Triton matrix products out = x W^T, for weights [out, in] that lie K-contiguous.

Legend: M rows (tokens), N output features, K input features. `gemv` serves one row, `gemm` a few
hundred with its K range split over programs, `gemm_tma` thousands. All three multiply by a scale
per row and per output channel when asked, which is what 8-bit codes need, so that `w8a8` uses them
too. Operands of one product have one type: bfloat16, float16, float32, int8 or e4m3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_rows(pointers, num_bytes):
    """Ask L2 for `num_bytes` (a multiple of 16) behind each pointer; sm_90 and later."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sum_splits(acc, partials_ptr, counters_ptr, tile, split, SPLITS: tl.constexpr):
    """(sum over the splits of a tile, whether this program was the last of them to arrive).

    Whoever arrives last adds all partial sums in the order of the splits, so the bits do not depend
    on the order of arrival, and puts the counter back to zero.
    """
    BLOCK_A: tl.constexpr = acc.shape[0]
    BLOCK_B: tl.constexpr = acc.shape[1]
    SIZE: tl.constexpr = BLOCK_A * BLOCK_B
    at = tl.arange(0, BLOCK_A)[:, None] * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
    first = partials_ptr + tile.to(tl.int64) * (SPLITS * SIZE)
    tl.store(first + split * SIZE + at, acc, cache_modifier=".cg")
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == SPLITS - 1
    total = tl.zeros_like(acc)
    if is_last:
        for i in tl.static_range(SPLITS):
            total += tl.load(first + i * SIZE + at, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return total, is_last


@triton.jit
def load_scale(ptr, at, limit):
    """Scales as float32, None where there are none. Asked for before a product, or each of its
    programs ends with the time that memory takes to answer."""
    scale = None
    if ptr is not None:
        scale = tl.load(ptr + at, mask=at < limit, other=0.0).to(tl.float32)
    return scale


@triton.jit
def finish(acc, n, m, N, M, out_ptr, row_scale, channel_scale, bias_ptr):
    """Scale, add the bias and store a tile of sums; `n`, `m` and the scales broadcast to its shape.
    What is None is left out."""
    y = acc.to(tl.float32)
    if row_scale is not None:
        y = y * row_scale
    if channel_scale is not None:
        y = y * channel_scale
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    at = out_ptr + m.to(tl.int64) * N + n
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def gemv(
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
    PDL: tl.constexpr,
):
    """One row: a program owns BLOCK_N channels and walks all of K. The next tile is always asked
    for before the one at hand is used, and the first before anything is waited for."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    w = tl.load(w_ptrs, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    channel_scale = load_scale(channel_scale_ptr, n, N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.zeros([BLOCK_N], dtype=tl.int32)
    row_scale = load_scale(row_scale_ptr, m, 1)
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        left = K - start - BLOCK_K
        mask = (k < left)[None, :]
        w_next = tl.load(
            w_ptrs + (start + BLOCK_K), mask=mask, other=0.0, eviction_policy="evict_first"
        )
        acc += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
        w = w_next
    finish(acc, n, m, N, 1, out_ptr, row_scale, channel_scale, bias_ptr)


@triton.jit
def sum_products(w_ptrs, x_ptrs, first, end, K, EXACT_EVERY: tl.constexpr, EVEN_K: tl.constexpr):
    """W x^T over columns [first, end) of K, of which `w_ptrs` [n, k] and `x_ptrs` [k, m] are the
    first BLOCK_K; int32 for int8, else float32."""
    BLOCK_K: tl.constexpr = w_ptrs.shape[1]
    IS_INT: tl.constexpr = w_ptrs.dtype.element_ty == tl.int8
    ACC: tl.constexpr = tl.int32 if IS_INT else tl.float32
    acc = tl.zeros([w_ptrs.shape[0], x_ptrs.shape[1]], dtype=ACC)
    for start in range(first, end, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs)
        else:
            is_there = tl.arange(0, BLOCK_K) < K - start
            w = tl.load(w_ptrs, mask=is_there[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=is_there[:, None], other=0.0)
        acc = tl.dot(
            w, x, acc, out_dtype=ACC, max_num_imprecise_acc=EXACT_EVERY, input_precision="ieee"
        )
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    return acc


@triton.jit(do_not_specialize=["M"])
def gemm(
    x_ptr,
    w_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    row_scale_ptr,
    channel_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    split_k,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT_EVERY: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile [BLOCK_N, BLOCK_M] of W x^T over columns [split * split_k, + split_k) of K.

    The weights are the left operand, whose tiles the tensor cores take 64 rows at a time, and the
    few rows of x the right one, which may be as narrow as 16. split_k is a multiple of BLOCK_K;
    EVEN_K says that K is a multiple of BLOCK_K. PREFETCH bytes of each weight row (0: none) are
    brought to L2 while the kernel ahead still runs. e4m3: the tensor cores of sm_90 keep 14 bits
    when adding; their sums are moved to float32 every EXACT_EVERY columns.
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
    k = split * split_k + tl.arange(0, BLOCK_K)
    end = tl.minimum(K, (split + 1) * split_k)
    w_rows = w_ptr + tl.minimum(n, N - 1).to(tl.int64) * K
    channel_scale = load_scale(channel_scale_ptr, n[:, None], N)
    if PDL:
        if PREFETCH > 0:
            item_bytes: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
            size = tl.minimum((end - split * split_k) * item_bytes, PREFETCH)
            prefetch_rows(w_rows + split * split_k, size)
        tl.extra.cuda.gdc_wait()
    row_scale = load_scale(row_scale_ptr, m[None, :], M)
    w_ptrs = w_rows[:, None] + k[None, :]
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = sum_products(w_ptrs, x_ptrs, split * split_k, end, K, EXACT_EVERY, EVEN_K)
    if SPLITS == 1:
        finish(acc, n[:, None], m[None, :], N, M, out_ptr, row_scale, channel_scale, bias_ptr)
    else:
        total, is_last = sum_splits(acc, partials_ptr, counters_ptr, tile, split, SPLITS)
        if is_last:
            finish(total, n[:, None], m[None, :], N, M, out_ptr, row_scale, channel_scale, bias_ptr)


@triton.jit(do_not_specialize=["M"])
def gemm_tma(
    x_desc,
    w_desc,
    w_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    row_scale_ptr,
    channel_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    split_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT_EVERY: tl.constexpr,
    PREFETCH: tl.constexpr,
    IS_INT: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of x W^T over parts of K through the copy engine, as many at a time as programs.

    IS_SWAPPED makes the weights the left operand, for fewer rows than the 64 it takes. Tiles go
    GROUP_M rows of tiles at a time, so that those in flight share their operands in L2. What lies
    past the edges reads as zero.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = num_m * num_n
    ACC: tl.constexpr = tl.int32 if IS_INT else tl.float32
    if PDL:
        if PREFETCH > 0:
            tile, split = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
            first = tl.minimum((tile // num_m) * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
            size = tl.minimum(K - split * split_k, PREFETCH)
            prefetch_rows(w_ptr + first.to(tl.int64) * K + split * split_k, size)
        tl.extra.cuda.gdc_wait()
    for unit in tl.range(tl.program_id(0), num_tiles * SPLITS, tl.num_programs(0)):
        tile = unit % num_tiles
        split = unit // num_tiles
        group = tile // (GROUP_M * num_n)
        rows = tl.minimum(num_m - group * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * num_n)
        first_m = (group * GROUP_M + within % rows) * BLOCK_M
        first_n = (within // rows) * BLOCK_N
        m = first_m + tl.arange(0, BLOCK_M)
        n = first_n + tl.arange(0, BLOCK_N)
        if IS_SWAPPED:
            m, n = m[None, :], n[:, None]
        else:
            m, n = m[:, None], n[None, :]
        row_scale = load_scale(row_scale_ptr, m, M)
        channel_scale = load_scale(channel_scale_ptr, n, N)
        if IS_SWAPPED:
            acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=ACC)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=ACC)
        for start in range(split * split_k, tl.minimum(K, (split + 1) * split_k), BLOCK_K):
            x = x_desc.load([first_m, start])
            w = w_desc.load([first_n, start])
            if IS_SWAPPED:
                acc = tl.dot(w, x.T, acc, out_dtype=ACC, max_num_imprecise_acc=EXACT_EVERY)
            else:
                acc = tl.dot(x, w.T, acc, out_dtype=ACC, max_num_imprecise_acc=EXACT_EVERY)
        if SPLITS == 1:
            finish(acc, n, m, N, M, out_ptr, row_scale, channel_scale, bias_ptr)
        else:
            total, is_last = sum_splits(acc, partials_ptr, counters_ptr, tile, split, SPLITS)
            if is_last:
                finish(total, n, m, N, M, out_ptr, row_scale, channel_scale, bias_ptr)
