"""gate | up of a large step, slice by slice: whole it would be the largest tensor by far."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runtime.kernels.backend import target_of
from runtime.kernels.w4a16.launch import dequantized
from runtime.kernels.w4a16.pack import W4A16Weight

SLICE_ROWS = 2048  # a dense product is no quicker with more


def gated_in_slices(x_TK: Tensor, weight: W4A16Weight, act: str) -> Tensor:
    """act(gate) * up by the dequantized weight gate | up: [T, in] -> [T, out / 2]."""
    from runtime.kernels.gate.kernel import launch_gate

    matrix, target = dequantized(weight), target_of(x_TK.device)
    out_TN = torch.empty(len(x_TK), len(matrix) // 2, dtype=x_TK.dtype, device=x_TK.device)
    for first in range(0, len(x_TK), SLICE_ROWS):
        rows = slice(first, first + SLICE_ROWS)
        launch_gate(functional.linear(x_TK[rows], matrix), act, out_TN[rows], None, target)
    return out_TN
