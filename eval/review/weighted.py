"""Shares of items that stand for different numbers of requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval.stats import Interval, clopper_pearson_lower, clopper_pearson_upper


def effective_size(weights: Sequence[float]) -> float:
    """Kish's effective sample size: items of equal weight that tell as much."""
    return sum(weights) ** 2 / sum(w * w for w in weights)


def share_bounds(weights: Sequence[float], holds: Sequence[bool], confidence: float) -> Interval:
    """The weighted share of items that hold, with one-sided Clopper-Pearson bounds.

    Korn and Graubard (1998): the exact bounds of as many hits in as many trials as the effective
    size has, rounded outward. With equal weights these are the plain bounds of the count.
    """
    trials = effective_size(weights)
    share = math.fsum(w for w, held in zip(weights, holds, strict=True) if held) / sum(weights)
    hits, whole = round(share * trials, 9), math.floor(round(trials, 9))
    return Interval(
        estimate=share,
        lower=clopper_pearson_lower(math.floor(hits), whole, confidence),
        upper=clopper_pearson_upper(min(math.ceil(hits), whole), whole, confidence),
    )
