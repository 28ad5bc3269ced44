"""Quality under load: the same items answered by the same server, alone and among many others.

Greedy answers change with the batch they are computed in, so some texts differ; what the checks
make of them should not.
"""

from __future__ import annotations

from collections.abc import Sequence

from eval.evaluation import Exchange
from eval.measurement import Measurement
from eval.stats import Sampling, paired_by_cluster

TEXT, CHECKS = "load_text_agreement", "load_check_agreement"


def measure(
    alone: Sequence[Exchange], crowded: Sequence[Exchange], sampling: Sampling
) -> tuple[Measurement, Measurement]:
    """Share of items whose text, and share of items whose every check value, is the same."""
    pairs = list(zip(alone, crowded, strict=True))
    docs = [one.pair.item.doc for one, _ in pairs]
    same_text = [_said(one) == _said(other) for one, other in pairs]
    same_checks = [one.pair.candidate.values == other.pair.candidate.values for one, other in pairs]
    return _share(TEXT, same_text, docs, sampling), _share(CHECKS, same_checks, docs, sampling)


def _said(exchange: Exchange) -> object:
    """A written answer's text; for a choice, which one was taken."""
    candidate = exchange.pair.candidate
    return candidate.details.get("chosen", exchange.candidate_text)


def _share(name: str, same: Sequence[bool], docs: Sequence[str], sampling: Sampling) -> Measurement:
    """Agreement with bounds: whatever differs counts as lost."""
    found = paired_by_cluster([True] * len(same), same, docs, sampling)
    return Measurement(
        name=name,
        unit="share",
        base=None,
        candidate=None,
        estimate=1 - found.interval.estimate,
        lower=max(1 - found.interval.upper, 0.0),
        upper=min(1 - found.interval.lower, 1.0),
        counted="items",
        num_scored=len(same),
        num_clusters=len(set(docs)),
    )


def first_divergence(alone: Sequence[Exchange], crowded: Sequence[Exchange]) -> int | None:
    """The median token at which differing answers part; None when all are the same."""
    apart = []
    for one, other in zip(alone, crowded, strict=True):
        left, right = one.candidate_answer.token_ids, other.candidate_answer.token_ids
        if left != right:
            pairs = enumerate(zip(left, right, strict=False))
            apart.append(next((i for i, (a, b) in pairs if a != b), min(len(left), len(right))))
    return sorted(apart)[len(apart) // 2] if apart else None
