"""What counts as steady decode, on an engine and a clock that follow a script."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from benchmarks import gpu_engine
from benchmarks.gpu_engine import Driver
from runtime.request import FinishReason, Request, StepOutput


@dataclass
class Scripted:
    """Starts one sequence more in each step and gives every started one a token; a step takes
    1 s while prompts run and 0.25 s after."""

    now: float = 0.0
    num_started: int = 0
    waiting: list[Request] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=dict)
    resolved: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(vocab_size=10))

    @property
    def has_work(self) -> bool:
        return bool(self.live or self.waiting)

    def add(self, request: Request) -> None:
        assert len(set(request.prompt)) <= 10
        self.waiting.append(request)

    def abort(self, name: str) -> None:
        self.live.pop(name, None)

    def step(self) -> StepOutput:
        self.now += 1.0 if self.waiting else 0.25
        if self.waiting:
            request = self.waiting.pop(0)
            assert request.sampling.max_tokens is not None
            self.live[request.id] = request.sampling.max_tokens
        output = StepOutput()
        for name in list(self.live):
            self.live[name] -= 1
            output.request_ids.append(name)
            output.token_ids.append(1)
            output.finish_reasons.append(None if self.live[name] else FinishReason.LENGTH)
            if not self.live[name]:
                del self.live[name]
        return output


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    clock = SimpleNamespace(perf_counter=lambda: scripted.now, time=lambda: scripted.now)
    monkeypatch.setattr(gpu_engine, "time", clock)
    return scripted


def test_steady_runs_from_the_last_start_to_before_the_first_end(engine: Scripted) -> None:
    """Three prompts start in steps 1 to 3; the first sequence has had 3 of its 7 tokens then."""
    found = Driver(engine).steady(3, 5, 7)  # type: ignore[arg-type]
    assert (found.num_tokens, found.seconds) == (3 * 3, 3 * 0.25)
    assert found.tok_s == 12
    assert found.step_ms == (250,) * 3
    assert found.total_s == 3 * 1.0 + 6 * 0.25
    assert not engine.has_work


def test_no_steady_decode_is_an_error(engine: Scripted) -> None:
    with pytest.raises(RuntimeError, match="no steady decode"):
        Driver(engine).steady(3, 5, 1)  # type: ignore[arg-type]


def test_first_tokens_take_the_time_of_all_prompts(engine: Scripted) -> None:
    assert Driver(engine).first_tokens(4, 5) == 4.0  # type: ignore[arg-type]
