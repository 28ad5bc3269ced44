"""What the attention kernels' programs do in a step, worked out on the device from its lengths.

One launch a step and window, whose results every layer reads.

Shape legend: S sequences, P programs, I tiles of queries, J those they are compared to.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "window"])
def plan_decode_kernel(
    seq_lens_ptr,
    starts_ptr,
    shares_ptr,
    num_seqs,
    num_programs,
    window,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SLACK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What each program does: so that it finds its work in one read.

    shares [P + 1, 4]: a program's number of units; the sequence of its first unit, that sequence's
        own first unit and its length. The last row begins with the least units of a program that
        has any, and with how many programs, the first ones, have one more.
    Parts: the last row goes on with a number of tiles, `part`, 0 for none; a unit then is a part of
        a head, `part` tiles at most, and programs have one or none. The smallest `part` is taken
        for which programs suffice, if it is at most SLACK tiles above the mean.
    starts [S]: scratch, the first unit of each sequence.

    The kernels behind this one start when it has ended: what was written up to here, tables,
    lengths and shares, may be read by them before they wait for the kernel ahead of them.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    s = tl.arange(0, BLOCK_S)
    seq_lens = tl.load(seq_lens_ptr + s, mask=s < num_seqs, other=0)
    tiles = tl.cdiv(seq_lens, TILE)
    if WINDOWED:
        tiles -= tl.maximum(seq_lens - window, 0) // TILE
    total = tl.sum(tiles * KV_HEADS, 0)
    mean = tl.maximum(tl.cdiv(total, num_programs), MIN_UNITS)
    part = 0
    for i in tl.static_range(SLACK + 1):
        candidate = mean + SLACK - i
        if tl.sum(tl.cdiv(tiles, candidate) * KV_HEADS, 0) <= num_programs:
            part = candidate
    if part > 0:
        tiles = tl.cdiv(tiles, part)
        total = tl.sum(tiles * KV_HEADS, 0)
    ends = tl.cumsum(tiles * KV_HEADS, 0)
    num_busy = tl.maximum(tl.minimum(num_programs, total // MIN_UNITS), 1)
    if part > 0:
        num_busy = tl.maximum(total, 1)
    least, num_larger = total // num_busy, total % num_busy
    tl.store(starts_ptr + s, ends - tiles * KV_HEADS, mask=s < num_seqs)
    tl.store(shares_ptr + 4 * num_programs, least)
    tl.store(shares_ptr + 4 * num_programs + 1, num_larger)
    tl.store(shares_ptr + 4 * num_programs + 2, part)
    tl.debug_barrier()
    p = tl.arange(0, BLOCK_P)
    is_p = p < num_programs
    unit = p * least + tl.minimum(p, num_larger)
    low = tl.zeros([BLOCK_P], tl.int32)
    for i in tl.static_range(SEARCH_STEPS):
        middle = low + (BLOCK_S >> (i + 1))
        start = tl.load(starts_ptr + middle, mask=middle < num_seqs, other=2147483647)
        low = tl.where(start <= unit, middle, low)
    num_units = tl.where(p < num_busy, least + (p < num_larger).to(tl.int32), 0)
    tl.store(shares_ptr + 4 * p, num_units, mask=is_p)
    tl.store(shares_ptr + 4 * p + 1, low, mask=is_p)
    tl.store(shares_ptr + 4 * p + 2, tl.load(starts_ptr + low, mask=is_p, other=0), mask=is_p)
    tl.store(shares_ptr + 4 * p + 3, tl.load(seq_lens_ptr + low, mask=is_p, other=0), mask=is_p)


@triton.jit
def _tiles_of_queries(
    tiles_I,
    starts_ptr,
    seq_lens_ptr,
    num_spans,
    num_tiles,
    search_steps,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each tile: its first row in the step, its span's rows from there on, its first row's
    position, its span, and how many tiles of keys its rows see, 0 where the tile is surplus.

    Laid out as in `prefill_kernel._span_of`.
    """
    origin = tl.load(starts_ptr)
    spans_I = tl.zeros_like(tiles_I)
    for i in range(search_steps):
        middle_I = spans_I + (1 << (search_steps - 1 - i))
        is_I = middle_I < num_spans
        first_I = (tl.load(starts_ptr + middle_I, mask=is_I, other=0) - origin) // BLOCK_Q
        spans_I = tl.where(is_I & (first_I + middle_I <= tiles_I), middle_I, spans_I)
    start_I, stop_I = tl.load(starts_ptr + spans_I), tl.load(starts_ptr + spans_I + 1)
    rows_I = start_I + (tiles_I - (start_I - origin) // BLOCK_Q - spans_I) * BLOCK_Q
    left_I = stop_I - rows_I
    positions_I = tl.load(seq_lens_ptr + spans_I) - left_I
    lengths_I = tl.cdiv(positions_I + tl.minimum(left_I, BLOCK_Q), TILE)
    lengths_I = tl.where((tiles_I < num_tiles) & (left_I > 0), lengths_I, 0)
    return rows_I, left_I, positions_I, spans_I, lengths_I


@triton.jit(do_not_specialize=["first_span", "num_spans", "num_tiles", "search_steps"])
def plan_prefill_kernel(
    starts_ptr,
    seq_lens_ptr,
    work_ptr,
    first_span,
    num_spans,
    num_tiles,
    search_steps,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """work [num_tiles, 5]: the tiles of BLOCK_Q queries of `num_spans` spans, longest first, each
    as `_tiles_of_queries` gives it. There are at most 2 ** search_steps spans."""
    starts_ptr += first_span
    seq_lens_ptr += first_span
    tiles_I = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows_I, left_I, positions_I, spans_I, lengths_I = _tiles_of_queries(
        tiles_I, starts_ptr, seq_lens_ptr, num_spans, num_tiles, search_steps, BLOCK_Q, TILE
    )
    ranks_I = tl.zeros_like(tiles_I)
    for first in range(0, num_tiles, BLOCK):
        tiles_J = first + tl.arange(0, BLOCK)
        lengths_J = _tiles_of_queries(
            tiles_J, starts_ptr, seq_lens_ptr, num_spans, num_tiles, search_steps, BLOCK_Q, TILE
        )[4]
        is_ahead_IJ = lengths_J[None, :] > lengths_I[:, None]
        is_tie_IJ = lengths_J[None, :] == lengths_I[:, None]
        is_ahead_IJ |= is_tie_IJ & (tiles_J[None, :] < tiles_I[:, None])
        ranks_I += tl.sum((is_ahead_IJ & (tiles_J < num_tiles)[None, :]).to(tl.int32), 1)
    at_I, is_I = work_ptr + 5 * ranks_I, tiles_I < num_tiles
    tl.store(at_I, rows_I, mask=is_I)
    tl.store(at_I + 1, left_I, mask=is_I)
    tl.store(at_I + 2, positions_I, mask=is_I)
    tl.store(at_I + 3, spans_I + first_span, mask=is_I)
    tl.store(at_I + 4, lengths_I, mask=is_I)
