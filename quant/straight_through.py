"""Rounding that gradients pass through as if it were not there (Bengio et al., arXiv 1308.3432)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(values: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """`rounding(values)`, with the gradient that `values` themselves would have."""
    rounded = rounding(values.detach())
    if not (torch.is_grad_enabled() and values.requires_grad):
        return rounded
    result: Tensor = _StraightThrough.apply(values, rounded)  # type: ignore[no-untyped-call]
    return result
