"""Planning: the published sample-size tables, and exact probabilities by the gate's own rule."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.gate_rules import decide_paired
from eval.plan import (
    Trial,
    _fails,
    _passes,
    _tables,
    ability,
    alarm_probability,
    equal,
    fail_probability,
    items_to_notice,
    items_to_pass,
    pass_probability,
    smallest_drop,
    unpaired_items,
)
from eval.stats import PairedCounts, drop_upper, mcnemar_p

# The published sizes were simulated to about 2 %; these are exact.
SIMULATED = 0.025

# Discordance -> margin -> items with which an equal candidate passes with power 0.8 and 0.9, by the
# score test alone.
TO_PASS = {
    0.01: {0.01: (799, 1064), 0.02: (256, 329), 0.03: (147, 199), 0.05: (87, 87)},
    0.02: {0.01: (1327, 1839), 0.02: (404, 532), 0.03: (202, 265), 0.05: (101, 118)},
    0.04: {0.01: (2541, 3494), 0.02: (667, 917), 0.03: (323, 436), 0.05: (131, 176)},
    0.08: {0.01: (5017, 6804), 0.02: (1260, 1736), 0.03: (580, 791), 0.05: (221, 305)},
}


@pytest.mark.parametrize("discordance", TO_PASS)
def test_items_to_pass_an_equal_candidate(discordance: float) -> None:
    for margin, published in TO_PASS[discordance].items():
        trial = equal(discordance, margin, safeguards=False)
        for power, n in zip((0.8, 0.9), published, strict=True):
            found = items_to_pass(trial, power)
            assert found is not None
            # Counts are whole, so power is a saw: a later tooth is enough as well.
            assert found <= n * (1 + SIMULATED)
            assert pass_probability(replace(trial, num_items=n)) >= power - 0.02
            if (discordance, margin, power) != (0.02, 0.05, 0.8):
                assert found >= n * (1 - SIMULATED)


# From 98 % down to: gain rate -> items with which McNemar finds it with power 0.8 and 0.9.
TO_DETECT = {
    0.82: {0.0: (41, 48), 0.005: (44, 54), 0.01: (46, 58), 0.02: (52, 66)},
    0.96: {0.0: (333, 397), 0.005: (502, 655), 0.01: (672, 894), 0.02: (989, 1356)},
    0.97: {0.0: (674, 801), 0.005: (1356, 1770), 0.01: (1996, 2718), 0.02: (3245, 4436)},
}


@pytest.mark.parametrize("candidate", TO_DETECT)
def test_items_to_detect_a_drop(candidate: float) -> None:
    for gained, published in TO_DETECT[candidate].items():
        lost = 0.98 - candidate + gained
        trial = Trial(num_items=1, lost=lost, gained=gained, margin=0.02)
        for power, n in zip((0.8, 0.9), published, strict=True):
            assert items_to_notice(trial, power) == pytest.approx(n, rel=SIMULATED)
            assert alarm_probability(replace(trial, num_items=n)) == pytest.approx(power, abs=0.02)


def test_unpaired_items() -> None:
    found = [unpaired_items(0.98, candidate, 0.9) for candidate in (0.82, 0.96, 0.97)]
    assert found == [56, 1242, 4171]


# True drop -> items -> probability of PASS at 2 pp with 1 % gained. The published first column is
# headed "0"; its figures are those of a true drop of half a point.
PASSES = {
    0.005: {100: 0.17, 400: 0.51, 1000: 0.88, 2000: 0.99},
    0.02: {100: 0.05, 400: 0.05, 1000: 0.05, 2000: 0.05},
    0.04: {100: 0.007, 400: 0.001, 1000: 0.0, 2000: 0.0},
}


@pytest.mark.parametrize("drop", PASSES)
def test_probability_of_passing(drop: float) -> None:
    for n, published in PASSES[drop].items():
        trial = Trial(num_items=n, lost=0.01 + drop, gained=0.01, margin=0.02, safeguards=False)
        assert pass_probability(trial) == pytest.approx(published, abs=0.01)


@pytest.mark.parametrize(
    ("n", "published"),
    [(150, 0.048), (200, 0.048), (300, 0.061), (400, 0.048), (600, 0.048), (1000, 0.048)],
)
def test_size_at_the_boundary_over_gain_rates(n: int, published: float) -> None:
    """The score test's worst size at 2 pp; the exact bound for few changes repairs n = 300."""
    rates = np.arange(0.0, 0.0201, 0.001)
    trials = [Trial(num_items=n, lost=0.02 + g, gained=g, margin=0.02) for g in rates]
    worst = max(pass_probability(replace(trial, safeguards=False)) for trial in trials)
    assert worst == pytest.approx(published, abs=0.002)
    assert max(map(pass_probability, trials)) <= 0.05


def test_co_primary_metrics_multiply() -> None:
    one = pass_probability(replace(equal(0.02, 0.02), num_items=600))
    assert [round(one**k, 2) for k in (1, 3, 5, 8)] == pytest.approx(
        [0.93, 0.81, 0.70, 0.56], abs=0.015
    )


def test_a_hundred_items_cannot_accept_even_a_perfect_model_at_two_points() -> None:
    assert pass_probability(replace(equal(0.02, 0.02, safeguards=False), num_items=100)) < 0.3
    assert pass_probability(replace(equal(0.02, 0.02), num_items=100)) < 0.02


