"""The runner of devices, on the CPU: one step behind, it gives exactly what the waiting one gives.

No graphs, no pinned memory; everything else is the code that runs on a GPU. The scripted decoder
reads each sequence back from the KV pool through the block table it is given, so a wrong slot,
table, position or token changes every later one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_engine import (
    EMPTY,
    VOCAB,
    Logits,
    Pool,
    ScriptedDecoder,
    hashed_logits,
    make_engine,
    prompt_of,
    request,
    run,
)
from test_engine_cases import SMALL, mixed_requests, same, say

from runtime.config import EngineConfig
from runtime.engine.cuda_runner import CudaRunner
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem
from runtime.engine.step_plan import RunnerLimits
from runtime.model.kv_cache import KVCache
from runtime.model.step import StepInputs
from runtime.request import Completion, FinishReason, Request, SamplingParams


def limits_of(engine: Engine) -> RunnerLimits:
    return RunnerLimits(
        max_num_seqs=engine.resolved.max_num_seqs,
        max_num_batched_tokens=engine.resolved.max_num_batched_tokens,
        max_model_len=engine.resolved.max_model_len,
        block_size=engine.resolved.block_size,
    )


def behind(
    decoder: ScriptedDecoder | None = None, deterministic: bool = False, **options: Any
) -> Engine:
    """A scripted engine whose runner is the one of devices."""
    plain = make_engine(**options)
    decoder = decoder or ScriptedDecoder(plain.runner.decoder.make_logits)
    size = plain.resolved.num_blocks * plain.resolved.block_size
    pool = Pool(torch.full((size,), EMPTY), plain.resolved.block_size)
    runner = CudaRunner(decoder, pool, limits_of(plain), deterministic=deterministic)
    return Engine(decoder, pool, plain.resolved, runner=runner)


@pytest.fixture(scope="module")
def expected() -> dict[str, Completion]:
    return run(make_engine(num_blocks=256), mixed_requests())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, SMALL, {**SMALL, "caching": False}, {"chunk": 9}])
def test_one_step_behind_changes_nothing(
    options: dict[str, Any], deterministic: bool, expected: dict[str, Completion]
) -> None:
    """Eight ways of sampling at once: chunked, preempted, cached, in changing company."""
    engine = behind(deterministic=deterministic, **options)
    for order in (0, 1):
        requests = mixed_requests()
        random.Random(order).shuffle(requests)
        done = run(engine, requests)
        assert [name for name in done if not same(done[name], expected[name])] == []
    assert (engine.stats().preemptions_total > 0) == ("num_blocks" in options)


def test_guests_that_come_and_go_disturb_nobody(expected: dict[str, Completion]) -> None:
    """Slots change hands all the time, biased and penalized ones too."""
    engine = behind(**SMALL)
    pending = mixed_requests()
    tokens: dict[str, list[int]] = {name: [] for name in expected}
    guests = [
        {}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 1.0},
        {"logit_bias": ((1, 5.0), (2, -5.0), (1, 1.0))}, {"min_tokens": 3, "stop_token_ids": (4,)},
    ]  # fmt: skip
    for step in range(1000):
        if pending and step % 5 == 0:
            engine.add(pending.pop())
        if step < 150:
            way = guests[step % len(guests)]
            engine.add(request(f"g{step}", prompt_of(step, 9), max_tokens=3 + step % 9, **way))
            engine.abort(f"g{step - 3}")
        output = engine.step()
        engine.audit()
        for name, token in zip(output.request_ids, output.token_ids, strict=True):
            if name in tokens:
                tokens[name].append(token)
        if not engine.has_work and not pending:
            break
    assert tokens == {name: done.token_ids for name, done in expected.items()}


def test_stop_ids_are_seen_one_step_late() -> None:
    """The token drawn behind the end is dropped, and its place is another's afterwards."""
    stop = {"stop_token_ids": (5,), "max_tokens": 30}
    requests = [request(f"r{i}", prompt_of(1, 20 + i), **stop) for i in range(4)]
    engine = behind(ScriptedDecoder(say([3, 4, 3, 5, 9], 20)), num_blocks=32)
    done = run(engine, requests)
    assert done["r0"].token_ids == [3, 4, 3, 5]
    assert done["r0"].finish_reason is FinishReason.STOP
    assert run(engine, requests) == run(engine, requests)


