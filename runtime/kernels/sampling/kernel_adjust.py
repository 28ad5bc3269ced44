"""Penalties, logit bias and masked ids in Triton, and the counts that penalties look back on.

Only rows that have any are written; `is_adjusted` tells the kernels behind which those are. The
order of operations is that of `reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.sampling.kernel import (
    FREQUENCY,
    INFINITY,
    MIN_TOKENS,
    NUM_GENERATED,
    PRESENCE,
    REPETITION,
    WORDS,
    begin,
    load_scores,
)


@triton.jit
def adjust_kernel(
    logits_ptr,
    row_stride,
    adjusted_ptr,
    is_adjusted_ptr,
    slots_ptr,
    doubles_ptr,
    floats_ptr,
    ints_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    masked_ids_ptr,
    counts_ptr,
    prompt_mask_ptr,
    vocab,
    num_words,
    BLOCK: tl.constexpr,
    NUM_BIASED: tl.constexpr,
    NUM_MASKED: tl.constexpr,
    LIST: tl.constexpr,
    PENALIZED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adjusted scores of the rows that have penalties, a bias or masked ids; says which have."""
    begin(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_row = slot >= 0
    is_penalized = False
    is_biased = False
    is_masked = False
    if PENALIZED:
        repetition = tl.load(floats_ptr + slot * WORDS + REPETITION, mask=is_row, other=1.0)
        doubles = doubles_ptr + slot * (WORDS // 2)
        presence = tl.load(doubles + PRESENCE, mask=is_row, other=0.0)
        frequency = tl.load(doubles + FREQUENCY, mask=is_row, other=0.0)
        is_penalized = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    if BIASED:
        if NUM_BIASED > 0:
            is_biased = tl.load(bias_ids_ptr + slot * NUM_BIASED, mask=is_row, other=-1) >= 0
        if NUM_MASKED > 0:
            ints = ints_ptr + slot * WORDS
            min_tokens = tl.load(ints + MIN_TOKENS, mask=is_row, other=0)
            is_masked = tl.load(ints + NUM_GENERATED, mask=is_row, other=0) < min_tokens
    is_adjusted = is_penalized | is_biased | is_masked
    tl.store(is_adjusted_ptr + row, tl.where(is_adjusted, 1, 0), mask=block == 0)
    if is_adjusted:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        scores = load_scores(logits_ptr, row_stride, None, None, row, ids, vocab, ADJUSTED=False)
        if PENALIZED:
            # Rows without penalties come out as they were.
            counts = tl.load(counts_ptr + slot * vocab + ids, mask=inside, other=0)
            if repetition != 1.0:
                words = tl.load(
                    prompt_mask_ptr + slot * num_words + ids // 32, mask=inside, other=0
                )
                is_seen = (counts > 0) | (((words >> (ids % 32)) & 1) != 0)
                factor = tl.zeros_like(scores) + repetition
                changed = tl.where(scores > 0, tl.div_rn(scores, factor), scores * factor)
                limit = 3.4028234663852886e38
                changed = tl.minimum(tl.maximum(changed, -limit), limit)
                scores = tl.where(is_seen & inside, changed, scores)
            added = (-presence - frequency * counts.to(tl.float64)).to(tl.float32)
            scores += tl.where(counts > 0, added, 0.0)
        out = adjusted_ptr + row.to(tl.int64) * vocab
        tl.store(out + ids, scores, mask=inside)
        if BIASED:
            if is_biased:
                tl.debug_barrier()
                for start in range(0, NUM_BIASED, LIST):
                    at = start + tl.arange(0, LIST)
                    listed = tl.load(
                        bias_ids_ptr + slot * NUM_BIASED + at, mask=at < NUM_BIASED, other=-1
                    )
                    here = (listed >= 0) & (listed // BLOCK == block)
                    value = tl.load(bias_values_ptr + slot * NUM_BIASED + at, mask=here, other=0.0)
                    score = tl.load(out + listed, mask=here, other=0.0)
                    tl.store(out + listed, score + value, mask=here)
            if is_masked:
                tl.debug_barrier()
                for start in range(0, NUM_MASKED, LIST):
                    at = start + tl.arange(0, LIST)
                    listed = tl.load(
                        masked_ids_ptr + slot * NUM_MASKED + at, mask=at < NUM_MASKED, other=-1
                    )
                    here = (listed >= 0) & (listed // BLOCK == block)
                    tl.store(out + listed, -INFINITY, mask=here)


@triton.jit
def count_kernel(ids_ptr, is_finite_ptr, slots_ptr, counts_ptr, vocab, PDL: tl.constexpr):
    """counts[slot, id] += 1, up to the largest int16."""
    begin(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_counted = (slot >= 0) & (tl.load(is_finite_ptr + row) != 0)
    at = counts_ptr + slot * vocab + tl.load(ids_ptr + row)
    count = tl.load(at, mask=is_counted, other=0).to(tl.int32)
    tl.store(at, tl.minimum(count + 1, 32767).to(tl.int16), mask=is_counted)