def naive_two_proportions(n: int) -> float:
    """Probability that "p > .05, so fine" accepts a fall from 98 % to 96 %: unpaired z-test."""
    rng = np.random.default_rng(n)
    a, b = rng.binomial(n, 0.98, 20_000), rng.binomial(n, 0.96, 20_000)
    pooled = (a + b) / (2 * n)
    spread = np.sqrt(np.maximum(pooled * (1 - pooled) * 2 / n, 1e-12))
    return float(np.mean(np.abs(a - b) / n / spread < 1.96))


@pytest.mark.parametrize(("n", "unpaired"), [(100, 0.88), (200, 0.79), (400, 0.62), (1000, 0.24)])
def test_no_significant_difference_is_not_acceptance(n: int, unpaired: float) -> None:
    """What the naive rule lets through, the gate passes in 5 of 100 at most."""
    assert naive_two_proportions(n) == pytest.approx(unpaired, abs=0.05)
    assert pass_probability(Trial(num_items=n, lost=0.025, gained=0.005, margin=0.02)) <= 0.05


@pytest.mark.parametrize(("n", "published"), [(100, 0.97), (200, 0.83), (400, 0.57), (1000, 0.13)])
def test_a_naive_mcnemar_test_accepts_the_drop_too(n: int, published: float) -> None:
    """Two-sided, 98 % to 96 % with 1 % gained: nearly blind at 100 items."""
    lost, gained, weights = _tables(Trial(num_items=n, lost=0.03, gained=0.01, margin=0.02))
    shown = weights > 1e-9
    silent = sum(
        weights[i, j]
        for i, j in zip(*np.nonzero(shown), strict=True)
        if two_sided_mcnemar(int(lost[i, 0]), int(gained[0, j])) > 0.05
    )
    assert silent == pytest.approx(published, abs=0.01)


def two_sided_mcnemar(lost: int, gained: int) -> float:
    more = max(lost, gained)
    flips = lost + gained
    return min(1.0, 2 * sum(math.comb(flips, k) for k in range(more, flips + 1)) / 2**flips)


tables = st.tuples(
    st.integers(1, 400), st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.01, 0.02, 0.05])
).filter(lambda t: t[1] + t[2] <= t[0])


@settings(deadline=None)
@given(tables, st.sampled_from([1.0, 0.9]))
def test_the_rule_planned_with_is_the_rule_judged_by(
    table: tuple[int, int, int, float], base: float
) -> None:
    n, lost, gained, margin = table
    base_ok = round(n * base)
    if lost > base_ok or gained > n - base_ok:
        return
    trial = Trial(num_items=n, lost=0, gained=0, margin=margin, base=base)
    cells = np.array([[lost]]), np.array([[gained]])
    planned = {"pass": bool(_passes(trial, *cells)), "fail": bool(_fails(trial, *cells))}
    counts = PairedCounts(num_items=n, num_base_ok=base_ok, lost=lost, gained=gained)
    judged, _ = decide_paired(counts, margin, 0.95)
    assert planned == {"pass": judged == "pass", "fail": judged == "fail"}


def test_probabilities_by_brute_force() -> None:
    """Every table of 12 items in exact fractions."""
    n, lost, gained = 12, Fraction(1, 5), Fraction(1, 20)
    passed = alarmed = Fraction(0)
    for b in range(n + 1):
        for c in range(n + 1 - b):
            ways = math.comb(n, b) * math.comb(n - b, c)
            weight = ways * lost**b * gained**c * (1 - lost - gained) ** (n - b - c)
            table = PairedCounts(num_items=n, num_base_ok=n - c, lost=b, gained=c)
            passed += weight * (drop_upper(table) < 0.3)
            alarmed += weight * (mcnemar_p(table) < 0.05)
    trial = Trial(num_items=n, lost=0.2, gained=0.05, margin=0.3, safeguards=False)
    assert pass_probability(trial) == pytest.approx(float(passed), abs=1e-12)
    assert alarm_probability(trial) == pytest.approx(float(alarmed), abs=1e-12)


def test_ability_of_the_two_shipped_sizes() -> None:
    """180 items at 5 pp and 900 at 2 pp accept an equal model 19 times of 20."""
    small = ability(replace(equal(0.02, 0.05, base=0.98), num_items=180))
    assert small.accepts_equal > 0.95
    assert small.flawless == pytest.approx(0.0148, abs=1e-4)
    assert small.noticed == pytest.approx(0.052, abs=0.002)
    assert small.rejected is not None
    assert small.noticed < small.rejected < 0.12
    full = ability(replace(equal(0.02, 0.02, base=0.98), num_items=900))
    assert full.accepts_equal > 0.95


def test_the_smallest_drop_has_the_power_it_names() -> None:
    trial = replace(equal(0.02, 0.05), num_items=180)
    drop = smallest_drop(trial, fail_probability, 0.8)
    assert drop is not None
    assert fail_probability(replace(trial, lost=drop + 0.01)) == pytest.approx(0.8, abs=0.01)
    assert smallest_drop(replace(trial, num_items=3), fail_probability, 0.999) is None


def test_a_candidate_at_the_margin_needs_endless_items() -> None:
    assert items_to_pass(Trial(num_items=1, lost=0.02, gained=0.0, margin=0.02)) is None
