"""Time of one call on a GPU: many calls on different data captured in a graph, replays, medians.

Data are rotated: calls of a graph go through sets of data that are more in all than the L2 cache
holds, again and again where the sets are few, so that a graph's start and end weigh nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

ROTATED_BYTES = 160 * 2**20
MIN_CALLS = 24
BYTES_PER_US = 4.3e6  # what the reference card reads at best


def num_copies(num_bytes: int, device: torch.device) -> int:
    """How many sets of data one graph needs so that none is still in the cache when it returns."""
    return 2 if device.type == "cpu" else min(64, max(2, -(-ROTATED_BYTES // num_bytes)))


def call_us(
    calls: Sequence[Callable[[], object]], device: torch.device, repeats: int = 15
) -> list[float]:
    """Microseconds per call, one figure per pass: on a GPU a graph of at least MIN_CALLS."""
    if device.type == "cuda":
        calls = [*calls] * -(-MIN_CALLS // len(calls))
    run = _captured(calls) if device.type == "cuda" else _looped(calls)
    run()
    return [_pass_us(run, device) / len(calls) for _ in range(repeats)]


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Each call runs twice first, outside: kernels are compiled and libraries choose then."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _looped(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    return lambda: [call() for call in calls]


def _pass_us(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    passed_ms: float = begin.elapsed_time(end)
    return 1e3 * passed_ms
