"""The account of a GPU's time, on traces made by hand (microseconds)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_profile import (
    Work,
    account,
    as_json,
    busy_pct,
    describe,
    kernel_times,
    read_trace,
    union,
)


def work(name: str, start: float, end: float, launch: int) -> Work:
    return Work(name=name, start=start, end=end, launch=launch)


# Two graphs of 40 us, 20 us between them, in which a copy takes 5.
WORK = [
    work("a", 0, 10, 1),
    work("b", 8, 20, 1),  # overlaps its predecessor
    work("a", 25, 40, 1),  # 5 us after it
    work("copy", 45, 50, 2),
    work("a", 60, 70, 3),
    work("b", 70, 100, 3),
    work("early", -50, -40, 9),  # before the window
]


def test_idle_and_gaps_are_told_apart() -> None:
    found = account(WORK, {1, 3})
    assert found is not None
    assert (found.window_us, found.steps, found.graph_us) == (100, 2, 40)
    assert found.idle_pct == pytest.approx(20)
    assert found.outside_pct == pytest.approx(5)
    assert found.gap_pct == pytest.approx(5)


def test_charges_add_up_to_busy_time() -> None:
    inside = [w for w in WORK if w.launch in (1, 3)]
    times = {k.name: (k.calls, k.us) for k in kernel_times(inside, 2)}
    assert times == {"a": (1.5, 17.5), "b": (1.0, 20.0)}
    assert sum(us for _, us in times.values()) * 2 == 75


def test_one_graph_is_no_window() -> None:
    assert account(WORK, {1}) is None
    assert account([], set()) is None


def test_union_joins_what_touches() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (3.5, 3.6)]) == [(0, 2), (3, 4)]


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 5.0, "dur": 2.0}
    events = [
        {**kernel, "args": {"correlation": 7}},
        {**kernel, "ts": 9.0, "args": {"correlation": 8}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1.0, "dur": 1.0,
         "args": {"correlation": 7}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 3.0, "dur": 1.0,
         "args": {"correlation": 8}},
        {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    found = account(*read_trace(path))
    assert found is not None
    assert found.idle_pct == pytest.approx(100 * 2 / 6)


def test_a_profile_is_told_by_kernel() -> None:
    kernels = as_json(kernel_times([w for w in WORK if w.launch in (1, 3)], 2))
    text = describe({"kernels": kernels, "graph_us": 40.0})
    assert text.splitlines()[0] == "graph_us 40.0"
    assert text.splitlines()[1].split() == ["20.0", "us", "1.0", "x", "20.00", "b"]
    assert busy_pct(WORK[:3]) == pytest.approx(100 * 35 / 40)
    assert busy_pct([]) == 0
