"""Layer 1: how far the candidate's next-token distributions are from the base's on held-out text.

Perplexity, KL(base || candidate) in nats over the full vocabulary, and top-1 agreement, all on the
same tokens, so every figure is paired. Tokens of a document depend on each other, so intervals
resample whole documents. Statistics carry the names `llama-perplexity --kl-divergence` prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.measurement import Measurement, Unit
from eval.metrics.lengths import LENGTH_EDGES, length_bucket
from eval.stats import Sampling, cluster_bootstrap
from eval.windows import Window

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
FLIP_NATS = (0.1, 1.0)
# Bins of KL for its percentile, 2.3 % wide, and the value each stands for.
_BINS = np.geomspace(1e-6, 100.0, 800)
_EDGES = np.append(_BINS, 2 * _BINS[-1])
_BIN_DRAWS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScores:
    """Both models on one window: float64 [n] in nats, bool [n]; n = window.num_scored."""

    window: Window
    base_nll: np.ndarray
    candidate_nll: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The distribution of per-token KL: `percentiles` maps 50.0, 90.0, ... to nats.

    above: share of tokens with a KL over each of FLIP_NATS.
    """

    num_tokens: int
    mean: float
    percentiles: dict[float, float]
    maximum: float
    above: dict[float, float]


def measure(
    scores: Sequence[WindowScores], sampling: Sampling, edges: Sequence[int] = LENGTH_EDGES
) -> tuple[Measurement, ...]:
    """Every judged metric of layer 1 with its domains.

    edges: where one bucket of context lengths ends, in tokens; a token counts where it stands.
    """
    parts = _by_domain(scores) | _by_length(scores, edges)
    return tuple(
        replace(
            one(scores, sampling),
            domains=tuple((name, one(part, sampling)) for name, part in sorted(parts.items())),
        )
        for one in _MEASURES
    )


def ladder(scores: Sequence[WindowScores]) -> Ladder:
    """Mean, percentiles and maximum of KL over all scored tokens."""
    kl = np.concatenate([score.kl for score in scores])
    return Ladder(
        num_tokens=len(kl),
        mean=float(kl.mean()),
        percentiles={p: float(np.percentile(kl, p)) for p in PERCENTILES},
        maximum=float(kl.max()),
        above={nats: float((kl > nats).mean()) for nats in FLIP_NATS},
    )


_Measure = Callable[[Sequence[WindowScores], Sampling], Measurement]


def _by_domain(scores: Sequence[WindowScores]) -> dict[str, list[WindowScores]]:
    names = {name for score in scores for name in domain_names(score)}
    return {name: [s for s in scores if name in domain_names(s)] for name in names}


def _by_length(
    scores: Sequence[WindowScores], edges: Sequence[int]
) -> dict[str, list[WindowScores]]:
    """The tokens by how many stand before them; nothing when that is one bucket for all."""
    ends = [0, *edges, max(len(s.window.token_ids) for s in scores) + max(edges)]
    parts: dict[str, list[WindowScores]] = {}
    for low, high in zip(ends, ends[1:], strict=False):
        cut = (_between(score, low, high) for score in scores)
        if inside := [part for part in cut if len(part.kl)]:
            parts[f"length:{length_bucket(low, edges)}"] = inside
    return parts if len(parts) > 1 else {}


def _between(score: WindowScores, low: int, high: int) -> WindowScores:
    """Its tokens with at least `low` and fewer than `high` tokens before them."""
    first = score.window.num_context
    part = slice(max(low - first, 0), max(high - first, 0))
    return replace(
        score,
        base_nll=score.base_nll[part],
        candidate_nll=score.candidate_nll[part],
        kl=score.kl[part],
        agrees=score.agrees[part],
    )


def domain_names(score: WindowScores) -> tuple[str, str]:
    """The domains a window belongs to."""
    return f"source:{score.window.source}", f"lang:{score.window.lang}"


def per_document(scores: Sequence[WindowScores], rows: Sequence[np.ndarray]) -> np.ndarray:
    """[documents, K]: sums over the tokens of each document. rows: [n, K] for each window."""
    sums: dict[str, np.ndarray] = {}
    for score, values in zip(scores, rows, strict=True):
        name = score.window.document
        sums[name] = sums.get(name, 0.0) + values.sum(axis=0, dtype=np.float64)
    return np.stack(list(sums.values()))


def _with_counts(values: np.ndarray) -> np.ndarray:
    """[n, 2]: the values, and ones to count them."""
    return np.stack([values, np.ones(len(values))], axis=1)


def _num_nonfinite(scores: Sequence[WindowScores]) -> int:
    """Positions where the candidate is not finite although the base is."""
    return sum(
        int((np.isfinite(s.base_nll) & ~(np.isfinite(s.candidate_nll) & np.isfinite(s.kl))).sum())
        for s in scores
    )


