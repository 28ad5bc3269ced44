"""The gated activation written out (SwiGLU and GEGLU, arXiv 2002.05202)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gate_reference(gate_up: Tensor, act: str) -> Tensor:
    """act(first half) * second half, in float32: [T, 2 n] -> [T, n]."""
    first, second = gate_up.float().chunk(2, dim=-1)
    if act == "silu":
        return first / (1 + torch.exp(-first)) * second
    if act == "gelu":
        return first * 0.5 * (1 + torch.erf(first / math.sqrt(2))) * second
    inner = math.sqrt(2 / math.pi) * (first + 0.044715 * first**3)
    return first * 0.5 * (1 + torch.tanh(inner)) * second
