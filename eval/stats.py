"""Statistics of the gate: paired proportions, exact bounds and the cluster bootstrap.

Pure functions of numbers; knows no model, metric or threshold. All bounds are one-sided at the
given confidence, so the pair (lower, upper) at 0.95 is a 90 % two-sided interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

import numpy as np

_NORMAL = NormalDist()
_BISECTIONS = 60
BCA_BELOW = 200
# With fewer clusters than this that differ, their likeness cannot be estimated and is taken to be
# complete.
FEW_CLUSTERS = 5
# All signs are tried up to this many clusters that differ, then a sample is drawn.
_EXACT_SIGNS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCounts:
    """Outcomes of the same items under two models.

    num_items: all items; num_base_ok: items the base got right; lost: base right and candidate
    wrong; gained: base wrong and candidate right.
    """

    num_items: int
    num_base_ok: int
    lost: int
    gained: int

    @property
    def drop(self) -> float:
        """Fall of the success rate, base minus candidate, as a share of all items."""
        return (self.lost - self.gained) / self.num_items


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A point estimate with its one-sided lower and upper bounds."""

    estimate: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How intervals are made: one-sided confidence, number of bootstrap draws, seed."""

    confidence: float = 0.95
    draws: int = 10_000
    seed: int = 0


def paired_counts(base_ok: list[bool], candidate_ok: list[bool]) -> PairedCounts:
    """Count the four outcomes of items judged under both models (lists of equal length)."""
    pairs = list(zip(base_ok, candidate_ok, strict=True))
    return PairedCounts(
        num_items=len(pairs),
        num_base_ok=sum(base_ok),
        lost=sum(b and not c for b, c in pairs),
        gained=sum(c and not b for b, c in pairs),
    )


def drop_z(counts: PairedCounts, margin: float) -> float:
    """Score statistic of H0 "drop >= margin" for paired proportions (Tango 1998; Nam 1997).

    The variance uses the maximum-likelihood estimate of P(gained) under drop = margin.
    Very negative values speak against H0.
    """
    n, b, c, d = counts.num_items, counts.lost, counts.gained, margin
    linear = (b + c) * (1 - d) - 2 * c * d - 2 * (n - b - c) * d
    root = math.sqrt(max(linear**2 + 8 * n * c * d * (1 - d), 0.0))
    p = min(max((linear + root) / (4 * n), max(0.0, -d)), (1 - d) / 2)
    variance = (2 * p + d - d * d) / n
    gap = counts.drop - d
    if variance <= 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / math.sqrt(variance)


def drop_upper(counts: PairedCounts, confidence: float = 0.95) -> float:
    """The one-sided upper bound of the drop: the score test inverted."""
    critical = -_NORMAL.inv_cdf(confidence)
    low, high = counts.drop, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if drop_z(counts, middle) < critical else (middle, high)
    return high


def drop_lower(counts: PairedCounts, confidence: float = 0.95) -> float:
    """The one-sided lower bound of the drop (the upper bound of the mirrored table)."""
    mirrored = PairedCounts(
        num_items=counts.num_items,
        num_base_ok=counts.num_base_ok - counts.lost + counts.gained,
        lost=counts.gained,
        gained=counts.lost,
    )
    return -drop_upper(mirrored, confidence)


def drop_interval(counts: PairedCounts, confidence: float = 0.95) -> Interval:
    """The drop with both of its score bounds."""
    return Interval(
        estimate=counts.drop,
        lower=drop_lower(counts, confidence),
        upper=drop_upper(counts, confidence),
    )


def mcnemar_p(counts: PairedCounts) -> float:
    """Exact one-sided McNemar p-value of "the candidate is worse": P(Binom(b+c, 1/2) >= b)."""
    flips = counts.lost + counts.gained
    tail = sum(math.comb(flips, k) for k in range(counts.lost, flips + 1))
    return float(tail / 2**flips)


def clopper_pearson_upper(successes: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided upper bound of a proportion (Clopper and Pearson 1934); 1.0 without trials."""
    if successes >= trials:
        return 1.0
    counts = np.arange(successes + 1)
    log_ways = np.concatenate([[0.0], np.cumsum(np.log((trials - counts[:-1]) / counts[1:]))])
    low, high = successes / trials, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        log_terms = log_ways + counts * math.log(middle) + (trials - counts) * math.log1p(-middle)
        is_above = np.exp(log_terms).sum() < 1 - confidence
        low, high = (low, middle) if is_above else (middle, high)
    return high


