"""Log-probabilities worth reporting: of the chosen token, its rank, and the most likely ones.

They describe the model's own distribution (no temperature, penalty, bias or filter). Always finite:
anything below FLOOR is FLOOR, so that no encoder ever meets -inf. Ties rank by the lower id.

Shape legend: R rows, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.request import TokenLogprobs

FLOOR = -9999.0


def token_logprobs(
    logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry per row: `token_ids[r]` with its rank, and the `num_top[r]` most likely tokens.

    Ranks and order come from the logits, which is the order of the probabilities, but exact.
    """
    values_RV = logits_RV.float().log_softmax(-1).clamp_(min=FLOOR)
    chosen_R1 = torch.tensor(token_ids, device=logits_RV.device).unsqueeze(1)
    chosen_values = values_RV.gather(1, chosen_R1).squeeze(1).tolist()
    ranks = _ranks(logits_RV, chosen_R1).tolist()
    top_ids_RK = top_ids(logits_RV, max(num_top))
    top_values = values_RV.gather(1, top_ids_RK).tolist()
    return [
        TokenLogprobs(
            token_id=token_ids[row],
            value=chosen_values[row],
            rank=ranks[row],
            top_ids=tuple(ids[:k]),
            top_values=tuple(top_values[row][:k]),
        )
        for row, (ids, k) in enumerate(zip(top_ids_RK.tolist(), num_top, strict=True))
    ]


def top_ids(scores_RV: torch.Tensor, k: int) -> torch.Tensor:
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


def _ranks(logits_RV: torch.Tensor, chosen_R1: torch.Tensor) -> torch.Tensor:
    own_R1 = logits_RV.gather(1, chosen_R1)
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    tied_before = (logits_RV == own_R1) & (ids_V < chosen_R1)
    return ((logits_RV > own_R1) | tied_before).sum(-1) + 1
