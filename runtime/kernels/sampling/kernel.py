"""Drawing in Triton: rows without filters in one launch; what the other kernels share.

The grid is (blocks of the vocabulary, rows). Every program reduces its block to a few partial
results; the last program of a row to arrive merges them in the order of blocks, so bits depend
neither on timing nor on the other rows of the step. Where a row is drawn at random, the merge
picks the block by the cumulative sums of blocks and draws inside that one block.

Scores are handled as distances y = (max - score) * (1 / temperature) >= 0, rounded as
`reference.draw` rounds them, so that equal scores are equal here and there.

Columns of the parameter rows follow `tensors.pack_row`.
"""

from __future__ import annotations

import triton
import triton.language as tl

GREEDY_BELOW = tl.constexpr(1e-5)
INFINITY = tl.constexpr(float("inf"))
FAR = tl.constexpr(1e38)  # a distance that stays finite where scores were clamped
NO_ID = tl.constexpr(2**31 - 1)

# Columns of 8 bytes, then of 4, in a row of parameters.
SEED = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
PRESENCE = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
DOUBLES = tl.constexpr(8)
TEMPERATURE = tl.constexpr(10)
REPETITION = tl.constexpr(11)
TOP_K = tl.constexpr(12)
MIN_TOKENS = tl.constexpr(13)
NUM_LOGPROBS = tl.constexpr(14)
NUM_GENERATED = tl.constexpr(15)
WORDS = tl.constexpr(16)

# Columns of a row's search state (float64). The tokens that may be the last ones kept have
# distances in [LOW, HIGH), MEMBERS of them; BEFORE tokens lie below LOW.
LOW = tl.constexpr(0)
HIGH = tl.constexpr(1)
WIDTH = tl.constexpr(2)
MAXIMUM = tl.constexpr(3)
TOTAL = tl.constexpr(4)
MEMBERS = tl.constexpr(5)
BEFORE = tl.constexpr(6)
MODE = tl.constexpr(7)
EDGE = tl.constexpr(8)  # distance of the last token kept; TIES of those at it are kept
TIES = tl.constexpr(9)
GREEDY_ID = tl.constexpr(10)
STATE = tl.constexpr(16)

# What is left to do for a row.
DRAWN = tl.constexpr(0)
SEARCH = tl.constexpr(1)  # for the edge, by rounds that narrow [LOW, HIGH)
ALL_KEPT = tl.constexpr(2)  # no edge: min_p alone
SEARCH_WHOLE_ROW = tl.constexpr(3)  # for the edge, by one program: rounds do not help

NUM_BINS = tl.constexpr(64)  # of a round; every doubling doubles what a histogram costs


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start; then wait for the ones before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def is_last(counter_ptr, num_programs):
    """True in the last of a row's programs; all that the others stored is visible to it."""
    tl.debug_barrier()
    num_before = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    is_last = num_before == num_programs - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def load_scores(
    logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row, ids, vocab, ADJUSTED: tl.constexpr
):
    """float32 scores of a row's ids, adjusted if the row is; -inf outside the vocabulary."""
    row = row.to(tl.int64)
    end = vocab
    if ADJUSTED:
        is_adjusted = tl.load(is_adjusted_ptr + row)
        end = tl.where(is_adjusted != 0, 0, vocab)
    scores = tl.load(logits_ptr + row * row_stride + ids, mask=ids < end, other=-INFINITY)
    scores = scores.to(tl.float32)
    if ADJUSTED:
        adjusted = tl.load(
            adjusted_ptr + row * vocab + ids, mask=ids < vocab - end, other=-INFINITY
        )
        scores = tl.maximum(scores, adjusted)
    return scores


@triton.jit
def reciprocal(temperature):
    return tl.div_rn(1.0, temperature)


@triton.jit
def distances(maximum, scores, scale):
    """(maximum - scores) * scale, each rounded to nearest; `maximum` is finite."""
    return (maximum - scores) * scale


