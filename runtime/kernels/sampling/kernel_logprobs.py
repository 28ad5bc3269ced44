"""Log-probabilities in Triton: of given ids with their ranks, and of the most likely ids.

Values are ordered by an integer of 64 bits: the score's bits made monotone, then the complement of
the id, so that the largest is the first of equals. Grid and merge are those of `kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.sampling.kernel import (
    INFINITY,
    NUM_LOGPROBS,
    WORDS,
    begin,
    is_last,
    load_scores,
)

LOWEST = tl.constexpr(-(2**63))
ID_BITS = tl.constexpr(2**32 - 1)
FLOOR = tl.constexpr(-9999.0)


@triton.jit
def _keys(scores, ids, vocab):
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0: equals are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (ids.to(tl.int64) ^ ID_BITS)
    return tl.where(ids < vocab, keys, LOWEST)


@triton.jit
def _score(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_wanted(slots_ptr, ints_ptr, row, BY_SLOT: tl.constexpr):
    """True where the row's slot asks for log-probs; for every row unless BY_SLOT."""
    if BY_SLOT:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        asked = tl.load(ints_ptr + slot * WORDS + NUM_LOGPROBS, mask=slot >= 0, other=-1)
        return asked >= 0
    return row >= 0


@triton.jit
def logprobs_kernel(
    logits_ptr,
    row_stride,
    slots_ptr,
    ints_ptr,
    ids_ptr,
    partials_ptr,
    bounds_ptr,
    counters_ptr,
    chosen_ptr,
    ranks_ptr,
    vocab,
    num_top,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    BY_SLOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Log-probs and ranks of `ids_ptr`, for the rows that want them; the others stay unwritten.

    partials_ptr [R, 5, BLOCKS_POW2] float32: maximum, sum of exponentials, ids ranked before.
    bounds_ptr [R, 2] float32: what no score among the num_top best is under; what is subtracted
    from a score to make it a log-prob.
    """
    begin(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    if not _is_wanted(slots_ptr, ints_ptr, row, BY_SLOT):
        return
    chosen = tl.load(ids_ptr + row).to(tl.int32)
    own = tl.load(logits_ptr + row.to(tl.int64) * row_stride + chosen).to(tl.float32)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = load_scores(logits_ptr, row_stride, None, None, row, ids, vocab, ADJUSTED=False)
    top = tl.max(scores, 0)
    is_before = (scores > own) | ((scores == own) & (ids < chosen))
    partials = partials_ptr + row * (5 * BLOCKS_POW2)
    tl.store(partials + block, top)
    tl.store(partials + BLOCKS_POW2 + block, tl.sum(tl.exp(scores - top), 0))
    num_before = tl.sum((is_before & (ids < vocab)).to(tl.int32), 0)
    tl.store(partials + 2 * BLOCKS_POW2 + block, num_before.to(tl.float32))
    if is_last(counters_ptr + row, NUM_BLOCKS):
        blocks = tl.arange(0, BLOCKS_POW2)
        is_block = blocks < NUM_BLOCKS
        tops = tl.load(partials + blocks, mask=is_block, other=-INFINITY, cache_modifier=".cg")
        sums = tl.load(
            partials + BLOCKS_POW2 + blocks, mask=is_block, other=0.0, cache_modifier=".cg"
        )
        before = tl.load(
            partials + 2 * BLOCKS_POW2 + blocks, mask=is_block, other=0.0, cache_modifier=".cg"
        )
        maximum = tl.max(tops, 0)
        norm = maximum + tl.log(tl.sum(sums * tl.exp(tops - maximum), 0))
        tl.store(chosen_ptr + row, tl.maximum(own - norm, FLOOR))
        tl.store(ranks_ptr + row, tl.sum(before.to(tl.int32), 0) + 1)
        # num_top blocks have a score at or over the maximum of the one ranked num_top among them.
        ranks = tl.sum((tops[:, None] > tops[None, :]).to(tl.int32), 0)
        bound = tl.min(tl.where((ranks < num_top) & is_block, tops, INFINITY), 0)
        bound = tl.where(num_top > NUM_BLOCKS, -INFINITY, bound)
        tl.store(bounds_ptr + 2 * row, bound)
        tl.store(bounds_ptr + 2 * row + 1, norm)


@triton.jit
def top_kernel(
    logits_ptr,
    row_stride,
    slots_ptr,
    ints_ptr,
    partials_ptr,
    bounds_ptr,
    best_ptr,
    counters_ptr,
    top_ids_ptr,
    top_values_ptr,
    vocab,
    num_top,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    TOP_POW2: tl.constexpr,
    BY_SLOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The num_top most likely ids of the rows that want them, out of each block's best.

    partials_ptr: how many each block has. best_ptr [R, num_blocks, TOP_POW2] int64.
    """
    begin(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    if not _is_wanted(slots_ptr, ints_ptr, row, BY_SLOT):
        return
    bound = tl.load(bounds_ptr + 2 * row)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = load_scores(logits_ptr, row_stride, None, None, row, ids, vocab, ADJUSTED=False)
    num_found = tl.sum(((scores >= bound) & (ids < vocab)).to(tl.int32), 0)
    num_found = tl.minimum(num_found, num_top)
    partials = partials_ptr + row * (5 * BLOCKS_POW2)
    tl.store(partials + block, num_found.to(tl.float32))
    row_best = best_ptr + row.to(tl.int64) * NUM_BLOCKS * TOP_POW2
    keys = _keys(scores, ids, vocab)
    place = 0
    while place < num_found:
        best = tl.max(keys, 0)
        tl.store(row_best + block * TOP_POW2 + place, best)
        keys = tl.where(keys == best, LOWEST, keys)
        place += 1
    if is_last(counters_ptr + row, NUM_BLOCKS):
        blocks = tl.arange(0, BLOCKS_POW2)
        counts = tl.load(
            partials + blocks, mask=blocks < NUM_BLOCKS, other=0.0, cache_modifier=".cg"
        )
        places = tl.arange(0, TOP_POW2)
        found = tl.load(
            row_best + blocks[:, None] * TOP_POW2 + places[None, :],
            mask=places[None, :] < counts.to(tl.int32)[:, None],
            other=LOWEST,
            cache_modifier=".cg",
        )
        norm = tl.load(bounds_ptr + 2 * row + 1)
        place = 0
        while place < num_top:
            best = tl.max(tl.max(found, 1), 0)
            found = tl.where(found == best, LOWEST, found)
            tl.store(top_ids_ptr + row * num_top + place, ((best & ID_BITS) ^ ID_BITS).to(tl.int32))
            value = tl.maximum(_score(best) - norm, FLOOR)
            tl.store(top_values_ptr + row * num_top + place, value)
            place += 1
