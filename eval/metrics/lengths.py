"""Buckets of input lengths, in tokens: which one a length falls into and what it is called."""

from __future__ import annotations

from collections.abc import Sequence

# Where one bucket ends and the next begins, unless a gates file says otherwise.
LENGTH_EDGES = (1024, 2048, 4096, 8192)
# A drift is held between ends of at least so many items; a thinner one takes in the next bucket.
ENOUGH = 50
_K = 1024


def bucket_of(num_tokens: int, edges: Sequence[int]) -> int:
    """The bucket's place, 0 for the shortest."""
    return sum(num_tokens >= edge for edge in edges)


def length_bucket(num_tokens: int, edges: Sequence[int] = LENGTH_EDGES) -> str:
    """The bucket's name: 0-1k, 1-2k, 2-4k, 4-8k, 8k+."""
    at = bucket_of(num_tokens, edges)
    return label_of(at, at, edges)


def label_of(first: int, last: int, edges: Sequence[int]) -> str:
    """What the buckets from `first` to `last` are called together."""
    low = edges[first - 1] if first else 0
    if last == len(edges):
        return f"{_short(low)}+"
    high = edges[last]
    if low % _K or high % _K:
        return f"{low}-{high}"
    return f"{low // _K}-{high // _K}k"


def _short(number: int) -> str:
    return f"{number // _K}k" if number and number % _K == 0 else str(number)