@triton.jit
def uniform(longs_ptr, ints_ptr, slot):
    """The draw's random number in (0, 1), float64."""
    seed = tl.load(longs_ptr + slot * (WORDS // 2) + SEED)
    place = tl.load(ints_ptr + slot * WORDS + NUM_GENERATED)
    word, _, _, _ = tl.randint4x(seed, place)
    return (word.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit
def pick_block(masses, blocks, target):
    """(block in which the cumulative sum passes `target`, the sum before it)."""
    cumulative = tl.cumsum(masses, 0)
    block = tl.sum((cumulative <= target).to(tl.int32), 0)
    block = tl.minimum(block, tl.max(tl.where(masses > 0, blocks, 0), 0))
    return block, tl.sum(tl.where(blocks == block - 1, cumulative, 0.0), 0)


@triton.jit
def draw_inside(weights, ids, target, otherwise):
    """The first id whose cumulative weight passes `target`; rounding may leave only the last."""
    cumulative = tl.cumsum(weights, 0).to(tl.float64)
    has_weight = weights > 0
    first = tl.min(tl.where((cumulative > target) & has_weight, ids, NO_ID), 0)
    last = tl.max(tl.where(has_weight, ids, -1), 0)
    drawn = tl.where(first < NO_ID, first, last)
    return tl.where(drawn >= 0, drawn, otherwise)


@triton.jit
def pow2_at_least(x):
    """The power of two >= x > 0 (float32, not subnormal), by its exponent bits: exact."""
    exponent = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    return (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def draw_kernel(
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
    is_finite_ptr,
    vocab,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    ADJUSTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw every row but the filtered ones, whose search it starts; check that logits are finite.

    partials_ptr [R, 5, BLOCKS_POW2] float32: by block maximum, its id, mass, minimum, faults.
    """
    begin(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if FILTERED:
        tl.store(state_ptr + row * STATE + MODE, 0.0, mask=(block == 0) & (slot < 0))
    if slot < 0:
        tl.store(ids_ptr + row, 0, mask=block == 0)
        tl.store(is_finite_ptr + row, 1, mask=block == 0)
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = load_scores(logits_ptr, row_stride, None, None, row, ids, vocab, ADJUSTED=False)
    is_finite_here = tl.abs(scores) < INFINITY
    num_faults = tl.sum(tl.where((ids < vocab) & (is_finite_here == 0), 1, 0), 0)
    scores = tl.where(is_finite_here, scores, -INFINITY)
    if ADJUSTED:
        scores = load_scores(
            logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row, ids, vocab, ADJUSTED=True
        )
    top, top_at = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    partials = partials_ptr + row * (5 * BLOCKS_POW2)
    tl.store(partials + block, top)
    tl.store(partials + BLOCKS_POW2 + block, (block * BLOCK + top_at).to(tl.float32))
    tl.store(partials + 4 * BLOCKS_POW2 + block, num_faults.to(tl.float32))
    scale = 1.0
    is_random = False
    if RANDOM:
        temperature = tl.load(floats_ptr + slot * WORDS + TEMPERATURE)
        scale = reciprocal(temperature)
        top_k = tl.load(ints_ptr + slot * WORDS + TOP_K)
        is_random = (temperature >= GREEDY_BELOW) & (top_k != 1)
        if is_random:
            # A block may hold nothing but -inf.
            mass = tl.sum(tl.exp(-distances(tl.maximum(top, -FAR), scores, scale)), 0)
            tl.store(partials + 2 * BLOCKS_POW2 + block, mass)
            if FILTERED:
                lowest = tl.min(tl.where(scores > -INFINITY, scores, INFINITY), 0)
                tl.store(partials + 3 * BLOCKS_POW2 + block, lowest)
    if is_last(counters_ptr + row, NUM_BLOCKS):
        blocks = tl.arange(0, BLOCKS_POW2)
        is_block = blocks < NUM_BLOCKS
        tops = tl.load(partials + blocks, mask=is_block, other=-INFINITY, cache_modifier=".cg")
        tops_at = tl.load(
            partials + BLOCKS_POW2 + blocks, mask=is_block, other=0.0, cache_modifier=".cg"
        )
        faults = tl.load(
            partials + 4 * BLOCKS_POW2 + blocks, mask=is_block, other=0.0, cache_modifier=".cg"
        )
        maximum = tl.max(tops, 0)
        drawn = tl.min(tl.where(tops == maximum, tops_at.to(tl.int32), NO_ID), 0)
        drawn = tl.minimum(drawn, vocab - 1)
        is_finite = tl.sum(faults, 0) == 0.0
        tl.store(is_finite_ptr + row, is_finite.to(tl.uint8))
        mode = 0
        is_drawn = is_random
        if RANDOM:
            is_drawn = is_random & is_finite
        if is_drawn:
            masses = tl.load(
                partials + 2 * BLOCKS_POW2 + blocks,
                mask=is_block,
                other=0.0,
                cache_modifier=".cg",
            )
            masses *= tl.exp(-distances(maximum, tops, scale))
            masses = masses.to(tl.float64)
            total = tl.sum(masses, 0)
            if FILTERED:
                mode = _start_search(
                    state_ptr + row * STATE,
                    partials + 3 * BLOCKS_POW2,
                    doubles_ptr + slot * (WORDS // 2),
                    top_k,
                    maximum,
                    total,
                    drawn,
                    scale,
                    vocab,
                    NUM_BLOCKS,
                    BLOCKS_POW2,
                )
            if mode == 0:
                target = uniform(longs_ptr, ints_ptr, slot) * total
                at, before = pick_block(masses, blocks, target)
                ids = at * BLOCK + tl.arange(0, BLOCK)
                scores = load_scores(
                    logits_ptr,
                    row_stride,
                    adjusted_ptr,
                    is_adjusted_ptr,
                    row,
                    ids,
                    vocab,
                    ADJUSTED,
                )
                weights = tl.exp(-distances(maximum, scores, scale))
                drawn = draw_inside(weights, ids, target - before, drawn)
        tl.store(ids_ptr + row, tl.where(is_finite, drawn, 0))
        if FILTERED:
            tl.store(state_ptr + row * STATE + MODE, mode.to(tl.float64))


@triton.jit
def _start_search(
    state,
    lowest_ptr,
    doubles,
    top_k,
    maximum,
    total,
    greedy_id,
    scale,
    vocab,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
):
    """What is to be done for a random row with these filters, and where the edge may lie."""
    top_p = tl.load(doubles + TOP_P)
    min_p = tl.load(doubles + MIN_P)
    by_count = (top_k > 0) & (top_k < vocab)
    mode = tl.where(min_p > 0.0, ALL_KEPT, DRAWN)
    mode = tl.where(by_count | (top_p < 1.0), SEARCH, mode)
    if mode != 0:
        blocks = tl.arange(0, BLOCKS_POW2)
        lowest = tl.load(
            lowest_ptr + blocks, mask=blocks < NUM_BLOCKS, other=INFINITY, cache_modifier=".cg"
        )
        farthest = tl.minimum((maximum - tl.min(lowest, 0)) * scale, FAR)
        if by_count == 0:
            # Tokens with weights under (1 - p) Z / V weigh less than (1 - p) Z together.
            bound = tl.log(vocab.to(tl.float64) / (tl.maximum(1.0 - top_p, 1e-18) * total)) + 1.0
            farthest = tl.minimum(farthest, bound.to(tl.float32))
        width = pow2_at_least(farthest / (NUM_BINS - 1))
        tl.store(state + LOW, 0.0)
        tl.store(state + WIDTH, width.to(tl.float64))
        tl.store(state + HIGH, (width * NUM_BINS).to(tl.float64))
        tl.store(state + MAXIMUM, maximum.to(tl.float64))
        tl.store(state + TOTAL, total)
        tl.store(state + MEMBERS, vocab.to(tl.float64))
        tl.store(state + BEFORE, 0.0)
        tl.store(state + EDGE, INFINITY)
        tl.store(state + TIES, vocab.to(tl.float64))
        tl.store(state + GREEDY_ID, greedy_id.to(tl.float64))
    return mode