def _token_mean(
    name: str,
    unit: Unit,
    values: Callable[[WindowScores], np.ndarray],
    link: Callable[[np.ndarray], np.ndarray],
    own: Callable[[Sequence[WindowScores]], tuple[float | None, float | None]],
) -> _Measure:
    """A measurement link(mean over tokens); `own` gives the base's and the candidate's value."""

    def one(scores: Sequence[WindowScores], sampling: Sampling) -> Measurement:
        rows = per_document(scores, [_with_counts(values(score)) for score in scores])
        interval = cluster_bootstrap(rows, lambda s: link(s[:, 0] / s[:, 1]), sampling)
        base, candidate = own(scores)
        return Measurement(
            name=name,
            unit=unit,
            base=base,
            candidate=candidate,
            estimate=interval.estimate,
            lower=interval.lower,
            upper=interval.upper,
            counted="tokens",
            num_scored=int(rows[:, 1].sum()),
            num_clusters=len(rows),
            num_nonfinite=_num_nonfinite(scores),
        )

    return one


def _drift(name: str, values: Callable[[WindowScores], np.ndarray]) -> _Measure:
    """Mean over the last quarter of each window's tokens minus the mean over the first."""

    def one(scores: Sequence[WindowScores], sampling: Sampling) -> Measurement:
        rows = per_document(scores, [_quarters(values(score)) for score in scores])
        interval = cluster_bootstrap(
            rows, lambda t: t[:, 0] / t[:, 1] - t[:, 2] / t[:, 3], sampling
        )
        return Measurement(
            name=name,
            unit="nats",
            base=None,
            candidate=None,
            estimate=interval.estimate,
            lower=interval.lower,
            upper=interval.upper,
            counted="tokens",
            num_scored=int(rows[:, [1, 3]].sum()),
            num_clusters=len(rows),
            num_nonfinite=_num_nonfinite(scores),
            about="the last quarter of each window minus its first",
        )

    return one


def _quarters(values: np.ndarray) -> np.ndarray:
    """[n, 4]: values of the last quarter and ones to count them, then of the first."""
    quarter = np.arange(len(values)) * 4 // max(len(values), 1)
    last, first = quarter == 3, quarter == 0
    parts = (np.where(last, values, 0.0), last, np.where(first, values, 0.0), first)
    return np.stack([np.asarray(part, dtype=np.float64) for part in parts], axis=1)


def _perplexities(scores: Sequence[WindowScores]) -> tuple[float, float]:
    base = np.concatenate([score.base_nll for score in scores])
    candidate = np.concatenate([score.candidate_nll for score in scores])
    with np.errstate(over="ignore"):
        return float(np.exp(base.mean())), float(np.exp(candidate.mean()))


def _neither(scores: Sequence[WindowScores]) -> tuple[None, None]:
    return None, None


def _kl_p99(scores: Sequence[WindowScores], sampling: Sampling) -> Measurement:
    """The 99th percentile of KL, its bounds from counts in narrow bins of each document."""
    kl = np.concatenate([score.kl for score in scores])
    rows = per_document(scores, [_bins_of(score.kl) for score in scores])
    interval = cluster_bootstrap(rows, _upper_percentile, replace(sampling, draws=_BIN_DRAWS))
    found = float(np.percentile(kl, 99.0)) if np.isfinite(kl).all() else math.nan
    return Measurement(
        name="kl_p99",
        unit="nats",
        base=None,
        candidate=None,
        estimate=found,
        lower=min(interval.lower, found),
        upper=max(interval.upper, found),
        counted="tokens",
        num_scored=len(kl),
        num_clusters=len(rows),
        num_nonfinite=_num_nonfinite(scores),
    )


def _bins_of(kl: np.ndarray) -> np.ndarray:
    """[1, bins + 1]: how many tokens of a window fall into each bin."""
    return np.bincount(np.searchsorted(_BINS, kl), minlength=len(_BINS) + 1)[None]


def _upper_percentile(totals: np.ndarray) -> np.ndarray:
    """[D] 99th percentile of [D, bins + 1] counts: the upper edge of its bin."""
    reached = np.cumsum(totals, axis=1) >= 0.99 * totals.sum(axis=1, keepdims=True)
    edges: np.ndarray = _EDGES[np.argmax(reached, axis=1)]
    return edges


_MEASURES: tuple[_Measure, ...] = (
    _token_mean(
        "perplexity_ratio", "ratio", lambda s: s.candidate_nll - s.base_nll, np.exp, _perplexities
    ),
    _token_mean("kl_mean", "nats", lambda s: s.kl, np.positive, _neither),
    _kl_p99,
    _token_mean("top1_agreement", "share", lambda s: s.agrees, np.positive, _neither),
    _drift("kl_drift", lambda s: s.kl),
    _drift("nll_drift", lambda s: s.candidate_nll - s.base_nll),
)
