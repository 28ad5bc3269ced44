"""Fault kinds of serving, tried on a decoder whose every token depends on all tokens before it."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from scripted_engine import (
    VOCAB,
    Logits,
    alone,
    assert_idle,
    hashed_logits,
    make_engine,
    prompt_of,
    request,
    run,
)

from runtime.request import (
    Completion,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    StepOutput,
)

SMALL = {"num_blocks": 24, "chunk": 32}  # 384 tokens: eight long requests preempt all the time
lags = pytest.mark.parametrize("lag", [0, 1, 2, 3])


def say(tokens: list[int], prompt_length: int) -> Logits:
    """Logits that make a greedy request say `tokens` one after the other."""

    def logits(history: tuple[int, ...]) -> torch.Tensor:
        step = len(history) - prompt_length
        values = torch.zeros(VOCAB)
        values[tokens[min(max(step, 0), len(tokens) - 1)]] = 5.0
        return values

    return logits


def mixed_requests() -> list[Request]:
    """All different on purpose: eight ways of sampling, prompts of all lengths."""
    ways: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 1.2, "top_p": 0.1, "seed": 12, "logprobs": 3},
        {"temperature": 1.0, "min_p": 0.05, "top_k": 9, "seed": 13},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"logit_bias": ((7, 1.5), (9, -2.0)), "logprobs": 5, "prompt_logprobs": 2},
        {"min_tokens": 12, "stop_token_ids": tuple(range(0, 40)), "temperature": 1.0, "seed": 14},
    ]
    return [
        request(f"r{i}", prompt_of(i, 11 + 14 * i), max_tokens=40, **way)
        for i, way in enumerate(ways)
    ]


@pytest.fixture(scope="module")
def mixed_alone() -> dict[str, Completion]:
    return dict(alone({}, mixed_requests()))


def same(got: Completion, expected: Completion) -> bool:
    """Equal in everything but how much of the prompt came from the cache."""
    return replace(got, cached_tokens=0) == replace(expected, cached_tokens=0)


@pytest.mark.parametrize(
    "options",
    [
        {}, SMALL, {**SMALL, "caching": False}, {"chunk": 9}, {"lag": 1}, {**SMALL, "lag": 1},
        {**SMALL, "lag": 2}, {**SMALL, "caching": False, "lag": 3}, {"chunk": 9, "lag": 3},
    ],
)  # fmt: skip
def test_d03_d15_crowds_and_preemption_change_nothing(
    options: dict[str, object], mixed_alone: dict[str, Completion]
) -> None:
    engine = make_engine(**options)
    for order in (0, 1):
        requests = mixed_requests()
        random.Random(order).shuffle(requests)
        done = run(engine, requests)
        assert [name for name in done if not same(done[name], mixed_alone[name])] == []
    assert (engine.stats().preemptions_total > 0) == ("num_blocks" in options)


@lags
def test_d15_staggered_arrival_and_leaving(mixed_alone: dict[str, Completion], lag: int) -> None:
    """Rows come, go, are aborted and preempted around them: each keeps its own settings."""
    engine = make_engine(**SMALL, lag=lag)
    pending = mixed_requests()
    tokens: dict[str, list[int]] = defaultdict(list)
    for step in range(1000):
        if pending and step % 5 == 0:
            engine.add(pending.pop())
        if step < 100:
            guest = request(f"guest{step}", prompt_of(100 + step, 9), max_tokens=1 + step % 9)
            engine.add(guest)
            engine.abort(f"guest{step - 3}")
        output = engine.step()
        engine.audit()
        for name, token in zip(output.request_ids, output.token_ids, strict=True):
            tokens[name].append(token)
        if not engine.has_work:
            break
    for name, expected in mixed_alone.items():
        assert tokens[name] == expected.token_ids
    assert_idle(engine)


@lags
def test_d01_larger_than_the_pool(lag: int) -> None:
    engine = make_engine(**SMALL, lag=lag)
    with pytest.raises(RequestError, match="400 tokens.*holds 384") as caught:
        engine.add(request("never", prompt_of(1, 400)))
    assert caught.value.param == "prompt"
    requests = [
        request("grows", prompt_of(2, 300), max_tokens=200),
        request("exact", prompt_of(3, 384), max_tokens=5),
        *(request(f"n{i}", prompt_of(4, 100), max_tokens=4) for i in range(4)),
        *(request(f"small{i}", prompt_of(10 + i, 8), max_tokens=4) for i in range(10)),
    ]
    done = run(engine, requests)
    assert len(done["grows"].token_ids) == 384 + 1 - 300
    assert done["grows"].finish_reason is FinishReason.LENGTH
    assert len(done["exact"].token_ids) == 1
    assert done["exact"].finish_reason is FinishReason.LENGTH
    assert all(len(done[f"small{i}"].token_ids) == 4 for i in range(10))
    assert len({tuple(done[f"n{i}"].token_ids) for i in range(4)}) == 1
    assert engine.stats().steps_total < 400, "no busy spin"


@lags
def test_n_choices_at_once_share_their_prompt(lag: int) -> None:
    engine = make_engine(num_blocks=64, chunk=256, lag=lag)
    done = run(engine, [request(f"n{i}", prompt_of(4, 100), max_tokens=4) for i in range(4)])
    assert [done[f"n{i}"].cached_tokens for i in range(4)] == [0, 96, 96, 96]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_d05_a_whole_prompt_in_the_cache(length: int) -> None:
    engine = make_engine()
    one = request("a", prompt_of(5, length), max_tokens=1, logprobs=3)
    first, second, third = (run(engine, [one])["a"] for _ in range(3))
    assert first.cached_tokens == 0
    assert second.cached_tokens == third.cached_tokens == (length - 1) // 16 * 16
    assert same(second, first)
    assert same(third, first)


@lags
def test_d09_aborts_at_any_moment_give_everything_back(lag: int) -> None:
    rng = random.Random(0)
    engine = make_engine(num_blocks=24, chunk=16, lag=lag)
    for wave in range(20):
        names = [f"{wave}/{i}" for i in range(64)]
        for i, name in enumerate(names):
            engine.add(request(name, prompt_of(i % 7, 200), max_tokens=20))
        for _ in range(rng.randrange(12)):
            engine.step()
            engine.audit()
        for name in rng.sample(names, 64):
            engine.abort(name)
            engine.abort(name)
        assert_idle(engine)
        while engine.has_work:
            assert engine.step() == StepOutput(), "a row of a request that was aborted"
    after = run(engine, [request("after", prompt_of(3, 50))])
    assert same(after["after"], alone({}, [request("after", prompt_of(3, 50))])["after"])


def test_an_aborted_request_emits_nothing_more() -> None:
    engine = make_engine()
    engine.add(request("a", prompt_of(1, 5), max_tokens=50))
    engine.add(request("b", prompt_of(2, 5), max_tokens=50))
    engine.step()
    engine.abort("a")
    assert engine.step().request_ids == ["b"]
    engine.add(request("a", prompt_of(3, 5), max_tokens=2))
    rows = [name for _ in range(3) for name in engine.step().request_ids]
    assert rows.count("a") == 2, "its id is free again"


def test_d13_a_long_prompt_does_not_stop_decodes_or_newcomers() -> None:
    engine = make_engine(num_blocks=256, chunk=16, max_num_seqs=6)
    for i in range(4):
        engine.add(request(f"d{i}", prompt_of(i, 4), max_tokens=200))
    engine.step()
    engine.add(request("long", prompt_of(9, 480), max_tokens=1))
    first_row: dict[str, int] = {}
    for step in range(45):
        if step == 5:
            engine.add(request("newcomer", prompt_of(10, 5), max_tokens=1))
        output = engine.step()
        assert {f"d{i}" for i in range(4)} <= set(output.request_ids), "a decode was left out"
        first_row |= {name: step for name in output.request_ids if name not in first_row}
    assert first_row["newcomer"] == 5, "the newcomer waited behind the long prompt"
    assert 480 // 12 <= first_row["long"] < 480 // 12 + 3, "the long prompt lost its budget"


def test_d17_two_hundred_copies_say_the_same() -> None:
    engine = make_engine(num_blocks=200, max_num_seqs=64, chunk=128)
    copies = [request(f"c{i}", prompt_of(1, 20), max_tokens=12) for i in range(200)]
    done = run(engine, copies)
    assert {tuple(c.token_ids) for c in done.values()} == {
        tuple(alone({}, copies[:1])["c0"].token_ids)
    }


@pytest.mark.parametrize("chunk", [16, 256])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lag", [0, 2])
def test_d21_prompt_logprobs_equal_the_cold_run_in_any_order(
    chunk: int, caching: bool, lag: int
) -> None:
    text, more = prompt_of(1, 50), prompt_of(2, 40)
    wanted = [
        request("A", text, max_tokens=1, prompt_logprobs=2),
        request("AB", (*text, *more), max_tokens=1, prompt_logprobs=0),
        request("A5", text, max_tokens=1, prompt_logprobs=5, logprobs=1),
        request("plain", text, max_tokens=1),
    ]
    cold = alone({}, wanted)
    engine = make_engine(chunk=chunk, caching=caching, lag=lag)
    for order in (wanted, wanted[::-1], [wanted[1], wanted[0], wanted[3], wanted[2]]):
        for one in order:
            got = run(engine, [one])[one.id]
            assert same(got, cold[one.id])
            assert got.cached_tokens == 0 or one.id == "plain"
    assert [len(cold[n].prompt_logprobs or []) for n in ("A", "AB", "A5")] == [50, 90, 50]


def test_prompt_logprobs_by_definition() -> None:
    text = prompt_of(1, 20)
    entries = run(make_engine(chunk=9), [request("a", text, prompt_logprobs=1)])[
        "a"
    ].prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    for i, entry in enumerate(entries[1:], start=1):
        values = hashed_logits(text[:i]).log_softmax(0)
        assert entry is not None
        assert entry.token_id == text[i]
        assert entry.value == pytest.approx(values[text[i]].item(), abs=1e-6)
        assert entry.top_ids == (values.argmax().item(),)


@lags
def test_d23_penalties_count_the_right_tokens_after_preemption_and_cache_hits(lag: int) -> None:
    """Against a greedy loop that knows nothing of batches, caches or preemption."""
    prompt = prompt_of(3, 40)
    params = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    history, produced = list(prompt), list[int]()
    for _ in range(30):
        values = hashed_logits(tuple(history)).clone()
        for token in set(history):
            values[token] = values[token] / 1.4 if values[token] > 0 else values[token] * 1.4
        for token in set(produced):
            values[token] -= 0.3 + 0.2 * produced.count(token)
        produced.append(int(values.argmax()))
        history.append(produced[-1])
    one = request("a", prompt, max_tokens=30, **params)
    engine = make_engine(num_blocks=12, chunk=32, lag=lag)
    for _ in range(2):
        crowd = [request(f"x{i}", prompt_of(20 + i, 40), max_tokens=30) for i in range(4)]
        assert run(engine, [*crowd, one])["a"].token_ids == produced
    assert engine.stats().preemptions_total > 0


def test_d25_streams_hold_their_own_tokens_only() -> None:
    def countdown(history: tuple[int, ...]) -> torch.Tensor:
        values = torch.zeros(VOCAB)
        values[(history[0] + len(history)) % VOCAB] = 9.0
        return values

    engine = make_engine(max_num_seqs=16, num_blocks=128, make_logits=countdown)
    for _ in range(2):
        done = run(engine, [request(f"s{i}", [i, i, i], max_tokens=20) for i in range(16)])
        for i in range(16):
            assert done[f"s{i}"].token_ids == [(i + 3 + k) % VOCAB for k in range(20)]


@lags
def test_b11_any_end_of_text_id_stops_and_ignore_ignores_all(lag: int) -> None:
    prompt = prompt_of(1, 4)
    for eos in ((7,), (8,), (7, 8)):
        engine = make_engine(eos=eos, make_logits=say([5, 8, 6, 7, 4, 3, 2, 1, 1], 4), lag=lag)
        done = run(engine, [request("a", prompt), request("b", prompt, ignore_eos=True)])
        tokens = [5, 8] if 8 in eos else [5, 8, 6, 7]
        assert (done["a"].token_ids, done["a"].finish_reason) == (tokens, FinishReason.STOP)
        assert (len(done["b"].token_ids), done["b"].finish_reason) == (8, FinishReason.LENGTH)


@lags
def test_min_tokens_keeps_stop_ids_back_until_they_may_come(lag: int) -> None:
    engine = make_engine(eos=(8,), make_logits=say([8], 4), lag=lag)
    done = run(engine, [request("a", prompt_of(1, 4), min_tokens=3, stop_token_ids=(9,))])
    assert len(done["a"].token_ids) == 4
    assert done["a"].token_ids[-1] == 8
    assert not {8, 9} & set(done["a"].token_ids[:3])


@lags
def test_c07_logprobs_align_with_tokens_up_to_the_stop_id(lag: int) -> None:
    engine = make_engine(eos=(8,), make_logits=say([5, 6, 8], 4), lag=lag)
    done = run(engine, [request("a", prompt_of(1, 4), logprobs=3)])["a"]
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == done.token_ids == [5, 6, 8]
    assert all(len(entry.top_ids) == 3 for entry in done.logprobs)


def test_c09_logprobs_are_finite_whatever_the_filters() -> None:
    def peaked(history: tuple[int, ...]) -> torch.Tensor:
        values = torch.full((VOCAB,), -1e30)
        values[3] = 1e30
        return values

    engine = make_engine(make_logits=peaked)
    one = request("a", prompt_of(1, 4), logprobs=5, prompt_logprobs=5, top_k=1, top_p=1e-9)
    done = run(engine, [one])["a"]
    entries = [*(done.logprobs or []), *(e for e in done.prompt_logprobs or [] if e)]
    values = [v for e in entries for v in (e.value, *e.top_values)]
    assert min(values) == -9999.0
    assert max(values) == 0.0


def broken(history: tuple[int, ...]) -> torch.Tensor:
    values = hashed_logits(history)
    if history[0] == 13 and len(history) > 24:
        values = values.clone()
        values[5] = float("nan")
    if history[0] == 14:
        return torch.full((VOCAB,), float("inf"))
    return values


@lags
def test_non_finite_logits_end_their_own_request_only(lag: int) -> None:
    engine = make_engine(make_logits=broken, lag=lag)
    bad = (13, *prompt_of(1, 19))
    requests = [
        request("good", prompt_of(2, 20), max_tokens=20),
        request("bad", bad, max_tokens=20, logprobs=2),
        request("worse", (14, 1, 2), max_tokens=20, prompt_logprobs=1),
        request("random", prompt_of(3, 33), max_tokens=20, temperature=1.0, seed=3),
    ]
    done = run(engine, requests)
    assert (done["bad"].finish_reason, len(done["bad"].token_ids)) == (FinishReason.ERROR, 5)
    assert "NaN" in (done["bad"].error or "")
    assert (done["worse"].finish_reason, done["worse"].token_ids) == (FinishReason.ERROR, [])
    expected = alone({"make_logits": broken}, [requests[0], requests[3]])
    assert same(done["good"], expected["good"])
    assert same(done["random"], expected["random"])
    again = run(engine, [request("again", bad, max_tokens=1)])["again"]
    assert again.cached_tokens == 0, "the blocks of a faulty request are not shared"


def test_seeds_make_streams_and_their_absence_is_reproducible() -> None:
    def texts(*, seed: int | None) -> list[list[int]]:
        requests = [
            request(f"a{i}", prompt_of(1, 9), temperature=1.0, seed=seed, max_tokens=30)
            for i in range(3)
        ]
        return [c.token_ids for c in run(make_engine(), requests).values()]

    assert texts(seed=5)[0] == texts(seed=5)[1] == texts(seed=5)[2]
    assert texts(seed=5) != texts(seed=6)
    unseeded = texts(seed=None)
    assert len({tuple(t) for t in unseeded}) == 3
    assert texts(seed=None) == unseeded


def test_generate_refuses_as_a_whole_and_needs_an_idle_engine() -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="empty"):
        engine.generate([request("a", prompt_of(1, 4)), request("b", [])])
    assert_idle(engine)
    with pytest.raises(RequestError, match="'a' is running already"):
        engine.generate([request("a", prompt_of(1, 4))] * 2)
    assert_idle(engine)
    engine.add(request("a", prompt_of(1, 4)))
    with pytest.raises(RequestError, match="idle engine"):
        engine.generate([request("b", prompt_of(1, 4))])


@lags
@pytest.mark.parametrize("length", [4, 9])
def test_a_decoder_that_fails_leaves_an_idle_engine_behind_generate(lag: int, length: int) -> None:
    def failing(history: tuple[int, ...]) -> torch.Tensor:
        return hashed_logits(history) if len(history) < length else {}["the device is gone"]

    engine = make_engine(make_logits=failing, lag=lag)
    with pytest.raises(KeyError):
        engine.generate([request("a", prompt_of(1, 5)), request("b", prompt_of(2, 4))])
    assert_idle(engine)
    assert not engine.has_work


@lags
def test_stats_count_tokens_once_whatever_happens_on_the_way(lag: int) -> None:
    engine = make_engine(**SMALL, lag=lag)
    requests = [request(f"r{i}", prompt_of(i, 60), max_tokens=40) for i in range(8)]
    run(engine, requests)
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.prompt_tokens_total == stats.prefix_queries_total == 8 * 60
    assert stats.generation_tokens_total == 8 * 40
    assert stats.step_s_total > 0


def test_c13_without_max_tokens_the_context_is_filled_and_no_more() -> None:
    engine = make_engine(max_model_len=64)
    done = run(engine, [request("a", prompt_of(1, 40), max_tokens=None)])["a"]
    assert (len(done.token_ids), done.finish_reason) == (24, FinishReason.LENGTH)


@lags
@pytest.mark.parametrize("length", [1, 64])
def test_max_tokens_zero_scores_the_prompt_and_draws_nothing(lag: int, length: int) -> None:
    engine = make_engine(max_model_len=64, lag=lag)
    one = request("a", prompt_of(1, length), max_tokens=0, prompt_logprobs=1)
    done = run(engine, [one])["a"]
    assert (done.token_ids, done.finish_reason) == ([], FinishReason.LENGTH)
    assert len(done.prompt_logprobs or []) == length


@pytest.mark.parametrize(
    ("length", "max_tokens", "is_refused"),
    [(63, 1, False), (64, None, True), (65, None, True), (640, 5, True), (40, 24, False),
     (40, 25, True), (63, None, False)],
)  # fmt: skip
def test_c15_prompt_lengths(length: int, max_tokens: int | None, is_refused: bool) -> None:
    engine = make_engine(max_model_len=64)
    one = request("a", prompt_of(1, length), max_tokens=max_tokens)
    if is_refused:
        with pytest.raises(RequestError, match=f"{length} tokens.*holds 64"):
            engine.add(one)
    else:
        done = run(engine, [one])["a"]
        assert len(done.token_ids) == 64 - length
    assert run(engine, [request("b", prompt_of(2, 5))])["b"].finish_reason is FinishReason.LENGTH


BAD_IDS = [-1, VOCAB, VOCAB + 10**9, 2**63, 2**70, "12", 1.0, True, None]


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
def test_c17_ids_outside_the_vocabulary(field: str, bad: object) -> None:
    engine = make_engine()
    engine.add(request("neighbour", prompt_of(1, 9), max_tokens=6))
    engine.step()
    value = ((bad, 1.0),) if field == "logit_bias" else (1, bad)
    is_prompt = field == "prompt"
    prompt, sampling = (value, {}) if is_prompt else (prompt_of(1, 4), {field: value})
    with pytest.raises(RequestError, match=f"{field}.*from 0 to {VOCAB - 1}") as caught:
        engine.add(request("bad", prompt, min_tokens=2, **sampling))
    assert caught.value.param == field
    assert len(str(caught.value)) < 200
    tokens = list[int]()
    while engine.has_work:
        tokens += engine.step().token_ids
    expected = alone({}, [request("neighbour", prompt_of(1, 9), max_tokens=6)])
    assert tokens == expected["neighbour"].token_ids[1:]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "1"),
        ("top_k", -1), ("top_k", 2.0), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1),
        ("repetition_penalty", 0.0), ("presence_penalty", float("inf")), ("max_tokens", -1),
        ("min_tokens", -1), ("min_tokens", 9), ("seed", 2**63), ("seed", 1.5), ("logprobs", -1),
        ("logprobs", VOCAB + 1), ("prompt_logprobs", -1), ("frequency_penalty", None),
        ("logit_bias", ((1, float("nan")),)),
    ],
)  # fmt: skip
def test_sampling_parameters_out_of_range(field: str, bad: object) -> None:
    engine = make_engine()
    with pytest.raises(RequestError) as caught:
        engine.add(request("a", prompt_of(1, 4), **{field: bad}))
    assert caught.value.param == field
    assert_idle(engine)


def test_min_tokens_that_cannot_be_met() -> None:
    engine = make_engine(max_model_len=32)
    every = tuple(range(VOCAB))
    with pytest.raises(RequestError, match="leaves nothing to draw"):
        engine.add(request("a", prompt_of(1, 4), min_tokens=2, stop_token_ids=every, seed=1))
    with pytest.raises(RequestError, match="min_tokens 29.* 33, but the context holds 32"):
        engine.add(request("a", prompt_of(1, 4), min_tokens=29, max_tokens=None))
    assert_idle(engine)
    done = run(engine, [request("a", prompt_of(1, 4), stop_token_ids=every)])["a"]
    assert len(done.token_ids) == 1


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    engine = make_engine()
    engine.add(request("a", prompt_of(1, 4)))
    with pytest.raises(RequestError, match="'a' is running already"):
        engine.add(request("a", prompt_of(2, 4)))
    tokens = list[int]()
    while engine.has_work:
        tokens += engine.step().token_ids
    assert tokens == alone({}, [request("a", prompt_of(1, 4))])["a"].token_ids


def test_defaults_of_sampling_are_accepted() -> None:
    engine = make_engine(max_model_len=32)
    done = run(engine, [Request(id="a", prompt=(1, 2), sampling=SamplingParams())])["a"]
    assert len(done.token_ids) == 30
