"""The account of a calibration set: what was read, dropped, used, and what it looks like.

Plain numbers; `warnings` turns the suspicious ones into advice. Knows nothing of tokenizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_MIN_PREFIX = 32
_MIN_PREFIX_SHARE = 0.5
_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCoverage:
    """One source: distinct rows, rows that gave a window, windows and their tokens."""

    rows: int
    used: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The longest run of `tokens` ids with which at least half of the samples begin."""

    tokens: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """rows = blank + duplicates + not_drawn + used (rows, not windows).

    windowed: used rows longer than max_tokens. windows_left: further windows of drawn rows that
    were not needed. tail_tokens: ids in last windows too short to keep. template_share: part of
    the drawn rows' tokens that the chat template added. length_histogram: samples per bucket of
    tokens, keyed by its inclusive upper bound (0: longer than all). by_lang counts samples.
    """

    rows: int
    used: int
    samples: int
    tokens: int
    files: tuple[str, ...] = ()
    blank: int = 0
    duplicates: int = 0
    not_drawn: int = 0
    windowed: int = 0
    windows_left: int = 0
    tail_tokens: int = 0
    samples_asked: int = 0
    max_tokens: int = 0
    template_share: float = 0.0
    length_histogram: Mapping[int, int] = field(default_factory=dict)
    by_source: Mapping[str, SourceCoverage] = field(default_factory=dict)
    by_lang: Mapping[str, int] = field(default_factory=dict)
    ignored_keys: Mapping[str, int] = field(default_factory=dict)
    shared_prefix: SharedPrefix | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data (histogram keys as strings)."""
        data = asdict(self)
        data["length_histogram"] = {str(k): v for k, v in self.length_histogram.items()}
        data["warnings"] = list(self.warnings())
        return data

    def warnings(self) -> Iterator[str]:
        """Advice, one sentence each."""
        if self.samples < self.samples_asked:
            yield (
                f"{self.samples_asked} samples were asked for and the data gives {self.samples}; "
                "add rows for a steadier result"
            )
        if self.shared_prefix is not None:
            yield (
                f"{self.shared_prefix.samples} of {self.samples} samples begin with the same "
                f"{self.shared_prefix.tokens} tokens, which weigh accordingly in the statistics; "
                "shorten or vary a repeated system prompt"
            )
        if self.template_share > 0.5:
            yield (
                f"{self.template_share:.0%} of the tokens come from the chat template; "
                "longer rows say more about the model's real work"
            )
        if self.duplicates > self.rows // 4:
            yield f"{self.duplicates} of {self.rows} rows are exact duplicates and count once"


def length_histogram(samples: Sequence[Sequence[int]]) -> dict[int, int]:
    """Samples per length bucket, keyed by the bucket's inclusive upper bound (0: beyond)."""
    found = Counter(next((b for b in _BUCKETS if len(s) <= b), 0) for s in samples)
    return {bound: found[bound] for bound in (*_BUCKETS, 0) if found[bound]}


def shared_prefix(samples: Sequence[Sequence[int]]) -> SharedPrefix | None:
    """The longest prefix that half of the samples share, if it is long enough to matter."""
    group = _largest_group(samples, 0, _MIN_PREFIX)
    least = max(2, _MIN_PREFIX_SHARE * len(samples))
    if len(group) < least:
        return None
    length = _MIN_PREFIX
    while len(longer := _largest_group(group, length, length + 1)) >= least:
        group, length = longer, length + 1
    return SharedPrefix(tokens=length, samples=len(group))


def _largest_group(samples: Sequence[Sequence[int]], start: int, stop: int) -> list[Sequence[int]]:
    """The samples of at least `stop` ids that agree with most others on ids start..stop."""
    long_enough = [s for s in samples if len(s) >= stop]
    common = Counter(tuple(s[start:stop]) for s in long_enough).most_common(1)
    return [s for s in long_enough if tuple(s[start:stop]) == common[0][0]] if common else []
