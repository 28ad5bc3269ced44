"""How many rows each stratum (source, length bucket) gives. Counts only; knows no rows.

The longest rows come first: a share of the sample is reserved for them, longest bucket downward.
The rest goes to sources by their traffic (or equally), none empty, and within a source by length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeVar

BUCKETS = (256, 1024, 4096, 16384)
Balance = Literal["traffic", "equal"]
Stratum = tuple[str, int]
Key = TypeVar("Key", str, Stratum)


def bucket(tokens: int) -> int:
    """Index into BUCKETS of the first bound that holds `tokens`; len(BUCKETS) beyond all."""
    return next((i for i, bound in enumerate(BUCKETS) if tokens <= bound), len(BUCKETS))


def allot(
    counts: Mapping[Stratum, int], total: int, *, long_share: float = 0.25, balance: Balance
) -> dict[Stratum, int]:
    """Rows to draw of each stratum: none above its count, min(total, all rows) together."""
    total = min(total, sum(counts.values()))
    quota = _long_quota(counts, math.ceil(long_share * total))
    left = {key: count - quota.get(key, 0) for key, count in counts.items()}
    by_source: dict[str, int] = {}
    for (source, _), count in left.items():
        by_source[source] = by_source.get(source, 0) + count
    shares = share_out(by_source, total - sum(quota.values()), equal=balance == "equal")
    for source, share in shares.items():
        own = {key: count for key, count in left.items() if key[0] == source}
        for key, count in share_out(own, share).items():
            quota[key] = quota.get(key, 0) + count
    return {key: quota.get(key, 0) for key in sorted(counts)}


def _long_quota(counts: Mapping[Stratum, int], wanted: int) -> dict[Stratum, int]:
    """`wanted` rows of the longest buckets, none as short as the median row's."""
    by_bucket: dict[int, dict[Stratum, int]] = {}
    for key, count in counts.items():
        by_bucket.setdefault(key[1], {})[key] = count
    half, median, seen = sum(counts.values()) / 2, 0, 0
    for index in sorted(by_bucket):
        if seen <= half:
            median = index
        seen += sum(by_bucket[index].values())
    quota: dict[Stratum, int] = {}
    for index in sorted((i for i in by_bucket if i > median), reverse=True):
        quota |= share_out(by_bucket[index], wanted - sum(quota.values()))
    return quota


def share_out(capacity: Mapping[Key, int], total: int, *, equal: bool = False) -> dict[Key, int]:
    """`total` (or all there is) by weight, at least one each if it suffices, none over capacity."""
    everything = sum(capacity.values())
    total = min(total, everything)
    given = dict.fromkeys(sorted(capacity), 0)
    for key in sorted(capacity, key=lambda k: (-capacity[k], k))[:total]:
        given[key] = min(1, capacity[key])
    # Most of it at once: nobody's share is less than this, so the loop below only rounds.
    spare = max(0, total - len(capacity))
    for key, most in capacity.items():
        share = spare // len(capacity) if equal else spare * most // max(1, everything)
        given[key] = max(given[key], min(most, share))
    for _ in range(total - sum(given.values())):
        open_ = (k for k in given if given[k] < capacity[k])
        # Whoever is furthest below its share.
        best = min(open_, key=lambda k: ((given[k] + 1) / (1 if equal else capacity[k]), k))
        given[best] += 1
    return given
