"""The engine's speed on one artifact: one process, one load, all batches in it.

Decode is *steady*: `batch` sequences of random tokens, greedy, end-of-text ignored, no prefix
cache; the clock runs from the step in which the last of them has started to the last one before any
ends. Graphs and kernels of a batch size are made by a short run of that size beforehand.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_profile import (
    Account,
    Work,
    account,
    as_json,
    busy_pct,
    kernel_times,
    read_trace,
)
from benchmarks.gpu_rows import Origin, Subject, row
from runtime.engine.engine import Engine
from runtime.request import Request, SamplingParams

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. Sizes are the bars' own unless this is a dry run.

    prefill: (sequences, tokens each) or None. repeats: of prefill and first token; decodes of
    fewer than `repeat_below` sequences are measured that often too, larger ones once.
    profile_batches: batches to put under the profiler for `profile_steps` steps; the profiler
    slows a process down, so they are runs of their own. deadline: `time.time()` after which
    nothing more is begun.
    """

    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    input_len: int = 1024
    output_len: int = 256
    prefill: tuple[int, int] | None = (16, 2048)
    repeats: int = 3
    repeat_below: int = 64
    profile_batches: tuple[int, ...] = (1,)
    profile_steps: int = 48
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """One steady decode: tokens made in `seconds`, and how long each step took."""

    num_tokens: int
    seconds: float
    step_ms: tuple[float, ...]
    total_s: float

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds


