"""The host runs behind: what a step draws is known `lag` steps after it was launched.

Tokens are compared with those of a plain loop over the scripted model, which knows no engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lagging import DeviceFault, ListRunner, expected_tokens, list_engine, next_token
from scripted_engine import assert_idle, make_engine, prompt_of, request

from runtime.engine.block_manager import hash_root
from runtime.engine.engine import Engine
from runtime.engine.scheduler import Schedule
from runtime.engine.score import ScoreItem
from runtime.engine.sequence import Sequence, Status
from runtime.request import FinishReason, Request, RequestError, SamplingParams, StepOutput

VOCAB = 50
lags = pytest.mark.parametrize("lag", [0, 1, 2, 3])


def make(lag: int, *, num_blocks: int = 64, vocab: int = VOCAB, **options: Any) -> Engine:
    fields = {k: options.pop(k) for k in list(options) if k.startswith(("max_", "enable_"))}
    runner = ListRunner(num_blocks, 8, vocab, lag, **options)
    return list_engine(runner, **fields)


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(next_token((seed, i), VOCAB) for i in range(length))


def ask(name: str, prompt: tuple[int, ...], max_tokens: int = 8, **sampling: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)
    return Request(id=name, prompt=prompt, sampling=params)


class Rows:
    """Everything an engine gave, request by request; audited after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}

    def step(self) -> StepOutput:
        output = self.engine.step()
        self.engine.audit()
        known = self.engine.runner.last
        assert all(s.status is Status.RUNNING for s in known), "the runner keeps who has left"
        rows = zip(output.request_ids, output.token_ids, output.finish_reasons, strict=True)
        for name, token_id, reason in rows:
            assert name not in self.reasons, "a row after the last one"
            if token_id >= 0:
                self.tokens[name].append(token_id)
            if reason is not None:
                self.reasons[name] = reason
        return output

    def drain(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                assert_idle(self.engine)
                return
            self.step()
        raise AssertionError("somebody starves")


def stop_after(prompt: tuple[int, ...], num_tokens: int) -> int:
    """An id that ends the answer to `prompt` after so many tokens."""
    tokens = expected_tokens(ask("", prompt, num_tokens), VOCAB, frozenset())
    assert tokens[-1] not in tokens[:-1], "choose another prompt"
    return tokens[-1]


@lags
def test_rows_come_lag_steps_after_their_launch(lag: int) -> None:
    engine = make(lag)
    engine.add(ask("a", text(1, 5), 6))
    outputs = [engine.step() for _ in range(6)]
    assert [len(output.token_ids) for output in outputs] == [0] * min(lag, 6) + [1] * (6 - lag)
    assert len(engine.runner.in_flight) == lag
    assert engine.stats().steps_total == 6 - lag
    while engine.has_work:
        outputs.append(engine.step())
    assert len(outputs) == 6 + lag
    tokens = [token_id for output in outputs for token_id in output.token_ids]
    assert tokens == expected_tokens(ask("a", text(1, 5), 6), VOCAB, frozenset())


@lags
def test_a_stop_id_drops_what_was_computed_beyond_it_and_frees_at_once(lag: int) -> None:
    prompt = text(7, 10)
    stop = stop_after(prompt, 4)
    engine = make(lag)
    rows = Rows(engine)
    engine.add(ask("a", prompt, 40, stop_token_ids=(stop,)))
    while "a" not in rows.reasons:
        rows.step()
    assert rows.reasons["a"] is FinishReason.STOP
    assert rows.tokens["a"] == expected_tokens(ask("a", prompt, 4), VOCAB, frozenset())
    assert_idle(engine)  # the blocks are free although steps are in flight
    assert engine.has_work == (lag > 0)
    assert engine.runner.num_launched == 4 + lag
    extra = 0
    while engine.has_work:
        assert rows.step() == StepOutput()
        extra += 1
    assert extra == lag
    assert engine.stats().generation_tokens_total == 4


@lags
@pytest.mark.parametrize(
    ("limits", "max_tokens", "num_drawn"),
    [({}, 9, 9), ({"max_model_len": 48}, None, 28), ({"num_blocks": 4}, None, 13), ({}, 0, 0)],
)
def test_no_step_is_launched_past_what_is_known_in_advance(
    lag: int, limits: dict[str, int], max_tokens: int | None, num_drawn: int
) -> None:
    engine = make(lag, **limits)
    rows = Rows(engine)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    engine.add(Request(id="a", prompt=text(1, 20), sampling=params))
    rows.drain()
    assert (len(rows.tokens["a"]), rows.reasons["a"]) == (num_drawn, FinishReason.LENGTH)
    launched = sum(sum(schedule.spans.values()) for schedule in engine.runner.schedules)
    assert launched == 20 + max(num_drawn - 1, 0)


@lags
def test_blocks_are_findable_when_their_step_was_collected_and_not_before(lag: int) -> None:
    engine = make(lag, max_num_batched_tokens=16, max_num_seqs=1)
    engine.add(ask("a", text(1, 40), 12))
    (sequence,) = engine._scheduler
    extra = ("", engine.resolved.artifact_digest, engine.resolved.kv_cache_dtype)
    while engine.has_work:
        engine.step()
        known = Sequence(
            request=Request(id="k", prompt=tuple(sequence.tokens[: sequence.num_known])),
            arrival=0, max_len=0, stop_ids=frozenset(), seed=0, hash_root=hash_root(extra),
        )  # fmt: skip
        hashes = known.hashes(known.num_prompt // 8, 8)
        num_collected = sum(s.spans[sequence] for s in collected(engine))
        assert len(engine._blocks.match(hashes)) == num_collected // 8
    assert num_collected == 40 + 12 - 1


def collected(engine: Engine) -> list[Any]:
    runner = engine.runner
    return runner.schedules[: runner.num_collected]


@lags
def test_equal_prompts_are_computed_once_whatever_is_in_flight(lag: int) -> None:
    engine = make(lag, max_num_batched_tokens=64)
    rows = Rows(engine)
    for i in range(4):
        engine.add(ask(f"n{i}", text(1, 40), 5))
    rows.drain()
    expected = expected_tokens(ask("", text(1, 40), 5), VOCAB, frozenset())
    assert all(rows.tokens[f"n{i}"] == expected for i in range(4))
    assert engine.stats().prefix_hits_total == 3 * 32


def at_first_preemption(engine: Engine, then: Callable[[Sequence], None]) -> None:
    """Step until somebody is preempted, whose steps are in flight; call `then` with the victim."""
    found: list[Sequence] = []
    inner = engine.runner.launch

    def launch(schedule: Schedule) -> Any:
        found.extend(schedule.preempted)
        if schedule.preempted and len(found) == 1:
            then(found[0])
        return inner(schedule)

    engine.runner.launch = launch
    for _ in range(100):
        if not found:
            engine.step()
    assert found, "the pool is too large for this test"


@lags
def test_a_preempted_sequence_waits_for_its_tokens_in_flight(lag: int) -> None:
    engine = make(lag, num_blocks=10, enable_prefix_caching=False)
    requests = [ask(f"r{i}", text(i, 14), 40) for i in range(3)]
    for one in requests:
        engine.add(one)
    in_flight: list[int] = []
    at_first_preemption(engine, lambda victim: in_flight.append(victim.num_in_flight))
    assert in_flight == [lag]
    (victim,) = (s for s in engine._scheduler if s.num_preempted)
    for one in requests:
        if one.id != victim.id:
            engine.abort(one.id)  # there is room again at once
    for _ in range(max(lag - 1, 0)):
        assert engine.step()
        engine.audit()
        assert victim not in engine.runner.schedules[-1].spans
    rows = Rows(engine)
    rows.tokens[victim.id] = victim.tokens[14 : victim.num_known]
    rows.step()
    assert victim in engine.runner.schedules[-1].spans
    rows.drain()
    assert rows.tokens[victim.id] == expected_tokens(victim.request, VOCAB, frozenset())


@lags
def test_an_aborted_request_gives_no_rows_and_its_id_can_come_again(lag: int) -> None:
    engine = make(lag)
    engine.add(ask("a", text(1, 9), 30))
    engine.add(ask("b", text(2, 9), 30))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    engine.audit()
    rows = Rows(engine)
    again = ask("a", text(3, 9), 6)
    engine.add(again)
    rows.drain()
    assert rows.tokens["a"] == expected_tokens(again, VOCAB, frozenset())
    assert rows.reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


@lags
def test_blocks_of_an_aborted_request_go_to_others_while_it_is_in_flight(lag: int) -> None:
    """The pool is full of it; the newcomer's step is launched before its last ones are known."""
    engine = make(lag, num_blocks=8)
    engine.add(ask("a", text(1, 50), 10))
    for _ in range(6):
        engine.step()
    engine.abort("a")
    rows = Rows(engine)
    one = ask("b", text(2, 50), 10)
    engine.add(one)
    rows.step()
    assert len(engine.runner.in_flight) == lag
    rows.drain()
    assert rows.tokens["b"] == expected_tokens(one, VOCAB, frozenset())


@lags
def test_what_needs_an_idle_engine_waits_for_the_steps_in_flight(lag: int) -> None:
    engine = make_engine(lag=lag)
    engine.add(request("a", prompt_of(1, 9), max_tokens=30))
    for _ in range(4):
        engine.step()
    with pytest.raises(RequestError, match="1 requests are live"):
        engine.generate([])
    engine.abort("a")
    assert engine.has_work == (lag > 0)
    (scored,) = engine.score([ScoreItem(token_ids=prompt_of(2, 20))])
    assert len(scored.nll) == 19
    assert not engine.has_work
    engine.add(request("a", prompt_of(1, 9), max_tokens=30))
    engine.step()
    engine.abort("a")
    done = engine.generate([request("b", prompt_of(1, 9), max_tokens=3)])
    assert len(done[0].token_ids) == 3
    assert not engine.has_work


@lags
def test_a_faulty_row_ends_its_request_and_drops_its_steps_in_flight(lag: int) -> None:
    bad = ask("bad", text(1, 20), 30)
    history = (*bad.prompt, *expected_tokens(bad, VOCAB, frozenset())[:6])
    engine = make(lag, is_sound=lambda h: h != history)
    rows = Rows(engine)
    good = ask("good", text(2, 20), 30)
    engine.add(bad)
    engine.add(good)
    errors: dict[str, str] = {}
    while engine.has_work:
        output = rows.step()
        errors |= output.errors
        if output.errors:
            assert "bad" not in engine._scheduler
    assert errors == {"bad": "not finite"}
    assert rows.reasons == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert rows.tokens["bad"] == list(history[20:])
    assert rows.tokens["good"] == expected_tokens(good, VOCAB, frozenset())
    rows = Rows(engine)
    engine.add(ask("again", bad.prompt, 1))
    rows.drain()
    assert engine.stats().prefix_hits_total == 0, "the blocks of a faulty request are not shared"


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_fault_found_after_preemption_takes_its_blocks_out_of_the_cache(lag: int) -> None:
    engine = make(lag, num_blocks=10)
    for i in range(3):
        engine.add(ask(f"r{i}", text(i, 17), 40))

    victims: list[Sequence] = []

    def spoil(victim: Sequence) -> None:
        assert len(engine._blocks.match(victim.block_hashes)) >= 2
        engine.runner.in_flight[-1].errors[victim] = "not finite"
        victims.append(victim)

    at_first_preemption(engine, spoil)
    while victims[0].status is not Status.FINISHED:
        engine.step()
        engine.audit()
    assert engine._blocks.match(victims[0].block_hashes) == []
    Rows(engine).drain()


@lags
@pytest.mark.parametrize("verb", ["fail_launch", "fail_collect"])
def test_a_step_that_fails_leaves_an_engine_that_can_go_on(lag: int, verb: str) -> None:
    requests = [ask(f"r{i}", text(i, 5 + 9 * i), 12) for i in range(5)]
    engine = make(lag, num_blocks=20, max_num_batched_tokens=16, **{verb: {1, 4, 9, 10, 15}})
    rows = Rows(engine)
    for one in requests:
        engine.add(one)
    num_faults = 0
    while engine.has_work:
        try:
            rows.step()
        except DeviceFault:
            num_faults += 1
            engine.audit()
            assert not engine.runner.in_flight
    assert num_faults == 5
    for one in requests:
        assert rows.tokens[one.id] == expected_tokens(one, VOCAB, frozenset())
    assert_idle(engine)


@lags
@pytest.mark.parametrize("verb", ["fail_launch", "fail_collect"])
def test_generate_leaves_an_idle_engine_when_a_step_fails(lag: int, verb: str) -> None:
    engine = make(lag, **{verb: {5}})
    requests = [ask(f"r{i}", text(i, 9), 12) for i in range(3)]
    with pytest.raises(DeviceFault):
        engine.generate(requests)
    assert_idle(engine)
    assert not engine.has_work
    done = engine.generate(requests)
    assert [c.token_ids for c in done] == [
        expected_tokens(one, VOCAB, frozenset()) for one in requests
    ]


@lags
def test_a_runner_may_ask_for_everything_to_be_collected_first(lag: int) -> None:
    """Every step of one request, launched while none is in flight; the others go on."""

    def forbids(schedule: Any) -> bool:
        return any(sequence.id == "odd" for sequence in schedule.spans)

    engine = make(lag, num_blocks=16, forbids=forbids)
    rows = Rows(engine)
    requests = [ask("odd", text(1, 20), 9), *(ask(f"r{i}", text(i, 20), 30) for i in range(2, 5))]
    for one in requests:
        engine.add(one)
    rows.drain()
    for one in requests:
        assert rows.tokens[one.id] == expected_tokens(one, VOCAB, frozenset())
    assert engine.runner.num_launched == engine.runner.num_collected


@lags
def test_step_time_is_counted_once_however_far_the_host_is_behind(
    lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count()
    monkeypatch.setattr("runtime.engine.engine.perf_counter", lambda: float(next(clock)))
    engine = make(lag)
    for _ in range(2):
        engine.add(ask("a", text(1, 5), 20))
        before, started = engine.stats().step_s_total, next(clock)
        while engine.has_work:
            engine.step()
        elapsed = next(clock) - started
        spent = engine.stats().step_s_total - before
        assert spent == (elapsed - 2 if lag else 20), "from first launch to last collect"
    assert engine.stats().steps_total == 40


def test_steady_decode_costs_little_python() -> None:
    """A bound far above what it takes, to catch a step that asks too much of the host."""
    num_seqs = 256
    engine = make(1, num_blocks=num_seqs * 8, max_num_seqs=num_seqs, max_num_batched_tokens=8192)
    engine.runner._compute = lambda sequence, num_tokens: ()
    for i in range(num_seqs):
        engine.add(ask(f"r{i}", text(i, 20), 40))
    for _ in range(5):
        engine.step()
    started = process_time()
    for _ in range(20):
        assert len(engine.step().token_ids) == num_seqs
    assert (process_time() - started) / 20 < 0.02


asks = st.tuples(
    st.integers(1, 4),  # which text
    st.integers(1, 40),  # prompt length
    st.integers(0, 30),  # max_tokens
    st.sampled_from([(), (), (3,), (1, 2)]),  # stop ids
    st.integers(-1, 1),  # priority
    st.sampled_from(["", "", "salt"]),
)
actions = st.lists(
    st.one_of(asks, st.integers(0, 9), st.sampled_from(["step"] * 4)), min_size=1, max_size=40
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_traffic_gives_each_request_what_it_gets_alone(data: st.DataObject) -> None:
    vocab, num_blocks = 9, data.draw(st.integers(6, 20), "num_blocks")
    divisor = data.draw(st.sampled_from([10**9, 61]), "faults")

    def is_sound(history: tuple[int, ...]) -> bool:
        return next_token((*history, -5), divisor) != 0

    engine = make(
        data.draw(st.integers(0, 3), "lag"),
        num_blocks=num_blocks,
        vocab=vocab,
        max_num_seqs=data.draw(st.integers(1, 6), "max_num_seqs"),
        max_num_batched_tokens=data.draw(st.integers(6, 40), "chunk"),
        enable_prefix_caching=data.draw(st.booleans(), "caching"),
        is_sound=is_sound,
        forbids=data.draw(st.sampled_from([lambda s: False, lambda s: len(s.spans) == 2])),
        fail_collect=data.draw(st.sets(st.integers(1, 30), max_size=2), "fail_collect"),
        fail_launch=data.draw(st.sets(st.integers(1, 30), max_size=2), "fail_launch"),
    )
    rows, requests, aborted = Rows(engine), list[Request](), dict[str, int]()

    def step() -> None:
        try:
            rows.step()
        except DeviceFault:
            engine.audit()

    for action in data.draw(actions, "actions"):
        if action == "step":
            step()
        elif isinstance(action, int):  # an abort
            for one in requests[action : action + 1]:
                engine.abort(one.id)
                engine.audit()
                if one.id not in rows.reasons:
                    aborted[one.id] = len(rows.tokens[one.id])
        else:
            which, length, max_tokens, stops, priority, salt = action
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stops)
            prompt = tuple(next_token((which, i), vocab) for i in range(length))
            one = Request(
                id=f"r{len(requests)}", prompt=prompt, sampling=params,
                priority=priority, cache_salt=salt,
            )  # fmt: skip
            requests.append(one)
            engine.add(one)
    for _ in range(3000):
        if not engine.has_work:
            break
        step()
    assert_idle(engine)
    assert not engine.has_work
    for one in requests:
        tokens, reason = outcome(one, vocab, num_blocks * 8 + 1, is_sound)
        if one.id in aborted:
            assert rows.tokens[one.id] == tokens[: aborted[one.id]]
        else:
            assert (rows.tokens[one.id], rows.reasons[one.id]) == (tokens, reason)


def outcome(one: Request, vocab: int, limit: int, is_sound: Any) -> tuple[list[int], str]:
    stop_ids = frozenset(one.sampling.stop_token_ids)
    tokens = expected_tokens(one, vocab, stop_ids)[: limit - len(one.prompt)]
    for i in range(len(tokens)):
        if not is_sound((*one.prompt, *tokens[:i])):
            return tokens[:i], "error"
    return tokens, "stop" if tokens and tokens[-1] in stop_ids else "length"
