"""The gated activation between gate|up and down: act(gate) * up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu_tanh", "gelu"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}


def gate(gate_up: Tensor, act: Activation) -> Tensor:
    """act(first half) * second half of the last dimension: [T, 2 n] -> [T, n]."""
    first, second = torch.chunk(gate_up, 2, dim=-1)
    return _ACTIVATIONS[act](first).mul_(second)
