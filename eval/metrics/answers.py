"""Layer 2: what both models' answers achieved, item by item, as paired measurements.

Every figure is paired: the same item under both models. Items of one document or dialog depend on
each other: rates are resampled by whole documents, and counts of what passes or fails are shrunk by
the design effect of their documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from eval.checks.base import Value
from eval.checks.catalogue import TASK_METRICS, Rate, TaskMetric
from eval.checks.registry import Scored
from eval.measurement import Measurement
from eval.metrics.lengths import LENGTH_EDGES, length_bucket
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedItem:
    """One item with both models' scores. num_prompt_tokens: of the prompt they answered."""

    item: TaskItem
    base: Scored
    candidate: Scored
    num_prompt_tokens: int = 0

    def strata(self, edges: Sequence[int] = LENGTH_EDGES) -> tuple[str, str, str]:
        """The domains it counts in. edges: where one bucket of input lengths ends, in tokens."""
        bucket = length_bucket(self.num_prompt_tokens, edges)
        return f"source:{self.item.source}", f"lang:{self.item.lang}", f"length:{bucket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One item's part in one metric: the counts of both models (a single one for pass-or-fail)."""

    doc: str
    base: tuple[float, ...]
    candidate: tuple[float, ...]


def measure(
    pairs: Sequence[PairedItem], sampling: Sampling, edges: Sequence[int] = LENGTH_EDGES
) -> tuple[Measurement, ...]:
    """Every metric that any item gave a value for, each with its domains."""
    found = (_with_domains(name, pairs, sampling, edges) for name in TASK_METRICS)
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


def _with_domains(
    name: str, pairs: Sequence[PairedItem], sampling: Sampling, edges: Sequence[int]
) -> Measurement | None:
    judged = [pair for pair in pairs if values_of(name, pair) is not None]
    if not judged:
        return None
    rows = [row_of(name, pair) for pair in judged]

    def one(rows: Sequence[Row], pairs: Sequence[PairedItem]) -> Measurement:
        return measurement(name, rows, pairs, sampling)

    return with_domains(judged, rows, one, edges)


def with_domains(
    pairs: Sequence[PairedItem],
    rows: Sequence[Row],
    one: Callable[[Sequence[Row], Sequence[PairedItem]], Measurement],
    edges: Sequence[int],
) -> Measurement:
    """What `one` makes of all items and, as its domains, of those of each stratum."""
    strata = [pair.strata(edges) for pair in pairs]
    parts = []
    for stratum in sorted({name for names in strata for name in names}):
        inside = [i for i, names in enumerate(strata) if stratum in names]
        part = one([rows[i] for i in inside], [pairs[i] for i in inside])
        if part.num_scored:
            parts.append((stratum, part))
    return replace(one(rows, pairs), domains=tuple(parts))


def row_of(name: str, pair: PairedItem) -> Row:
    """A pair's part in a metric that it has values of."""
    found = values_of(name, pair)
    assert found is not None
    base, candidate = (v if isinstance(v, tuple) else (v,) for v in found)
    return Row(doc=pair.item.doc, base=base, candidate=candidate)


def measurement(
    name: str, rows: Sequence[Row], pairs: Sequence[PairedItem], sampling: Sampling
) -> Measurement:
    """One metric over these items, each with its row."""
    metric = TASK_METRICS[name]
    num_failed = sum(pair.candidate.failed for pair in pairs)
    if metric.rate is None:
        found = pass_or_fail(name, rows, num_failed, sampling)
    else:
        found = graded(name, rows, num_failed, sampling, metric.rate)
    lost = (
        pair.item.id
        for pair, row in zip(pairs, rows, strict=True)
        if pair.item.golden and _is_right(row.base, metric) and not _is_right(row.candidate, metric)
    )
    return replace(found, golden_lost=tuple(lost) if metric.kept is None else ())


def _is_right(values: tuple[float, ...], metric: TaskMetric) -> bool:
    """Whether one answer passes, or has all that its counts are of."""
    if metric.rate is None:
        return values[0] == 1
    return value(metric.rate, np.array([values])) == 1


def pass_or_fail(
    name: str, rows: Sequence[Row], num_failed: int, sampling: Sampling
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


def graded(
    name: str,
    rows: Sequence[Row],
    num_failed: int,
    sampling: Sampling,
    rate: Rate,
) -> Measurement:
    """A rate made of counts; whole documents are resampled."""
    base, candidate, num_changed = _clustered(rows)
    width = base.shape[1]
    sums = np.concatenate([base, candidate], axis=1)
    interval = cluster_bootstrap(
        sums, lambda totals: rate(totals[:, :width]) - achieved(rate, totals[:, width:]), sampling
    )
    interval = unsure(interval, num_changed, len(sums), sampling.confidence)
    return Measurement(
        name=name,
        unit="drop",
        base=value(rate, base.sum(axis=0, keepdims=True)),
        candidate=value(partial(achieved, rate), candidate.sum(axis=0, keepdims=True)),
        estimate=interval.estimate,
        lower=interval.lower,
        upper=interval.upper,
        counted="items",
        # Without one thing to count in the base's answers its rate is 0 / 0: nothing was scored.
        num_scored=0 if math.isnan(interval.estimate) else len(rows),
        num_clusters=len(sums),
        num_nonfinite=num_failed,
    )


def achieved(rate: Rate, sums: np.ndarray) -> np.ndarray:
    """The candidate's rate. Where nothing is left to count (0 / 0), nothing was achieved: who gives
    no field at all has kept the type of none."""
    found: np.ndarray = np.nan_to_num(rate(sums), nan=0.0)
    return found


def _clustered(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, int]:
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


def unsure(interval: Interval, num_changed: int, num_clusters: int, confidence: float) -> Interval:
    """Bounds no narrower than what so few changed clusters can show.

    Resampling items of which none changed gives a width of zero, as if five flawless items proved
    that nothing is ever lost. The exact bound counts each changed cluster as lost whole.
    """
    if num_changed >= FEW_CHANGED:
        return interval
    most = clopper_pearson_upper(num_changed, num_clusters, confidence)
    return replace(interval, lower=min(interval.lower, -most), upper=max(interval.upper, most))
