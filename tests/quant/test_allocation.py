"""The knapsack against brute force, and what holds for every answer of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quant.allocation import Allocation, Allocator, Group, Option, diverse
from quant.errors import PlanError

OPTIONS = st.builds(
    Option,
    scheme=st.just("w4a16-g64"),
    num_bytes=st.integers(1, 40).map(lambda n: 16 * n),
    score=st.floats(0, 1, allow_nan=False),
)
GROUPS = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=5).map(
    lambda rows: [Group(name=str(i), options=tuple(row)) for i, row in enumerate(rows)]
)


def w4(num_bytes: int, score: float) -> Option:
    return Option(scheme="w4a16-g64", num_bytes=num_bytes, score=score)


# 64 and 80 bytes by the same three scores: their sums differ only by the order of adding.
EQUAL_BUT_FOR_ROUNDING = [
    Group(name="0", options=(w4(16, 0.2752841732878882),)),
    Group(name="1", options=(w4(16, 0.9764436628560185), w4(32, 0.6863522168663682))),
    Group(name="2", options=(w4(16, 0.9764436628560185), w4(48, 0.6863522168663682))),
]


def every(groups: list[Group]) -> list[Allocation]:
    products = itertools.product(*(group.options for group in groups))
    return [Allocation(choices=choices) for choices in products]


@settings(max_examples=150, deadline=None)
@given(groups=GROUPS, share=st.floats(0, 1))
def test_the_least_score_within_a_budget(groups: list[Group], share: float) -> None:
    allocator = Allocator(groups)
    low, high = allocator.least_bytes, allocator.most_bytes
    budget = low + int(share * (high - low))
    found = allocator.within(budget)
    assert found.num_bytes <= budget
    best = min(a.score for a in every(groups) if a.num_bytes <= budget)
    assert found.score == pytest.approx(best, abs=1e-12)
    limited = Allocator(groups, limit=budget).within(budget)
    assert limited.score == pytest.approx(best, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(groups=GROUPS, ceiling=st.floats(0, 5))
def test_the_least_bytes_within_a_score(groups: list[Group], ceiling: float) -> None:
    allocator = Allocator(groups)
    # Sums of floats in another order differ in the last bits: stay clear of ties.
    if any(abs(a.score - ceiling) < 1e-9 for a in every(groups)):
        return
    fitting = [a.num_bytes for a in every(groups) if a.score <= ceiling]
    if not fitting:
        with pytest.raises(PlanError, match="no plan is predicted"):
            allocator.smallest(ceiling)
        return
    found = allocator.smallest(ceiling)
    assert found.score <= ceiling
    assert found.num_bytes == min(fitting)


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, cells=st.integers(2, 12))
def test_a_coarse_unit_never_exceeds_the_budget(groups: list[Group], cells: int) -> None:
    allocator = Allocator(groups, max_cells=cells)
    for budget in range(allocator.least_bytes, allocator.most_bytes + 1, 48):
        assert allocator.within(budget).num_bytes <= budget


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, cells=st.integers(2, 1 << 17))
@example(groups=EQUAL_BUT_FOR_ROUNDING, cells=1 << 17)
def test_the_frontier_falls_in_score_as_it_grows(groups: list[Group], cells: int) -> None:
    points = Allocator(groups, max_cells=cells).frontier()
    for small, large in itertools.pairwise(points):
        assert small.num_bytes < large.num_bytes
        assert small.score > large.score


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS)
def test_diverse_plans_differ_fit_and_begin_with_the_best(groups: list[Group]) -> None:
    allocator = Allocator(groups)
    budget = (allocator.least_bytes + allocator.most_bytes) // 2
    plans = diverse(groups, budget, 3)
    assert 1 <= len(plans) <= 3
    assert plans[0].score == pytest.approx(allocator.within(budget).score)
    assert all(plan.num_bytes <= budget for plan in plans)


def test_a_budget_below_the_smallest_plan_is_refused_with_its_size() -> None:
    group = Group(name="a", options=(Option(scheme="w4a16-g64", num_bytes=64, score=0.1),))
    with pytest.raises(PlanError, match="smallest plan takes 64"):
        Allocator([group]).within(63)
    with pytest.raises(PlanError, match="smallest plan takes 64"):
        Allocator([group], limit=63)
