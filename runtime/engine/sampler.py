"""Drawing the next token of every row of a mixed batch; each row has its own parameters.

All state of a row comes in with it (`SamplingRow`), so rows may change place, leave and return.
The random number of a draw depends on (seed, number of tokens generated) alone, never on the batch,
on preemption or on earlier draws.

Order of operations: repetition penalty (CTRL, Keskar et al. 2019, section 4.1), presence and
frequency penalties, logit bias, mask of stop ids before min_tokens; then greedy, or temperature,
top_k, top_p (nucleus, Holtzman et al. 2019) over what top_k left, min_p; then inversion of the
cumulative distribution in the order of ids. Filters keep exactly as many tokens as they say: tokens
of equal probability at the edge are kept by rising id.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain

import torch

from runtime.request import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures under this one overflow float32 and mean greedy
HEAD_SIZE = 1024  # a nucleus is looked for among this many tokens before all are sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One row's parameters and history, as plain values.

    num_generated: tokens drawn before this one. prompt_ids: distinct ids of the prompt.
    output_counts: how often each id was generated. masked_ids: must not be drawn now.
    """

    params: SamplingParams
    seed: int
    num_generated: int
    prompt_ids: Iterable[int] = ()
    output_counts: dict[int, int] = field(default_factory=dict)
    masked_ids: Iterable[int] = ()

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1


def uniform(seed: int, num_generated: int) -> float:
    """The random number in (0, 1) of a draw: a hash of its place in the request's stream."""
    digest = sha256(
        b"draw" + seed.to_bytes(16, "little", signed=True) + num_generated.to_bytes(8, "little")
    ).digest()
    return (int.from_bytes(digest[:4], "little") + 0.5) / 2**32


