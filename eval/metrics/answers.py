"""Layer 2: what both models' answers achieved, item by item, as paired measurements.

Every figure is paired: the same item under both models. Items of one document or dialog depend on
each other: rates are resampled by whole documents, and counts of what passes or fails are shrunk by
the design effect of their documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eval.checks.base import Value
from eval.checks.catalogue import TASK_METRICS, Rate
from eval.checks.registry import Scored
from eval.measurement import Measurement
from eval.stats import (
    Interval,
    Sampling,
    clopper_pearson_upper,
    cluster_bootstrap,
    paired_by_cluster,
    value,
)
from eval.suites import TaskItem

# Below this many changed clusters the bootstrap is too sure of itself.
FEW_CHANGED = 5
# Upper ends of the strata of prompt lengths, in tokens.
LENGTH_BUCKETS = (1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedItem:
    """One item with both models' scores. num_prompt_tokens: of the prompt they answered."""

    item: TaskItem
    base: Scored
    candidate: Scored
    num_prompt_tokens: int = 0

    @property
    def strata(self) -> tuple[str, str, str]:
        """The domains it counts in."""
        bucket = length_bucket(self.num_prompt_tokens)
        return f"source:{self.item.source}", f"lang:{self.item.lang}", f"length:{bucket}"


def length_bucket(num_tokens: int) -> str:
    """The stratum of a prompt length: 0-1k, 1-2k, 2-4k, 4-8k, 8k+."""
    low = 0
    for high in LENGTH_BUCKETS:
        if num_tokens < high:
            return f"{low // 1024}-{high // 1024}k"
        low = high
    return f"{low // 1024}k+"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One item's part in one metric: the counts of both models (a single one for pass-or-fail)."""

    doc: str
    base: tuple[float, ...]
    candidate: tuple[float, ...]


def measure(pairs: Sequence[PairedItem], sampling: Sampling) -> tuple[Measurement, ...]:
    """Every metric that any item gave a value for, each with its domains."""
    found = (_with_domains(name, pairs, sampling) for name in TASK_METRICS)
    return tuple(m for m in found if m is not None)


def values_of(name: str, pair: PairedItem) -> tuple[Value, Value] | None:
    """Both models' values of one metric, None where the item's checks do not give it."""
    metric = TASK_METRICS[name]
    if metric.kept is not None:
        if name not in pair.base.signals:
            return None
        is_kept = metric.kept(pair.base.signals[name], pair.candidate.signals[name])
        return 1.0, float(is_kept and not pair.candidate.failed)
    if name not in pair.base.values:
        return None
    return pair.base.values[name], pair.candidate.values[name]


def _with_domains(name: str, pairs: Sequence[PairedItem], sampling: Sampling) -> Measurement | None:
    scored = [(pair, found) for pair in pairs if (found := values_of(name, pair)) is not None]
    if not scored:
        return None
    judged = [pair for pair, _ in scored]
    rows = [_row(pair, found) for pair, found in scored]
    names = sorted({stratum for pair in judged for stratum in pair.strata})
    parts = []
    for stratum in names:
        inside = [i for i, pair in enumerate(judged) if stratum in pair.strata]
        part = _measurement(name, [rows[i] for i in inside], [judged[i] for i in inside], sampling)
        if part.num_scored:
            parts.append((stratum, part))
    return replace(_measurement(name, rows, judged, sampling), domains=tuple(parts))


def _row(pair: PairedItem, found: tuple[Value, Value]) -> _Row:
    base, candidate = (v if isinstance(v, tuple) else (v,) for v in found)
    return _Row(doc=pair.item.doc, base=base, candidate=candidate)


def _measurement(
    name: str, rows: Sequence[_Row], pairs: Sequence[PairedItem], sampling: Sampling
) -> Measurement:
    metric = TASK_METRICS[name]
    num_failed = sum(pair.candidate.failed for pair in pairs)
    if metric.rate is None:
        found = _pass_or_fail(name, rows, num_failed, sampling)
        lost = (
            pair.item.id
            for pair, row in zip(pairs, rows, strict=True)
            if pair.item.golden and row.base[0] == 1 and row.candidate[0] != 1
        )
        return replace(found, golden_lost=tuple(lost) if metric.kept is None else ())
    return _graded(name, rows, num_failed, sampling, metric.rate)


def _pass_or_fail(
    name: str, rows: Sequence[_Row], num_failed: int, sampling: Sampling
) -> Measurement:
    """What each item passes or fails: score bounds of the paired drop, documents as clusters."""
    base, candidate = [row.base[0] == 1 for row in rows], [row.candidate[0] == 1 for row in rows]
    found = paired_by_cluster(base, candidate, [row.doc for row in rows], sampling)
    return Measurement(
        name=name,
        unit="drop",
        base=sum(base) / len(rows),
        candidate=sum(candidate) / len(rows),
        estimate=found.interval.estimate,
        lower=found.interval.lower,
        upper=found.interval.upper,
        counted="items",
        num_scored=len(rows),
        num_clusters=len({row.doc for row in rows}),
        paired=found.counts,
        design_effect=found.design_effect,
        p_value=found.p_value,
        num_nonfinite=num_failed,
    )


def _graded(
    name: str,
    rows: Sequence[_Row],
    num_failed: int,
    sampling: Sampling,
    rate: Rate,
) -> Measurement:
    """A rate made of counts; whole documents are resampled."""
    base, candidate, num_changed = _clustered(rows)
    width = base.shape[1]
    sums = np.concatenate([base, candidate], axis=1)
    interval = cluster_bootstrap(
        sums, lambda totals: rate(totals[:, :width]) - rate(totals[:, width:]), sampling
    )
    interval = _unsure(interval, num_changed, len(sums), sampling.confidence)
    return Measurement(
        name=name,
        unit="drop",
        base=value(rate, base.sum(axis=0, keepdims=True)),
        candidate=value(rate, candidate.sum(axis=0, keepdims=True)),
        estimate=interval.estimate,
        lower=interval.lower,
        upper=interval.upper,
        counted="items",
        # Without one thing to count in all items the rate is 0 / 0 and nothing was scored.
        num_scored=0 if math.isnan(interval.estimate) else len(rows),
        num_clusters=len(sums),
        num_nonfinite=num_failed,
    )


def _clustered(rows: Sequence[_Row]) -> tuple[np.ndarray, np.ndarray, int]:
    """[C, K] sums of each document for base and candidate, and how many documents changed."""
    docs = list(dict.fromkeys(row.doc for row in rows))
    place = {doc: index for index, doc in enumerate(docs)}
    width = len(rows[0].base)
    base, candidate = np.zeros((len(docs), width)), np.zeros((len(docs), width))
    changed = set()
    for row in rows:
        base[place[row.doc]] += row.base
        candidate[place[row.doc]] += row.candidate
        if row.base != row.candidate:
            changed.add(row.doc)
    return base, candidate, len(changed)


def _unsure(interval: Interval, num_changed: int, num_clusters: int, confidence: float) -> Interval:
    """Bounds no narrower than what so few changed clusters can show.

    Resampling items of which none changed gives a width of zero, as if five flawless items proved
    that nothing is ever lost. The exact bound counts each changed cluster as lost whole.
    """
    if num_changed >= FEW_CHANGED:
        return interval
    most = clopper_pearson_upper(num_changed, num_clusters, confidence)
    return replace(interval, lower=min(interval.lower, -most), upper=max(interval.upper, most))
