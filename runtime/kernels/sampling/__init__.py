"""Drawing the next token of every row of a step on the device, and log-probabilities to report.

Parameters lie on the device by slot (`SamplingTensors`); rows say which slot they are. Each row has
its own parameters, and its result depends on them, its logits and its counter alone. What is drawn
is defined in `reference`. Knows no requests and no tokens' meaning.
"""

from __future__ import annotations

from torch import Tensor

from runtime.kernels.backend import uses_triton
from runtime.kernels.sampling import reference
from runtime.kernels.sampling.tensors import (
    Drawn,
    History,
    RowLogprobs,
    SamplingFeatures,
    SamplingTensors,
    pack_row,
)
from runtime.kernels.workspace import Workspace

__all__ = [
    "Drawn",
    "History",
    "RowLogprobs",
    "SamplingFeatures",
    "SamplingTensors",
    "pack_row",
    "row_logprobs",
    "sample_rows",
]


def sample_rows(
    logits_RV: Tensor,
    params: SamplingTensors,
    slots_R: Tensor,
    *,
    features: SamplingFeatures,
    workspace: Workspace,
) -> Drawn:
    """Draw a token for every row; with penalties, also count it in the slot's history.

    `logits_RV` float32, bfloat16 or float16, not changed. `slots_R` int32; slot -1 is padding: id
    0, finite, not counted. With Triton the call can be captured in a CUDA graph; the workspace
    must have been used with as many rows before it is frozen.
    """
    if not uses_triton(logits_RV.device):
        return reference.sample_rows(logits_RV, params, slots_R, features)
    from runtime.kernels.sampling.launch import sample_rows_triton

    return sample_rows_triton(logits_RV, params, slots_R, features, workspace)


def row_logprobs(
    logits_RV: Tensor, ids_R: Tensor, num_top: int, *, workspace: Workspace
) -> RowLogprobs:
    """Log-probs of `ids_R` (integers) under each row's raw logits, and the `num_top` best ids."""
    if not uses_triton(logits_RV.device):
        return reference.row_logprobs(logits_RV, ids_R, num_top)
    from runtime.kernels.sampling.launch import row_logprobs_triton

    return row_logprobs_triton(logits_RV, ids_R, num_top, workspace)
