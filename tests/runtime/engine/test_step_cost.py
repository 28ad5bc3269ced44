"""The step-cost table: between, below and beyond what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.step_cost import StepCost, interpolated, measure

COST = StepCost(
    decode=((1, 0.002), (64, 0.006), (256, 0.015)), prefill=((512, 0.012), (8192, 0.17))
)


def test_points_are_met_and_joined() -> None:
    assert COST.decode_s(64) == pytest.approx(0.006)
    assert COST.decode_s(160) == pytest.approx(0.0105)
    assert COST.decode_s(512) == pytest.approx(0.030), "twice the largest: twice its time"
    assert COST.prefill_s(1) == pytest.approx(0.012), "a small chunk reads all the weights, too"
    assert COST.prefill_tokens_per_s == pytest.approx(8192 / 0.17)


def test_decodes_beside_a_prompt_count_as_its_tokens() -> None:
    assert COST.step_s(64, 0) == COST.decode_s(64)
    assert COST.step_s(100, 924) == COST.prefill_s(1024)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=9), st.integers(1, 5000))
def test_a_larger_step_never_costs_less(times: list[float], size: int) -> None:
    rows = [2**i for i in range(len(times))]
    table = dict(zip(rows, times, strict=True))
    points = measure(rows, lambda row: table[row], budget_s=100.0)
    assert interpolated(points, size) <= interpolated(points, size + 1) * (1 + 1e-12)
    assert all(seconds <= table[row] for row, seconds in points)


def test_the_first_run_of_a_size_is_not_its_cost() -> None:
    calls: list[int] = []

    def seconds_of(size: int) -> float:
        calls.append(size)
        return 5.0 if calls.count(size) == 1 else 0.01 * size

    assert measure([4, 1], seconds_of, budget_s=1.0) == ((1, 0.01), (4, 0.04))
    assert calls == [1] * 4 + [4] * 4


def test_measuring_ends_when_its_time_is_spent() -> None:
    calls: list[int] = []

    def seconds_of(size: int) -> float:
        calls.append(size)
        return 1.0

    measure(range(1, 6), seconds_of, budget_s=2.0)
    assert len(calls) <= 12, "one counted run a size, once the budget is gone"
