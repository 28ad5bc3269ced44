"""Sampling against slow definitions: filters, penalties, random streams, ties, mixed batches."""

from __future__ import annotations

from collections import Counter
from math import exp, log, log1p

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.logprobs import FLOOR, token_logprobs
from runtime.engine.sampler import SamplingRow, adjust, sample
from runtime.kernels.sampling import reference
from runtime.kernels.sampling.reference import top_ids, uniforms
from runtime.request import SamplingParams


def row(num_generated: int = 0, seed: int = 1, **fields: object) -> SamplingRow:
    history = {
        k: fields.pop(k) for k in ("prompt_ids", "output_counts", "masked_ids") if k in fields
    }
    return SamplingRow(
        params=SamplingParams(**fields), seed=seed, num_generated=num_generated, **history
    )


def keep_likely(scores_RV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return reference.keep_likely(
        scores_RV,
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
    )


def kept_by_definition(scores: list[float], params: SamplingParams) -> set[int]:
    """top_k, then top_p over the rest, then min_p; ties by id. Plain Python, double precision."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = order[: params.top_k or None]
    weights = {i: exp(scores[i] - scores[order[0]]) for i in order}
    total, mass, kept = sum(weights.values()), 0.0, set()
    for i in order:
        is_in_nucleus = params.top_p >= 1.0 or mass < params.top_p * total * (1 - 1e-12)
        if is_in_nucleus and weights[i] >= params.min_p:
            kept.add(i)
        mass += weights[i]
    return kept or {order[0]}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(-6, 6), min_size=7, max_size=7), min_size=1, max_size=4),
    st.integers(0, 9),
    st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.001]),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
)
def test_filters_keep_what_their_definition_keeps(
    scores: list[list[int]], top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    values = torch.tensor(scores, dtype=torch.float32) * 0.7
    shifted = values - values.amax(-1, keepdim=True)
    kept = keep_likely(shifted, [params] * len(scores)).isfinite()
    for mask, line in zip(kept.tolist(), shifted.tolist(), strict=True):
        assert {i for i, is_kept in enumerate(mask) if is_kept} == kept_by_definition(line, params)


def test_a_nucleus_larger_than_the_head_that_is_looked_at_first() -> None:
    torch.manual_seed(0)
    flat = torch.randn(3, 5000) * 0.01
    flat -= flat.amax(-1, keepdim=True)
    params = [
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=7),
        SamplingParams(top_k=2000, top_p=0.5),
    ]
    kept = keep_likely(flat, params).isfinite().sum(-1).tolist()
    assert 4400 < kept[0] < 4600
    assert kept[1] == 7
    assert 950 < kept[2] < 1050


def test_greedy_takes_the_lowest_of_equal_ids_whatever_stands_beside_it() -> None:
    logits = torch.zeros(5, 40)
    logits[:, [3, 17, 30]] = 2.0
    rows = [
        row(temperature=0.0),
        row(temperature=1e-6),
        row(top_k=1),
        row(temperature=0.7, top_p=0.5),
        row(temperature=0.0, presence_penalty=0.1),
    ]
    ids = sample(logits, rows).tolist()
    assert [ids[i] for i in (0, 1, 2, 4)] == [3, 3, 3, 3]
    for i in range(5):
        assert sample(logits[i : i + 1], [rows[i]]).tolist() == [ids[i]]


def test_penalties_bias_and_masks_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 0.0, 0.0]])
    one = row(
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias=((4, 3.0), (2, -1.0)),
        prompt_ids=(0, 1, 1),
        output_counts={2: 3},
        masked_ids=(5,),
    )
    expected = [2.0 / 2, -2.0 * 2, 1.0 / 2 - 0.25 - 3 * 0.5 - 1.0, 0.5, 3.0, -torch.inf]
    assert adjust(logits, [one]).tolist() == [pytest.approx(expected)]
    assert logits[0, 0] == 2.0, "the logits that log-probs are made of stay as they are"


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    logits = torch.zeros(1, 4)
    plain = row(presence_penalty=1.0, frequency_penalty=1.0, prompt_ids=(1, 2))
    assert adjust(logits, [plain]).tolist() == [[0.0] * 4]


def test_rows_of_a_mixed_batch_do_not_touch_each_other() -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, 60) * 3
    rows = [
        row(temperature=0.0),
        row(temperature=1.3, seed=5),
        row(top_k=3, seed=6, num_generated=4),
        row(top_p=0.1, seed=7),
        row(min_p=0.2, seed=8, temperature=2.0),
        row(repetition_penalty=1.7, prompt_ids=range(30), seed=9),
        row(logit_bias=((7, 50.0),), masked_ids=(8, 9), seed=10),
    ]
    together = sample(logits, rows).tolist()
    assert together[6] == 7
    for order in (range(7), range(6, -1, -1), [3, 0, 5, 2, 6, 1, 4]):
        mixed = sample(logits[list(order)], [rows[i] for i in order]).tolist()
        assert mixed == [together[i] for i in order]
    assert [sample(logits[i : i + 1], [rows[i]]).item() for i in range(7)] == together


# Known answers of Philox4x32-10 from the Random123 distribution (kat_vectors).
PHILOX = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "answer"), PHILOX)
def test_philox_gives_its_known_answers(
    key: tuple[int, ...], counter: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    words = [[np.array([word], dtype=np.uint32) for word in group] for group in (key, counter)]
    found = reference.philox4x32((words[0][0], words[0][1]), tuple(words[1]))
    assert tuple(int(word[0]) for word in found) == answer


def test_a_stream_depends_on_seed_and_place_only() -> None:
    seeds = np.repeat(np.array([-(2**63), -1, 0, 1, 2**63 - 1]), 400)
    places = np.tile(np.arange(400), 5)
    values = uniforms(seeds, places)
    assert len(set(values)) == len(values)
    assert all(0 < value < 1 for value in values)
    assert abs(values.mean() - 0.5) < 0.03
    assert uniforms(seeds[777:778], places[777:778]) == values[777]
    assert uniforms(np.zeros(1, np.int64), np.zeros(1, np.int64)) == (0x6627E8D5 + 0.5) / 2**32


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 4000 draws, 5 degrees of freedom; 25 is the 99.99th percentile."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 1.5]])
    num_draws = 4000
    rows = [row(temperature=0.8, num_generated=i, seed=42) for i in range(num_draws)]
    counts = Counter(sample(logits.expand(num_draws, -1).contiguous(), rows).tolist())
    probabilities = (logits[0] / 0.8).softmax(0).tolist()
    expected = [p * num_draws for p in probabilities]
    statistic = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))
    assert statistic < 25.0


def test_tiny_temperatures_and_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, 2.9e4, -3e4, 0.0]])
    assert sample(logits, [row(temperature=2e-5)]).tolist() == [0]


@pytest.mark.parametrize("penalty", [1e-30, 1e-38, 1e-40, 1e-300])
def test_a_penalty_that_overflows_still_draws_an_id(penalty: float) -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    rows = [row(repetition_penalty=penalty, prompt_ids=(0, 1, 2, 3), seed=s) for s in (1, 2)]
    assert torch.isfinite(adjust(logits, rows)).all()
    ids = sample(logits, rows).tolist()
    assert ids[0] in (0, 1)
    assert ids[1] in range(4)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_top_ids_are_in_falling_order_with_ties_by_id(scores: list[list[int]], k: int) -> None:
    found = top_ids(torch.tensor(scores, dtype=torch.float32), k).tolist()
    assert found == [sorted(range(9), key=lambda i: (-line[i], i))[:k] for line in scores]


def test_logprobs_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1e6], [0.0, 0.0, 0.0, 0.0]])
    one, two = token_logprobs(logits, [2, 3], [3, 0])
    norm = 2.0 + log(2.0) + log1p(exp(-2.0) / 2.0)
    assert one.value == pytest.approx(2.0 - norm, abs=1e-6)
    assert (one.rank, one.top_ids) == (2, (1, 2, 0))
    assert one.top_values[0] == one.value
    assert (two.rank, two.top_ids, two.top_values) == (4, (), ())
    assert token_logprobs(logits, [3, 0], [4, 4])[0].value == FLOOR