def test_a_deterministic_prompt_never_ends_as_a_decode() -> None:
    """However a prompt is cut, its rows go through the kernels of prompts."""
    decoder = ScriptedDecoder()
    engine = behind(decoder, deterministic=True, chunk=8)
    requests = [request(f"r{i}", prompt_of(i, 17 + 8 * i), max_tokens=6) for i in range(3)]
    run(engine, requests)
    for step in decoder.steps:
        for s, (new, total) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
            is_decode = s < step.num_decodes
            assert new == 1 or not is_decode
            assert not (is_decode and total in (17, 25, 33)), "a prompt's last token"
    assert any(step.num_decodes for step in decoder.steps)


def faulty(bad: Sequence[int]) -> Logits:
    """NaN behind histories of these lengths."""

    def logits(history: tuple[int, ...]) -> torch.Tensor:
        values = hashed_logits(history)
        return values * float("nan") if len(history) in bad else values

    return logits


@pytest.mark.parametrize("ask", [{}, {"logprobs": 2}, {"presence_penalty": 0.5}])
def test_a_row_that_is_not_finite_fails_alone(ask: dict[str, Any]) -> None:
    requests = [request(f"r{i}", prompt_of(i, n), **ask) for i, n in enumerate((10, 30, 50))]
    done = run(behind(ScriptedDecoder(faulty([33]))), requests)
    assert done["r1"].finish_reason is FinishReason.ERROR
    assert len(done["r1"].token_ids) == 3
    assert "NaN" in (done["r1"].error or "")
    whole = run(make_engine(), [requests[0], requests[2]])
    assert all(same(done[name], whole[name]) for name in ("r0", "r2"))


def test_prompt_logprobs_that_are_not_finite_fail_their_request() -> None:
    engine = behind(ScriptedDecoder(faulty([7])), chunk=16)
    asked = request("asked", prompt_of(1, 40), prompt_logprobs=1)
    done = run(engine, [asked, request("other", prompt_of(2, 40))])
    assert done["asked"].finish_reason is FinishReason.ERROR
    assert done["other"].finish_reason is FinishReason.LENGTH


class TightDecoder(ScriptedDecoder):
    """Has memory for steps of so many tokens only."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__()
        self.most_tokens, self.num_refused = most_tokens, 0

    def forward(self, step: StepInputs, kv: Pool) -> torch.Tensor:
        if len(step.token_ids_T) > self.most_tokens:
            self.num_refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(step, kv)


@pytest.fixture
def no_cuda_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.usefixtures("no_cuda_cache")
def test_prompts_are_cut_further_where_memory_is_short() -> None:
    requests = [
        request(f"r{i}", prompt_of(i, 300 + 200 * i), prompt_logprobs=0 if i == 1 else None)
        for i in range(3)
    ]
    options = {"chunk": 1500, "num_blocks": 128}
    decoder = TightDecoder(300)
    done = run(behind(decoder, **options), requests)
    assert {name: c.token_ids for name, c in done.items()} == {
        name: c.token_ids for name, c in run(make_engine(**options), requests).items()
    }
    assert 0 < decoder.num_refused < 4, "what was learned is kept"


@pytest.mark.usefixtures("no_cuda_cache")
def test_a_step_that_fits_in_no_way_fails_its_requests_and_the_engine_lives() -> None:
    decoder = TightDecoder(10)
    engine = behind(decoder, chunk=1000, num_blocks=128)
    engine.runner._kv.tokens.fill_(0)  # the step behind the one that fails reads what it left
    done = run(engine, [request("large", prompt_of(1, 900))])
    assert done["large"].finish_reason is FinishReason.ERROR
    assert "out of memory" in (done["large"].error or "")
    small = request("small", prompt_of(2, 9))
    assert same(run(engine, [small])["small"], run(make_engine(), [small])["small"])


def test_an_abandoned_engine_goes_on() -> None:
    """Everything on the device is forgotten; the host's tokens bring it back."""
    engine = behind(num_blocks=256)
    requests = mixed_requests()
    for one in requests:
        engine.add(one)
    tokens: dict[str, list[int]] = {one.id: [] for one in requests}
    collect, num_calls = engine.runner.collect, 0

    def failing(ticket: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (9, 20):
            raise RuntimeError("the device is gone for a moment")
        return collect(ticket)

    engine.runner.collect = failing  # type: ignore[method-assign]
    while engine.has_work:
        try:
            output = engine.step()
        except RuntimeError:
            continue
        for name, token in zip(output.request_ids, output.token_ids, strict=True):
            tokens[name].append(token)
    found = run(make_engine(num_blocks=256), requests)
    assert tokens == {name: done.token_ids for name, done in found.items()}


def tiny_engines(path: Path, **config: Any) -> tuple[Engine, Engine]:
    """The waiting runner's engine and, on the same weights, that of devices."""
    settings = {"max_num_seqs": 8, "num_gpu_blocks_override": 80, **config}
    waiting = Engine.from_artifact(path, EngineConfig(device="cpu", **settings))
    decoder, resolved = waiting.runner.decoder, waiting.resolved
    kv = KVCache(
        decoder.spec, resolved.num_blocks, resolved.block_size, resolved.kv_cache_dtype, "cpu"
    )
    for pool in kv.pools:
        pool[: resolved.num_blocks].fill_(float("nan"))
    runner = CudaRunner(decoder, kv, limits_of(waiting))
    return waiting, Engine(decoder, kv, resolved, waiting.artifact, runner)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("chunk", [2048, 40])
def test_a_real_decoder_says_the_same(
    family: str,
    chunk: int,
    tiny_model: Callable[..., Path],
    dense_artifact: Callable[[Path], Path],
) -> None:
    waiting, ahead = tiny_engines(
        dense_artifact(tiny_model(family)), max_num_batched_tokens=chunk, max_num_seqs=6
    )
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 2, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logit_bias": ((5, 2.0),), "min_tokens": 5},
    ]
    requests = [
        Request(
            id=f"r{i}",
            prompt=tuple(torch.randint(0, 290, (11 + 13 * i,)).tolist()),
            sampling=SamplingParams(max_tokens=20, **ways[i % len(ways)]),
        )
        for i in range(10)
    ]
    found, wanted = run(ahead, requests), run(waiting, requests)
    for name, done in wanted.items():
        assert found[name].token_ids == done.token_ids, name
        assert_close(found[name], done)


