"""Drawing the next token of every row of a mixed batch on the host's terms: plain rows in, ids out.

All state of a row comes in with it (`SamplingRow`), so rows may change place, leave and return.
The random number of a draw depends on (seed, number of tokens generated) alone, never on the batch,
on preemption or on earlier draws. What is drawn, in which order of operations and with which random
numbers is defined in `runtime.kernels.sampling.reference`; the kernels of a GPU follow it too. Here
penalties are made from each row's own short history instead of tables by slot.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from runtime.kernels.sampling.reference import GREEDY_BELOW, draw, penalize_repetition, uniforms
from runtime.request import SamplingParams

__all__ = ["GREEDY_BELOW", "SamplingRow", "adjust", "sample"]


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
    scores_RV[r, i] = penalize_repetition(scores_RV[r, i], penalties)


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
    """`scores_RV` is a copy and is changed."""
    params, device = [row.params for row in rows], scores_RV.device
    vocab = scores_RV.shape[1]
    seeds = np.array([row.seed for row in rows], dtype=np.int64)
    places = np.array([row.num_generated for row in rows], dtype=np.int64)
    top_k = [min(p.top_k, vocab) for p in params]
    return draw(
        scores_RV,
        temperature_R=torch.tensor([p.temperature for p in params], device=device),
        top_k_R=torch.tensor(top_k, device=device),
        top_p_R=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        min_p_R=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
        draws_R=torch.from_numpy(uniforms(seeds, places)).to(device),
    )
