"""Attention of spans of several queries over a paged 16-bit pool, for Hopper (sm_90).

Written in Gluon, since none of this can be said in Triton: one warp copies keys and values, a block
of the pool at a time, by the tensor copy engine, whose addresses cost the other warps nothing; two
warpgroups compute, each 64 rows (queries x heads of a group) of the tile of queries. A warpgroup's
scores of one tile of keys are computed beside its values of the tile before, and its softmax lies
between (FlashAttention-3, arXiv 2407.08608, section 3.2); the warpgroups take turns at the tensor
cores. Programs are as many as multiprocessors and walk a list of items, each a tile of queries of
one key/value head, longest first (`plan_prefill_kernel`), back and forth, so that their sums come
out alike.

Causal, no window. Nothing here depends on the host's knowledge of lengths.

Shape legend: M rows of a warpgroup, N keys of a tile, D head_dim.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Later versions of Triton renamed it.
_load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# Rows of a warpgroup's products.
ROWS = gl.constexpr(64)


@gluon.jit
def _item(turn):
    """A program's item at its turn: forth on even turns, back on odd ones."""
    p, n = gl.program_id(0), gl.num_programs(0)
    return turn * n + gl.where(turn % 2 == 0, p, n - 1 - p)


@gluon.jit
def _read_item(work_ptr, item, num_items, KV_HEADS: gl.constexpr):
    """(key/value head, first row, rows of the span from there on, position of the first one, span,
    tiles of keys: 0 where there is nothing to do)."""
    at_ptr = work_ptr + gl.minimum(item, num_items - 1) // KV_HEADS * 5
    row, rows, position = gl.load(at_ptr), gl.load(at_ptr + 1), gl.load(at_ptr + 2)
    span, tiles = gl.load(at_ptr + 3), gl.load(at_ptr + 4)
    is_item = item < num_items
    rows, tiles = gl.where(is_item, rows, 0), gl.where(is_item, tiles, 0)
    return item % KV_HEADS, row, rows, position, span, tiles


@gluon.jit
def _copy_tile(
    desc,
    buffer,
    full,
    table_ptr,
    first_block,
    last_block,
    side,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Ask for a tile's blocks; beyond the sequence its last one stands in.

    Few table entries are held at a time: the warp has next to no registers.
    """
    AT_ONCE: gl.constexpr = min(BLOCKS, 4)
    for i in gl.static_range(0, BLOCKS, AT_ONCE):
        blocks = ()
        for j in gl.static_range(AT_ONCE):
            at = gl.minimum(first_block + i + j, last_block)
            blocks = blocks + (gl.load(table_ptr + at),)
        for j in gl.static_range(AT_ONCE):
            row = (blocks[j] * (2 * KV_HEADS) + side) * BLOCK_SIZE
            slot = buffer.slice((i + j) * BLOCK_SIZE, BLOCK_SIZE)
            _load_block(desc, [row, 0], full, slot)


@gluon.jit
def _copy(
    desc,
    k_tiles,
    v_tiles,
    k_full,
    k_empty,
    v_full,
    v_empty,
    tables_ptr,
    work_ptr,
    table_stride,
    num_items,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp: all items' tiles of keys and values, STAGES ahead of who reads them."""
    BLOCKS: gl.constexpr = TILE // BLOCK_SIZE
    NUM_BYTES: gl.constexpr = TILE * HEAD_DIM * 2
    step = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        head, _row, rows, position, span, tiles = _read_item(
            work_ptr, _item(turn), num_items, KV_HEADS
        )
        last_block = (position + rows - 1) // BLOCK_SIZE
        table_ptr = tables_ptr + span.to(gl.int64) * table_stride
        for n in range(tiles):
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), NUM_BYTES)
            _copy_tile(
                desc, k_tiles.index(stage), k_full.index(stage), table_ptr, n * BLOCKS,
                last_block, head, KV_HEADS, BLOCK_SIZE, BLOCKS,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), NUM_BYTES)
            _copy_tile(
                desc, v_tiles.index(stage), v_full.index(stage), table_ptr, n * BLOCKS,
                last_block, KV_HEADS + head, KV_HEADS, BLOCK_SIZE, BLOCKS,
            )  # fmt: skip
            step += 1


@gluon.jit
def _ask_scores(
    q_tile, k_tiles, k_full, step, SCORES: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr
):
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), step // STAGES & 1)
    blank = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    k_tile = k_tiles.index(stage).permute((1, 0))
    return warpgroup_mma(q_tile, k_tile, blank, use_acc=False, is_async=True)


