"""The experts of a mixture-of-experts layer as linears of their own, under checkpoint names.

transformers computes all experts of a layer from two stacked parameters; checkpoints, and the
engines that serve artifacts, know a linear per expert and projection. `Experts` takes the place of
the stacked module and computes the same sum, so that each projection can be observed, quantized and
replaced like any linear. Routing stays where it was: router and weights come in as arguments.

It does not know families, files or methods.

Shape legend: N tokens (padding included), K experts per token, H hidden size, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

ExpertLeaves = tuple[str, str, str]  # checkpoint names of gate, up and down projection


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)); its linears have the family's own names."""

    def __init__(
        self, hidden: int, inner: int, leaves: ExpertLeaves, act: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.leaves, self.act = leaves, act
        for leaf, (rows, columns) in zip(
            leaves, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
        ):
            self.add_module(leaf, nn.Linear(columns, rows, bias=False))

    def inner(self, rows: Tensor) -> Tensor:
        """What the down projection reads, [n, I], for rows [n, H]."""
        gate, up, _ = (self.get_submodule(leaf) for leaf in self.leaves)
        product: Tensor = self.act(gate(rows)) * up(rows)
        return product

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.get_submodule(self.leaves[2])(self.inner(rows))
        return output


class Experts(nn.ModuleList):
    """All experts of a layer: each sees the tokens that the router sent it, and no others."""

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """[N, H] of hidden [N, H] and what the router says: experts (indices), weights, [N, K]."""
        output = torch.zeros_like(hidden)
        for index in torch.unique(experts).tolist():
            token, place = torch.where(experts == index)
            part = self[index](hidden[token]) * weights[token, place, None]
            output.index_add_(0, token, part.to(output.dtype))
        return output
