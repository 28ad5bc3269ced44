"""Amounts: how much of a suite one evaluation uses. Stdlib only, for the command line's defaults.

The defaults fit two CPU cores and a small model in about two minutes. 60 items are the fewest with
which a candidate that loses nothing can be accepted at a margin of 5 pp and 95 % confidence.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """Windows of `window_tokens` tokens, extraction items, and the seed that picks both."""

    num_windows: int = 36
    window_tokens: int = 256
    num_items: int = 60
    seed: int = 0
