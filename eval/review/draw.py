"""Which requests people see: a stratified draw from what the two models answered differently.

Where both gave the same answer nobody can prefer one, so such requests are known without asking:
they count with a preference of zero, and a few of them serve as controls. That is the extreme of
oversampling what differs; weights put the rest right. Pure; knows no file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.errors import UsageError
from eval.review.samples import Sample

# Of the requests, so many identical pairs and as many planted defects: together 7-8 % of a pack.
CONTROL_SHARE = 0.04
FEWEST_CONTROLS = 2
# The longest inputs are in the pack whatever the draw says.
LONGEST_SHARE = 0.05

Domain = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A request in the pack; it stands for `weight` requests of the evaluation (1: for itself)."""

    sample: Sample
    weight: float
    is_longest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What goes into a pack. num_requests, num_differing: of the whole evaluation."""

    drawn: tuple[Drawn, ...]
    identical: tuple[Sample, ...]
    planted: tuple[Sample, ...]
    num_requests: int
    num_differing: int


def draw(samples: Sequence[Sample], count: int, seed: int) -> Draw:
    """Draw up to `count` differing requests and the controls beside them.

    The draw depends on seed and ids alone, not on the order of lines. Longest inputs first, with
    certainty; then every (task, source, lang) in proportion to its size, each with one at least.

    Raises UsageError when no answers differ, or when too few requests are left for controls.
    """
    order = sorted(samples, key=lambda sample: _shuffled(sample.id, seed))
    differing = [sample for sample in order if sample.differs]
    if not differing:
        raise UsageError(
            f"both models gave the same answer to all {len(samples)} requests: there is nothing "
            "for people to compare"
        )
    longest = _longest(differing, min(count, len(differing)))
    controls = _num_controls(min(count, len(differing)))
    identical, planted = _controls(order, {s.id for s in longest}, controls)
    taken = {sample.id for sample in (*identical, *planted, *longest)}
    rest = [sample for sample in differing if sample.id not in taken]
    strata = _sizes(differing, longest)
    picked = _pick(rest, strata, count - len(longest))
    if strata and not picked:
        raise UsageError(_too_few(len(samples)))
    return Draw(
        drawn=(
            *(Drawn(sample=sample, weight=1.0, is_longest=True) for sample in longest),
            *_weighted(picked, strata),
        ),
        identical=tuple(identical),
        planted=tuple(planted),
        num_requests=len(samples),
        num_differing=len(differing),
    )


def _shuffled(text: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()


def _num_controls(count: int) -> int:
    return max(FEWEST_CONTROLS, round(CONTROL_SHARE * count))


def _longest(differing: Sequence[Sample], count: int) -> list[Sample]:
    """Ties keep the shuffled order."""
    return sorted(differing, key=lambda s: -s.input_length)[: math.ceil(LONGEST_SHARE * count)]


def _controls(
    order: Sequence[Sample], kept: set[str], each: int
) -> tuple[list[Sample], list[Sample]]:
    """Identical pairs and bases of planted defects: from equal answers first, which none misses."""
    usable = [s for s in order if s.base.text.strip() and s.id not in kept]
    usable.sort(key=lambda sample: sample.differs)
    if len(usable) < 2 * each:
        raise UsageError(_too_few(len(order)))
    return usable[:each], usable[each : 2 * each]


def _too_few(count: int) -> str:
    return (
        f"{count} requests are too few for a review: the controls and the longest inputs leave "
        "nothing to draw from; evaluate more items"
    )


def _sizes(differing: Sequence[Sample], longest: Sequence[Sample]) -> dict[Domain, int]:
    """How many requests each stratum has; controls are missing from the draw at random."""
    certain = {sample.id for sample in longest}
    sizes: dict[Domain, int] = {}
    for sample in differing:
        if sample.id not in certain:
            sizes[sample.domain] = sizes.get(sample.domain, 0) + 1
    return sizes


def _pick(rest: Sequence[Sample], strata: Mapping[Domain, int], count: int) -> list[Sample]:
    available: dict[Domain, list[Sample]] = {domain: [] for domain in strata}
    for sample in rest:
        available[sample.domain].append(sample)
    shares = allocate({d: len(rows) for d, rows in available.items() if rows}, count)
    return [s for d, share in sorted(shares.items()) for s in available[d][:share]]


def allocate(sizes: Mapping[Domain, int], count: int) -> dict[Domain, int]:
    """Parts of `count` in proportion to `sizes`: one at least, its size at most.

    Largest remainders; when there are more strata than places, the largest strata have them.
    """
    total = sum(sizes.values())
    if count >= total:
        return dict(sizes)
    by_size = sorted(sizes, key=lambda domain: (-sizes[domain], domain))
    shares = {d: max(1, count * sizes[d] // total) for d in by_size[: max(count, 0)]}
    rest = sorted(shares, key=lambda d: (-(count * sizes[d] % total), d))
    while sum(shares.values()) > count:
        shares[max(shares, key=lambda d: (shares[d], d))] -= 1
    for domain in (d for _ in range(count) for d in rest):
        if sum(shares.values()) == count:
            break
        shares[domain] += shares[domain] < sizes[domain]
    return shares


def _weighted(picked: Sequence[Sample], strata: Mapping[Domain, int]) -> list[Drawn]:
    """Each stands for its stratum's size over the number drawn from it.

    A stratum that is too small to be drawn from is shared out over the others, so that the
    weights always add up to the number of requests that answers differ in.
    """
    counts: dict[Domain, int] = {}
    for sample in picked:
        counts[sample.domain] = counts.get(sample.domain, 0) + 1
    covered = sum(strata[domain] for domain in counts)
    spread = sum(strata.values()) / covered if covered else 1.0
    return [Drawn(sample=s, weight=spread * strata[s.domain] / counts[s.domain]) for s in picked]
