"""Scratch memory that kernels of one decoder share, at addresses that captured graphs may keep.

Kernels of one stream use it one after another: what lies in it means nothing between two launches,
but for the counters, which every kernel leaves at zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


class Workspace:
    """Counters and partial sums on one device. Grows until `freeze`, then refuses to.

    A graph holds the addresses it was captured with, so growing afterwards would leave it writing
    into freed memory.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._partials = torch.empty(0, dtype=torch.float32, device=self.device)
        self._is_frozen = False

    def counters(self, num: int) -> Tensor:
        """[num] int32, all zero; whoever changes them puts the zeros back."""
        if num > self._counters.numel():
            self._check_growth(num)
            self._counters = torch.zeros(num, dtype=torch.int32, device=self.device)
        return self._counters[:num]

    def partials(self, num: int) -> Tensor:
        """[num] float32 with unknown content."""
        if num > self._partials.numel():
            self._check_growth(num)
            self._partials = torch.empty(num, dtype=torch.float32, device=self.device)
        return self._partials[:num]

    def freeze(self) -> None:
        """From here on growing is an error: graphs hold these addresses."""
        self._is_frozen = True

    @property
    def num_bytes(self) -> int:
        return self._counters.nbytes + self._partials.nbytes

    def _check_growth(self, num: int) -> None:
        assert not self._is_frozen, f"a captured graph holds the workspace; {num} is more than it"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What packing a weight has to know beside the weight.

    deterministic: one tile choice for every number of rows, so that a row's bits do not depend on
        the rows beside it.
    """

    workspace: Workspace = field(default_factory=lambda: Workspace("cpu"))
    deterministic: bool = False
