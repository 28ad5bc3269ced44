"""Drift with the input's length: how much more is lost in the longest inputs than in the shortest.

Quantization noise adds up over a long context, and an average over mostly short items hides it. The
drop of each task metric among the longest inputs, minus its drop among the shortest; both models
answered the same items, and whole documents are resampled. (Drift along a text's positions is in
`eval.metrics.divergence`.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.checks.catalogue import TASK_METRICS, Rate, length_drift, share
from eval.measurement import Measurement
from eval.metrics.answers import (
    FEW_CHANGED,
    PairedItem,
    Row,
    achieved,
    measurement,
    row_of,
    values_of,
)
from eval.metrics.lengths import ENOUGH, bucket_of, label_of
from eval.stats import Interval, Sampling, cluster_bootstrap


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """The items at one end of the lengths: what they are called, their pairs and rows."""

    label: str
    pairs: list[PairedItem]
    rows: list[Row]

    @property
    def num_changed(self) -> int:
        """Documents in which some answer's values differ."""
        return len({row.doc for row in self.rows if row.base != row.candidate})


def measure(
    pairs: Sequence[PairedItem], sampling: Sampling, edges: Sequence[int]
) -> tuple[Measurement, ...]:
    """The drift of every metric that has enough short and enough long items."""
    found = (_drift(name, pairs, sampling, edges) for name in TASK_METRICS)
    return tuple(m for m in found if m is not None)


def _drift(
    name: str, pairs: Sequence[PairedItem], sampling: Sampling, edges: Sequence[int]
) -> Measurement | None:
    scored = [pair for pair in pairs if values_of(name, pair) is not None]
    ends = _ends(name, scored, edges)
    if ends is None:
        return None
    short, long = ends
    interval = _interval(short, long, TASK_METRICS[name].rate, sampling)
    if math.isnan(interval.estimate):
        return None
    if min(short.num_changed, long.num_changed) < FEW_CHANGED:
        parts = [measurement(name, end.rows, end.pairs, sampling) for end in ends]
        interval = _no_narrower(interval, *parts)
    return Measurement(
        name=length_drift(name),
        unit="drop",
        base=None,
        candidate=None,
        estimate=interval.estimate,
        lower=interval.lower,
        upper=interval.upper,
        counted="items",
        num_scored=len(short.pairs) + len(long.pairs),
        num_clusters=len({row.doc for end in ends for row in end.rows}),
        num_nonfinite=sum(pair.candidate.failed for end in ends for pair in end.pairs),
        about=f"{len(long.pairs)} items of {long.label} tokens against {len(short.pairs)} of "
        f"{short.label}",
    )


def _ends(name: str, pairs: Sequence[PairedItem], edges: Sequence[int]) -> tuple[_End, _End] | None:
    """The shortest and the longest buckets that hold ENOUGH items, None when they would meet."""
    held: list[list[PairedItem]] = [[] for _ in range(len(edges) + 1)]
    for pair in pairs:
        held[bucket_of(pair.num_prompt_tokens, edges)].append(pair)
    sizes = np.array([len(bucket) for bucket in held])
    up, down = np.cumsum(sizes), np.cumsum(sizes[::-1])[::-1]
    if up[-1] < 2 * ENOUGH:
        return None
    last_short = int(np.argmax(up >= ENOUGH))
    first_long = int(np.flatnonzero(down >= ENOUGH)[-1])
    if first_long <= last_short:
        return None
    return (
        _end(name, held[: last_short + 1], label_of(0, last_short, edges)),
        _end(name, held[first_long:], label_of(first_long, len(edges), edges)),
    )


def _end(name: str, buckets: Sequence[list[PairedItem]], label: str) -> _End:
    pairs = [pair for bucket in buckets for pair in bucket]
    return _End(label=label, pairs=pairs, rows=[row_of(name, pair) for pair in pairs])


def _interval(short: _End, long: _End, rate: Rate | None, sampling: Sampling) -> Interval:
    """[C, 4 K] sums of each document (base and candidate, short and long), resampled."""
    docs = list(dict.fromkeys(row.doc for end in (short, long) for row in end.rows))
    place = {doc: index for index, doc in enumerate(docs)}
    width = len(_counts(short.rows[0].base, rate))
    sums = np.zeros((len(docs), 4, width))
    for at, end in ((0, short), (2, long)):
        for row in end.rows:
            sums[place[row.doc], at] += _counts(row.base, rate)
            sums[place[row.doc], at + 1] += _counts(row.candidate, rate)

    def statistic(totals: np.ndarray) -> np.ndarray:
        parts = totals.reshape(len(totals), 4, width).swapaxes(0, 1)
        base_short, base_long = ((rate or share)(parts[at]) for at in (0, 2))
        short_, long_ = (achieved(rate or share, parts[at]) for at in (1, 3))
        drift: np.ndarray = (base_long - long_) - (base_short - short_)
        return drift

    return cluster_bootstrap(sums.reshape(len(docs), -1), statistic, sampling)


def _counts(values: tuple[float, ...], rate: Rate | None) -> tuple[float, ...]:
    """What a rate is made of; of pass or fail, the passes among the answers."""
    return values if rate is not None else (values[0], 1.0)


def _no_narrower(interval: Interval, short: Measurement, long: Measurement) -> Interval:
    """Where few answers changed, resampling shows no spread: as wide as both ends' own bounds.

    The bounds of a difference of two independent estimates from theirs (Zou and Donner 2008).
    """
    below = math.hypot(long.estimate - long.lower, short.upper - short.estimate)
    above = math.hypot(long.upper - long.estimate, short.estimate - short.lower)
    return replace(
        interval,
        lower=min(interval.lower, interval.estimate - below),
        upper=max(interval.upper, interval.estimate + above),
    )
