"""Decode attention (one query per sequence) as one balanced walk over all keys of a step.

The work is a list of units, one per (sequence, key/value head, tile of keys), in that order.
Every program takes an equal, contiguous stretch of it (the stream-K idea of arXiv 2301.03598,
applied to keys), so neither the grid nor the balance depends on how lengths are spread. A head
that several programs share is put together by the last of them to arrive, in the order of its
keys: no atomics on floats, the same bits every time.

Such a stretch has parts of two heads, and every part costs a start and a delivery. Where lengths
allow it, programs get one part of one head each instead, if the longest part is longer than a fair
share by a few tiles only: `plan_kernels` decides.

With SPLITS > 0 the stretches depend on a sequence's own length alone (deterministic mode): a
row's bits then do not depend on the rows beside it.

All query heads of a key/value head are columns of one tile, so keys are read once.

Shape legend: W warps, M rows (heads of one group, padded to 8), N keys of a warp in a tile,
D head_dim, G heads of a group, I segments of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.attention.kernel_parts import (
    attend_pairs_by_warp,
    attend_tile_by_warp,
    block_ids,
    join_warps,
    outer_scales,
)


@triton.jit
def _attend_segment(
    q_ptr,
    pool_ptr,
    token_scales_ptr,
    table_ptr,
    head,
    first_tile,
    num_tiles,
    seq_len,
    low,
    qk_scale,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KV: tl.constexpr,
    WINDOWED: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    ALONE: tl.constexpr = WARPS == 1
    in_tile_WN = tl.arange(0, WARPS)[:, None] * (TILE // WARPS)
    in_tile_WN = in_tile_WN + tl.arange(0, TILE // WARPS)[None, :]
    keys_WN = first_tile * TILE + in_tile_WN
    blocks_WN = block_ids(table_ptr, keys_WN, seq_len, BLOCK_SIZE)
    if PDL:
        # Queries and the last token's keys come from the kernel ahead; nothing up to here does.
        tl.extra.cuda.gdc_wait()
    rows_M = tl.arange(0, ROWS)
    is_row_11M = (rows_M < GROUP)[None, None, :]
    copies_W11 = tl.zeros([WARPS], tl.int32)[:, None, None]
    q_row_W1M = copies_W11 + (head * GROUP + rows_M)[None, None, :] * HEAD_DIM
    m_WM = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    l_WM = tl.zeros([WARPS, ROWS], tl.float32)
    if KV == "plain":
        q_at_WDM = q_row_W1M + tl.arange(0, HEAD_DIM)[None, :, None]
        q_WDM = tl.load(q_ptr + q_at_WDM, mask=is_row_11M, other=0.0).to(DTYPE)
        acc_WDM = tl.zeros([WARPS, HEAD_DIM, ROWS], tl.float32)
    else:
        q_at_WDM = q_row_W1M + 2 * tl.arange(0, HEAD_DIM // 2)[None, :, None]
        q_WDM = tl.load(q_ptr + q_at_WDM, mask=is_row_11M, other=0.0).to(DTYPE)
        q_odd_WDM = tl.load(q_ptr + q_at_WDM + 1, mask=is_row_11M, other=0.0).to(DTYPE)
        acc_WDM = tl.zeros([WARPS, HEAD_DIM // 2, ROWS], tl.float32)
        odd_WDM = acc_WDM
    for _ in range(num_tiles):
        is_stored_WN = keys_WN < seq_len
        is_visible_WN = is_stored_WN
        if WINDOWED:
            is_visible_WN &= keys_WN >= low
        # The next tile's blocks are on their way while this one is computed.
        next_blocks_WN = block_ids(table_ptr, keys_WN + TILE, seq_len, BLOCK_SIZE)
        if KV == "plain":
            m_WM, l_WM, acc_WDM = attend_tile_by_warp(
                q_WDM, m_WM, l_WM, acc_WDM, pool_ptr, blocks_WN, keys_WN, is_visible_WN,
                is_stored_WN, head, qk_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, not ALONE,
            )  # fmt: skip
        else:
            m_WM, l_WM, acc_WDM, odd_WDM = attend_pairs_by_warp(
                q_WDM, q_odd_WDM, m_WM, l_WM, acc_WDM, odd_WDM, pool_ptr, token_scales_ptr,
                blocks_WN, keys_WN, is_visible_WN, is_stored_WN, head, qk_scale,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, KV, not ALONE, USE_PTX,
            )  # fmt: skip
        keys_WN += TILE
        blocks_WN = next_blocks_WN
    if KV != "plain":
        both_WDM2 = tl.join(acc_WDM, odd_WDM)
        acc_WDM = tl.reshape(tl.permute(both_WDM2, 0, 1, 3, 2), [WARPS, HEAD_DIM, ROWS])
    return join_warps(m_WM, l_WM, acc_WDM, WARPS)


@triton.jit
def _merge(
    partials_ptr,
    sums_ptr,
    out_ptr,
    first_slot,
    skip,
    num_segments,
    v_scale,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Put a head's segments together in the order of its keys, MERGE at a time.

    Segment 0 lies in slot `first_slot + skip`, segment i > 0 in `first_slot + i * STEP`.
    """
    g = tl.arange(0, GROUP_ROWS)
    d = tl.arange(0, HEAD_DIM)
    m_G = tl.full([GROUP_ROWS], -1e30, tl.float32)
    l_G = tl.zeros([GROUP_ROWS], tl.float32)
    acc_GD = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32)
    for first in range(0, num_segments, MERGE):
        i = first + tl.arange(0, MERGE)
        slot_I = first_slot + i * STEP + tl.where(i == 0, skip, 0)
        row_IG = slot_I[:, None] * GROUP + g[None, :]
        ok_IG = (i < num_segments)[:, None] & (g < GROUP)[None, :]
        m_IG = tl.load(sums_ptr + 2 * row_IG, mask=ok_IG, other=-1e30, cache_modifier=".cg")
        l_IG = tl.load(sums_ptr + 2 * row_IG + 1, mask=ok_IG, other=0.0, cache_modifier=".cg")
        acc_IGD = tl.load(
            partials_ptr + row_IG[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=ok_IG[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        m_new_G = tl.maximum(m_G, tl.max(m_IG, 0))
        weight_IG = tl.exp2(m_IG - m_new_G[None, :])
        alpha_G = tl.exp2(m_G - m_new_G)
        l_G = l_G * alpha_G + tl.sum(weight_IG * l_IG, 0)
        acc_GD = acc_GD * alpha_G[:, None] + tl.sum(acc_IGD * weight_IG[:, :, None], 0)
        m_G = m_new_G
    out_GD = acc_GD * (v_scale / tl.maximum(l_G, 1e-30))[:, None]
    at_GD = g[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + at_GD, out_GD.to(out_ptr.dtype.element_ty), mask=(g < GROUP)[:, None])


@triton.jit
def _program_of(unit, least, num_larger):
    """The program that does `unit`; the first `num_larger` have least + 1 units, others least."""
    in_larger = num_larger * (least + 1)
    later = num_larger + (unit - in_larger) // least
    return tl.where(unit < in_larger, unit // (least + 1), later)


@triton.jit
def _segment_of_share(p, unit, stop, start, tiles, least, num_larger):
    """Program p's segment at `unit` of a sequence whose units begin at `start`.

    (head, first tile, tiles, segments of this head, this one's slot, and where the head's slots
    are: see `_merge`). A program has two slots: for its first segment and for a later one, which
    can only be its last.
    """
    head = (unit - start) // tl.maximum(tiles, 1)
    head_unit = start + head * tiles
    tile = unit - head_unit
    num_tiles = tl.minimum(tiles - tile, stop - unit)
    first = _program_of(head_unit, least, num_larger)
    num_segments = _program_of(head_unit + tiles - 1, least, num_larger) - first + 1
    slot = 2 * p + (unit != p * least + tl.minimum(p, num_larger)).to(tl.int32)
    skip = (first * least + tl.minimum(first, num_larger) < head_unit).to(tl.int32)
    return head, tile, num_tiles, num_segments, slot, 2 * first, skip


@triton.jit
def _segment_of_part(unit, start, tiles, part):
    """`_segment_of_share` where unit and program are one part of a head, as even as they go."""
    num_segments = tl.maximum(tl.cdiv(tiles, part), 1)
    head = (unit - start) // num_segments
    even = tl.cdiv(tiles, num_segments)
    tile = (unit - start) % num_segments * even
    num_tiles = tl.minimum(even, tiles - tile)
    first_slot = 2 * (start + head * num_segments)
    return head, tile, num_tiles, num_segments, 2 * unit, first_slot, first_slot * 0


@triton.jit
def _segment_of_split(
    p, tiles, KV_HEADS: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr
):
    """`_segment_of_share` where program p is one of SPLITS of a head, whatever the batch."""
    per_split = tl.maximum(tl.cdiv(tiles, SPLITS), MIN_TILES)
    tile = p % SPLITS * per_split
    num_tiles = tl.maximum(tl.minimum(per_split, tiles - tile), 0)
    num_segments = tl.cdiv(tiles, per_split)
    return p // SPLITS % KV_HEADS, tile, num_tiles, num_segments, p, p - p % SPLITS, 0


@triton.jit
def _segment_at(
    p,
    unit,
    stop,
    start,
    seq_len,
    window,
    least,
    num_larger,
    part,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """The segment of program p that begins at `unit`: what `_segment_of_share` says of it, the unit
    behind it and the one behind its sequence."""
    low_tile = 0
    if WINDOWED:
        low_tile = tl.maximum(seq_len - window, 0) // TILE
    tiles = tl.cdiv(seq_len, TILE) - low_tile
    behind = stop
    if SPLITS:
        head, tile, num_tiles, num_segments, slot, first_slot, skip = _segment_of_split(
            p, tiles, KV_HEADS, SPLITS, MIN_TILES
        )
    elif part > 0:
        head, tile, num_tiles, num_segments, slot, first_slot, skip = _segment_of_part(
            unit, start, tiles, part
        )
    else:
        head, tile, num_tiles, num_segments, slot, first_slot, skip = _segment_of_share(
            p, unit, stop, start, tiles, least, num_larger
        )
        behind = unit + num_tiles
    end = start + tiles * KV_HEADS
    return head, low_tile + tile, num_tiles, num_segments, slot, first_slot, skip, behind, end


@triton.jit
def _deliver(
    m_M,
    l_M,
    acc_DM,
    out_ptr,
    partials_ptr,
    sums_ptr,
    counter_ptr,
    slot,
    first_slot,
    skip,
    num_segments,
    v_scale,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Write a whole head's result, or this segment's, which the last segment to come merges."""
    rows_M = tl.arange(0, ROWS)
    at_DM = rows_M[None, :] * HEAD_DIM + tl.arange(0, HEAD_DIM)[:, None]
    is_row_M = rows_M < GROUP
    if num_segments == 1:
        out_DM = (acc_DM * (v_scale / l_M)[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_DM, out_DM, mask=is_row_M[None, :])
    else:
        row_M = slot.to(tl.int64) * GROUP + rows_M
        acc_ptr = partials_ptr + slot.to(tl.int64) * (GROUP * HEAD_DIM)
        tl.store(acc_ptr + at_DM, acc_DM, mask=is_row_M[None, :])
        tl.store(sums_ptr + 2 * row_M, m_M, mask=is_row_M)
        tl.store(sums_ptr + 2 * row_M + 1, l_M, mask=is_row_M)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if arrived == num_segments - 1:
            tl.store(counter_ptr, 0)
            _merge(
                partials_ptr, sums_ptr, out_ptr, first_slot, skip, num_segments, v_scale,
                STEP, GROUP, GROUP_ROWS, HEAD_DIM, MERGE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "window"])
def decode_kernel(
    q_ptr,
    pool_ptr,
    head_scales_ptr,
    token_scales_ptr,
    tables_ptr,
    seq_lens_ptr,
    shares_ptr,
    partials_ptr,
    sums_ptr,
    counters_ptr,
    out_ptr,
    num_seqs,
    q_stride,
    table_stride,
    window,
    scale,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KV: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MERGE: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """out [S, H * D] = attention of the S decodes; see the module's docstring.

    pool: the plain pool, or an 8-bit one as 16-bit words.
    partials: weighted values [num_slots, G, D]; sums: (m, l) [num_slots, G, 2], m in log2 units.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0)
    if SPLITS:
        if PDL:
            tl.extra.cuda.gdc_wait()
        s = p // (SPLITS * KV_HEADS)
        unit, stop, start, least, num_larger, part = 0, 1, 0, 1, 0, 0
        seq_len = tl.load(seq_lens_ptr + s)
    else:
        last_row_ptr = shares_ptr + 4 * tl.num_programs(0)
        least, num_larger = tl.maximum(tl.load(last_row_ptr), 1), tl.load(last_row_ptr + 1)
        part = tl.load(last_row_ptr + 2)
        unit = p * least + tl.minimum(p, num_larger)
        stop = unit + tl.load(shares_ptr + 4 * p)
        s = tl.load(shares_ptr + 4 * p + 1)
        start = tl.load(shares_ptr + 4 * p + 2)
        seq_len = tl.load(shares_ptr + 4 * p + 3)
    row_len = tl.load(seq_lens_ptr + p, mask=p < num_seqs, other=1)
    head, tile, num_tiles, num_segments, slot, first_slot, skip, behind, end = _segment_at(
        p, unit, stop, start, seq_len, window, least, num_larger, part, KV_HEADS, TILE, WINDOWED,
        SPLITS, MIN_TILES,
    )  # fmt: skip
    while unit < stop:
        if num_tiles > 0:
            low = 0
            if WINDOWED:
                low = tl.maximum(seq_len - window, 0)
            qk_scale, v_scale = outer_scales(head_scales_ptr, head, scale, KV_HEADS, KV)
            m_M, l_M, acc_DM = _attend_segment(
                q_ptr + s.to(tl.int64) * q_stride, pool_ptr, token_scales_ptr,
                tables_ptr + s.to(tl.int64) * table_stride, head, tile, num_tiles, seq_len, low,
                qk_scale, DTYPE, GROUP, ROWS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, KV, WINDOWED,
                WARPS, PDL, USE_PTX,
            )  # fmt: skip
            row = s.to(tl.int64) * KV_HEADS + head
            _deliver(
                m_M, l_M, acc_DM, out_ptr + row * (GROUP * HEAD_DIM), partials_ptr, sums_ptr,
                counters_ptr + row, slot, first_slot, skip, num_segments, v_scale,
                1 if SPLITS else 2, GROUP, ROWS, GROUP_ROWS, HEAD_DIM, MERGE,
            )  # fmt: skip
        unit = behind
        if unit < stop:
            if unit == end:
                s += 1
                start = unit
                seq_len = tl.load(seq_lens_ptr + s)
            head, tile, num_tiles, num_segments, slot, first_slot, skip, behind, end = _segment_at(
                p, unit, stop, start, seq_len, window, least, num_larger, part, KV_HEADS, TILE,
                WINDOWED, SPLITS, MIN_TILES,
            )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    _clear_empty_rows(
        seq_lens_ptr, out_ptr, num_seqs, p, row_len, tl.num_programs(0), GROUP * KV_HEADS, HEAD_DIM
    )


@triton.jit
def _clear_empty_rows(
    seq_lens_ptr,
    out_ptr,
    num_seqs,
    s,
    seq_len,
    step,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Sequences of length 0 are padding of a captured step: their rows become zeros.

    Rows s (whose length is at hand), s + step, ...
    """
    d = tl.arange(0, HEAD_DIM)
    while s < num_seqs:
        if seq_len == 0:
            row_ptr = out_ptr + s * (HEADS * HEAD_DIM)
            for head in range(HEADS):
                tl.store(
                    row_ptr + head * HEAD_DIM + d, tl.zeros([HEAD_DIM], out_ptr.dtype.element_ty)
                )
        s += step
        seq_len = tl.load(seq_lens_ptr + s, mask=s < num_seqs, other=1)
