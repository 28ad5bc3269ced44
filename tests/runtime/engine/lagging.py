"""Runners that run behind without a device.

What a step draws is known to the runner alone until the step is collected, as on a GPU: everything
is computed at launch, in the order of the launches, and kept from the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from runtime.config import ResolvedConfig
from runtime.engine.engine import Engine
from runtime.engine.model_runner import DecoderLike, ModelRunner
from runtime.engine.runner import StepResult
from runtime.engine.scheduler import Schedule
from runtime.engine.sequence import PENDING, Sequence
from runtime.request import Request


class DeviceFault(RuntimeError):
    """What a test's runner raises when it is told to."""


class LaggingRunner(ModelRunner):
    """The CPU's runner with `lag` steps in flight; their tokens live in `drawn`, by position."""

    def __init__(self, decoder: DecoderLike, kv: Any, block_size: int, lag: int) -> None:
        super().__init__(decoder, kv, block_size)
        self.lag = lag
        self.drawn: dict[Sequence, dict[int, int]] = {}
        self.in_flight: deque[StepResult] = deque()
        self.most_in_flight = 0

    def launch(self, schedule: Schedule) -> StepResult:
        with self._filled_in(schedule):
            ticket = super().launch(schedule)
        for sequence, token_id in zip(schedule.sampling, ticket.token_ids, strict=True):
            self.drawn.setdefault(sequence, {})[len(sequence.tokens)] = token_id
        self.in_flight.append(ticket)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        assert len(self.in_flight) <= self.lag + 1
        return ticket

    def collect(self, ticket: StepResult) -> StepResult:
        assert ticket is self.in_flight.popleft(), "collected out of order"
        return ticket

    def release(self, sequence: Sequence) -> None:
        self.drawn.pop(sequence, None)

    def abandon(self) -> None:
        self.drawn.clear()
        self.in_flight.clear()

    @contextmanager
    def _filled_in(self, schedule: Schedule) -> Iterator[None]:
        """The sequences as the device knows them."""
        saved = []
        for sequence in schedule.spans:
            counts = dict(sequence._output_counts), sequence._num_counted
            saved.append((sequence, list(sequence.tokens), sequence.num_known, counts))
            for position in range(sequence.num_known, len(sequence.tokens)):
                sequence.tokens[position] = self.drawn[sequence][position]
            sequence.num_known = len(sequence.tokens)
        try:
            yield
        finally:
            for sequence, tokens, num_known, counts in saved:
                sequence.tokens[:], sequence.num_known = tokens, num_known
                sequence._output_counts, sequence._num_counted = counts


def next_token(history: tuple[int, ...], vocab: int) -> int:
    """The whole model of `ListRunner`."""
    return crc32(repr(history).encode()) % vocab


def is_sound(history: tuple[int, ...]) -> bool:
    return True


@dataclass
class ListRunner:
    """A model, a KV pool and a device made of lists; no tensors, so that many steps cost little.

    The token after a history depends on all of it, read back from the pool through the block table.
    is_sound: False for a history makes the row of logits non-finite. fail_launch, fail_collect:
    the numbers of those calls that raise. forbids: schedules that must not be launched behind.
    """

    num_blocks: int
    block_size: int
    vocab: int
    lag: int = 0
    is_sound: Callable[[tuple[int, ...]], bool] = is_sound
    forbids: Callable[[Schedule], bool] = lambda schedule: False
    fail_launch: set[int] = field(default_factory=set)
    fail_collect: set[int] = field(default_factory=set)
    rows_per_slice: int = 64
    num_launched: int = 0
    num_collected: int = 0

    def __post_init__(self) -> None:
        self.pool = [PENDING] * (self.num_blocks * self.block_size)
        self.last: dict[Sequence, int] = {}
        self.in_flight: deque[StepResult] = deque()
        self.schedules: list[Schedule] = []

    def can_run_behind(self, schedule: Schedule) -> bool:
        return not self.forbids(schedule)

    def launch(self, schedule: Schedule) -> StepResult:
        self.num_launched += 1
        assert not (self.in_flight and self.forbids(schedule)), "launched behind"
        if self.num_launched in self.fail_launch:
            raise DeviceFault("launch")
        ticket = StepResult()
        ends = {s: self._compute(s, n) for s, n in schedule.spans.items()}
        for sequence in schedule.sampling:
            history = ends[sequence]
            self.last[sequence] = next_token(history, self.vocab)
            ticket.token_ids.append(self.last[sequence])
            if not self.is_sound(history):
                ticket.errors[sequence] = "not finite"
        self.in_flight.append(ticket)
        assert len(self.in_flight) <= self.lag + 1
        self.schedules.append(schedule)
        return ticket

    def collect(self, ticket: StepResult) -> StepResult:
        self.num_collected += 1
        if self.num_collected in self.fail_collect:
            raise DeviceFault("collect")
        assert ticket is self.in_flight.popleft(), "collected out of order"
        return ticket

    def release(self, sequence: Sequence) -> None:
        self.last.pop(sequence, None)

    def abandon(self) -> None:
        self.last.clear()
        self.in_flight.clear()

    def forward(self, pieces: Any) -> Any:
        raise AssertionError("not scripted")

    logits = forward

    def _compute(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Write the span's tokens to the pool; the tokens of all its positions so far."""
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        assert end <= sequence.compute_limit, "computed for nothing"
        for position in range(start, end):
            token_id = sequence.tokens[position]
            if token_id == PENDING:
                assert num_tokens == 1
                token_id = self.last[sequence]
            self.pool[self._slot(sequence, position)] = token_id
        history = tuple(self.pool[self._slot(sequence, position)] for position in range(end))
        assert PENDING not in history, "read a slot that was never written"
        return history

    def _slot(self, sequence: Sequence, position: int) -> int:
        block = sequence.block_ids[position // self.block_size]
        return block * self.block_size + position % self.block_size


@dataclass
class _NoDecoder:
    spec: Any = None
    device: Any = None


def list_engine(runner: ListRunner, **resolved: Any) -> Engine:
    """An engine around `runner`; `resolved` are fields of ResolvedConfig."""
    fields: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "long_prefill_token_threshold": 0,
        "enable_prefix_caching": True,
        "deterministic": False,
        "seed": 0,
        "eos_token_ids": (),
        "artifact_digest": "scripted",
        "block_size": runner.block_size,
        "num_blocks": runner.num_blocks,
        "vocab_size": runner.vocab,
    }
    config = ResolvedConfig(**{**fields, **resolved})
    return Engine(_NoDecoder(), None, config, runner=runner)


def expected_tokens(request: Request, vocab: int, stop_ids: frozenset[int]) -> list[int]:
    """What `ListRunner` says to a request, by a loop that knows no engine."""
    history, produced = list(request.prompt), list[int]()
    while len(produced) < (request.sampling.max_tokens or 0):
        produced.append(next_token(tuple(history), vocab))
        history.append(produced[-1])
        if produced[-1] in stop_ids:
            break
    return produced
