"""Drawing from what top_k, top_p and min_p keep, once the edge is known.

States, modes and distances are those of `kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.sampling.kernel import (
    EDGE,
    GREEDY_ID,
    MAXIMUM,
    MIN_P,
    MODE,
    STATE,
    TEMPERATURE,
    TIES,
    WORDS,
    begin,
    distances,
    draw_inside,
    is_last,
    load_scores,
    pick_block,
    reciprocal,
    uniform,
)


@triton.jit
def round_up(x):
    """The least float32 that is not under the float64 `x` >= 0."""
    near = x.to(tl.float32)
    above = (near.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(near.to(tl.float64) < x, above, near)


@triton.jit
def draw_kept_kernel(
    logits_ptr,
    row_stride,
    adjusted_ptr,
    is_adjusted_ptr,
    slots_ptr,
    doubles_ptr,
    longs_ptr,
    floats_ptr,
    ints_ptr,
    partials_ptr,
    state_ptr,
    counters_ptr,
    ids_ptr,
    vocab,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    ADJUSTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw the filtered rows. partials_ptr: by block the mass nearer than the edge, ties at it."""
    begin(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    state = state_ptr + row * STATE
    if tl.load(state + MODE) == 0.0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    maximum = tl.load(state + MAXIMUM).to(tl.float32)
    edge = tl.load(state + EDGE).to(tl.float32)
    least = round_up(tl.load(doubles_ptr + slot * (WORDS // 2) + MIN_P))
    scale = reciprocal(tl.load(floats_ptr + slot * WORDS + TEMPERATURE))
    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = load_scores(
        logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row, ids, vocab, ADJUSTED
    )
    y = distances(maximum, scores, scale)
    weights = tl.exp(-y)
    weights = tl.where(weights >= least, weights, 0.0)
    partials = partials_ptr + row * (5 * BLOCKS_POW2)
    tl.store(partials + block, tl.sum(tl.where(y < edge, weights, 0.0), 0))
    num_ties = tl.sum(((y == edge) & (weights > 0)).to(tl.int32), 0)
    tl.store(partials + BLOCKS_POW2 + block, num_ties.to(tl.float32))
    if is_last(counters_ptr + row, NUM_BLOCKS):
        blocks = tl.arange(0, BLOCKS_POW2)
        is_block = blocks < NUM_BLOCKS
        masses = tl.load(partials + blocks, mask=is_block, other=0.0, cache_modifier=".cg")
        ties = tl.load(
            partials + BLOCKS_POW2 + blocks, mask=is_block, other=0.0, cache_modifier=".cg"
        ).to(tl.int32)
        wanted = tl.load(state + TIES).to(tl.int32)
        left = tl.maximum(wanted - (tl.cumsum(ties, 0) - ties), 0)
        kept = tl.minimum(left, ties)
        edge_weight = tl.exp(-edge)
        masses = masses.to(tl.float64) + kept.to(tl.float64) * edge_weight.to(tl.float64)
        target = uniform(longs_ptr, ints_ptr, slot) * tl.sum(masses, 0)
        at, before = pick_block(masses, blocks, target)
        left_here = tl.sum(tl.where(blocks == at, left, 0), 0)
        ids = at * BLOCK + tl.arange(0, BLOCK)
        scores = load_scores(
            logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row, ids, vocab, ADJUSTED
        )
        y = distances(maximum, scores, scale)
        weights = tl.exp(-y)
        weights = tl.where((weights >= least) & (y <= edge), weights, 0.0)
        if left_here < tl.sum(tl.where(blocks == at, ties, 0), 0):
            is_tie = (y == edge) & (weights > 0)
            is_cut = is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) > left_here)
            weights = tl.where(is_cut, 0.0, weights)
        otherwise = tl.load(state + GREEDY_ID).to(tl.int32)
        tl.store(ids_ptr + row, draw_inside(weights, ids, target - before, otherwise))
