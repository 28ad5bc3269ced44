"""Layer 1 in full: the statistics `llama-perplexity --kl-divergence` prints, under its names.

Unlike there, every token of a window but its context is scored, log-probabilities are not rounded
to 16 bits, intervals resample whole documents (tokens of a document depend on each other, so plain
standard errors are two to three times too small), and each domain stands for itself. Described,
not judged: what a gates file may judge is in `eval.metrics.divergence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.metrics.divergence import WindowScores, domain_names, per_document
from eval.stats import Interval, Sampling, Statistic, cluster_bootstrap

KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)
DELTA_P_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)
# Tokens before the one that is scored: error that grows with the input shows here.
LENGTH_EDGES = (0, 64, 256, 1024, 2048, 4096, 8192)
DECILES = 10
_DRAWS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """One domain, or all of them under "". `means` and `points` map llama-perplexity's names.

    means: with intervals. points: percentiles and extremes, which have none. KLD in nats, delta-p
    (the change of the probability of the text's own next token) in shares of 1.
    """

    domain: str
    num_tokens: int
    num_documents: int
    means: dict[str, Interval]
    points: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens at one place: mean KLD and mean ln(PPL(Q)/PPL(base)) there."""

    label: str
    num_tokens: int
    kld: Interval
    log_ratio: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer1:
    """All of it. positions: deciles of a window; lengths: by how many tokens went before.

    slope: change of the mean KLD from the beginning of a window to its end, by a straight line.
    """

    domains: tuple[Statistics, ...]
    positions: tuple[Part, ...]
    lengths: tuple[Part, ...]
    slope: Interval


def describe(scores: Sequence[WindowScores], sampling: Sampling) -> Layer1:
    """Every statistic of layer 1. Fewer bootstrap draws than the gate's: nothing hangs on them."""
    sampling = replace(sampling, draws=min(sampling.draws, _DRAWS))
    names = sorted({name for score in scores for name in domain_names(score)})
    inside = [(n, [s for s in scores if n in domain_names(s)]) for n in names]
    return Layer1(
        domains=tuple(_statistics(n, part, sampling) for n, part in [("", list(scores)), *inside]),
        positions=tuple(_by_position(scores, sampling)),
        lengths=tuple(_by_length(scores, sampling)),
        slope=_slope(scores, sampling),
    )


def delta_p(score: WindowScores) -> np.ndarray:
    """[n] change of the probability of the given next token, candidate minus base."""
    change: np.ndarray = np.exp(-score.candidate_nll) - np.exp(-score.base_nll)
    return change


def _statistics(domain: str, scores: Sequence[WindowScores], sampling: Sampling) -> Statistics:
    kld = np.concatenate([s.kl for s in scores])
    change = np.concatenate([delta_p(s) for s in scores])
    points = {"Cor(ln(PPL(Q)), ln(PPL(base)))": _correlation(scores)}
    points |= dict(_percentiles("KLD", kld, KLD_PERCENTILES))
    points |= dict(_percentiles("delta-p", change, DELTA_P_PERCENTILES))
    sums = _sums(scores)
    return Statistics(
        domain=domain,
        num_tokens=len(kld),
        num_documents=len(sums),
        means={name: cluster_bootstrap(sums, of, sampling) for name, of in _MEANS.items()},
        points=points,
    )


def _sums(scores: Sequence[WindowScores]) -> np.ndarray:
    """[documents, 7]: sums over tokens of what _MEANS are made of; the last is their number."""
    rows = [
        np.stack(
            [s.candidate_nll, s.base_nll, s.kl, delta_p(s), delta_p(s) ** 2, s.agrees,
             np.ones(len(s.kl))],
            axis=1,
        )
        for s in scores
    ]  # fmt: skip
    return per_document(scores, rows)


def _mean(column: int) -> Statistic:
    return lambda t: t[:, column] / t[:, -1]


def _exp_mean(column: int) -> Statistic:
    return lambda t: np.exp(t[:, column] / t[:, -1])


def _difference(t: np.ndarray) -> np.ndarray:
    apart: np.ndarray = np.exp(t[:, 0] / t[:, -1]) - np.exp(t[:, 1] / t[:, -1])
    return apart


_MEANS: dict[str, Statistic] = {
    "Mean PPL(Q)": _exp_mean(0),
    "Mean PPL(base)": _exp_mean(1),
    "Mean ln(PPL(Q)/PPL(base))": lambda t: (t[:, 0] - t[:, 1]) / t[:, -1],
    "Mean PPL(Q)/PPL(base)": lambda t: np.exp((t[:, 0] - t[:, 1]) / t[:, -1]),
    "Mean PPL(Q)-PPL(base)": _difference,
    "Mean KLD": _mean(2),
    "Mean delta-p": _mean(3),
    "RMS delta-p": lambda t: np.sqrt(t[:, 4] / t[:, -1]),
    "Same top p": _mean(5),
}


def _correlation(scores: Sequence[WindowScores]) -> float:
    """Pearson's, of both models' negative log-likelihoods of the same tokens."""
    base = np.concatenate([s.base_nll for s in scores])
    candidate = np.concatenate([s.candidate_nll for s in scores])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        spread = np.sqrt(base.var() * candidate.var())
        return float(((base - base.mean()) * (candidate - candidate.mean())).mean() / spread)


def _percentiles(
    what: str, values: np.ndarray, percents: Sequence[float]
) -> Iterator[tuple[str, float]]:
    yield f"Maximum {what}", float(values.max())
    for percent in percents:
        name = f"Median {what}" if percent == 50 else f"{percent:.1f}% {what}"
        yield name, float(np.percentile(values, percent))
    yield f"Minimum {what}", float(values.min())


def _decile(count: int) -> np.ndarray:
    """[count] 0 .. 9: where in a window each scored token stands."""
    return np.arange(count) * DECILES // count


def _by_position(scores: Sequence[WindowScores], sampling: Sampling) -> Iterator[Part]:
    for decile in range(DECILES):
        masks = [_decile(len(s.kl)) == decile for s in scores]
        label = f"{decile * 10}-{decile * 10 + 10} %"
        yield from _part(label, scores, masks, sampling)


def _by_length(scores: Sequence[WindowScores], sampling: Sampling) -> Iterator[Part]:
    before = [s.window.num_context + np.arange(len(s.kl)) for s in scores]
    for low, high in zip(LENGTH_EDGES, (*LENGTH_EDGES[1:], None), strict=True):
        masks = [(at >= low) & (at < (high or np.inf)) for at in before]
        label = f"{low}-{high} tokens" if high else f"from {low} tokens"
        yield from _part(label, scores, masks, sampling)


def _part(
    label: str, scores: Sequence[WindowScores], masks: Sequence[np.ndarray], sampling: Sampling
) -> Iterator[Part]:
    """The tokens under the masks, nothing when there are none."""
    num_tokens = int(sum(mask.sum() for mask in masks))
    if not num_tokens:
        return
    rows = [
        np.stack([s.kl, s.candidate_nll - s.base_nll, np.ones(len(s.kl))], axis=1)[mask]
        for s, mask in zip(scores, masks, strict=True)
    ]
    sums = per_document(scores, rows)
    sums = sums[sums[:, -1] > 0]
    yield Part(
        label=label,
        num_tokens=num_tokens,
        kld=cluster_bootstrap(sums, _mean(0), sampling),
        log_ratio=cluster_bootstrap(sums, _mean(1), sampling),
    )


def _slope(scores: Sequence[WindowScores], sampling: Sampling) -> Interval:
    """Least squares of KLD on the place in the window, 0 at its beginning and 1 at its end."""
    rows = []
    for s in scores:
        x = (np.arange(len(s.kl)) + 0.5) / len(s.kl)
        rows.append(np.stack([x, x * x, s.kl, x * s.kl, np.ones(len(x))], axis=1))

    def slope(t: np.ndarray) -> np.ndarray:
        x, xx, y, xy, n = t.T
        steepness: np.ndarray = (n * xy - x * y) / (n * xx - x * x)
        return steepness

    return cluster_bootstrap(per_document(scores, rows), slope, sampling)
