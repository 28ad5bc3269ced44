"""Attention of spans of several queries over the paged pool, causal and windowed.

A tile's rows are queries x heads of one key/value head, so a group's heads share every key read.
One launch serves all spans: a program finds its span from the query starts alone. Tiles of keys
start at multiples of TILE whatever the chunk, and a tile in which a row sees nothing leaves it as
it was, so a row's result does not depend on where its prompt was cut.

Shape legend: M rows, N keys of a tile, D head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.attention.kernel_parts import attend_tile, block_ids, outer_scales


@triton.jit
def _span_of(tile, starts_ptr, num_spans, BLOCK_Q: tl.constexpr):
    """The span that owns a tile: span s starts at tile (start - start of span 0) // BLOCK_Q + s.

    That reserves at least as many tiles as each span needs; the surplus ones do nothing.
    """
    origin = tl.load(starts_ptr)
    low, high = tile * 0, tile * 0 + num_spans
    while high - low > 1:
        middle = (low + high) // 2
        first = (tl.load(starts_ptr + middle) - origin) // BLOCK_Q + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low, tile - ((tl.load(starts_ptr + low) - origin) // BLOCK_Q + low)


@triton.jit
def _attend_range(
    q_MD,
    m_M,
    l_M,
    acc_MD,
    positions_M,
    pool_ptr,
    token_scales_ptr,
    table_ptr,
    head,
    first_tile,
    last_tile,
    seq_len,
    window,
    qk_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KV: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    keys_N = first_tile * TILE + tl.arange(0, TILE)
    blocks_N = block_ids(table_ptr, keys_N, seq_len, BLOCK_SIZE)
    for _ in range(first_tile, last_tile):
        visible_MN = keys_N[None, :] <= positions_M[:, None]
        if WINDOWED:
            visible_MN &= keys_N[None, :] > positions_M[:, None] - window
        next_blocks_N = block_ids(table_ptr, keys_N + TILE, seq_len, BLOCK_SIZE)
        m_M, l_M, acc_MD = attend_tile(
            q_MD, m_M, l_M, acc_MD, pool_ptr, token_scales_ptr, blocks_N, keys_N, visible_MN,
            keys_N < seq_len, head, qk_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, KV, MASKED,
            WINDOWED, USE_PTX,
        )  # fmt: skip
        keys_N += TILE
        blocks_N = next_blocks_N
    return m_M, l_M, acc_MD


@triton.jit(do_not_specialize=["first_span", "num_spans", "table_stride", "window"])
def prefill_kernel(
    q_ptr,
    pool_ptr,
    head_scales_ptr,
    token_scales_ptr,
    tables_ptr,
    starts_ptr,
    seq_lens_ptr,
    out_ptr,
    first_span,
    num_spans,
    q_stride,
    table_stride,
    window,
    scale,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE_TILE: tl.constexpr,
    KV: tl.constexpr,
    WINDOWED: tl.constexpr,
    UNIFORM: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out [T, H * D]: the rows of `num_spans` spans from `first_span` on.

    starts [S + 1]: first row of every span of the step, and the end of the last.
    Keys that every row sees come in tiles of WHOLE_TILE, those near the diagonal in tiles of TILE.
    UNIFORM: all take the masked path in tiles of TILE, so that which path a key takes cannot show
    in a row's bits (deterministic mode).
    """
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    starts_ptr += first_span
    seq_lens_ptr += first_span
    tables_ptr += first_span.to(tl.int64) * table_stride
    # Later tiles see more keys: starting them first leaves the short ones to even out the end.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, head = program // KV_HEADS, program % KV_HEADS
    s, local = _span_of(tile, starts_ptr, num_spans, BLOCK_Q)
    start = tl.load(starts_ptr + s)
    num_queries = tl.load(starts_ptr + s + 1) - start
    first_query = local * BLOCK_Q
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens_ptr + s)
    rows_M = tl.arange(0, ROWS)
    queries_M = first_query + rows_M // GROUP
    is_row_M = (queries_M < num_queries) & (rows_M < BLOCK_Q * GROUP)
    positions_M = tl.minimum(seq_len - num_queries + queries_M, seq_len - 1)
    first_position = seq_len - num_queries + first_query
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    heads_M = head * GROUP + rows_M % GROUP
    d = tl.arange(0, HEAD_DIM)
    q_row_M = (start + queries_M).to(tl.int64)
    q_at_MD = (q_row_M * q_stride + heads_M * HEAD_DIM)[:, None] + d[None, :]
    q_MD = tl.load(q_ptr + q_at_MD, mask=is_row_M[:, None], other=0.0).to(DTYPE)
    qk_scale, v_scale = outer_scales(head_scales_ptr, head, scale, KV_HEADS, KV)
    table_ptr = tables_ptr + s.to(tl.int64) * table_stride
    m_M = tl.full([ROWS], float("-inf"), tl.float32)
    l_M = tl.zeros([ROWS], tl.float32)
    acc_MD = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    low_tile = tile * 0
    if WINDOWED:
        low_tile = tl.maximum(first_position + 1 - window, 0) // TILE
    if not WINDOWED and not UNIFORM:
        num_whole = (first_position + 1) // WHOLE_TILE
        m_M, l_M, acc_MD = _attend_range(
            q_MD, m_M, l_M, acc_MD, positions_M, pool_ptr, token_scales_ptr, table_ptr, head,
            low_tile, num_whole, seq_len, window, qk_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            WHOLE_TILE, KV, False, WINDOWED, USE_PTX,
        )  # fmt: skip
        low_tile = num_whole * (WHOLE_TILE // TILE)
    m_M, l_M, acc_MD = _attend_range(
        q_MD, m_M, l_M, acc_MD, positions_M, pool_ptr, token_scales_ptr, table_ptr, head,
        low_tile, tl.cdiv(end, TILE), seq_len, window, qk_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        TILE, KV, True, WINDOWED, USE_PTX,
    )  # fmt: skip
    out_MD = acc_MD * (v_scale / l_M)[:, None]
    out_at_MD = (q_row_M * (KV_HEADS * GROUP) + heads_M)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + out_at_MD, out_MD.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None])
