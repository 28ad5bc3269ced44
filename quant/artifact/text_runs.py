"""Texts as hashes of runs of tokens, the unit in which texts are compared.

A token is a word, or one character of a script written without spaces, so Chinese and English are
treated alike.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
)
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")
_ASCII_TOKEN = re.compile(r"[a-z0-9]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def normalised(text: str) -> str:
    """Compatibility forms, case and white space made equal."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.casefold().split())


def tokens(text: str) -> list[str]:
    """Words, and single characters of unspaced scripts, of normalised text."""
    return (_ASCII_TOKEN if text.isascii() else _TOKEN).findall(text)


def ngrams(text: str, size: int) -> U64:
    """Sorted distinct hashes of all runs of `size` tokens; of the whole when it is shorter."""
    found = tokens(text) or [text]
    words = np.fromiter((crc32(t.encode()) for t in found), np.uint64, len(found))
    *_, value = rolling(words, min(size, len(words)))
    return np.unique(value)


def rolling(words: U64, size: int) -> Iterator[U64]:
    """Hashes of all runs of 1, 2, ... size words; run i begins at word i."""
    value = np.zeros(len(words), np.uint64)
    for i in range(size):
        value = value[: len(words) - i] * _MULTIPLIER + words[i:]
        value ^= value >> _SHIFT
        yield value