def sample(logits_RV: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """[R] int64: the drawn ids. `logits_RV` (float32, finite) is not changed."""
    scores_RV = adjust(logits_RV, rows)
    ids_R = scores_RV.argmax(-1)  # the first of equals
    random = [index for index, row in enumerate(rows) if not row.is_greedy]
    if random:
        drawn = _draw(scores_RV[random], [rows[index] for index in random])
        ids_R[torch.tensor(random, device=ids_R.device)] = drawn
    return ids_R


def adjust(logits_RV: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Penalties, bias and masks; the same tensor if no row has any."""
    if not any(_is_adjusted(row) for row in rows):
        return logits_RV
    scores_RV = logits_RV.clone()
    _penalize_repetition(scores_RV, rows)
    _add(scores_RV, [_additions(row) for row in rows])
    masked = [(r, i) for r, row in enumerate(rows) for i in row.masked_ids]
    if masked:
        where = torch.tensor(masked, device=scores_RV.device)
        scores_RV[where[:, 0], where[:, 1]] = -torch.inf
    return scores_RV


def _is_adjusted(row: SamplingRow) -> bool:
    p = row.params
    return bool(
        p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or row.masked_ids
    )


def _penalize_repetition(scores_RV: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    seen = [
        (r, i)
        for r, row in enumerate(rows)
        if row.params.repetition_penalty != 1.0
        for i in {*row.prompt_ids, *row.output_counts}
    ]
    if not seen:
        return
    r, i = torch.tensor(seen, device=scores_RV.device).unbind(1)
    penalties = torch.tensor([rows[row].params.repetition_penalty for row, _ in seen]).to(scores_RV)
    values = scores_RV[r, i]
    penalized = torch.where(values > 0, values / penalties, values * penalties)
    # A penalty near 0 overflows (or is 0 in float32); infinity minus infinity would be NaN later.
    limit = torch.finfo(scores_RV.dtype).max
    scores_RV[r, i] = penalized.clamp_(-limit, limit)


def _additions(row: SamplingRow) -> Iterable[tuple[int, float]]:
    p = row.params
    penalties: Iterable[tuple[int, float]] = ()
    if p.presence_penalty or p.frequency_penalty:
        penalties = (
            (i, -p.presence_penalty - p.frequency_penalty * count)
            for i, count in row.output_counts.items()
        )
    return chain(penalties, p.logit_bias)


def _add(scores_RV: torch.Tensor, additions: Sequence[Iterable[tuple[int, float]]]) -> None:
    flat = [(r, i, value) for r, pairs in enumerate(additions) for i, value in pairs]
    if not flat:
        return
    r, i, values = zip(*flat, strict=True)
    device = scores_RV.device
    where = (torch.tensor(r, device=device), torch.tensor(i, device=device))
    scores_RV.index_put_(where, torch.tensor(values).to(scores_RV), accumulate=True)


def _draw(scores_RV: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    device = scores_RV.device
    temperatures_R1 = torch.tensor([[row.params.temperature] for row in rows], device=device)
    # Shifted by the maximum first: a small temperature must not overflow. `scores_RV` is a copy.
    scores_RV = scores_RV.sub_(scores_RV.amax(-1, keepdim=True)).div_(temperatures_R1)
    filtered = [index for index, row in enumerate(rows) if _is_filtered(row.params)]
    if filtered:
        params = [rows[index].params for index in filtered]
        scores_RV[filtered] = keep_likely(scores_RV[filtered], params)
    cumulative_RV = scores_RV.exp().cumsum(-1, dtype=torch.float64)
    draws = [[uniform(row.seed, row.num_generated)] for row in rows]
    draws_R1 = torch.tensor(draws, dtype=torch.float64, device=device)
    ids_R1 = torch.searchsorted(cumulative_RV, draws_R1 * cumulative_RV[:, -1:], right=True)
    return ids_R1.squeeze(1)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def keep_likely(scores_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """`scores_RV` with everything outside top_k, top_p and min_p at -inf.

    Only how many tokens each row keeps is worked out from the sorted scores; which ones follows.
    """
    vocab = scores_RV.shape[1]
    size = min(vocab, max(HEAD_SIZE, *(p.top_k for p in params)))
    head_RK = scores_RV.topk(size, dim=-1).values
    num_kept_R = _num_kept(head_RK, scores_RV, params)
    kept_RV = _keep_first(scores_RV, head_RK, num_kept_R)
    short = ((num_kept_R == size) & (size < vocab)).nonzero().squeeze(1)
    if short.numel():
        rows_RV = scores_RV[short]
        sorted_RV = rows_RV.sort(-1, descending=True).values
        num_kept_R = _num_kept(sorted_RV, rows_RV, [params[i] for i in short.tolist()])
        kept_RV[short] = _keep_first(rows_RV, sorted_RV, num_kept_R)
    return kept_RV


def _num_kept(
    head_RK: torch.Tensor, scores_RV: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """[R] how many of the sorted scores pass all filters; K itself means "maybe more"."""
    device, size = head_RK.device, head_RK.shape[1]
    vocab = scores_RV.shape[1]
    top_k = torch.tensor([p.top_k or vocab for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
    order_K = torch.arange(size, device=device)
    weights_RK = head_RK.exp().double() * (order_K < top_k.unsqueeze(1))
    all_weights = scores_RV.exp().sum(-1, dtype=torch.float64)
    total_R = torch.where(top_k <= size, weights_RK.sum(-1), all_weights)
    mass_before_RK = weights_RK.cumsum(-1) - weights_RK
    in_nucleus = mass_before_RK < (top_p * total_R).unsqueeze(1)
    is_likely = head_RK.exp() >= min_p.unsqueeze(1)  # the maximum has weight 1
    everything = (top_p >= 1.0).unsqueeze(1)
    kept_RK = (in_nucleus | everything) & is_likely & (order_K < top_k.unsqueeze(1))
    return kept_RK.sum(-1).clamp(min=1)


def _keep_first(
    scores_RV: torch.Tensor, head_RK: torch.Tensor, num_kept_R: torch.Tensor
) -> torch.Tensor:
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
