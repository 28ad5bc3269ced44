"""Statistics of the gate against worked-out tables and exact identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.stats import (
    PairedCounts,
    Sampling,
    clopper_pearson_upper,
    cluster_bootstrap,
    design_effect,
    drop_lower,
    drop_upper,
    drop_z,
    fewest_clusters,
    holm,
    mcnemar_p,
    paired_by_cluster,
    paired_counts,
    shrunk,
    sign_flip_p,
)


def counts(n: int, lost: int, gained: int) -> PairedCounts:
    return PairedCounts(num_items=n, num_base_ok=n - gained, lost=lost, gained=gained)


# n, lost, gained, one-sided 95 % upper bound of the drop.
UPPER_BOUNDS = [
    (100, 0, 0, 0.0263),
    (150, 0, 0, 0.0177),
    (200, 1, 1, 0.0176),
    (200, 4, 0, 0.0438),
    (400, 2, 2, 0.0106),
    (400, 4, 1, 0.0199),
    (400, 8, 0, 0.0351),
    (1000, 10, 5, 0.0122),
    (1000, 20, 10, 0.0197),
    (1000, 30, 10, 0.0312),
    (60, 10, 0, 0.2598),
    (100, 16, 0, 0.2291),
    (400, 64, 0, 0.1924),
]


@pytest.mark.parametrize(("n", "lost", "gained", "expected"), UPPER_BOUNDS)
def test_upper_bound_of_the_drop(n: int, lost: int, gained: int, expected: float) -> None:
    assert drop_upper(counts(n, lost, gained)) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("n", "lost", "gained", "expected"),
    [(400, 8, 0, 0.0039), (1000, 30, 10, 0.0011), (100, 16, 0, 1.5e-5), (50, 0, 0, 1.0)],
)
def test_mcnemar(n: int, lost: int, gained: int, expected: float) -> None:
    assert mcnemar_p(counts(n, lost, gained)) == pytest.approx(expected, rel=0.03)


def test_clopper_pearson_has_the_rule_of_three_and_the_defining_tail() -> None:
    assert clopper_pearson_upper(1, 200) == pytest.approx(0.0235, abs=5e-5)
    assert clopper_pearson_upper(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert clopper_pearson_upper(0, 0) == 1.0
    assert clopper_pearson_upper(7, 7) == 1.0
    upper = clopper_pearson_upper(3, 50)
    tail = sum(math.comb(50, k) * upper**k * (1 - upper) ** (50 - k) for k in range(4))
    assert tail == pytest.approx(0.05, rel=1e-9)


tables = st.integers(1, 500).flatmap(
    lambda n: st.integers(0, n).flatmap(
        lambda lost: st.integers(0, n - lost).map(lambda gained: counts(n, lost, gained))
    )
)


@given(tables)
def test_bounds_enclose_the_drop_and_mirror(table: PairedCounts) -> None:
    mirrored = counts(table.num_items, table.gained, table.lost)
    assert -1 <= drop_lower(table) <= table.drop <= drop_upper(table) <= 1
    assert drop_upper(mirrored) == pytest.approx(-drop_lower(table), abs=1e-12)


@given(tables)
def test_the_upper_bound_is_where_the_score_test_stops_rejecting(table: PairedCounts) -> None:
    upper = drop_upper(table)
    if upper < 0.999:
        assert drop_z(table, upper + 1e-6) < -1.6448
        assert drop_z(table, max(upper - 1e-6, table.drop)) > -1.6450


def test_size_of_the_score_test_at_the_boundary() -> None:
    """A candidate exactly at the margin passes about 5 % of the time."""
    rng = np.random.default_rng(0)
    draws = rng.multinomial(400, [0.03, 0.01, 0.96], size=4000)
    passed = np.mean([drop_upper(counts(400, int(b), int(c))) < 0.02 for b, c, _ in draws])
    assert 0.03 < passed < 0.065


def test_paired_counts() -> None:
    found = paired_counts([True, True, False, False, True], [True, False, True, False, False])
    assert found == PairedCounts(num_items=5, num_base_ok=3, lost=2, gained=1)
    with pytest.raises(ValueError):
        paired_counts([True], [])


def ratio(sums: np.ndarray) -> np.ndarray:
    return np.exp(sums[:, 0] / sums[:, 1])


def test_bootstrap_is_seeded_and_scales_with_the_number_of_clusters() -> None:
    rng = np.random.default_rng(1)
    few = np.stack([rng.normal(0.1, 1.0, 30), np.full(30, 10.0)], axis=1)
    many = np.tile(few, (16, 1))
    sampling = Sampling(draws=2000)
    narrow, wide = cluster_bootstrap(many, ratio, sampling), cluster_bootstrap(few, ratio, sampling)
    assert wide == cluster_bootstrap(few, ratio, sampling)
    assert wide.lower < wide.estimate < wide.upper
    assert narrow.estimate == pytest.approx(wide.estimate)
    shrink = (wide.upper - wide.lower) / (narrow.upper - narrow.lower)
    assert shrink == pytest.approx(4, rel=0.15)


def test_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    below = 0
    for trial in range(300):
        values = rng.exponential(1.0, size=40)
        sums = np.stack([values, np.ones(40)], axis=1)
        interval = cluster_bootstrap(
            sums, lambda s: s[:, 0] / s[:, 1], Sampling(draws=1000, seed=trial)
        )
        below += interval.upper < 1.0
    assert 0.02 < below / 300 < 0.10


def test_clusters_that_depend_on_each_other_widen_the_interval() -> None:
    """Tokens of a document are alike: treating them as independent would be too sure."""
    rng = np.random.default_rng(3)
    documents = rng.normal(0.0, 1.0, size=(40, 1)).repeat(50, axis=1)
    tokens = documents + rng.normal(0.0, 1.0, size=documents.shape)
    mean = lambda s: s[:, 0] / s[:, 1]  # noqa: E731
    by_document = cluster_bootstrap(
        np.stack([tokens.sum(1), np.full(40, 50.0)], 1), mean, Sampling(draws=2000)
    )
    by_token = cluster_bootstrap(
        np.stack([tokens.ravel(), np.ones(2000)], 1), mean, Sampling(draws=2000)
    )
    assert by_document.upper - by_document.lower > 3 * (by_token.upper - by_token.lower)


@pytest.mark.parametrize("count", [5, 8, 12])
def test_bootstrap_of_few_clusters_is_wide_enough(count: int) -> None:
    """Plain percentiles of 5 clusters miss the truth 11 times in 100, twice as often as said."""
    rng = np.random.default_rng(count)
    missed = 0
    for trial in range(400):
        sums = np.stack([rng.normal(1.0, 0.5, count), np.ones(count)], axis=1)
        interval = cluster_bootstrap(
            sums, lambda s: s[:, 0] / s[:, 1], Sampling(draws=1000, seed=trial)
        )
        missed += interval.upper < 1.0
    assert missed / 400 < 0.085


def test_fewest_clusters() -> None:
    assert [fewest_clusters(c) for c in (0.6, 0.9, 0.95, 0.99)] == [2, 4, 5, 7]


def test_bootstrap_without_information_claims_none() -> None:
    for count in range(1, 5):
        rows = np.array([[float(n), 10.0] for n in range(count)])
        few = cluster_bootstrap(rows, ratio, Sampling(draws=1000))
        assert few.lower == -math.inf
        assert few.upper == math.inf
    same = cluster_bootstrap(np.tile([[1.0, 10.0]], (5, 1)), ratio, Sampling(draws=1000))
    assert same.lower == same.upper == same.estimate
    broken = cluster_bootstrap(np.array([[math.nan, 1.0], [0, 1]]), ratio, Sampling(draws=1000))
    assert math.isnan(broken.estimate)


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "c": 0.06, "b": 0.06}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}
    assert holm({}) == {}


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), max_size=14))
def test_sign_flips_of_single_items_are_mcnemar(drops: list[float]) -> None:
    table = counts(len(drops) or 1, drops.count(1.0), drops.count(-1.0))
    assert sign_flip_p(np.array(drops), Sampling()) == pytest.approx(mcnemar_p(table), abs=1e-9)


def test_sampled_sign_flips_agree_with_the_exact_test() -> None:
    drops = np.array([1.0] * 20 + [-1.0] * 8)
    exact = mcnemar_p(counts(28, 20, 8))
    assert sign_flip_p(drops, Sampling(draws=20_000)) == pytest.approx(exact, abs=0.005)


@pytest.mark.parametrize("sizes", [[1] * 200 + [40] * 5, [2] * 100 + [40] * 5, [5] * 60])
@pytest.mark.parametrize("are_alike", [True, False])
def test_a_loss_at_the_margin_seldom_passes_whatever_the_sizes(
    sizes: list[int], are_alike: bool
) -> None:
    """Large documents that happen to lose nothing hide what all documents lose by half and half."""
    chance, num_passed = np.random.default_rng(2), 0
    docs = [f"d{n}" for n, size in enumerate(sizes) for _ in range(size)]
    for _ in range(200):
        own, of_doc = chance.random(len(docs)), np.repeat(chance.random(len(sizes)), sizes)
        drawn = np.where(chance.random(len(docs)) < 0.7, of_doc, own) if are_alike else own
        kept = (drawn >= 0.05).tolist()
        found = paired_by_cluster([True] * len(docs), kept, docs, Sampling(draws=100))
        num_passed += found.interval.upper < 0.05
    assert num_passed <= 0.09 * 200


def test_design_effect_of_copies_and_of_independent_items() -> None:
    rng = np.random.default_rng(0)
    names = [f"doc{i // 5}" for i in range(1000)]
    alone = (rng.random(1000) < 0.2).astype(float)
    assert design_effect(alone, names) == pytest.approx(1.0, abs=0.2)
    copies = np.repeat(rng.random(200) < 0.2, 5).astype(float)
    assert design_effect(copies, names) == pytest.approx(5.0, rel=0.1)
    assert design_effect(np.zeros(1000), names) == 5.0
    uneven = ["a"] * 6 + ["b", "c"]
    assert design_effect(np.zeros(8), uneven) == pytest.approx((36 + 1 + 1) / 8)


def test_shrunk_counts_never_say_more_than_the_items() -> None:
    table = PairedCounts(num_items=400, num_base_ok=390, lost=5, gained=3)
    assert shrunk(table, 1.0) == table
    small = shrunk(table, 4.0)
    assert small == PairedCounts(num_items=100, num_base_ok=98, lost=2, gained=0)
    assert drop_upper(small) > drop_upper(table)


def test_items_that_share_documents_are_judged_by_documents() -> None:
    """A false alarm is as rare as it should be although ten items of a document flip together."""
    rng = np.random.default_rng(5)
    names = [f"doc{i // 10}" for i in range(600)]
    missed = alarms = 0
    for trial in range(150):
        lost, gained = (np.repeat(rng.random(60) < 0.05, 10) for _ in range(2))
        base, candidate = ~gained, ~lost
        base = base | (lost & gained)
        found = paired_by_cluster(
            list(base), list(candidate), names, Sampling(draws=1000, seed=trial)
        )
        missed += found.interval.upper < 0.0
        alarms += found.p_value < 0.05
    assert missed / 150 < 0.09
    assert alarms / 150 < 0.09


def test_one_item_a_document_is_the_plain_test() -> None:
    base, candidate = [True] * 20, [True] * 16 + [False] * 4
    found = paired_by_cluster(base, candidate, [str(i) for i in range(20)], Sampling())
    assert found.design_effect == 1.0
    assert found.p_value == mcnemar_p(counts(20, 4, 0)) == 2**-4
    assert found.interval.upper == drop_upper(counts(20, 4, 0))
