"""Scratch memory that kernels of one decoder share, at addresses that captured graphs may keep.

Kernels of one stream use it one after another: what lies in it means nothing between two launches,
but for the counters, which every kernel leaves at zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


class Workspace:
    """Counters and partial sums on one device. Grows when more is asked for than there is.

    A view handed out stays good when it does: whoever captures a graph keeps one of each, so that
    the graph never writes into freed memory.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._partials = torch.empty(0, dtype=torch.float32, device=self.device)

    def counters(self, num: int) -> Tensor:
        """[num] int32, all zero; whoever changes them puts the zeros back."""
        if num > self._counters.numel():
            self._counters = torch.zeros(num, dtype=torch.int32, device=self.device)
        return self._counters[:num]

    def partials(self, num: int) -> Tensor:
        """[num] float32 with unknown content."""
        if num > self._partials.numel():
            self._partials = torch.empty(num, dtype=torch.float32, device=self.device)
        return self._partials[:num]

    @property
    def num_bytes(self) -> int:
        return self._counters.nbytes + self._partials.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What packing a weight has to know beside the weight.

    deterministic: one tile choice for every number of rows, so that a row's bits do not depend on
        the rows beside it.
    """

    workspace: Workspace = field(default_factory=lambda: Workspace("cpu"))
    deterministic: bool = False
