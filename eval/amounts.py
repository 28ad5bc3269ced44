"""Amounts: how much of a suite one evaluation uses. Stdlib only, for the command line's defaults.

The defaults fit two CPU cores and a small model in minutes. 180 items accept a candidate as good
as its base at a margin of 5 pp 24 times of 25 when the two differ on 2 % (`evaluate plan`); 60 are
the fewest that can accept one at all, and only one that loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """Windows of `window_tokens` tokens, extraction items, and the seed that picks both.

    num_noise_items: how many of the items the base answers a second time, for the noise floor.
    """

    num_windows: int = 36
    window_tokens: int = 256
    num_items: int = 180
    num_noise_items: int = 16
    seed: int = 0
