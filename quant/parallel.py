"""Ranks: the processes that quantize one model together, each on its share of the windows.

Every rank runs the whole pipeline on its own calibration windows. Where the pipeline sums something
over all of them, it asks its `Ranks`; where it chooses codes, the work is dealt out and the codes
are exchanged; what is on disk is rank 0's alone. `Single` is a process on its own, for which all
of this is nothing at all. The real thing is `quant.parallel_group.Group`; how several processes
come to be is `quant.parallel_launch`.

All ranks must ask the same things in the same order. It knows no layers, methods or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank brings: tensors by name, and a value that can be pickled."""

    tensors: Mapping[str, Tensor]
    value: Any = None


class Ranks(Protocol):
    """One rank's view of all. Tensors are worked on where they are (CPU, or the rank's GPU).

    Every method raises what another rank failed with, and PipelineError when one is gone.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add(self, *tensors: Tensor) -> None:
        """Make each tensor the sum over the ranks, in place and alike to the last bit on all."""

    def largest(self, *tensors: Tensor) -> None:
        """Make each tensor the elementwise maximum over the ranks, in place."""

    def total(self, count: int) -> int:
        """The sum of a number over the ranks."""

    def first(self, make: Callable[[], T]) -> T:
        """What `make()` returns on rank 0, the only one that calls it; it must be picklable."""

    def first_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors that rank 0 makes, on every rank, on the CPU if they are made there."""

    def gather(self, mine: Part) -> list[Part]:
        """What each rank brings, in the order of the ranks."""

    def agree(self, what: str, value: Mapping[str, Any]) -> None:
        """PipelineError on all ranks, naming the keys, unless `value` is the same on all."""


@dataclass(frozen=True, slots=True)
class Single:
    """A process on its own."""

    rank: int = 0
    size: int = 1

    def add(self, *tensors: Tensor) -> None:
        return

    def largest(self, *tensors: Tensor) -> None:
        return

    def total(self, count: int) -> int:
        return count

    def first(self, make: Callable[[], T]) -> T:
        return make()

    def first_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return dict(make())

    def gather(self, mine: Part) -> list[Part]:
        return [mine]

    def agree(self, what: str, value: Mapping[str, Any]) -> None:
        return


def share_of(lengths: Sequence[int], ranks: Ranks) -> list[int]:
    """Indices of this rank's windows: the longest first, each to whoever has the fewest tokens."""
    loads = [0] * ranks.size
    mine = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = loads.index(min(loads))
        loads[least] += lengths[index]
        if least == ranks.rank:
            mine.append(index)
    return sorted(mine)


def rows_of(count: int, ranks: Ranks) -> slice:
    """This rank's part of `count` rows: even, in the order of the ranks, possibly empty."""
    return slice(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)