class Driver:
    """Feeds one engine with random prompts and watches the clock."""

    def __init__(self, engine: Engine, *, seed: int = 0) -> None:
        self.engine = engine
        self._random = random.Random(seed)
        self._num_requests = 0

    def add(self, count: int, input_len: int, output_len: int) -> list[str]:
        """Queue `count` requests; their ids."""
        vocab = range(self.engine.resolved.vocab_size)
        names = []
        for _ in range(count):
            self._num_requests += 1
            names.append(f"bench-{self._num_requests}")
            self.engine.add(
                Request(
                    id=names[-1],
                    prompt=tuple(self._random.choices(vocab, k=input_len)),
                    sampling=SamplingParams(
                        temperature=0.0, max_tokens=output_len, ignore_eos=True
                    ),
                )
            )
        return names

    def until_started(self, names: Sequence[str]) -> None:
        """Step until each of them has a token.

        With fewer places than names the last ones start when the first ones have ended, and then
        there is no steady decode.
        """
        waiting = set(names)
        while waiting:
            output = self.engine.step()
            check(output)
            waiting -= set(output.request_ids)

    def drain(self, names: Sequence[str] = ()) -> None:
        """End `names` and run out whatever is left."""
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work:
            check(self.engine.step())

    def steady(self, batch: int, input_len: int, output_len: int) -> Steady:
        """Tokens from the step after the last start to the one before the first end.

        The step in which a sequence ends is not counted: what runs behind has launched a smaller
        one by then, and may have captured a graph for it.
        """
        began = time.perf_counter()
        names = self.add(batch, input_len, output_len)
        self.until_started(names)
        marks, num_tokens, has_ended = [time.perf_counter()], 0, False
        while self.engine.has_work:
            output = self.engine.step()
            check(output)
            has_ended = any(reason is not None for reason in output.finish_reasons)
            if has_ended:
                break
            marks.append(time.perf_counter())
            num_tokens += len(output.token_ids)
        if not has_ended or not num_tokens:
            raise RuntimeError("a sequence ended before the last one had started: no steady decode")
        self.drain()
        steps = [1000 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
        return Steady(
            num_tokens=num_tokens,
            seconds=marks[-1] - marks[0],
            step_ms=tuple(steps),
            total_s=time.perf_counter() - began,
        )

    def first_tokens(self, count: int, input_len: int) -> float:
        """Seconds until `count` prompts have been computed and each has its one token."""
        names = self.add(count, input_len, 1)
        began = time.perf_counter()
        self.until_started(names)
        seconds = time.perf_counter() - began
        self.drain()
        return seconds

    def profile_decode(
        self, batch: int, steps: int, input_len: int, output_len: int
    ) -> tuple[Account | None, float]:
        """`steps` steady steps under torch's profiler, and milliseconds a step takes there."""
        names = self.add(batch, input_len, output_len)
        self.until_started(names)
        for _ in range(WARM_UP_TOKENS):
            self.engine.step()

        marks: list[float] = []

        def run() -> None:
            for _ in range(steps):
                marks.append(time.perf_counter())
                self.engine.step()

        work, graphs = profiled(run)
        self.drain(names)
        return account(work, graphs), 1000 * (marks[-1] - marks[0]) / (steps - 1)

    def profile_prompts(self, count: int, input_len: int) -> dict[str, Any]:
        """What the GPU does while prompts are computed, for a row's extra."""
        work, _ = profiled(lambda: self.first_tokens(count, input_len))
        return {"busy_pct": round(busy_pct(work), 2), "kernels": as_json(kernel_times(work, 1))}


def profiled(run: Callable[[], object]) -> tuple[list[Work], set[int]]:
    """The device's work while `run` runs, and its graph launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def check(output: Any) -> None:
    """A request that failed makes every figure worthless."""
    if output.errors:
        raise RuntimeError(f"requests failed: {output.errors}")


def measure(
    engine: Engine, subject: Subject, origin: Origin, plan: Plan, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """All rows of one engine, each as soon as it is known."""
    driver = Driver(engine)
    limits = {
        "max_num_batched_tokens": engine.resolved.max_num_batched_tokens,
        "max_num_seqs": engine.resolved.max_num_seqs,
        "block_size": engine.resolved.block_size,
    }
    lengths = {"input": plan.input_len, "output": plan.output_len}
    base = _with(subject, 1, **limits)
    yield _kv_tokens(engine, base, origin, **lengths)
    yield from _prompts(driver, base, origin, plan)
    for batch in plan.batches:
        if is_late(plan):
            say(f"batch {batch}: left out, no time is left")
            continue
        yield _decode(driver, _with(base, batch, **lengths), origin, plan)
    yield from _profiles(driver, _with(base, 1, **lengths), origin, plan, say)


def _profiles(
    driver: Driver, base: Subject, origin: Origin, plan: Plan, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Last of all: once a profiler has run in a process, launches stay slower there."""
    for batch in plan.profile_batches:
        if is_late(plan):
            say(f"profile at batch {batch}: left out, no time is left")
            continue
        found, ms = driver.profile_decode(
            batch, plan.profile_steps, plan.input_len, plan.output_len
        )
        if found is None:
            say(f"profile at batch {batch}: no graphs were launched")
            continue
        extra: dict[str, Any] = {"profiled_step_ms": round(ms, 4)}
        if batch == 1 and plan.prefill is not None:
            extra["prompt"] = driver.profile_prompts(1, plan.prefill[1])
        yield _idle(found, _with(base, batch), origin, **extra)


def _kv_tokens(engine: Engine, base: Subject, origin: Origin, **extra: Any) -> dict[str, Any]:
    resolved = engine.resolved
    if resolved.account is not None:
        extra["memory"] = asdict(resolved.account)
    return row(base, "kv_tokens", [resolved.num_blocks * resolved.block_size], origin, **extra)


def is_late(plan: Plan) -> bool:
    return plan.deadline is not None and time.time() > plan.deadline


def _with(subject: Subject, batch: int, **extra: Any) -> Subject:
    return Subject(
        suite=subject.suite,
        shape=subject.shape,
        scheme=subject.scheme,
        kv_dtype=subject.kv_dtype,
        batch=batch,
        extra={**subject.extra, **extra},
    )


def _prompts(driver: Driver, base: Subject, origin: Origin, plan: Plan) -> Iterator[dict[str, Any]]:
    if plan.prefill is None:
        return
    count, length = plan.prefill
    driver.first_tokens(count, length)
    tok_s = [count * length / driver.first_tokens(count, length) for _ in range(plan.repeats)]
    yield row(_with(base, count, input=length, output=1), "prefill_tok_s", tok_s, origin)
    driver.first_tokens(1, length)
    ms = [1000 * driver.first_tokens(1, length) for _ in range(plan.repeats + 2)]
    yield row(_with(base, 1, input=length, output=1), "ttft_ms", ms, origin)


def _decode(driver: Driver, subject: Subject, origin: Origin, plan: Plan) -> dict[str, Any]:
    batch = subject.batch
    driver.steady(batch, 16, WARM_UP_TOKENS)
    repeats = plan.repeats if batch < plan.repeat_below else 1
    runs = [driver.steady(batch, plan.input_len, plan.output_len) for _ in range(repeats)]
    step_ms = [ms for run in runs for ms in run.step_ms]
    return row(
        subject,
        "decode_tok_s",
        [run.tok_s for run in runs],
        origin,
        steps=len(runs[0].step_ms),
        step_ms=round(median(step_ms), 4),
        step_ms_max=round(max(step_ms), 3),
        end_to_end_tok_s=round(median(batch * plan.output_len / run.total_s for run in runs), 1),
    )


def _idle(found: Account, subject: Subject, origin: Origin, **extra: Any) -> dict[str, Any]:
    return row(
        subject,
        "gpu_idle_pct",
        [found.idle_pct],
        origin,
        gap_pct=round(found.gap_pct, 3),
        outside_pct=round(found.outside_pct, 3),
        graph_us=round(found.graph_us, 2),
        graphs=found.steps,
        kernels=as_json(found.kernels),
        **extra,
    )
