"""Rotary embedding of query and key heads, in place.

Shape legend: T tokens, H heads (query and key heads alike), D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_(x_THD: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `rotary_dim` dimensions of every head in place.

    cos and sin are [T, 1, rotary_dim] in x's dtype; sin's first half is negated, which turns
    "rotate half" into one roll.
    """
    width = cos.shape[-1]
    x = x_THD if width == x_THD.shape[-1] else x_THD[..., :width]
    swapped = torch.roll(x, width // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
