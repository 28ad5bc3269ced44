"""Blame: which modules carry an artifact's loss, by putting originals back and measuring again.

A best-first bisection: the half that wins back most is halved again, down to one layer's attention
or MLP, and there to the linears that must share a scheme. One broken layer of thirty is found in a
dozen measurements; a loss that is spread over everything uses up the budget, and that is said.
Pure: `measure` tells the loss with a set of units restored; knows no model.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A group of linears is named instead of its whole block when it alone wins back this much of it.
MOST_OF_BLOCK = 0.8
# Parts that win back less than this share of the loss are not looked into.
LEAST_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Modules that are put back together: a range of layers, a block of one, a fused group.

    parts: what it is made of. names: the tensors' modules, of all its parts. is_block: small enough
    to be named; folds between a norm and its linears stay inside it.
    """

    name: str
    names: frozenset[str]
    parts: tuple[Unit, ...] = ()
    is_block: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A unit to name, and by how much the loss falls when it alone is put back."""

    unit: Unit
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """loss: of the artifact. restored: with all culprits put back. target: what was aimed at.

    is_fixed: `restored` reaches the target. num_measured: how often the loss was measured.
    """

    loss: float
    restored: float
    target: float
    culprits: tuple[Culprit, ...]
    num_measured: int

    @property
    def is_fixed(self) -> bool:
        return self.restored <= self.target


Measure = Callable[[frozenset[str]], float]


def find(units: Sequence[Unit], measure: Measure, *, target: float, budget: int) -> Blame:
    """Name the units that carry the loss, heaviest first, until putting them back reaches `target`.

    measure: the loss with the modules of these names put back. budget: measurements at most (a few
    more to finish the unit at hand).
    """
    search = _Search(measure)
    loss = search(frozenset())
    order = itertools.count()
    queue: list[tuple[float, int, Unit]] = []

    def add(unit: Unit) -> None:
        gain = loss - search(unit.names)
        if gain >= LEAST_SHARE * loss:
            heapq.heappush(queue, (-gain, next(order), unit))

    for unit in units:
        add(unit)
    culprits: list[Culprit] = []
    back, restored = frozenset[str](), loss
    while queue and restored > target and search.num_measured < budget:
        gain, _, unit = heapq.heappop(queue)
        if not unit.is_block:
            for part in unit.parts:
                add(part)
            continue
        culprits.append(_narrowed(unit, -gain, loss, search))
        back |= culprits[-1].unit.names
        restored = search(back)
    return Blame(
        loss=loss,
        restored=restored,
        target=target,
        culprits=tuple(culprits),
        num_measured=search.num_measured,
    )


class _Search:
    """Measures each set once and counts."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._known: dict[frozenset[str], float] = {}

    def __call__(self, names: frozenset[str]) -> float:
        if names not in self._known:
            self._known[names] = self._measure(names)
        return self._known[names]

    @property
    def num_measured(self) -> int:
        return len(self._known)


def _narrowed(block: Unit, gain: float, loss: float, search: _Search) -> Culprit:
    """The one fused group that does most of what the whole block does, else the block.

    Where scales were folded into a norm a group alone does not fit back: then it wins nothing.
    """
    if len(block.parts) < 2:
        return Culprit(unit=block, gain=gain)
    gains = [(loss - search(part.names), part) for part in block.parts]
    best, part = max(gains, key=lambda pair: pair[0])
    if best >= MOST_OF_BLOCK * gain:
        return Culprit(unit=part, gain=best)
    return Culprit(unit=block, gain=gain)


def halves(units: Sequence[Unit], name: Callable[[Unit, Unit], str]) -> list[Unit]:
    """Units in order as a binary tree: at most two roots. name: of a range, from first to last."""

    def tree(some: Sequence[Unit]) -> Unit:
        if len(some) == 1:
            return some[0]
        middle = len(some) // 2
        parts = (tree(some[:middle]), tree(some[middle:]))
        names = frozenset[str]().union(*(part.names for part in parts))
        return Unit(name=name(some[0], some[-1]), names=names, parts=parts)

    middle = len(units) // 2
    return [tree(some) for some in (units[:middle], units[middle:]) if some]
