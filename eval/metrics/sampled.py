"""Sampled passes: what both models achieve when answers are drawn, K of each item.

The K answers of an item are one piece of evidence, not K: they are averaged within the item, then
the items are paired. pass^k is the share of items of which all K answers pass: what an application
sees that asks again and again. Changes against the base's own answer (language, length) are not
looked at here: drawn answers differ anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from eval.checks.catalogue import TASK_METRICS, pass_k, sampled, share
from eval.measurement import Measurement
from eval.metrics.answers import PairedItem, Row, graded, pass_or_fail, values_of, with_domains
from eval.stats import Sampling

# The passes of one item: as many pairs as seeds.
Passes = Sequence[PairedItem]


def measure(
    items: Sequence[Passes], sampling: Sampling, edges: Sequence[int]
) -> tuple[Measurement, ...]:
    """For each metric the averaged drop, and for pass-or-fail ones the drop of pass^k."""
    found: list[Measurement] = []
    for name, metric in TASK_METRICS.items():
        judged = [p for p in items if all(values_of(name, pair) is not None for pair in p)]
        if metric.kept is not None or not judged:
            continue
        found.append(_averaged(name, judged, sampling, edges))
        if metric.rate is None:
            found.append(_all_passed(name, judged, sampling, edges))
    return tuple(found)


def _averaged(
    name: str, items: Sequence[Passes], sampling: Sampling, edges: Sequence[int]
) -> Measurement:
    rate = TASK_METRICS[name].rate

    def one(rows: Sequence[Row], pairs: Sequence[PairedItem]) -> Measurement:
        num_failed = sum(pair.item.id in failed for pair in pairs)
        return graded(sampled(name), rows, num_failed, sampling, rate or share)

    failed = _failed(items)
    rows = [_mean_row(name, passes, is_counted=rate is None) for passes in items]
    return with_domains([passes[0] for passes in items], rows, one, edges)


def _failed(items: Sequence[Passes]) -> set[str]:
    """Items of which the candidate left an answer out: no statistics excuse that."""
    return {p[0].item.id for p in items if any(pair.candidate.failed for pair in p)}


def _mean_row(name: str, passes: Passes, *, is_counted: bool) -> Row:
    """Both models' values, each averaged over the passes. is_counted: with a one to count it."""
    sides = list(zip(*(_values(name, pair) for pair in passes), strict=True))
    base, candidate = (tuple(np.mean(side, axis=0).tolist()) for side in sides)
    more = (1.0,) if is_counted else ()
    return Row(doc=passes[0].item.doc, base=(*base, *more), candidate=(*candidate, *more))


def _values(name: str, pair: PairedItem) -> tuple[tuple[float, ...], tuple[float, ...]]:
    found = values_of(name, pair)
    assert found is not None
    base, candidate = (v if isinstance(v, tuple) else (v,) for v in found)
    return base, candidate


def _all_passed(
    name: str, items: Sequence[Passes], sampling: Sampling, edges: Sequence[int]
) -> Measurement:
    rows = []
    for passes in items:
        sides = zip(*(_values(name, pair) for pair in passes), strict=True)
        base, candidate = (float(all(value == (1.0,) for value in side)) for side in sides)
        rows.append(Row(doc=passes[0].item.doc, base=(base,), candidate=(candidate,)))

    failed = _failed(items)

    def one(rows: Sequence[Row], pairs: Sequence[PairedItem]) -> Measurement:
        num_failed = sum(pair.item.id in failed for pair in pairs)
        found = pass_or_fail(pass_k(name), rows, num_failed, sampling)
        return replace(found, about=f"all {len(items[0])} answers of an item")

    return with_domains([passes[0] for passes in items], rows, one, edges)
