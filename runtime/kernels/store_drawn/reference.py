"""`store_drawn` in torch: the definition, and the path of devices without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

FAULTY = -1  # handed to the host for a row whose logits were not finite


def store_drawn_reference(
    ids_R: Tensor, is_finite_R: Tensor, slots_R: Tensor, last_tokens_N: Tensor, out_R: Tensor
) -> None:
    """See `runtime.kernels.store_drawn.store_drawn`."""
    is_live = slots_R >= 0
    last_tokens_N[slots_R[is_live].long()] = ids_R[is_live]
    out_R.copy_(torch.where(is_finite_R, ids_R, FAULTY))