@gluon.jit
def _ask_values(p_MN, v_tiles, v_full, acc_MD, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(v_full.index(stage), step // STAGES & 1)
    return warpgroup_mma(p_MN, v_tiles.index(stage), acc_MD, is_async=True)


@gluon.jit
def _mask(s_MN, first_key, position, SCORES: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    key_N = first_key + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    position_M = position + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) // GROUP
    is_visible = gl.expand_dims(key_N, 0) <= gl.expand_dims(position_M, 1)
    return gl.where(is_visible, s_MN, float("-inf"))


@gluon.jit
def _soften(s_MN, scale, m_M, l_M):
    """Online softmax in powers of two; every row has seen a key once it has seen a tile."""
    m_new_M = gl.maximum(m_M, gl.max(s_MN, 1) * scale)
    p_MN = gl.exp2(s_MN * scale - gl.expand_dims(m_new_M, 1))
    alpha_M = gl.exp2(m_M - m_new_M)
    return m_new_M, l_M * alpha_M + gl.sum(p_MN, 1), p_MN, alpha_M


@gluon.jit
def _attend_range(
    q_tile,
    k_tiles,
    v_tiles,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turns,
    m_M,
    l_M,
    acc_MD,
    p_MN,
    step,
    taken,
    first,
    last,
    position,
    scale,
    MASKED: gl.constexpr,
    PART: gl.constexpr,
    SCORES: gl.constexpr,
    VALUES: gl.constexpr,
    GROUP: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles [first, last): scores and softmax of each, values of the one before it."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    for n in range(first, last):
        before = (step - 1) % STAGES
        mbarrier.wait(turns.index(PART), (taken & 1) ^ (1 - PART))
        s_MN = _ask_scores(q_tile, k_tiles, k_full, step, SCORES, TILE, STAGES)
        acc_MD = _ask_values(p_MN, v_tiles, v_full, acc_MD, step - 1, STAGES)
        mbarrier.arrive(turns.index(1 - PART), count=1)
        s_MN = warpgroup_mma_wait(1, (s_MN,))
        mbarrier.arrive(k_empty.index(step % STAGES), count=1)
        if MASKED:
            s_MN = _mask(s_MN, n * TILE, position, SCORES, GROUP, TILE)
        m_M, l_M, weights_MN, alpha_M = _soften(s_MN, scale, m_M, l_M)
        next_p_MN = gl.convert_layout(weights_MN.to(p_MN.dtype), WEIGHTS)
        # It came long ago. The assembler would wait for the values before the exponentials; it
        # moves neither across this test's branch.
        mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
        acc_MD, p_MN = warpgroup_mma_wait(0, (acc_MD, p_MN))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc_MD = acc_MD * gl.expand_dims(gl.convert_layout(alpha_M, gl.SliceLayout(1, VALUES)), 1)
        p_MN = next_p_MN
        step += 1
        taken += 1
    return m_M, l_M, acc_MD, p_MN, step, taken


@gluon.jit
def _clear_stale(v_tile, num_stored, TILE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zeros behind the sequence's last value: 0 * NaN of a stale slot would be NaN."""
    PIECE: gl.constexpr = 16
    BY_ROW: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    for i in gl.static_range(0, TILE, PIECE):
        if i + PIECE > num_stored:
            piece = v_tile.slice(i, PIECE)
            is_stored = i + gl.arange(0, PIECE, gl.SliceLayout(1, BY_ROW)) < num_stored
            piece.store(gl.where(gl.expand_dims(is_stored, 1), piece.load(BY_ROW), 0.0))
    fence_async_shared()


@gluon.jit
def _rows(head, row, rows, PART: gl.constexpr, GROUP: gl.constexpr, BY_ROW: gl.constexpr):
    """Of a warpgroup's rows: where they are in the step, their heads, and which there are."""
    QUERIES: gl.constexpr = ROWS // GROUP
    i_M = gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROW))
    query_M = PART * QUERIES + i_M // GROUP
    is_row = (query_M < rows) & (i_M < QUERIES * GROUP)
    return (row + query_M).to(gl.int64), head * GROUP + i_M % GROUP, gl.expand_dims(is_row, 1)


@gluon.jit
def _load_queries(
    q_ptr,
    q_stride,
    head,
    row,
    rows,
    PART: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BY_ROW: gl.constexpr,
):
    row_M, head_M, is_row = _rows(head, row, rows, PART, GROUP, BY_ROW)
    d = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, BY_ROW)), 0)
    at_MD = gl.expand_dims(row_M * q_stride + head_M * HEAD_DIM, 1) + d
    return gl.load(q_ptr + at_MD, mask=is_row, other=0.0)


