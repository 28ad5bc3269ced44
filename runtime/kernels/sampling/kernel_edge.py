"""The edge of what top_k and top_p keep: how far the last token is, how many equals are kept.

The few tokens that rounds have left are collected, and one program finds the edge among them: by
comparing every one with every other, or by bisection on the bits of their distances (which order as
integers, being >= 0). States, modes and distances are those of `kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.sampling.kernel import (
    BEFORE,
    EDGE,
    HIGH,
    INFINITY,
    LOW,
    MAXIMUM,
    MEMBERS,
    MODE,
    SEARCH,
    SEARCH_WHOLE_ROW,
    STATE,
    TEMPERATURE,
    TIES,
    TOP_K,
    TOP_P,
    TOTAL,
    WORDS,
    begin,
    distances,
    is_last,
    load_scores,
    reciprocal,
)

STEP = tl.constexpr(8)  # tokens compared at once
EXACT = tl.constexpr(float(2**40))  # one, as a weight in whole numbers


@triton.jit
def collect_kernel(
    logits_ptr,
    row_stride,
    adjusted_ptr,
    is_adjusted_ptr,
    slots_ptr,
    doubles_ptr,
    floats_ptr,
    ints_ptr,
    partials_ptr,
    members_ptr,
    state_ptr,
    counters_ptr,
    vocab,
    num_rows,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    ADJUSTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the edge of the rows that search, among their members or in the whole row.

    members_ptr [R, CAPACITY] float32, in no certain order: only sums over sets of equals and
    comparisons are made of them. counters_ptr [2, R].
    """
    begin(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    state = state_ptr + row * STATE
    mode = tl.load(state + MODE)
    if (mode != SEARCH) & (mode != SEARCH_WHOLE_ROW):
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    maximum = tl.load(state + MAXIMUM).to(tl.float32)
    scale = reciprocal(tl.load(floats_ptr + slot * WORDS + TEMPERATURE))
    low = tl.load(state + LOW).to(tl.float32)
    high = tl.load(state + HIGH).to(tl.float32)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = load_scores(
        logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row, ids, vocab, ADJUSTED
    )
    y = distances(maximum, scores, scale)
    is_member = (y >= low) & (y < high)
    partials = partials_ptr + row * (5 * BLOCKS_POW2)
    tl.store(partials + block, tl.sum(tl.where(y < low, tl.exp(-y), 0.0), 0))
    tl.store(partials + BLOCKS_POW2 + block, tl.min(tl.where(is_member, y, INFINITY), 0))
    tl.store(partials + 2 * BLOCKS_POW2 + block, tl.max(tl.where(is_member, y, 0.0), 0))
    num_here = tl.sum(is_member.to(tl.int32), 0)
    is_collected = (mode == SEARCH) & (tl.load(state + MEMBERS) <= CAPACITY)
    members = members_ptr + row.to(tl.int64) * CAPACITY
    if is_collected & (num_here > 0):
        first = tl.atomic_add(counters_ptr + num_rows + row, num_here)
        at = first + tl.cumsum(is_member.to(tl.int32), 0) - 1
        tl.store(members + at, y, mask=is_member & (at < CAPACITY))
    if is_last(counters_ptr + row, NUM_BLOCKS):
        num_found = tl.atomic_xchg(counters_ptr + num_rows + row, 0)
        blocks = tl.arange(0, BLOCKS_POW2)
        is_block = blocks < NUM_BLOCKS
        below = tl.load(partials + blocks, mask=is_block, other=0.0, cache_modifier=".cg")
        nearest = tl.load(
            partials + BLOCKS_POW2 + blocks, mask=is_block, other=INFINITY, cache_modifier=".cg"
        )
        farthest = tl.load(
            partials + 2 * BLOCKS_POW2 + blocks, mask=is_block, other=0.0, cache_modifier=".cg"
        )
        nearest = tl.min(nearest, 0)
        farthest = tl.max(farthest, 0)
        top_k = tl.load(ints_ptr + slot * WORDS + TOP_K)
        top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
        top_p = tl.load(doubles_ptr + slot * (WORDS // 2) + TOP_P)
        num_before = tl.load(state + BEFORE).to(tl.int32)
        mass_before = tl.sum(below.to(tl.float64), 0)
        limits = (top_k, top_p, tl.load(state + TOTAL))
        row_of = (logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row)
        scaled = (maximum, scale, vocab)
        if is_collected & (num_found <= FEW):
            edge, ties = _edge_of_few(
                members, num_found, num_before, mass_before, limits, FEW, STEP
            )
        elif is_collected & (num_found <= CAPACITY):
            places = tl.arange(0, CAPACITY)
            found = tl.load(
                members + places, mask=places < num_found, other=INFINITY, cache_modifier=".cg"
            )
            edge, ties = _find_edge(
                (found, num_before, mass_before),
                row_of,
                scaled,
                limits,
                nearest,
                farthest,
                BLOCK,
                NUM_BLOCKS,
                ADJUSTED,
                WHOLE_ROW=False,
            )
        else:
            edge, ties = _find_edge(
                (0, 0, 0),
                row_of,
                scaled,
                limits,
                tl.where(mode == SEARCH, nearest, 0.0),
                tl.where(mode == SEARCH, farthest, INFINITY),
                BLOCK,
                NUM_BLOCKS,
                ADJUSTED,
                WHOLE_ROW=True,
            )
        tl.store(state + EDGE, edge.to(tl.float64))
        tl.store(state + TIES, ties.to(tl.float64))


@triton.jit
def _key(y):
    """Bits of a distance >= 0: integers in the same order."""
    return y.to(tl.int32, bitcast=True)


@triton.jit
def _weight(key):
    return tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def _ties_in_nucleus(target, mass, weight, num_ties):
    """How many of equal tokens start before the mass `target`, `mass` lying before them."""
    wanted = tl.ceil((target - mass) / tl.maximum(weight, 1e-300))
    return tl.maximum(tl.minimum(wanted, num_ties.to(tl.float64)), 1.0).to(tl.int32)


@triton.jit
def _find_edge(
    members,
    row_of,
    scaled,
    limits,
    nearest,
    farthest,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ADJUSTED: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
):
    """(distance of the last token kept, how many at that distance are), between two distances.

    Among the collected tokens; or reading the whole row at every step, for what nothing else
    settles, such as thousands of tokens of a few distances at the edge.
    """
    top_k, top_p, total = limits
    edge = _key(farthest)
    ties = scaled[2]
    if top_k > 0:
        at = _key(nearest)
        while at < edge:
            middle = edge - (edge - at) // 2
            num, mass, equal = _below(
                middle, members, row_of, scaled, BLOCK, NUM_BLOCKS, ADJUSTED, WHOLE_ROW
            )
            at = tl.where(num < top_k, middle, at)
            edge = tl.where(num < top_k, edge, middle - 1)
        num, mass, equal = _below(
            edge, members, row_of, scaled, BLOCK, NUM_BLOCKS, ADJUSTED, WHOLE_ROW
        )
        ties = tl.minimum(equal, top_k - num)
        total = mass + ties.to(tl.float64) * _weight(edge)
    if top_p < 1.0:
        target = top_p * total
        at = _key(nearest)
        last = edge
        while at < edge:
            middle = edge - (edge - at) // 2
            num, mass, equal = _below(
                middle, members, row_of, scaled, BLOCK, NUM_BLOCKS, ADJUSTED, WHOLE_ROW
            )
            at = tl.where(mass < target, middle, at)
            edge = tl.where(mass < target, edge, middle - 1)
        num, mass, equal = _below(
            edge, members, row_of, scaled, BLOCK, NUM_BLOCKS, ADJUSTED, WHOLE_ROW
        )
        ties = tl.where(edge == last, tl.minimum(ties, equal), equal)
        ties = _ties_in_nucleus(target, mass, _weight(edge), ties)
    return edge.to(tl.float32, bitcast=True), ties


@triton.jit
def _below(
    key,
    members,
    row_of,
    scaled,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ADJUSTED: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
):
    """(how many tokens are nearer than `key`, their mass, how many are at it)."""
    if WHOLE_ROW:
        logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row = row_of
        maximum, scale, vocab = scaled
        nums = tl.zeros([BLOCK], tl.int32)
        equals = tl.zeros([BLOCK], tl.int32)
        masses = tl.zeros([BLOCK], tl.float64)
        for block in range(0, NUM_BLOCKS):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            scores = load_scores(
                logits_ptr, row_stride, adjusted_ptr, is_adjusted_ptr, row, ids, vocab, ADJUSTED
            )
            y = distances(maximum, scores, scale)
            is_below = (_key(y) < key) & (ids < vocab)
            nums += is_below.to(tl.int32)
            equals += ((_key(y) == key) & (ids < vocab)).to(tl.int32)
            masses += tl.where(is_below, tl.exp(-y), 0.0).to(tl.float64)
        return tl.sum(nums, 0), tl.sum(masses, 0), tl.sum(equals, 0)
    else:
        found, num_before, mass_before = members
        keys = _key(found)
        num = num_before + tl.sum((keys < key).to(tl.int32), 0)
        mass = tl.sum(tl.where(keys < key, _exact_weight(found), 0), 0)
        mass = mass_before + mass.to(tl.float64) * (1.0 / EXACT)
        return num, mass, tl.sum((keys == key).to(tl.int32), 0)


@triton.jit
def _exact_weight(y):
    """Weights as integers, whose sums do not depend on the order in which tokens were collected."""
    return (tl.exp(-y) * EXACT).to(tl.int64)


@triton.jit
def _edge_of_few(
    members_ptr, num_members, num_before, mass_before, limits, FEW: tl.constexpr, STEP: tl.constexpr
):
    """As `_find_edge`, for up to FEW collected tokens: each is compared with all others."""
    top_k, top_p, total = limits
    places = tl.arange(0, FEW)
    is_member = places < num_members
    y = tl.load(members_ptr + places, mask=is_member, other=INFINITY, cache_modifier=".cg")
    ranks = tl.zeros([FEW], tl.int32)
    masses = tl.zeros([FEW], tl.int64)
    start = 0
    while start < num_members:
        at = start + tl.arange(0, STEP)
        other = tl.load(
            members_ptr + at, mask=at < num_members, other=INFINITY, cache_modifier=".cg"
        )
        is_nearer = other[:, None] < y[None, :]
        ranks += tl.sum(is_nearer.to(tl.int32), 0)
        masses += tl.sum(tl.where(is_nearer, _exact_weight(other)[:, None], 0), 0)
        start += STEP
    ranks += num_before
    mass = mass_before + masses.to(tl.float64) * (1.0 / EXACT)
    edge = tl.max(tl.where(is_member, y, 0.0), 0)
    ties = tl.sum((y == edge).to(tl.int32), 0)
    if top_k > 0:
        edge = tl.max(tl.where(is_member & (ranks < top_k), y, 0.0), 0)
        is_edge = y == edge
        rank = tl.max(tl.where(is_edge, ranks, 0), 0)
        ties = tl.minimum(tl.sum(is_edge.to(tl.int32), 0), top_k - rank)
        before = tl.max(tl.where(is_edge, mass, 0.0), 0)
        total = before + ties.to(tl.float64) * _weight(_key(edge))
    if top_p < 1.0:
        target = top_p * total
        last = edge
        edge = tl.max(tl.where((mass < target) & (y <= last), y, 0.0), 0)
        is_edge = y == edge
        num_equal = tl.sum(is_edge.to(tl.int32), 0)
        ties = tl.where(edge == last, tl.minimum(ties, num_equal), num_equal)
        before = tl.max(tl.where(is_edge, mass, 0.0), 0)
        ties = _ties_in_nucleus(target, before, _weight(_key(edge)), ties)
    return edge, ties
