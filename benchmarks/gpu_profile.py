"""What a GPU did in a stretch of time: idle, waiting inside graphs, and which kernel took it.

Reads the chrome trace that torch's profiler exports (times in microseconds). A kernel belongs to
the graph launch whose correlation id it carries. Kernels may overlap (programmatic dependent launch
starts one before the last has ended), so a kernel is charged only for the time between the end of
all before it and its own end: the charges add up to the time in which the GPU was busy.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel, copy or fill on the device: [start, end) in us, and the launch it came from."""

    name: str
    start: float
    end: float
    launch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """A kernel's share: calls, and microseconds charged to it, per graph launch."""

    name: str
    calls: float
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A window from the start of the first graph to the end of the last, in percent of it.

    idle_pct: no graph is in flight. Work outside graphs (a copy between two of them) counts as
        idle, since the next graph waits for it; outside_pct says how much of idle_pct that is.
    gap_pct: a graph is in flight and none of its kernels runs.
    graph_us: mean length of a graph; steps: graphs in the window.
    """

    window_us: float
    steps: int
    graph_us: float
    idle_pct: float
    outside_pct: float
    gap_pct: float
    kernels: tuple[KernelTime, ...]


def read_trace(path: Path) -> tuple[list[Work], set[int]]:
    """Device work of a chrome trace, and the correlation ids of its graph launches.

    Any launch of more than one kernel is a graph's, whatever the call is named.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    work = [
        Work(
            name=event["name"],
            start=event["ts"],
            end=event["ts"] + event["dur"],
            launch=_correlation(event),
        )
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    ]
    named = {_correlation(event) for event in events if "GraphLaunch" in event.get("name", "")}
    kernels = Counter(_correlation(event) for event in events if event.get("cat") == "kernel")
    return work, named | {launch for launch, number in kernels.items() if number > 1} - {-1}


def _correlation(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def account(work: Sequence[Work], graphs: set[int]) -> Account | None:
    """None where fewer than two graphs ran."""
    inside = [item for item in work if item.launch in graphs]
    by_graph: dict[int, list[Work]] = defaultdict(list)
    for item in inside:
        by_graph[item.launch].append(item)
    spans = [(min(w.start for w in ws), max(w.end for w in ws)) for ws in by_graph.values()]
    if len(spans) < 2:
        return None
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    window, in_flight = last - first, union(spans)
    others = [_clip((w.start, w.end), first, last) for w in work if w.launch not in graphs]
    kernels = [(w.start, w.end) for w in inside]
    outside = covered([*in_flight, *others]) - covered(in_flight)
    return Account(
        window_us=window,
        steps=len(spans),
        graph_us=sum(end - start for start, end in spans) / len(spans),
        idle_pct=100 * (window - covered(in_flight)) / window,
        outside_pct=100 * outside / window,
        gap_pct=100 * (covered(in_flight) - covered(kernels)) / window,
        kernels=tuple(kernel_times(inside, len(spans))),
    )


def busy_pct(work: Sequence[Work]) -> float:
    """Share of the time from the first start to the last end in which something ran, in percent."""
    if not work:
        return 0.0
    window = max(w.end for w in work) - min(w.start for w in work)
    return 100 * covered((w.start, w.end) for w in work) / window


def as_json(kernels: Sequence[KernelTime], limit: int = 24) -> list[list[Any]]:
    """[name, calls, us] of the longest, for a result row."""
    return [[k.name[:100], round(k.calls, 2), round(k.us, 2)] for k in kernels[:limit]]


def kernel_times(work: Iterable[Work], num_launches: int) -> list[KernelTime]:
    """Kernels by the time charged to them, longest first."""
    calls: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    done = float("-inf")
    for item in sorted(work, key=lambda w: (w.start, w.end)):
        calls[item.name] += 1
        times[item.name] += max(0.0, item.end - max(item.start, done))
        done = max(done, item.end)
    rows = [
        KernelTime(name=name, calls=calls[name] / num_launches, us=us / num_launches)
        for name, us in times.items()
    ]
    return sorted(rows, key=lambda row: -row.us)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def covered(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def _clip(interval: Interval, first: float, last: float) -> Interval:
    return max(interval[0], first), min(interval[1], last)


def describe(extra: Mapping[str, Any]) -> str:
    """What a result row with `kernels` says the GPU waits for, a line per kernel."""
    figures = ("graphs", "graph_us", "gap_pct", "outside_pct", "busy_pct", "profiled_step_ms")
    lines = ["  ".join(f"{name} {extra[name]}" for name in figures if name in extra)]
    for name, calls, us in extra["kernels"]:
        lines.append(f"{us:10.1f} us {calls:7.1f} x {us / calls:8.2f}  {name}")
    return "\n".join(lines)
