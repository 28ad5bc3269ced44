"""Shares of items that stand for different numbers of requests. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from eval.stats import (
    FEW_CLUSTERS,
    Interval,
    clopper_pearson_lower,
    clopper_pearson_upper,
)


def effective_size(weights: Sequence[float]) -> float:
    """Kish's effective sample size: items of equal weight that tell as much."""
    return sum(weights) ** 2 / sum(w * w for w in weights)


def independent_size(weights: Sequence[float], docs: Sequence[str], holds: Sequence[bool]) -> float:
    """The effective size for the share of items that hold, where several come from one document.

    p (1 - p) over the variance of the share by documents (Korn and Graubard 1998). Where it holds
    in few documents of several items, likeness is taken to be complete: as if each were one item.
    """
    most = effective_size(weights)
    if len(set(docs)) == len(docs):
        return most
    total, share = math.fsum(weights), _share(weights, holds)
    sizes, apart = dict.fromkeys(docs, 0.0), dict.fromkeys(docs, 0.0)
    for doc, weight, held in zip(docs, weights, holds, strict=True):
        sizes[doc] += weight
        apart[doc] += weight * (held - share)
    several = {doc for doc, count in Counter(docs).items() if count > 1}
    holding = {doc for doc, held in zip(docs, holds, strict=True) if held and doc in several}
    spread = math.fsum(residual**2 for residual in apart.values()) / total**2
    if len(holding) < FEW_CLUSTERS or spread == 0:
        return effective_size(list(sizes.values()))
    count = len(sizes)
    return min(most, share * (1 - share) * (count - 1) / (count * spread))


def share_bounds(
    weights: Sequence[float], docs: Sequence[str], holds: Sequence[bool], confidence: float
) -> Interval:
    """The weighted share of items that hold, with one-sided Clopper-Pearson bounds.

    Korn and Graubard (1998): the exact bounds of as many hits in as many trials as the effective
    size has, rounded outward. With equal weights and one item a document these are the plain bounds
    of the count.
    """
    trials, share = independent_size(weights, docs, holds), _share(weights, holds)
    hits, whole = round(share * trials, 9), math.floor(round(trials, 9))
    return Interval(
        estimate=share,
        lower=clopper_pearson_lower(math.floor(hits), whole, confidence),
        upper=clopper_pearson_upper(min(math.ceil(hits), whole), whole, confidence),
    )


def _share(weights: Sequence[float], holds: Sequence[bool]) -> float:
    return math.fsum(w for w, held in zip(weights, holds, strict=True) if held) / sum(weights)
