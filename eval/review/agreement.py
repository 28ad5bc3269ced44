"""Agreement between raters on the same items. Pure; nominal categories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Cohen's kappa (1960) of two raters on the same items, in the same order.

    None without items, or when chance alone would agree on all (both used one category only).
    """
    count = len(first)
    if not count:
        return None
    agreed = sum(a == b for a, b in zip(first, second, strict=True))
    left, right = Counter(first), Counter(second)
    chance = sum(left[category] * right[category] for category in left)
    if chance == count**2:
        return None
    return (agreed / count - chance / count**2) / (1 - chance / count**2)


def krippendorff_alpha(units: Sequence[Sequence[Hashable]]) -> float | None:
    """Krippendorff's alpha (2004, chapter 11), nominal metric; one sequence of values per item.

    Items with fewer than two values say nothing. None when nothing can disagree.
    """
    paired = [unit for unit in units if len(unit) > 1]
    totals = Counter(value for unit in paired for value in unit)
    count = sum(totals.values())
    expected = sum(n * (count - n) for n in totals.values())
    if not expected:
        return None
    observed = sum(_disagreements(unit) / (len(unit) - 1) for unit in paired)
    return 1 - (count - 1) * observed / expected


def _disagreements(unit: Sequence[Hashable]) -> int:
    """Ordered pairs of unlike values."""
    return sum(n * (len(unit) - n) for n in Counter(unit).values())