@gluon.jit
def _compute(
    q_ptr,
    out_ptr,
    q_tile,
    k_tiles,
    v_tiles,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turns,
    work_ptr,
    num_items,
    q_stride,
    scale,
    PART: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Warpgroup PART (0 or 1): its half of the queries of every item."""
    QUERIES: gl.constexpr = ROWS // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_ROW: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    step, taken = 0, 0
    head, row, rows, position, span, tiles = _read_item(work_ptr, _item(0), num_items, KV_HEADS)
    q_MD = _load_queries(q_ptr, q_stride, head, row, rows, PART, GROUP, HEAD_DIM, BY_ROW)
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        next_head, next_row, next_rows, next_position, span, next_tiles = _read_item(
            work_ptr, _item(turn + 1), num_items, KV_HEADS
        )
        if tiles > 0:
            whole = gl.minimum((position + 1) // TILE, tiles)
            q_tile.store(q_MD)
            fence_async_shared()
            first_position = position + PART * QUERIES
            m_M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            l_M = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            acc_MD = gl.zeros([ROWS, HEAD_DIM], gl.float32, VALUES)
            s_MN = _ask_scores(q_tile, k_tiles, k_full, step, SCORES, TILE, STAGES)
            s_MN = warpgroup_mma_wait(0, (s_MN,))
            mbarrier.arrive(k_empty.index(step % STAGES), count=1)
            s_MN = _mask(s_MN, 0, first_position, SCORES, GROUP, TILE)
            m_M, l_M, weights_MN, alpha_M = _soften(s_MN, scale, m_M, l_M)
            p_MN = gl.convert_layout(weights_MN.to(DTYPE), WEIGHTS)
            step += 1
            m_M, l_M, acc_MD, p_MN, step, taken = _attend_range(
                q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, m_M, l_M,
                acc_MD, p_MN, step, taken, 1, whole, first_position, scale, False, PART, SCORES,
                VALUES, GROUP, TILE, STAGES,
            )  # fmt: skip
            m_M, l_M, acc_MD, p_MN, step, taken = _attend_range(
                q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, m_M, l_M,
                acc_MD, p_MN, step, taken, gl.maximum(whole, 1), tiles, first_position, scale, True,
                PART, SCORES, VALUES, GROUP, TILE, STAGES,
            )  # fmt: skip
            last = (step - 1) % STAGES
            num_stored = position + rows - (tiles - 1) * TILE
            if num_stored < TILE:
                mbarrier.wait(v_full.index(last), (step - 1) // STAGES & 1)
                _clear_stale(v_tiles.index(last), num_stored, TILE, HEAD_DIM)
            acc_MD = _ask_values(p_MN, v_tiles, v_full, acc_MD, step - 1, STAGES)
            # Nothing comes behind an item without tiles, so this is missed where nobody asks.
            q_MD = _load_queries(
                q_ptr, q_stride, next_head, next_row, next_rows, PART, GROUP, HEAD_DIM, BY_ROW
            )
            acc_MD, p_MN = warpgroup_mma_wait(0, (acc_MD, p_MN))
            mbarrier.arrive(v_empty.index(last), count=1)
            sums_M = gl.convert_layout(l_M, gl.SliceLayout(1, VALUES))
            out_MD = gl.convert_layout((acc_MD * gl.expand_dims(1.0 / sums_M, 1)).to(DTYPE), BY_ROW)
            row_M, head_M, is_row = _rows(head, row, rows, PART, GROUP, BY_ROW)
            d = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, BY_ROW)), 0)
            at_M = (row_M * (KV_HEADS * GROUP) + head_M) * HEAD_DIM
            gl.store(out_ptr + (gl.expand_dims(at_M, 1) + d), out_MD, mask=is_row)
        head, row, rows = next_head, next_row, next_rows
        position, tiles = next_position, next_tiles


@gluon.jit(do_not_specialize=["num_items", "table_stride"])
def hopper_prefill_kernel(
    q_ptr,
    pool_desc,
    tables_ptr,
    work_ptr,
    out_ptr,
    num_items,
    q_stride,
    table_stride,
    scale,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out [T, H * D]: the rows of the tiles of queries in `work`; num_warps=4.

    pool_desc: the pool as rows [N * 2 * K * BLOCK_SIZE, D], copied in blocks of BLOCK_SIZE rows.
    work: see `plan_prefill_kernel`, for tiles of 2 * (64 // GROUP) queries and TILE keys.
    num_items: key/value heads times tiles.
    """
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, ROWS, HEAD_DIM], SHARED)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], SHARED)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, HEAD_DIM], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    scale *= 1.4426950408889634
    gl.warp_specialize(
        [
            (_compute, (
                q_ptr, out_ptr, q_tiles.index(0), k_tiles, v_tiles, k_full, k_empty, v_full,
                v_empty, turns, work_ptr, num_items, q_stride, scale, 0, GROUP, KV_HEADS,
                HEAD_DIM, TILE, STAGES,
            )),
            (_compute, (
                q_ptr, out_ptr, q_tiles.index(1), k_tiles, v_tiles, k_full, k_empty, v_full,
                v_empty, turns, work_ptr, num_items, q_stride, scale, 1, GROUP, KV_HEADS,
                HEAD_DIM, TILE, STAGES,
            )),
            (_copy, (
                pool_desc, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, tables_ptr,
                work_ptr, table_stride, num_items, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