def clopper_pearson_lower(successes: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided lower bound of a proportion; 0.0 without trials."""
    return 1.0 - clopper_pearson_upper(trials - successes, trials, confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedResult:
    """Pass-or-fail items in clusters. `counts` are the items as they are.

    design_effect: by how much the clusters' likeness inflates the variance; `shrunk` divides by it.
    interval: the drop. p_value: one-sided, of "the candidate is worse".
    """

    counts: PairedCounts
    design_effect: float
    interval: Interval
    p_value: float


def paired_by_cluster(
    base_ok: Sequence[bool],
    candidate_ok: Sequence[bool],
    clusters: Sequence[str],
    sampling: Sampling,
) -> PairedResult:
    """Score bounds of the drop for items of which several may come from one document.

    The counts are divided by the design effect (Kish 1965; Korn and Graubard 1998): ten items of
    one document are between one and ten pieces of evidence. McNemar's test is replaced by flipping
    the signs of whole clusters.
    """
    counts = paired_counts(list(base_ok), list(candidate_ok))
    if len(set(clusters)) == len(clusters):
        interval = drop_interval(counts, sampling.confidence)
        return PairedResult(
            counts=counts, design_effect=1.0, interval=interval, p_value=mcnemar_p(counts)
        )
    base, candidate = np.array(base_ok, dtype=float), np.array(candidate_ok, dtype=float)
    change = base - candidate
    effect = max(design_effect(change, clusters), design_effect(np.maximum(change, 0), clusters))
    interval = drop_interval(shrunk(counts, effect), sampling.confidence)
    return PairedResult(
        counts=counts,
        design_effect=effect,
        interval=Interval(
            estimate=counts.drop,
            lower=min(interval.lower, counts.drop),
            upper=max(interval.upper, counts.drop),
        ),
        p_value=sign_flip_p(_cluster_sums(change, clusters), sampling),
    )


def design_effect(values: np.ndarray, clusters: Sequence[str]) -> float:
    """Variance of the mean of [N] values by clusters over that of independent values; >= 1.

    The larger of two estimates: from the clusters' sums, and from how alike two items of a cluster
    are, which counts large clusters in even where none of them happens to show a change. With few
    clusters of several items that are not all zero it is the largest possible one, as if the items
    of a cluster were copies of each other.
    """
    _, index, sizes = np.unique(list(clusters), return_inverse=True, return_counts=True)
    copies = float((sizes**2).sum() / len(values))
    sums, several = np.bincount(index, weights=values), sizes > 1
    squares = np.bincount(index, weights=(values - values.mean()) ** 2)
    if np.count_nonzero(sums[several]) < FEW_CLUSTERS or squares.sum() == 0:
        return copies
    apart = (sums - sizes * values.mean()) ** 2
    together = float(apart.sum() / squares.sum()) * len(sizes) / (len(sizes) - 1)
    pairs = ((apart - squares)[several] / (sizes[several] - 1)).sum()
    likeness = min(float(pairs / squares[several].sum()), 1.0)
    return max(1.0, together, 1 + likeness * (copies - 1))


def _cluster_sums(values: np.ndarray, clusters: Sequence[str]) -> np.ndarray:
    _, index = np.unique(list(clusters), return_inverse=True)
    return np.bincount(index, weights=values)


def shrunk(counts: PairedCounts, effect: float) -> PairedCounts:
    """The counts of as many independent items as these are worth, losses rounded up."""
    if effect <= 1:
        return counts
    lost = math.ceil(counts.lost / effect - 1e-9)
    gained = math.floor(counts.gained / effect + 1e-9)
    base_ok = max(round(counts.num_base_ok / effect), lost)
    items = max(math.floor(counts.num_items / effect), base_ok + gained, 1)
    return PairedCounts(num_items=items, num_base_ok=base_ok, lost=lost, gained=gained)


def sign_flip_p(drops: np.ndarray, sampling: Sampling) -> float:
    """One-sided p-value of "the candidate is worse" from [C] sums of base - candidate.

    The permutation test: without a difference, each cluster's sign is a coin's. With drops of one
    item each this is the exact McNemar test.
    """
    sizes = np.abs(drops[drops != 0])
    found = float(drops.sum()) - 1e-9
    if len(sizes) == 0:
        return 1.0
    if len(sizes) <= _EXACT_SIGNS:
        codes = np.arange(1 << len(sizes))[:, None] >> np.arange(len(sizes))
        return float(np.mean((1 - 2 * (codes & 1)) @ sizes >= found))
    rng = np.random.default_rng(sampling.seed)
    signs = 1 - 2 * rng.integers(0, 2, size=(sampling.draws, len(sizes)), dtype=np.int8)
    reached = int(np.count_nonzero(signs.astype(np.float64) @ sizes >= found))
    return (1 + reached) / (1 + sampling.draws)


K = TypeVar("K")


def holm(p_values: Mapping[K, float]) -> dict[K, float]:
    """Holm's adjusted p-values (1979): below 0.05, the chance of even one false alarm is 5 %."""
    adjusted: dict[K, float] = {}
    largest = 0.0
    ranked = sorted(p_values.items(), key=lambda pair: pair[1])
    for rank, (key, p) in enumerate(ranked):
        largest = max(largest, min(1.0, p * (len(ranked) - rank)))
        adjusted[key] = largest
    return adjusted


Statistic = Callable[[np.ndarray], np.ndarray]


def cluster_bootstrap(sums: np.ndarray, statistic: Statistic, sampling: Sampling) -> Interval:
    """Bootstrap a statistic of sums by resampling whole clusters (documents, items).

    Args:
        sums: [C, K] float64, per cluster the K sums the statistic is made of.
        statistic: maps [D, K] totals to [D] values (for instance exp(total / count)).
        sampling: confidence, draws and seed.

    Returns BCa bounds (Efron 1987) below 200 clusters, percentile bounds from there on, at levels
    expanded for small samples. With fewer than `fewest_clusters` the bounds are infinite.
    """
    estimate = value(statistic, sums.sum(axis=0, keepdims=True))
    if len(sums) < fewest_clusters(sampling.confidence) or not math.isfinite(estimate):
        return Interval(estimate=estimate, lower=-math.inf, upper=math.inf)
    values = _draw(sums, statistic, sampling)
    if np.ptp(values) == 0:
        return Interval(estimate=estimate, lower=estimate, upper=estimate)
    confidence = _expanded(sampling.confidence, len(sums))
    tails = (1 - confidence, confidence)
    if len(sums) < BCA_BELOW:
        tails = _bca_tails(sums, statistic, values, estimate, confidence)
    lower, upper = np.quantile(values, tails)
    return Interval(estimate=estimate, lower=float(lower), upper=float(upper))


def fewest_clusters(confidence: float) -> int:
    """The fewest clusters whose range can hold a bound at this confidence.

    A resampled bound never leaves the range of the clusters, and all n lie on one side of the true
    median with probability 2^-n, which must not exceed 1 - confidence (5 clusters at 0.95).
    """
    return max(2, math.ceil(-math.log2(1 - confidence)))


def _expanded(confidence: float, count: int) -> float:
    """The level at which bootstrap quantiles of `count` clusters have this confidence.

    Resampling understates the spread by sqrt((n - 1) / n) and knows no t distribution (Hesterberg
    2015, section 5.3). The t quantile is the expansion of Abramowitz and Stegun 26.7.5.
    """
    z, freedom = _NORMAL.inv_cdf(confidence), count - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return _NORMAL.cdf(t * math.sqrt(count / freedom))


def value(statistic: Statistic, totals: np.ndarray) -> float:
    """The statistic of [1, K] totals, NaN where it is undefined."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return float(statistic(totals)[0])


def _draw(sums: np.ndarray, statistic: Statistic, sampling: Sampling) -> np.ndarray:
    """Statistic of `draws` resamples, [D]; draws in which it is undefined are left out."""
    count = len(sums)
    rng = np.random.default_rng(sampling.seed)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=sampling.draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(weights.astype(np.float64) @ sums)
    finite: np.ndarray = values[np.isfinite(values)]
    return finite


def _bca_tails(
    sums: np.ndarray, statistic: Statistic, values: np.ndarray, estimate: float, confidence: float
) -> tuple[float, float]:
    """The quantiles BCa reads instead of 1 - confidence and confidence."""
    below = float(np.mean(values < estimate) + np.mean(values == estimate) / 2)
    if not 0 < below < 1:
        return 1 - confidence, confidence
    with np.errstate(divide="ignore", invalid="ignore"):
        jackknife = statistic(sums.sum(axis=0) - sums)
    spread = jackknife.mean() - jackknife
    norm = float((spread**2).sum()) ** 1.5
    skew = float((spread**3).sum()) / (6 * norm) if norm > 0 else 0.0
    shift = _NORMAL.inv_cdf(below)

    def tail(level: float) -> float:
        z = shift + _NORMAL.inv_cdf(level)
        return _NORMAL.cdf(shift + z / (1 - skew * z))

    lower, upper = tail(1 - confidence), tail(confidence)
    return (lower, upper) if math.isfinite(lower + upper) else (1 - confidence, confidence)
