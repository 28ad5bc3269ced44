"""The engine on the GPU: a batch gives what its members give alone, in graphs as without them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from agreement import Window, engine_logprobs, mean

from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem
from runtime.request import Completion, Request, SamplingParams

pytestmark = pytest.mark.gpu
MakeEngine = Callable[..., Any]
NEW_TOKENS = 40
# bfloat16 logits between 16 and 32 lie 0.125 apart: two such steps are what a tie may hide.
NEAR_TIE = 0.25


@pytest.fixture
def requests(windows: Sequence[Window]) -> list[Request]:
    """64 prompts of 5 to 400 tokens, cut from different places of real texts."""
    draw = random.Random(7)
    found = []
    for number in range(64):
        length, window = draw.randint(5, 400), windows[number % len(windows)]
        start = draw.randint(0, len(window) - length)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0
        )
        prompt = window[start : start + length]
        found.append(Request(id=f"r{number}", prompt=prompt, sampling=sampling))
    return found


def alone(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    return [engine.generate([request])[0] for request in requests]


@pytest.mark.parametrize(("name", "kv_dtype"), [("dense", "auto"), ("w4a16", "fp8")])
def test_a_batch_agrees_with_its_members(
    engine_of: MakeEngine,
    requests: list[Request],
    tell: Callable[[str], None],
    name: str,
    kv_dtype: str,
) -> None:
    engine = engine_of(name, kv_cache_dtype=kv_dtype)
    together = engine.generate(requests)
    texts = [(*r.prompt, *c.token_ids) for r, c in zip(requests, together, strict=True)]
    scores = [engine.score([ScoreItem(token_ids=text)])[0] for text in texts]
    agrees = [
        ours == theirs
        for completion, score in zip(together, scores, strict=True)
        for ours, theirs in zip(completion.token_ids, score.top1[-NEW_TOKENS:], strict=True)
    ]
    gaps = [
        abs(entry.value + nll)
        for completion, score in zip(together, scores, strict=True)
        for entry, nll in zip(completion.logprobs or [], score.nll[-NEW_TOKENS:], strict=True)
    ]
    tell(f"{name}, KV {kv_dtype}: forced top-1 {mean(agrees):.2%}, log-prob gap {mean(gaps):.4f}")
    assert mean(agrees) >= 0.99
    assert mean(gaps) < 0.03


def test_texts_part_only_at_near_ties(
    engine_of: MakeEngine, requests: list[Request], tell: Callable[[str], None]
) -> None:
    engine = engine_of("dense")
    together, singles = engine.generate(requests), alone(engine, requests)
    parted = 0
    for request, first, second in zip(requests, together, singles, strict=True):
        at = next((i for i in range(NEW_TOKENS) if first.token_ids[i] != second.token_ids[i]), None)
        if at is None:
            continue
        parted += 1
        text = (*request.prompt, *first.token_ids[: at + 1])
        row = engine_logprobs(engine, text)[-1]
        gap = abs(float(row[first.token_ids[at]] - row[second.token_ids[at]]))
        assert gap <= NEAR_TIE, f"{request.id} parts at token {at}, {gap:.3f} nats apart"
    tell(f"{parted} of {len(requests)} texts part, all at near-ties")


@pytest.mark.parametrize("name", ["dense", "w4a16", "w8a8", "fp8"])
def test_deterministic_to_the_bit(
    engine_of: MakeEngine, requests: list[Request], name: str
) -> None:
    engine = engine_of(name, deterministic=True)
    together, singles = engine.generate(requests), alone(engine, requests[::5])
    for first, second in zip(together[::5], singles, strict=True):
        assert first.token_ids == second.token_ids
        assert [e.value for e in first.logprobs or []] == [e.value for e in second.logprobs or []]


def test_the_same_run_twice_gives_the_same_bits(
    engine_of: MakeEngine, requests: list[Request]
) -> None:
    engine = engine_of("w4a16")
    first, second = engine.generate(requests), engine.generate(requests)
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert [c.logprobs for c in first] == [c.logprobs for c in second]


def test_graphs_compute_what_eager_steps_do(engine_of: MakeEngine, requests: list[Request]) -> None:
    graphs = engine_of("w4a16").generate(requests[:8])
    eager = engine_of("w4a16", enforce_eager=True).generate(requests[:8])
    same = [a == b for x, y in zip(graphs, eager, strict=True)
            for a, b in zip(x.token_ids, y.token_ids, strict=True)]  # fmt: skip
    assert [c.token_ids[:4] for c in graphs] == [c.token_ids[:4] for c in eager]
    assert mean(same) > 0.9


def test_a_small_pool_preempts_and_still_answers(
    engine_of: MakeEngine, requests: list[Request]
) -> None:
    engine = engine_of("dense", num_gpu_blocks_override=256, max_model_len=512)
    found = engine.generate(requests)
    assert engine.stats().preemptions_total > 0
    assert all(len(c.token_ids) == NEW_TOKENS for c in found)
    scores = [
        engine.score([ScoreItem(token_ids=(*r.prompt, *c.token_ids))])[0]
        for r, c in zip(requests, found, strict=True)
    ]
    agrees = [
        ours == theirs
        for completion, score in zip(found, scores, strict=True)
        for ours, theirs in zip(completion.token_ids, score.top1[-NEW_TOKENS:], strict=True)
    ]
    assert mean(agrees) >= 0.99


def test_sampled_text_follows_the_seed(engine_of: MakeEngine, requests: list[Request]) -> None:
    engine = engine_of("w4a16")

    def run(seed: int) -> list[list[int]]:
        settings = SamplingParams(
            temperature=0.8, top_p=0.95, top_k=50, seed=seed, max_tokens=24, ignore_eos=True,
            repetition_penalty=1.1, presence_penalty=0.2,
        )  # fmt: skip
        asked = [Request(id=r.id, prompt=r.prompt, sampling=settings) for r in requests[:16]]
        return [c.token_ids for c in engine.generate(asked)]

    assert run(1) == run(1)
    assert run(1) != run(2)