def assert_close(found: Completion, wanted: Completion) -> None:
    """Log-probs alike; their last bits depend on how rows are batched."""
    pairs = list(zip(found.logprobs or [], wanted.logprobs or [], strict=True))
    pairs += list(
        zip((found.prompt_logprobs or [None])[1:], (wanted.prompt_logprobs or [None])[1:],
            strict=True)
    )  # fmt: skip
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        assert (ours.token_id, ours.rank, ours.top_ids) == (
            theirs.token_id, theirs.rank, theirs.top_ids,
        )  # fmt: skip
        assert ours.value == pytest.approx(theirs.value, abs=1e-4)
        assert ours.top_values == pytest.approx(theirs.top_values, abs=1e-4)


def test_scores_are_those_of_the_waiting_runner(
    tiny_model: Callable[..., Path], dense_artifact: Callable[[Path], Path]
) -> None:
    waiting, ahead = tiny_engines(dense_artifact(tiny_model("llama")), max_num_batched_tokens=50)
    items = [ScoreItem(token_ids=tuple(prompt_of(i, 30 + 40 * i))) for i in range(3)]
    for ours, theirs in zip(ahead.score(items), waiting.score(items), strict=True):
        assert ours.nll == pytest.approx(theirs.nll, abs=1e-5)
        assert ours.top1 == theirs.top1


def test_more_log_probs_than_are_common() -> None:
    asked = request("a", prompt_of(1, 20), logprobs=VOCAB, prompt_logprobs=VOCAB)
    assert replace(run(behind(), [asked])["a"], cached_tokens=0) == run(make_engine(), [asked])["a"]


@pytest.mark.parametrize("num_tokens", [9, 128, 300])
def test_blank_prompts_fit_the_context_and_write_nothing(num_tokens: int) -> None:
    class Watching(ScriptedDecoder):
        def forward(self, step: StepInputs, kv: Pool) -> torch.Tensor:
            self.steps.append(step)
            return torch.zeros(len(step.token_ids_T), VOCAB)[step.logit_rows_R]

    decoder = Watching()
    runner = behind(decoder, max_model_len=128).runner
    assert isinstance(runner, CudaRunner)
    assert runner.blank_prompt(num_tokens, 8, draw=True).shape == (8, VOCAB)
    (step,) = decoder.steps
    assert sum(step.query_lens) == num_tokens
    assert max(step.seq_lens) <= 128
    assert step.slots_T.tolist() == [-1] * num_tokens
    assert step.logit_rows_R.tolist() == list(range(num_tokens - 8, num_tokens))
