"""Quotas: they add up, stay within what is there, and long rows are not starved."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant.sampling.strata import BUCKETS, allot, bucket

COUNTS = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, len(BUCKETS))),
    st.integers(1, 400),
    min_size=1,
)


@given(COUNTS, st.integers(1, 300), st.sampled_from(["traffic", "equal"]))
def test_quotas_add_up_and_fit(counts: dict[tuple[str, int], int], total: int, how: str) -> None:
    quota = allot(counts, total, balance=how)  # type: ignore[arg-type]
    assert sum(quota.values()) == min(total, sum(counts.values()))
    assert all(0 <= quota[key] <= counts[key] for key in counts)


def test_rare_long_rows_get_their_share() -> None:
    """Thousands of tickets must not crowd out ten contracts."""
    quota = allot({("tickets", 0): 5000, ("contracts", 3): 10}, 128, balance="traffic")
    assert quota["contracts", 3] == 10
    quota = allot({("tickets", 0): 5000, ("contracts", 3): 400}, 128, balance="traffic")
    assert quota["contracts", 3] >= math.ceil(0.25 * 128)


def test_every_source_is_there_and_equal_means_equal() -> None:
    counts = {("big", 0): 10_000, ("small", 0): 40, ("tiny", 0): 3}
    assert min(allot(counts, 64, balance="traffic").values()) >= 1
    assert allot(counts, 63, balance="equal") == {
        ("big", 0): 30,
        ("small", 0): 30,
        ("tiny", 0): 3,
    }


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0), (256, 0), (257, 1), (99_999, 4)])
def test_buckets_hold_their_upper_bound(tokens: int, expected: int) -> None:
    assert bucket(tokens) == expected
