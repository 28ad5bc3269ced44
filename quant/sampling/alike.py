"""Which texts are nearly the same: MinHash over shingles, and locality-sensitive hashing.

A shingle is three tokens; a token is a word, or one character of a script written without spaces,
so Chinese and English are treated alike. Broder, "On the resemblance and containment of documents",
1997. In numpy because a signature of 16-bit values keeps a million rows in 256 MB.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quant.artifact.text_runs import U64, ngrams

PERMUTATIONS = 128
_SHINGLE = 3
_CHUNK = 4096
_MAX_ROUNDS = 64
_random = np.random.Generator(np.random.PCG64(20260101))
_A = (
    _random.integers(1 << 32, 1 << 63, PERMUTATIONS, dtype=np.uint64) << np.uint64(1)
) | np.uint64(1)
_B = _random.integers(0, 1 << 63, PERMUTATIONS, dtype=np.uint64)

Signatures = NDArray[np.uint16]


def shingles(text: str) -> U64:
    return ngrams(text, _SHINGLE)


def jaccard(one: U64, other: U64) -> float:
    """Shared part of two sorted sets."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def signature(found: U64) -> Signatures:
    """(PERMUTATIONS,) lowest hash of a set under each permutation, its low 16 bits."""
    lowest = np.full(PERMUTATIONS, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(found), _CHUNK):
        part = found[start : start + _CHUNK]
        part = part ^ (part >> np.uint64(32))
        np.minimum(lowest, (part[None, :] * _A[:, None] + _B[:, None]).min(axis=1), out=lowest)
    return (lowest >> np.uint64(24)).astype(np.uint16)


def near_duplicates(signatures: Signatures, threshold: float) -> NDArray[np.bool_]:
    """(rows,) True where an earlier row that stays is alike: estimated Jaccard >= threshold.

    signatures (rows, PERMUTATIONS) in order of preference. Pairs are found by bands of hashes, so
    of pairs just at the threshold a few per cent are missed.
    """
    rows_per_band = _rows_per_band(threshold)
    gone = np.zeros(len(signatures), np.bool_)
    for start in range(0, PERMUTATIONS - rows_per_band + 1, rows_per_band):
        _drop_in_band(signatures, start, start + rows_per_band, threshold, gone)
    return gone


def _rows_per_band(threshold: float) -> int:
    """The longest band for which a pair at the threshold is found with 95 % chance."""
    chances = (
        (rows, 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows))
        for rows in range(PERMUTATIONS, 0, -1)
    )
    return next(rows for rows, chance in chances if chance >= 0.95 or rows == 1)


def _drop_in_band(
    signatures: Signatures, start: int, stop: int, threshold: float, gone: NDArray[np.bool_]
) -> None:
    alive = np.flatnonzero(~gone)
    key = np.zeros(len(alive), np.uint64)
    for column in range(start, stop):
        key = (key ^ signatures[alive, column]) * np.uint64(0x100000001B3) + np.uint64(column)
        key ^= key >> np.uint64(31)
    _, bucket, counts = np.unique(key, return_inverse=True, return_counts=True)
    crowded = counts[bucket] > 1
    order = np.argsort(bucket[crowded], kind="stable")
    rest, bucket = alive[crowded][order], bucket[crowded][order]
    for _ in range(_MAX_ROUNDS):
        if not len(rest):
            return
        first = np.r_[True, bucket[1:] != bucket[:-1]]
        leader = rest[np.flatnonzero(first)[np.cumsum(first) - 1]]
        near = _estimates(signatures, rest, leader) >= threshold
        gone[rest[near & ~first]] = True
        stays = ~near & ~first
        rest, bucket = rest[stays], bucket[stays]


def _estimates(
    signatures: Signatures, one: NDArray[np.intp], other: NDArray[np.intp]
) -> NDArray[np.float64]:
    found = np.empty(len(one))
    for start in range(0, len(one), _CHUNK):
        part = slice(start, start + _CHUNK)
        found[part] = (signatures[one[part]] == signatures[other[part]]).mean(axis=1)
    return found
