"""What a review of this size could have shown. Pure."""

from __future__ import annotations

import math

ALPHA, POWER = 0.05, 0.8
_BISECTIONS = 40


def sign_test_p(wins: int, losses: int) -> float:
    """Exact two-sided sign test of "both are preferred alike"; ties are left out."""
    pairs, most = wins + losses, max(wins, losses)
    tail = sum(math.comb(pairs, k) for k in range(most, pairs + 1))
    return min(1.0, float(2 * tail / 2**pairs))


def detectable_preference(pairs: int) -> float | None:
    """The weakest preference that `pairs` decisive pairs show with a power of 80 %.

    A share of 0.62 means that 62 of 100 decisive pairs go to the preferred side. Two-sided exact
    sign test at 0.05; None when not even unanimity is significant.
    """
    fewest = next((k for k in range(pairs // 2, pairs + 1) if _rejects(k, pairs)), None)
    if fewest is None:
        return None
    low, high = 0.5, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _upper_tail(fewest, pairs, middle) < POWER else (low, middle)
    return high


def _rejects(wins: int, pairs: int) -> bool:
    return 2 * wins > pairs and sign_test_p(wins, pairs - wins) <= ALPHA


def _upper_tail(least: int, trials: int, share: float) -> float:
    """P(Binom(trials, share) >= least)."""
    if share >= 1:
        return 1.0
    return math.fsum(
        math.exp(
            math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
            + k * math.log(share) + (trials - k) * math.log1p(-share)
        )
        for k in range(least, trials + 1)
    )  # fmt: skip
