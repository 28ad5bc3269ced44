"""Kappa, alpha and the power statement against published values, closed forms and brute force."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from eval.review.agreement import cohen_kappa, krippendorff_alpha
from eval.review.power import detectable_preference, sign_test_p


def test_kappa_by_hand() -> None:
    """20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: agreement .7, by chance .5, so kappa .4."""
    pairs = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    assert cohen_kappa([a for a, _ in pairs], [b for _, b in pairs]) == pytest.approx(0.4)


def test_kappa_of_three_categories_by_hand() -> None:
    """Diagonal 10, 6, 4 of 25; rows 12, 8, 5; columns 11, 8, 6: (.8 - .3616) / (1 - .3616)."""
    table = [(1, 1)] * 10 + [(0, 0)] * 6 + [(-1, -1)] * 4 + [(1, 0), (1, -1), (0, 1), (0, -1),
                                                               (-1, 0)]  # fmt: skip
    chance = (12 * 11 + 8 * 8 + 5 * 6) / 625
    kappa = cohen_kappa([a for a, _ in table], [b for _, b in table])
    assert kappa == pytest.approx((0.8 - chance) / (1 - chance))


def test_kappa_at_its_ends() -> None:
    assert cohen_kappa([1, 0, 1], [1, 0, 1]) == 1
    assert cohen_kappa([1, 0], [0, 1]) == -1
    assert cohen_kappa([], []) is None
    assert cohen_kappa([1, 1], [1, 1]) is None


KRIPPENDORFF = (
    (1, 1, None, 1), (2, 2, 3, 2), (3, 3, 3, 3), (3, 3, 3, 3), (2, 2, 2, 2), (1, 2, 3, 4),
    (4, 4, 4, 4), (1, 1, 2, 1), (2, 2, 2, 2), (None, 5, 5, 5), (None, None, 1, 1),
    (None, 3, None, None),
)  # fmt: skip


def test_alpha_of_krippendorffs_own_example() -> None:
    """Krippendorff 2011, Computing Krippendorff's alpha-reliability, example C: .743 nominal."""
    units = [[value for value in unit if value is not None] for unit in KRIPPENDORFF]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)


def test_alpha_against_all_pairs_of_values() -> None:
    draw = random.Random(7)
    for _ in range(30):
        units = [[draw.choice("xyz") for _ in range(draw.randint(0, 4))] for _ in range(12)]
        paired = [unit for unit in units if len(unit) > 1]
        values = [value for unit in paired for value in unit]
        observed = sum(
            (a != b) / (len(unit) - 1)
            for unit in paired
            for a, b in itertools.permutations(unit, 2)
        ) / len(values)  # fmt: skip
        pairs = list(itertools.permutations(values, 2))
        expected = sum(a != b for a, b in pairs) / len(pairs)
        assert krippendorff_alpha(units) == pytest.approx(1 - observed / expected)
    assert krippendorff_alpha([[1], [2]]) is None
    assert krippendorff_alpha([[1, 1], [1, 1]]) is None


def test_sign_test_by_hand() -> None:
    assert sign_test_p(0, 0) == 1
    assert sign_test_p(5, 0) == pytest.approx(2 / 32)
    assert sign_test_p(1, 5) == pytest.approx(14 / 64)
    assert sign_test_p(5, 5) == 1


@pytest.mark.parametrize(("pairs", "share"), [(199, 0.60), (90, 0.65), (49, 0.70)])
def test_pairs_needed_for_a_preference(pairs: int, share: float) -> None:
    """60/40 takes 199 decisive pairs, 65/35 takes 90, 70/30 takes 49; one pair less shows less."""
    weakest, weaker = detectable_preference(pairs), detectable_preference(pairs - 1)
    assert weakest is not None
    assert weaker is not None
    assert weakest <= share < weaker


def test_what_is_detectable_has_the_power_it_claims() -> None:
    for pairs in (6, 20, 75):
        share = detectable_preference(pairs)
        assert share is not None
        power = sum(
            math.comb(pairs, k) * share**k * (1 - share) ** (pairs - k)
            for k in range(pairs + 1)
            if k > pairs / 2 and sign_test_p(k, pairs - k) <= 0.05
        )
        assert power == pytest.approx(0.8, abs=1e-6)
    assert detectable_preference(5) is None
    assert detectable_preference(0) is None
