"""The account of a device, and which steps are captured; on plain numbers."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.graphs import DecodeGraphs, graph_sizes
from runtime.engine.memory import pool_facts
from runtime.engine.readiness import Readiness
from runtime.engine.step_plan import FILTERED_DRAW, GREEDY, Kind, RunnerLimits

GB = 10**9


def test_the_pool_gets_what_the_utilization_leaves() -> None:
    facts = pool_facts(
        total=150 * GB, outside=GB, weights=6 * GB, workspace=3 * GB, graphs=GB // 2,
        utilization=0.9,
    )  # fmt: skip
    assert facts.pool_bytes == int(124.5 * GB)
    account = asdict(facts.account) if facts.account is not None else {}
    assert account == {
        "total": 150 * GB, "weights": 6 * GB, "kv": 0, "workspace": 3 * GB, "graphs": GB // 2,
        "outside": GB, "left": int(139.5 * GB),
    }  # fmt: skip


def test_another_process_may_leave_no_room() -> None:
    facts = pool_facts(
        total=80 * GB, outside=70 * GB, weights=6 * GB, workspace=GB, graphs=0, utilization=0.9
    )
    assert facts.pool_bytes == 0


@given(st.integers(1, 1100))
def test_every_number_of_rows_has_a_graph_of_little_padding(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs
    assert list(sizes) == sorted(set(sizes))
    graphs = DecodeGraphs(sizes, lambda size, kind: None, lambda: None)
    for rows in range(1, max_num_seqs + 1):
        size = graphs.size_for(rows)
        assert rows <= size <= max(rows + 7, rows * 1.25)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)


class BlankSteps:
    """Notes what is run."""

    def __init__(self) -> None:
        self.decodes: list[tuple[int, Kind]] = []
        self.prompts: list[tuple[int, int, bool]] = []
        self.compiled: list[object] = []

    def run_padding(self, num_rows: int, kind: Kind) -> None:
        self.decodes.append((num_rows, kind))

    def compile_steps(self, decodes: list[tuple[int, Kind]], prompts: list[int]) -> None:
        self.compiled.append((decodes, prompts))

    def blank_prompt(self, num_tokens: int, num_rows: int, *, draw: bool) -> torch.Tensor:
        self.prompts.append((num_tokens, num_rows, draw))
        return torch.zeros(num_rows, 32)


LIMITS = RunnerLimits(max_num_seqs=12, max_num_batched_tokens=64, max_model_len=128, block_size=16)


def test_the_worst_step_is_as_large_as_the_limits() -> None:
    steps = BlankSteps()
    Readiness(steps, LIMITS, 32, torch.device("cpu"), None).run_worst_step()
    assert steps.prompts == [(64, 12, True)]
    assert {size for size, _ in steps.decodes} == {12}


def test_a_failed_capture_is_said_once_and_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    graphs = DecodeGraphs(graph_sizes(8), lambda size, kind: ran.append(size), lambda: None)

    def failing(size: int, kind: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_capture", failing)
    for rows in (1, 3, 3, 8):
        graphs.run(graphs.size_for(rows), GREEDY)
    assert ran == [1, 4, 4, 8]
    assert graphs.missing(GREEDY) == [], "nobody tries again"
    (record,) = caplog.records
    assert "not permitted" in record.getMessage()


def test_sizes_are_captured_when_needed_largest_first_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, replayed = BlankSteps(), []

    class Captured:
        result = None

        @property
        def graph(self) -> Captured:
            return self

        def replay(self) -> None:
            replayed.append(1)

    graphs = DecodeGraphs((1, 4, 12), steps.run_padding, lambda: None)
    monkeypatch.setattr(graphs, "_capture", lambda size, kind: Captured())
    graphs.run(4, GREEDY)
    graphs.run(4, GREEDY)
    assert (steps.decodes, len(replayed)) == ([(4, GREEDY)], 1)
    ready = Readiness(steps, LIMITS, 32, torch.device("cpu"), graphs)
    monkeypatch.setattr(steps, "run_padding", graphs.run)
    while ready.proceed():
        pass
    assert graphs.num_captured == 3
    graphs.run(1, FILTERED_DRAW)
    while ready.proceed():
        pass
    assert graphs.num_captured == 6, "what was used once is captured in every size"
    assert [size for size, kind in steps.decodes if kind == GREEDY] == [4, 12, 1]
