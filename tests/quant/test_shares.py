"""Shares of windows and rows put together again: ranks as threads against one that has all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quant.artifact.scheme import preset, with_group_size
from quant.capture import InputStatistics, Stream, collect_inputs, make_batches
from quant.layer_job import LayerWork, MethodSettings, quantize_modules
from quant.methods.gptq import GPTQSettings
from quant.outcome import ModuleOutcome
from quant.parallel import Part, Ranks, Single, share_of
from quant.plan_rows import PlanRow

T = TypeVar("T")
COLUMNS = 128
SETTINGS = MethodSettings(dtype=torch.float32, gptq=GPTQSettings())


@dataclass(slots=True)
class Table:
    """Where threads meet: each puts something down and takes what all have put."""

    barrier: threading.Barrier
    held: dict[int, Any] = field(default_factory=dict)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.held[rank] = value
        self.barrier.wait(60)
        seen = [self.held[r] for r in sorted(self.held)]
        self.barrier.wait(60)
        return seen


@dataclass(slots=True)
class Thread:
    """A Ranks among threads."""

    rank: int
    size: int
    table: Table

    def add(self, *tensors: Tensor) -> None:
        self._reduce(tensors, lambda parts: torch.stack(parts).sum(0))

    def largest(self, *tensors: Tensor) -> None:
        self._reduce(tensors, lambda parts: torch.stack(parts).amax(0))

    def total(self, count: int) -> int:
        return sum(self.table.swap(self.rank, count))

    def first(self, make: Callable[[], T]) -> T:
        value: T = self.table.swap(self.rank, make() if self.rank == 0 else None)[0]
        return value

    def first_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return dict(self.first(make))

    def gather(self, mine: Part) -> list[Part]:
        return self.table.swap(self.rank, mine)

    def agree(self, what: str, value: Mapping[str, Any]) -> None:
        assert all(other == value for other in self.table.swap(self.rank, value))

    def _reduce(self, tensors: Sequence[Tensor], how: Callable[[Sequence[Tensor]], Tensor]) -> None:
        parts = self.table.swap(self.rank, [tensor.clone() for tensor in tensors])
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                tensor.copy_(how([part[i] for part in parts]))


def together(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` gives on each of `size` ranks."""
    table = Table(threading.Barrier(size))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Thread(rank, size, table)), range(size)))


def statistics(windows: Sequence[list[int]], batch_tokens: int, ranks: Ranks) -> InputStatistics:
    """Of what a linear reads that is fed an embedding with an enormous row for padding."""
    table = torch.randn(50, 12, generator=torch.Generator().manual_seed(1))
    table[0] = 1e6
    linear = nn.Linear(12, 4, bias=False)
    mine = share_of([len(window) for window in windows], ranks)
    batches = make_batches(windows, batch_tokens, mine)
    stream = Stream(batches=batches, hidden=[table[b.token_ids] for b in batches], ranks=ranks)
    assert stream.num_tokens() == sum(map(len, windows))
    return collect_inputs(linear, stream, lambda h, _: linear(h), "toy", needs_hessian=True)


WINDOWS = st.lists(st.lists(st.integers(1, 49), min_size=1, max_size=30), min_size=1, max_size=12)


@settings(deadline=None, max_examples=40)
@given(WINDOWS, st.integers(1, 3), st.sampled_from((1, 16, 64, 400)))
def test_statistics_of_shares_are_those_of_all_tokens(
    windows: list[list[int]], size: int, batch_tokens: int
) -> None:
    """A rank without a window included."""
    alone = statistics(windows, 1, Single())
    shared = together(size, lambda ranks: statistics(windows, batch_tokens, ranks))
    for found in shared:
        assert found.num_tokens == alone.num_tokens == sum(map(len, windows))
        assert torch.equal(found.absmax, alone.absmax)
        torch.testing.assert_close(found.hessian, alone.hessian)
        torch.testing.assert_close(found.mean_square, alone.mean_square)
        assert torch.equal(found.hessian, shared[0].hessian)


def quantized(
    shapes: Sequence[int], method: str, scheme: str, ranks: Ranks
) -> dict[str, ModuleOutcome]:
    """Modules of these rows that share an input."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(400, COLUMNS, generator=generator)
    seen = InputStatistics(num_inputs=COLUMNS, device=torch.device("cpu"), needs_hessian=True)
    seen.add(inputs)
    rows, weights, linears = [], {}, {}
    size = 32 if scheme.startswith("w4") else None
    wanted = preset(scheme) if size is None else with_group_size(preset(scheme), size)
    for i, count in enumerate(shapes):
        name = f"m{i}"
        rows.append(PlanRow(module=name, shape=(count, COLUMNS), scheme=wanted, method=method))  # type: ignore[arg-type]
        weights[name] = torch.randn(count, COLUMNS, generator=generator)
        linears[name] = nn.Linear(COLUMNS, count, bias=False)
    told = None if method == "rtn" else seen
    work = LayerWork(
        linears=linears, weights=weights, stream=Stream(batches=[], ranks=ranks),
        run=lambda hidden, mask: hidden, settings=SETTINGS,
    )  # fmt: skip
    found = quantize_modules(rows, work, told)
    for name, outcome in found.items():
        assert torch.isfinite(linears[name].weight).all()
        assert outcome.result.shape == tuple(outcome.weight.codes.shape)
    return found


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8-block"])
def test_rows_quantized_apart_make_the_same_modules(method: str, scheme: str) -> None:
    """Modules of fewer rows than ranks included; blocks of rows stay whole."""
    for shapes, size in (((40, 7, 1), 2), ((2, 129), 3)):
        alone = quantized(shapes, method, scheme, Single())
        for found in together(
            size, lambda ranks, shapes=shapes: quantized(shapes, method, scheme, ranks)
        ):
            for name, outcome in found.items():
                mine, other = outcome.weight, alone[name].weight
                off = (mine.codes.float() != other.codes.float()).float().mean()
                assert float(off) <= (0.0 if method == "rtn" else 0.02)
                torch.testing.assert_close(mine.scale, other.scale, rtol=1e-3, atol=0)
                result, wanted = outcome.result, alone[name].result
                assert result.bytes == wanted.bytes
                assert result.rel_error == pytest.approx(wanted.rel_error, rel=1e-3)
                assert result.weight_outliers == pytest.approx(wanted.weight_outliers, rel=1e-6)
                assert (result.damping, result.dead_columns) == (
                    wanted.damping, wanted.dead_columns,
                )  # fmt: skip
