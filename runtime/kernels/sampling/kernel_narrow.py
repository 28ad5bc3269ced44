"""Rounds of the search for the last token that top_k and top_p keep, without sorting.

A round narrows down the distances among which that token's must lie: a histogram of counts over 64
bins tells the exact rank of each bin and bounds its mass from both sides. Widths of bins are powers
of two, so that every edge of a bin is exact. States, modes and distances are those of `kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.sampling.kernel import (
    BEFORE,
    HIGH,
    LOW,
    MAXIMUM,
    MEMBERS,
    MODE,
    NUM_BINS,
    SEARCH,
    SEARCH_WHOLE_ROW,
    STATE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOTAL,
    WIDTH,
    WORDS,
    begin,
    distances,
    is_last,
    load_scores,
    pow2_at_least,
    reciprocal,
)

SLACK = tl.constexpr(2e-6)  # of the total: what float32 sums may be wrong by
STEP = tl.constexpr(8)  # histograms merged at once


@triton.jit
def narrow_kernel(
    logits_ptr,
    row_stride,
    adjusted_ptr,
    is_adjusted_ptr,
    slots_ptr,
    doubles_ptr,
    floats_ptr,
    ints_ptr,
    partials_ptr,
    histograms_ptr,
    state_ptr,
    counters_ptr,
    vocab,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    CAPACITY: tl.constexpr,
    ADJUSTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One round for the rows that search: [LOW, HIGH) shrinks to a bin or a few.

    histograms_ptr [R, num_blocks, NUM_BINS] int32. partials_ptr: masses below LOW and inside.
    """
    begin(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    state = state_ptr + row * STATE
    if tl.load(state + MODE) != SEARCH:
        return
    if tl.load(state + MEMBERS) <= CAPACITY:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    low = tl.load(state + LOW).to(tl.float32)
    high = tl.load(state + HIGH).to(tl.float32)
    width = tl.load(state + WIDTH).to(tl.float32)
    maximum = tl.load(state + MAXIMUM).to(tl.float32)
    scale = reciprocal(tl.load(floats_ptr + slot * WORDS + TEMPERATURE))
    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = load_scores(
        logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row, ids, vocab, ADJUSTED
    )
    y = distances(maximum, scores, scale)
    weights = tl.exp(-y)
    is_inside = (y >= low) & (y < high)
    partials = partials_ptr + row * (5 * BLOCKS_POW2)
    tl.store(partials + block, tl.sum(tl.where(y < low, weights, 0.0), 0))
    tl.store(partials + BLOCKS_POW2 + block, tl.sum(tl.where(is_inside, weights, 0.0), 0))
    in_widths = tl.where(is_inside, y - low, 0.0) * (1.0 / width)
    in_bin = tl.minimum(in_widths.to(tl.int32), NUM_BINS - 1)
    at = tl.arange(0, NUM_BINS)
    histograms = histograms_ptr + row.to(tl.int64) * NUM_BLOCKS * NUM_BINS
    tl.store(histograms + block * NUM_BINS + at, tl.histogram(in_bin, NUM_BINS, mask=is_inside))
    if is_last(counters_ptr + row, NUM_BLOCKS):
        bins = tl.arange(0, NUM_BINS)
        counts = tl.zeros([NUM_BINS], tl.int32)
        for start in range(0, NUM_BLOCKS, STEP):
            some = start + tl.arange(0, STEP)
            tile = tl.load(
                histograms + some[:, None] * NUM_BINS + bins[None, :],
                mask=some[:, None] < NUM_BLOCKS,
                other=0,
                cache_modifier=".cg",
            )
            counts += tl.sum(tile, 0)
        top_k = tl.load(ints_ptr + slot * WORDS + TOP_K)
        top_p = tl.load(doubles_ptr + slot * (WORDS // 2) + TOP_P)
        before = tl.load(state + BEFORE).to(tl.int32)
        through = before + tl.cumsum(counts, 0)
        mode = SEARCH + 0
        if (top_k > 0) & (top_k < vocab):
            # The edge is in the first bin that reaches top_k. The mass of all that is before it is
            # needed where top_p follows, so all of it has to be collected.
            last = tl.sum((through < top_k).to(tl.int32), 0)
            num_through = tl.sum(tl.where(bins == last, through, 0), 0)
            keeps_all = (before == 0) & (num_through <= CAPACITY)
            first = tl.where(keeps_all, 0, last)
            is_lost = (last == NUM_BINS) | ((keeps_all == 0) & (top_p < 1.0))
            mode = tl.where(is_lost, SEARCH_WHOLE_ROW, mode)
        else:
            below, inside = _masses(partials, NUM_BLOCKS, BLOCKS_POW2)
            total = tl.load(state + TOTAL)
            target = top_p * total
            slack = SLACK * total
            atmost, atleast = _mass_before(counts, bins, low, width, below, inside)
            first = tl.maximum(tl.sum((atmost < target - slack).to(tl.int32), 0) - 1, 0)
            last = tl.maximum(tl.sum((atleast < target + slack).to(tl.int32), 0) - 1, first)
        num_first = tl.sum(tl.where(bins == first, through - counts, 0), 0)
        num_last = tl.sum(tl.where(bins == last, through, 0), 0)
        new_low = low + first.to(tl.float32) * width
        new_high = low + (last + 1).to(tl.float32) * width
        new_width = pow2_at_least((new_high - new_low) / (NUM_BINS - 1))
        tl.store(state + LOW, new_low.to(tl.float64))
        tl.store(state + HIGH, new_high.to(tl.float64))
        tl.store(state + WIDTH, tl.minimum(new_width, width).to(tl.float64))
        tl.store(state + BEFORE, num_first.to(tl.float64))
        tl.store(state + MEMBERS, (num_last - num_first).to(tl.float64))
        tl.store(state + MODE, mode.to(tl.float64))


@triton.jit
def _masses(partials, NUM_BLOCKS: tl.constexpr, BLOCKS_POW2: tl.constexpr):
    """(mass below LOW, mass inside), float64, summed in the order of blocks."""
    blocks = tl.arange(0, BLOCKS_POW2)
    is_block = blocks < NUM_BLOCKS
    below = tl.load(partials + blocks, mask=is_block, other=0.0, cache_modifier=".cg")
    inside = tl.load(
        partials + BLOCKS_POW2 + blocks, mask=is_block, other=0.0, cache_modifier=".cg"
    )
    return tl.sum(below.to(tl.float64), 0), tl.sum(inside.to(tl.float64), 0)


@triton.jit
def _mass_before(counts, bins, low, width, below, inside):
    """Bounds (at most, at least) of the mass before each bin: from the front and from the back."""
    nearest = low + bins.to(tl.float32) * width
    most = counts.to(tl.float64) * tl.exp(-nearest).to(tl.float64)
    least = counts.to(tl.float64) * tl.exp(-(nearest + width)).to(tl.float64)
    most_before = tl.cumsum(most, 0) - most
    least_before = tl.cumsum(least, 0) - least
    through = below + inside
    most_after = tl.sum(most, 0) - most_before
    least_after = tl.sum(least, 0) - least_before
    atmost = tl.minimum(below + most_before, through - least_after)
    atleast = tl.maximum(below + least_before, through - most_after)
    return atmost, atleast
