"""Drawing in torch: the definition, and the path wherever Triton does not serve the device.

Order of operations: repetition penalty (CTRL, Keskar et al. 2019, section 4.1), presence and
frequency penalties, logit bias, masks; then greedy, or temperature, top_k, top_p (nucleus, Holtzman
et al. 2019) over what top_k left, min_p; then inversion of the cumulative distribution in the order
of ids. Filters keep exactly as many tokens as they say: tokens of equal probability at the edge are
kept by rising id. Random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011, section 3.3).

Shape legend: R rows, V vocabulary, K highest scores of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.kernels.sampling.tensors import (
    MAX_COUNT,
    Drawn,
    RowLogprobs,
    SamplingFeatures,
    SamplingTensors,
)

GREEDY_BELOW = 1e-5  # temperatures under this one overflow float32 and mean greedy
HEAD_SIZE = 1024  # a nucleus is looked for among this many tokens before all are sorted
FLOOR = -9999.0  # of log-probs: no encoder shall ever meet -inf

_Words = NDArray[np.uint32]


def philox4x32(key: tuple[_Words, _Words], counter: tuple[_Words, ...]) -> tuple[_Words, ...]:
    """Ten rounds of Philox4x32: four words per element from two of key and four of counter."""
    low_bits, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = (word.astype(np.uint64) for word in key)
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in counter)
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * c0
        product1 = np.uint64(0xCD9E8D57) * c2
        c0, c1 = (product1 >> shift) ^ c1 ^ k0, product1 & low_bits
        c2, c3 = (product0 >> shift) ^ c3 ^ k1, product0 & low_bits
        k0 = (k0 + np.uint64(0x9E3779B9)) & low_bits
        k1 = (k1 + np.uint64(0xBB67AE85)) & low_bits
    return tuple(word.astype(np.uint32) for word in (c0, c1, c2, c3))


def uniforms(seeds: NDArray[np.int64], num_generated: NDArray[np.int64]) -> NDArray[np.float64]:
    """[R] numbers in (0, 1): key = seed, counter = tokens generated before; the first word."""
    seed_bits = seeds.astype(np.int64).view(np.uint64)
    key = (seed_bits.astype(np.uint32), (seed_bits >> np.uint64(32)).astype(np.uint32))
    low = num_generated.astype(np.uint32)
    zero = np.zeros_like(low)
    word = philox4x32(key, (low, zero, zero, zero))[0]
    return (word.astype(np.float64) + 0.5) / 2.0**32


def sample_rows(
    logits_RV: Tensor, params: SamplingTensors, slots_R: Tensor, features: SamplingFeatures
) -> Drawn:
    """See `runtime.kernels.sampling.sample_rows`."""
    is_row = slots_R >= 0
    slots = slots_R.clamp(min=0).long()
    is_finite = are_finite(logits_RV)
    raw_RV = torch.where(is_finite.unsqueeze(1), logits_RV.float(), 0.0)
    scores_RV = raw_RV
    if features.any_adjusted:
        scores_RV = _adjusted(raw_RV, params, slots, features)
    ids_R = scores_RV.argmax(-1)
    if features.any_random:
        _draw_random(scores_RV, ids_R, params, slots)
    ids_R = torch.where(is_row & is_finite, ids_R, 0)
    if features.any_penalty:
        _count(ids_R, params, slots, is_row & is_finite)
    num_top = features.num_logprobs
    return Drawn(
        ids_R=ids_R.to(torch.int32),
        is_finite_R=is_finite | ~is_row,
        logprobs=None if num_top is None else row_logprobs(raw_RV, ids_R, num_top),
    )


def are_finite(logits_RV: Tensor) -> Tensor:
    """[R] bool: every logit of the row is finite (both extremes propagate NaN)."""
    low_R, high_R = torch.aminmax(logits_RV, dim=-1)
    return low_R.isfinite() & high_R.isfinite()


def is_greedy(temperature_R: Tensor, top_k_R: Tensor) -> Tensor:
    return (temperature_R < GREEDY_BELOW) | (top_k_R == 1)


def _draw_random(scores_RV: Tensor, ids_R: Tensor, params: SamplingTensors, slots: Tensor) -> None:
    values = {name: params.field(name)[slots] for name in ("temperature", "top_k", "top_p")}
    random = (~is_greedy(values["temperature"], values["top_k"])).nonzero().squeeze(1)
    if not random.numel():
        return
    seeds, places = (params.field(name)[slots][random] for name in ("seed", "num_generated"))
    draws = uniforms(seeds.cpu().numpy(), places.cpu().numpy())
    ids_R[random] = draw(
        scores_RV[random],
        temperature_R=values["temperature"][random],
        top_k_R=values["top_k"][random].long(),
        top_p_R=values["top_p"][random],
        min_p_R=params.field("min_p")[slots][random],
        draws_R=torch.from_numpy(draws).to(scores_RV.device),
    )


def _adjusted(
    raw_RV: Tensor, params: SamplingTensors, slots: Tensor, features: SamplingFeatures
) -> Tensor:
    scores_RV = raw_RV.clone()
    if features.any_penalty:
        _penalize(scores_RV, params, slots)
    if features.any_biased:
        bias_ids, values = params.bias_ids_NB[slots].long(), params.bias_values_NB[slots]
        values = torch.where(bias_ids >= 0, values, 0.0)
        scores_RV.scatter_add_(1, bias_ids.clamp(min=0), values)
        is_early = params.num_generated_N[slots] < params.field("min_tokens")[slots]
        masked_ids = params.masked_ids_NM[slots].long()
        is_masked = (masked_ids >= 0) & is_early.unsqueeze(1)
        rows = torch.arange(len(slots), device=slots.device).unsqueeze(1).expand_as(masked_ids)
        scores_RV[rows[is_masked], masked_ids[is_masked]] = -torch.inf
    return scores_RV


def _penalize(scores_RV: Tensor, params: SamplingTensors, slots: Tensor) -> None:
    assert params.history is not None, "a penalty needs a history"
    vocab = scores_RV.shape[1]
    counts_RV = params.history.counts_NV[slots].double()
    words_RW = params.history.prompt_mask_NW[slots]
    shifts = torch.arange(32, device=slots.device, dtype=torch.int32)
    in_prompt_RV = ((words_RW.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :vocab].bool()
    repetition, presence, frequency = (
        params.field(f"{name}_penalty")[slots].unsqueeze(1)
        for name in ("repetition", "presence", "frequency")
    )
    is_seen = (in_prompt_RV | (counts_RV > 0)) & (repetition != 1.0)
    penalized = penalize_repetition(scores_RV, repetition)
    scores_RV.copy_(torch.where(is_seen, penalized, scores_RV))
    added = -presence - frequency * counts_RV
    scores_RV.add_(torch.where(counts_RV > 0, added, 0.0).float())


def penalize_repetition(scores: Tensor, penalty: Tensor) -> Tensor:
    """Scores of tokens that were seen, `penalty` being of their dtype and broadcast.

    A penalty near 0 overflows (or is 0 in float32); infinity minus infinity would be NaN later.
    """
    limit = torch.finfo(scores.dtype).max
    return torch.where(scores > 0, scores / penalty, scores * penalty).clamp_(-limit, limit)


def _count(ids_R: Tensor, params: SamplingTensors, slots: Tensor, is_counted: Tensor) -> None:
    assert params.history is not None, "a penalty needs a history"
    counts_NV = params.history.counts_NV
    where = (slots[is_counted], ids_R[is_counted])
    counts_NV[where] = (counts_NV[where].int() + 1).clamp_(max=MAX_COUNT).to(torch.int16)


def draw(
    scores_RV: Tensor,
    *,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    draws_R: Tensor,
) -> Tensor:
    """[R] int64: drawn ids of rows that are not greedy. Changes `scores_RV` (float32).

    temperature_R float32, top_k_R int64, top_p_R, min_p_R and draws_R float64.
    """
    # Shifted by the maximum first: a small temperature must not overflow. The reciprocal is rounded
    # once; kernels multiply by the same one, so that scores are equal here and there.
    scores_RV.sub_(scores_RV.amax(-1, keepdim=True)).mul_(temperature_R.reciprocal().unsqueeze(1))
    is_filtered = (top_k_R > 0) | (top_p_R < 1.0) | (min_p_R > 0.0)
    rows = is_filtered.nonzero().squeeze(1)
    if rows.numel():
        kept = keep_likely(scores_RV[rows], top_k_R[rows], top_p_R[rows], min_p_R[rows])
        scores_RV[rows] = kept
    cumulative_RV = scores_RV.exp().cumsum(-1, dtype=torch.float64)
    targets_R1 = draws_R.unsqueeze(1) * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, targets_R1, right=True).squeeze(1)


def keep_likely(scores_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """`scores_RV` (maximum 0) with everything outside top_k, top_p and min_p at -inf.

    Only how many tokens each row keeps is worked out from the sorted scores; which ones follows.
    """
    vocab = scores_RV.shape[1]
    top_k_R = torch.where(top_k_R > 0, top_k_R, vocab)
    filters = torch.stack((top_k_R.double(), top_p_R, min_p_R))
    smaller = top_k_R[top_k_R < vocab]
    size = min(vocab, max(HEAD_SIZE, int(smaller.max()) if smaller.numel() else 0))
    head_RK = scores_RV.topk(size, dim=-1).values
    num_kept_R = _num_kept(head_RK, scores_RV, filters)
    kept_RV = _keep_first(scores_RV, head_RK, num_kept_R)
    short = ((num_kept_R == size) & (size < vocab)).nonzero().squeeze(1)
    if short.numel():
        rows_RV = scores_RV[short]
        sorted_RV = rows_RV.sort(-1, descending=True).values
        num_kept_R = _num_kept(sorted_RV, rows_RV, filters[:, short])
        kept_RV[short] = _keep_first(rows_RV, sorted_RV, num_kept_R)
    return kept_RV


def _num_kept(head_RK: Tensor, scores_RV: Tensor, filters_3R: Tensor) -> Tensor:
    """[R] how many of the sorted scores pass all filters; K itself means "maybe more"."""
    size = head_RK.shape[1]
    top_k_R1, top_p_R1, min_p_R1 = filters_3R.unsqueeze(-1).unbind(0)
    order_K = torch.arange(size, device=head_RK.device)
    weights_RK = head_RK.exp().double() * (order_K < top_k_R1)
    all_weights = scores_RV.exp().sum(-1, keepdim=True, dtype=torch.float64)
    total_R1 = torch.where(top_k_R1 <= size, weights_RK.sum(-1, keepdim=True), all_weights)
    mass_before_RK = weights_RK.cumsum(-1) - weights_RK
    in_nucleus = (mass_before_RK < top_p_R1 * total_R1) | (top_p_R1 >= 1.0)
    is_likely = head_RK.exp() >= min_p_R1  # the maximum has weight 1
    return (in_nucleus & is_likely & (order_K < top_k_R1)).sum(-1).clamp(min=1)


def _keep_first(scores_RV: Tensor, head_RK: Tensor, num_kept_R: Tensor) -> Tensor:
    """Keep the `num_kept_R` highest scores of each row, equal ones by rising id.

    `head_RK`: the highest scores, sorted. Ties matter only where one is kept and the next is not.
    """
    edge_R1 = head_RK.gather(1, num_kept_R.unsqueeze(1) - 1)
    next_R1 = head_RK.gather(1, num_kept_R.clamp(max=head_RK.shape[1] - 1).unsqueeze(1))
    is_cut_R1 = num_kept_R.unsqueeze(1) < head_RK.shape[1]
    if not bool(((next_R1 == edge_R1) & is_cut_R1).any()):
        return scores_RV.masked_fill(scores_RV < edge_R1, -torch.inf)
    above_RV = scores_RV > edge_R1
    tied_RV = scores_RV == edge_R1
    num_tied_kept_R1 = num_kept_R.unsqueeze(1) - above_RV.sum(-1, keepdim=True)
    kept_RV = above_RV | (tied_RV & (tied_RV.cumsum(-1) <= num_tied_kept_R1))
    return scores_RV.masked_fill(~kept_RV, -torch.inf)


def row_logprobs(logits_RV: Tensor, ids_R: Tensor, num_top: int) -> RowLogprobs:
    """See `runtime.kernels.sampling.row_logprobs`.

    Ranks and order come from the logits, which is the order of the probabilities, but exact.
    """
    values_RV = logits_RV.float().log_softmax(-1).clamp_(min=FLOOR)
    ids_R1 = ids_R.long().unsqueeze(1)
    top_ids_RK = top_ids(logits_RV, num_top)
    return RowLogprobs(
        chosen_R=values_RV.gather(1, ids_R1).squeeze(1),
        rank_R=_ranks(logits_RV, ids_R1).to(torch.int32),
        top_ids_RK=top_ids_RK.to(torch.int32),
        top_values_RK=values_RV.gather(1, top_ids_RK),
    )


def top_ids(scores_RV: Tensor, k: int) -> Tensor:
    """[R, k] ids by falling score; equal scores by rising id (torch.topk promises no order)."""
    num_rows = scores_RV.shape[0]
    if k == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=scores_RV.device)
    kth_R1 = scores_RV.topk(k, dim=-1).values[:, -1:]
    rows, ids = (scores_RV >= kth_R1).nonzero(as_tuple=True)
    by_score = scores_RV[rows, ids].sort(descending=True, stable=True).indices
    order = by_score[rows[by_score].sort(stable=True).indices]
    num_kept_R = torch.bincount(rows, minlength=num_rows)
    first_R = num_kept_R.cumsum(0) - num_kept_R
    offsets_K = torch.arange(k, device=scores_RV.device)
    return ids[order[first_R.unsqueeze(1) + offsets_K]]


def _ranks(logits_RV: Tensor, ids_R1: Tensor) -> Tensor:
    own_R1 = logits_RV.gather(1, ids_R1)
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    tied_before = (logits_RV == own_R1) & (ids_V < ids_R1)
    return ((logits_RV > own_R1) | tied_before).sum(-1) + 1
