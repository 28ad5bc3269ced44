"""Log-probabilities worth reporting: of the chosen token, its rank, and the most likely ones.

They describe the model's own distribution (no temperature, penalty, bias or filter). Always finite,
and ties rank by the lower id: see `runtime.kernels.sampling`.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.kernels.sampling import row_logprobs
from runtime.kernels.sampling.reference import FLOOR
from runtime.kernels.workspace import Workspace
from runtime.request import TokenLogprobs

__all__ = ["FLOOR", "token_logprobs"]


def token_logprobs(
    logits_RV: torch.Tensor,
    token_ids: Sequence[int],
    num_top: Sequence[int],
    workspace: Workspace | None = None,
) -> list[TokenLogprobs]:
    """One entry per row: `token_ids[r]` with its rank, and the `num_top[r]` most likely tokens.

    `workspace`: scratch of the device the logits are on; one is made where none is given.
    """
    device = logits_RV.device
    ids_R = torch.tensor(token_ids, device=device)
    found = row_logprobs(logits_RV, ids_R, max(num_top), workspace=workspace or Workspace(device))
    columns = (found.chosen_R, found.rank_R, found.top_ids_RK, found.top_values_RK)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        TokenLogprobs(
            token_id=token_id,
            value=value,
            rank=rank,
            top_ids=tuple(top_ids[:k]),
            top_values=tuple(top_values[:k]),
        )
        for token_id, k, (value, rank, top_ids, top_values) in zip(
            token_ids, num_top, rows, strict=True
        )
    ]
