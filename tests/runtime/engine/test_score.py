"""Scoring: against plain formulas, in any chunking, leaving nothing behind."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import VOCAB, assert_idle, hashed_logits, make_engine, prompt_of, request, run

from runtime.engine.batch import Piece
from runtime.engine.score import ScoreItem, divergence
from runtime.request import RequestError


def reference(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(length - 1, VOCAB, generator=generator) * 2).log_softmax(-1)


def expected_values(tokens: tuple[int, ...]) -> torch.Tensor:
    rows = [hashed_logits(tokens[: i + 1]).double().log_softmax(0) for i in range(len(tokens) - 1)]
    return torch.stack(rows)


ITEMS = [
    ScoreItem(token_ids=prompt_of(i, length), reference=reference(length, i) if i % 2 else None)
    for i, length in enumerate([2, 3, 16, 17, 33, 64, 100, 150])
]


@pytest.mark.parametrize(("chunk", "num_blocks"), [(9, 10), (32, 24), (512, 64)])
def test_scores_by_their_formulas_in_any_chunking(chunk: int, num_blocks: int) -> None:
    engine = make_engine(chunk=chunk, num_blocks=num_blocks)
    run(engine, [request("warm", ITEMS[-1].token_ids)])
    scores = engine.score(ITEMS)
    for item, score in zip(ITEMS, scores, strict=True):
        values = expected_values(item.token_ids)
        picked = [values[i, token].item() for i, token in enumerate(item.token_ids[1:])]
        assert score.nll == pytest.approx([-v for v in picked], abs=1e-5)
        assert score.top1 == [int(row.argmax()) for row in values.float()]
        if item.reference is None:
            assert score.kl is None
            assert score.top1_agree is None
            continue
        p = item.reference.double()
        assert score.kl == pytest.approx((p.exp() * (p - values)).sum(-1).tolist(), abs=1e-5)
        agreed = (item.reference.argmax(-1) == torch.tensor(score.top1)).tolist()
        assert score.top1_agree == agreed
    assert_idle(engine)


def test_scoring_neither_reads_nor_fills_the_prefix_cache() -> None:
    engine = make_engine(num_blocks=24)
    text = prompt_of(1, 40)
    engine.score([ScoreItem(token_ids=text)])
    first = run(engine, [request("a", text)])["a"]
    assert first.cached_tokens == 0
    hits = engine.stats().prefix_hits_total
    engine.score([ScoreItem(token_ids=text)])
    assert engine.stats().prefix_hits_total == hits


def choices_of(seed: int, given: int, counts: tuple[int, ...]) -> list[ScoreItem]:
    """Items that go on from the same context; every other one with a reference."""
    context = prompt_of(seed, given)
    return [
        ScoreItem(
            token_ids=(*context, *prompt_of(100 * seed + i, count)),
            num_given=given,
            reference=reference(count + 1, i) if i % 2 else None,
        )
        for i, count in enumerate(counts)
    ]


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 70), st.lists(st.integers(1, 40), min_size=1, max_size=5)),
        min_size=1,
        max_size=5,
    ),
    chunk=st.sampled_from([9, 32, 512]),
    num_blocks=st.integers(7, 24),
    limit=st.integers(1, 8),
)
def test_a_context_is_read_once_and_changes_nothing(
    groups: list[tuple[int, list[int]]], chunk: int, num_blocks: int, limit: int
) -> None:
    """Also where contexts that are held leave no room for what goes on from them."""
    items = [
        item
        for seed, (given, counts) in enumerate(groups)
        for item in choices_of(seed, given, tuple(counts))
    ]
    engine = make_engine(chunk=chunk, num_blocks=num_blocks, max_num_seqs=limit)
    for item, score in zip(items, engine.score(items), strict=True):
        values = expected_values(item.token_ids)[item.num_given - 1 :]
        scored = item.token_ids[item.num_given :]
        nll = [-row[token].item() for row, token in zip(values, scored, strict=True)]
        assert score.nll == pytest.approx(nll, abs=1e-5)
        assert score.top1 == values.float().argmax(-1).tolist()
        if item.reference is not None:
            p = item.reference.double()
            assert score.kl == pytest.approx((p.exp() * (p - values)).sum(-1).tolist(), abs=1e-5)
    assert_idle(engine)


def test_what_is_read_of_items_with_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=24, chunk=512)
    seen: list[tuple[int, int]] = []
    inner = engine.runner.forward

    def forward(pieces: Seq[Piece]) -> torch.Tensor:
        seen.extend((len(piece.tokens), len(piece.wanted)) for piece in pieces)
        return inner(pieces)

    monkeypatch.setattr(engine.runner, "forward", forward)
    engine.score(choices_of(1, 40, (3, 3, 3, 3)))
    # Blocks of 16: 32 of the 40 given tokens are shared, and the last token is never computed.
    assert sorted(seen, reverse=True) == [(42, 3), *[(10, 3)] * 3]


def test_no_slice_of_logits_is_larger_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.model_runner.LOGIT_BYTES", 7 * 4 * VOCAB)
    engine = make_engine(chunk=512)
    seen: list[int] = []
    inner = engine.runner.decoder.logits

    def logits(hidden_RH: torch.Tensor) -> torch.Tensor:
        seen.append(hidden_RH.shape[0])
        return inner(hidden_RH)

    monkeypatch.setattr(engine.runner.decoder, "logits", logits)
    engine.score([ScoreItem(token_ids=prompt_of(1, 100))])
    run(engine, [request("a", prompt_of(1, 100), prompt_logprobs=1)])
    assert max(seen) == 7
    assert sum(seen) == 99 + 99 + 8


def test_a_reference_may_be_narrow_and_hold_minus_infinity() -> None:
    text = prompt_of(1, 12)
    exact = reference(12, 3)
    exact[:, 5] = -torch.inf
    exact = exact.log_softmax(-1)
    narrow = make_engine().score([ScoreItem(token_ids=text, reference=exact.half())])[0].kl
    wide = make_engine().score([ScoreItem(token_ids=text, reference=exact)])[0].kl
    assert wide is not None
    assert all(math.isfinite(value) for value in wide)
    assert narrow == pytest.approx(wide, abs=0.02)


def test_divergence_of_equals_is_nothing() -> None:
    """Both are normalized in float64: a float32 log_softmax is off by more than is measured."""
    exact = torch.randn(4, 40_000, dtype=torch.float64).log_softmax(-1)
    values = exact.float()
    assert divergence(values, values).tolist() == [0.0] * 4
    close = (exact + 1e-4 * torch.randn_like(exact)).log_softmax(-1).float()
    assert divergence(values, close).abs().max() < 1e-7


def test_non_finite_logits_are_told_not_hidden() -> None:
    engine = make_engine(make_logits=lambda history: torch.full((VOCAB,), float("nan")))
    score = engine.score([ScoreItem(token_ids=(1, 2, 3))])[0]
    assert all(math.isnan(value) for value in score.nll)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (ScoreItem(token_ids=(1,)), "item 1 has 1 tokens; scoring needs at least 2"),
        (ScoreItem(token_ids=(1, VOCAB)), "item 1 holds 50; token ids are integers from 0 to 49"),
        (ScoreItem(token_ids=(1, -1)), "item 1 holds -1"),
        (ScoreItem(token_ids=tuple([1] * 386)), "item 1 has 386 tokens.*pool 384"),
        (
            ScoreItem(token_ids=(1, 2), num_given=2),
            "item 1 gives 2 of its 2 tokens; expected 1 to 1",
        ),
        (ScoreItem(token_ids=(1, 2), num_given=0), "item 1 gives 0 of its 2 tokens"),
        (ScoreItem(token_ids=(1, 2), reference=torch.zeros(2, VOCAB)), r"expected \(1, 50\)"),
    ],
)
def test_items_that_cannot_be_scored(item: ScoreItem, message: str) -> None:
    engine = make_engine(num_blocks=24)
    with pytest.raises(RequestError, match=message):
        engine.score([ScoreItem(token_ids=(1, 2)), item])
    assert_idle(engine)


def test_scoring_needs_an_idle_engine_and_cleans_up_after_a_fault() -> None:
    engine = make_engine()
    engine.add(request("a", (1, 2)))
    with pytest.raises(RequestError, match="idle"):
        engine.score([ScoreItem(token_ids=(1, 2))])
    engine.abort("a")

    def fail(history: tuple[int, ...]) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    engine.runner.decoder.make_logits = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.score([ScoreItem(token_ids=prompt_of(1, 200))])
    assert_idle(engine)
