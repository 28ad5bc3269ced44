"""Rotating pairs (x_i, x_{i + n/2}) by an angle each (RoFormer, arXiv 2104.09864; NeoX order)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_reference(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotated copy; cos and signed sin are [T, 1, rotary_dim], the rest of D passes through."""
    width = cos.shape[-1]
    turned, passed = x_THD[..., :width], x_THD[..., width:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.cat((turned * cos + swapped * sin, passed), dim=-1)
