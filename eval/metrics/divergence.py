"""Layer 1: how far the candidate's next-token distributions are from the base's on held-out text.

Perplexity, KL(base || candidate) in nats over the full vocabulary, and top-1 agreement, all on the
same tokens, so every figure is paired. Tokens of a document depend on each other, so intervals
resample whole documents. Statistics carry the names `llama-perplexity --kl-divergence` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.measurement import Measurement, Unit
from eval.stats import Sampling, cluster_bootstrap
from eval.windows import Window

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
FLIP_NATS = (0.1, 1.0)


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


def measure(scores: Sequence[WindowScores], sampling: Sampling) -> tuple[Measurement, ...]:
    """perplexity_ratio, kl_mean and top1_agreement, each with its domains."""
    return tuple(_with_domains(one, scores, sampling) for one in _MEASURES)


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


def _with_domains(one: _Measure, scores: Sequence[WindowScores], sampling: Sampling) -> Measurement:
    names = sorted({name for score in scores for name in _domain_names(score)})
    parts = tuple((n, one([s for s in scores if n in _domain_names(s)], sampling)) for n in names)
    return replace(one(scores, sampling), domains=parts)


def _domain_names(score: WindowScores) -> tuple[str, str]:
    return f"source:{score.window.source}", f"lang:{score.window.lang}"


def _per_document(scores: Sequence[WindowScores], values: list[np.ndarray]) -> np.ndarray:
    """[documents, 2]: sum of the values and number of tokens of each document."""
    sums: dict[str, list[float]] = {}
    for score, value in zip(scores, values, strict=True):
        row = sums.setdefault(score.window.document, [0.0, 0.0])
        row[0] += float(value.sum())
        row[1] += len(value)
    return np.array(list(sums.values()), dtype=np.float64).reshape(-1, 2)


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
        rows = _per_document(scores, [values(score) for score in scores])
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


def _perplexities(scores: Sequence[WindowScores]) -> tuple[float, float]:
    base = np.concatenate([score.base_nll for score in scores])
    candidate = np.concatenate([score.candidate_nll for score in scores])
    with np.errstate(over="ignore"):
        return float(np.exp(base.mean())), float(np.exp(candidate.mean()))


def _neither(scores: Sequence[WindowScores]) -> tuple[None, None]:
    return None, None


_MEASURES: tuple[_Measure, ...] = (
    _token_mean(
        "perplexity_ratio", "ratio", lambda s: s.candidate_nll - s.base_nll, np.exp, _perplexities
    ),
    _token_mean("kl_mean", "nats", lambda s: s.kl, np.positive, _neither),
    _token_mean("top1_agreement", "share", lambda s: s.agrees, np.positive, _neither),
)
