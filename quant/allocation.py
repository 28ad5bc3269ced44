"""Which scheme each fused group gets: the least total score within a number of bytes, exactly.

The multiple-choice knapsack: one option per group, bytes add up, scores (predicted KL) add up. It
is solved by dynamic programming over bytes, counted in their greatest common divisor; where that
would need more than `MAX_CELLS` cells, in a coarser unit with every option rounded up, so that a
plan never exceeds its budget and misses at most one unit per group.

Knows numbers and names only: no models, no tensors, no recipes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quant.errors import PlanError

MAX_CELLS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One scheme for one group: its bytes on disk and the KL in nats that it is predicted to add.

    scheme: `Scheme.label`.
    """

    scheme: str
    num_bytes: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Modules that must share a scheme, and the options for all of them together."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One option per group, in the order of the groups."""

    choices: tuple[Option, ...]

    @property
    def num_bytes(self) -> int:
        return sum(option.num_bytes for option in self.choices)

    @property
    def score(self) -> float:
        return math.fsum(option.score for option in self.choices)


class Allocator:
    """The solved knapsack: answers for every budget up to `limit` bytes (None: any)."""

    def __init__(
        self, groups: Sequence[Group], *, limit: int | None = None, max_cells: int = MAX_CELLS
    ) -> None:
        assert groups
        assert all(group.options for group in groups)
        self._groups = tuple(groups)
        self.least_bytes = sum(min(o.num_bytes for o in g.options) for g in groups)
        self.most_bytes = sum(max(o.num_bytes for o in g.options) for g in groups)
        extra = [_extra_bytes(group) for group in groups]
        span = min(self.most_bytes, self.most_bytes if limit is None else limit) - self.least_bytes
        if span < 0:
            raise PlanError(self._too_small(int(limit or 0)))
        self._unit = _unit(extra, span, max_cells)
        self._costs = [[-(-e // self._unit) for e in row] for row in extra]
        self._best, self._taken = _solve(self._groups, self._costs, span // self._unit)

    def within(self, num_bytes: int) -> Allocation:
        """The least score in at most `num_bytes`; PlanError when not even the smallest fits."""
        spare = num_bytes - self.least_bytes
        if spare < 0:
            raise PlanError(self._too_small(num_bytes))
        return self._trace(min(spare // self._unit, len(self._best) - 1))

    def smallest(self, max_score: float) -> Allocation:
        """The least bytes with a score of at most `max_score`; PlanError when nothing has it."""
        fits = np.flatnonzero(self._best <= max_score)
        if not len(fits):
            raise PlanError(
                f"no plan is predicted to stay within a KL of {max_score:g}; the best one reaches "
                f"{float(self._best[-1]):.3g}"
            )
        return self._trace(int(fits[0]))

    def frontier(self) -> tuple[Allocation, ...]:
        """Every allocation that no other one beats in bytes and score, smallest first.

        Judged by exact sums: two equal scores whose sums were rounded in another order fall here,
        and so do cells of a coarse unit that hold no more bytes than the one before.
        """
        steps = np.flatnonzero(np.r_[True, np.diff(self._best) < 0])
        points = [self._trace(int(cell)) for cell in steps]
        kept: list[Allocation] = []
        for point in sorted(points, key=lambda p: (p.num_bytes, p.score)):
            if not kept or point.score < kept[-1].score:
                kept.append(point)
        return tuple(kept)

    def _trace(self, cell: int) -> Allocation:
        picked: list[Option] = []
        for index in reversed(range(len(self._groups))):
            choice = int(self._taken[index][cell])
            picked.append(self._groups[index].options[choice])
            cell -= self._costs[index][choice]
        return Allocation(choices=tuple(reversed(picked)))

    def _too_small(self, num_bytes: int) -> str:
        return (
            f"a budget of {num_bytes:,} bytes is too small: the smallest plan takes "
            f"{self.least_bytes:,}; raise the budget or allow smaller schemes"
        )


def diverse(
    groups: Sequence[Group], num_bytes: int, count: int, *, penalty: float = 0.25
) -> tuple[Allocation, ...]:
    """At most `count` different allocations within the budget, the best one first.

    After each one the scores of what it chose grow by the share `penalty`, so that the next one
    turns elsewhere where that costs little. Scores reported are the unchanged ones.
    """
    weights = [[1.0] * len(group.options) for group in groups]
    found: dict[tuple[int, ...], Allocation] = {}
    for _ in range(2 * count):
        tilted = [_tilt(g, w) for g, w in zip(groups, weights, strict=True)]
        chosen = Allocator(tilted, limit=num_bytes).within(num_bytes)
        picks = tuple(g.options.index(c) for g, c in zip(tilted, chosen.choices, strict=True))
        plain = tuple(g.options[i] for g, i in zip(groups, picks, strict=True))
        found.setdefault(picks, Allocation(choices=plain))
        if len(found) == count:
            break
        for row, pick in zip(weights, picks, strict=True):
            row[pick] *= 1 + penalty
    return tuple(found.values())


def _tilt(group: Group, weights: Sequence[float]) -> Group:
    pairs = zip(group.options, weights, strict=True)
    return replace(group, options=tuple(replace(o, score=o.score * w) for o, w in pairs))


def _extra_bytes(group: Group) -> list[int]:
    least = min(option.num_bytes for option in group.options)
    return [option.num_bytes - least for option in group.options]


def _unit(extra: Sequence[Sequence[int]], span: int, max_cells: int) -> int:
    exact = math.gcd(*(value for row in extra for value in row)) or 1
    return exact * max(1, -(-span // (exact * max_cells)))


def _solve(
    groups: Sequence[Group], costs: Sequence[Sequence[int]], cells: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """best[c]: least score with at most c units more than the smallest plan; option taken, by c."""
    best = np.zeros(cells + 1)
    taken = []
    for group, row in zip(groups, costs, strict=True):
        fresh = np.full(cells + 1, np.inf)
        choice = np.zeros(cells + 1, dtype=np.uint8)
        for index, (option, cost) in enumerate(zip(group.options, row, strict=True)):
            if cost > cells:
                continue
            trial = np.full(cells + 1, np.inf)
            trial[cost:] = best[: cells + 1 - cost] + option.score
            better = trial < fresh
            fresh[better], choice[better] = trial[better], index
        best = fresh
        taken.append(choice)
    return best, taken
