"""Sampling kernels in the interpreter against their reference and against the host's sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)

import triton
import triton.language as tl

from runtime.engine.sampler import SamplingRow, adjust, sample
from runtime.kernels.sampling import (
    Drawn,
    History,
    SamplingFeatures,
    SamplingTensors,
    launch,
    pack_row,
    reference,
)
from runtime.kernels.sampling.kernel import uniform
from runtime.kernels.workspace import Workspace
from runtime.request import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy meets inf and NaN

EVERYTHING = SamplingFeatures(
    any_random=True, any_filtered=True, any_penalty=True, any_biased=True, num_logprobs=None
)
FILTERED = SamplingFeatures(any_random=True, any_filtered=True)
EDGE = 2e-6  # float32 sums may move an edge by this much of the total


@pytest.fixture(autouse=True, scope="module")
def small_and_poisoned() -> Iterator[None]:
    """Several blocks in a small vocabulary; no memory holds a useful value by chance."""
    patch = pytest.MonkeyPatch()
    patch.setattr(launch, "BLOCK", 64)
    patch.setattr(launch, "CAPACITY", 16)
    patch.setattr(launch, "FEW", 8)
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> torch.Tensor:
        memory = empty(*size, **options)  # type: ignore[call-overload]
        return memory.fill_(torch.nan if memory.is_floating_point() else 77)  # type: ignore[no-any-return]

    patch.setattr(torch, "empty", poisoned)
    yield
    patch.undo()


def row(seed: int = 1, num_generated: int = 0, **fields: object) -> SamplingRow:
    """Fields of SamplingRow by name; all others are fields of SamplingParams."""
    history = {
        k: fields.pop(k) for k in ("prompt_ids", "output_counts", "masked_ids") if k in fields
    }
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return SamplingRow(params=params, seed=seed, num_generated=num_generated, **history)  # type: ignore[arg-type]


def packed(row: SamplingRow) -> torch.Tensor:
    p = row.params
    shared = {
        name: getattr(p, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    }
    words = pack_row(
        **shared,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        seed=row.seed,
        num_generated=row.num_generated,
        min_tokens=row.num_generated + 1 if row.masked_ids else 0,
        num_logprobs=p.logprobs,
    )
    return torch.frombuffer(bytearray(words), dtype=torch.int32)


def tensors_of(rows: Sequence[SamplingRow], vocab: int) -> SamplingTensors:
    """Row i is slot i."""
    tensors = SamplingTensors.empty(len(rows), "cpu", max_bias=5, max_masked=3)
    history = History.empty(len(rows), vocab, "cpu")
    for slot, one in enumerate(rows):
        tensors.rows_N16[slot] = packed(one)
        history.write(slot, one.prompt_ids, one.output_counts)
        for at, (token, value) in enumerate(one.params.logit_bias):
            tensors.bias_ids_NB[slot, at], tensors.bias_values_NB[slot, at] = token, value
        for at, token in enumerate(one.masked_ids):
            tensors.masked_ids_NM[slot, at] = token
    return replace(tensors, history=history)


def draw(
    logits_RV: torch.Tensor,
    tensors: SamplingTensors,
    features: SamplingFeatures,
    slots: Sequence[int] | None = None,
) -> Drawn:
    slots_R = torch.tensor(range(len(logits_RV)) if slots is None else slots, dtype=torch.int32)
    workspace = Workspace("cpu")
    drawn = launch.sample_rows_triton(logits_RV, tensors, slots_R, features, workspace)
    assert not workspace.counters(2 * len(slots_R)).any(), "counters are left as they were found"
    return drawn


def allowed(logits_V: torch.Tensor, one: SamplingRow) -> set[int]:
    """What the reference draws if edges lie a rounding error further left or right."""
    scores_1V = adjust(logits_V.float().unsqueeze(0), [one])
    if one.is_greedy:
        return {int(scores_1V.argmax())}
    p, vocab = one.params, len(logits_V)
    draws = reference.uniforms(np.array([one.seed]), np.array([one.num_generated]))
    moves = [(a, b, c) for a in (-EDGE, 0, EDGE) for b in (-EDGE, 0, EDGE) for c in (-EDGE, EDGE)]
    num = len(moves)
    by_draw, by_top_p, by_min_p = torch.tensor(moves, dtype=torch.float64).unbind(1)
    ids = reference.draw(
        scores_1V.repeat(num, 1),
        temperature_R=torch.full((num,), p.temperature),
        top_k_R=torch.full((num,), min(p.top_k, vocab)),
        top_p_R=p.top_p * (1 + by_top_p) if p.top_p < 1 else torch.ones(num, dtype=torch.float64),
        min_p_R=p.min_p * (1 + by_min_p),
        draws_R=(torch.from_numpy(draws) + by_draw).clamp(0, 1 - 2**-40),
    )
    return set(ids.tolist())


def logits_of(kind: str, num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_rows, vocab, generator=generator)
    kinds = {
        "flat": noise * 0.1,
        "peaked": noise * 4,
        "ties": (noise * 1.5).round(),
        "equal": torch.zeros(num_rows, vocab),
        "huge": noise * 1e4,
        "two levels": torch.where(noise > 0, 1.0, 1.25),
    }
    return kinds[kind]


KINDS = ["flat", "peaked", "ties", "equal", "huge", "two levels"]
TEMPERATURES = [0.0, 1e-6, 1e-4, 0.7, 1.0, 1.9]
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from(TEMPERATURES),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 15, 16, 17, 60, 10**6, 2**40]),
        "top_p": st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.6, 0.1, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "num_generated": st.integers(0, 2**31 - 2),
    }
)
adjustments = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([1e-40, 0.5, 1.3, 9.0]),
        "presence_penalty": st.sampled_from([-0.5, 0.8]),
        "frequency_penalty": st.sampled_from([-0.1, 0.3]),
        "logit_bias": st.sampled_from([((0, 3.0), (6, -100.0)), ((6, 1e4),), ((3, 0.125),)]),
        "masked_ids": st.sampled_from([(0,), (2, 6), (1, 3, 5)]),
        "prompt_ids": st.sampled_from([(0, 1, 2), (6, 6, 3), ()]),
        "output_counts": st.sampled_from([{0: 1, 5: 2}, {6: 40000}]),
    },
)
rows_of = st.builds(lambda a, b: row(**a, **b), filters, st.one_of(st.just({}), adjustments))
# A seed whose first number is almost 1: it draws the last id kept.
LAST = int(reference.uniforms(np.arange(200_000), np.zeros(200_000, np.int64)).argmax())


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(rows_of, min_size=1, max_size=3),
    st.sampled_from(KINDS),
    st.sampled_from([7, 63, 64, 150, 201]),
    st.sampled_from([torch.float32, torch.float16]),
    st.integers(0, 99),
)
def test_kernels_draw_what_the_reference_and_the_host_draw(
    rows: list[SamplingRow], kind: str, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    logits = logits_of(kind, len(rows), vocab, seed).to(dtype)
    rows = [
        replace(one, output_counts={k: min(n, 2**15 - 1) for k, n in one.output_counts.items()})
        for one in rows
    ]
    tensors = tensors_of(rows, vocab)
    slots = torch.arange(len(rows), dtype=torch.int32)
    host = sample(logits.float(), rows).tolist()
    kernel = draw(logits, tensors, EVERYTHING).ids_R.tolist()
    torch_ids = reference.sample_rows(logits, tensors_of(rows, vocab), slots, EVERYTHING).ids_R
    assert torch_ids.tolist() == host
    for one, line, expected, found in zip(rows, logits, host, kernel, strict=True):
        assert found == expected or found in allowed(line, one)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(filters, min_size=1, max_size=3),
    st.sampled_from(["flat", "ties", "equal", "two levels"]),
    st.sampled_from([7, 64, 150]),
    st.integers(0, 99),
)
def test_exactly_as_many_tokens_are_kept_as_the_filters_say(
    fields: list[dict[str, Any]], kind: str, vocab: int, seed: int
) -> None:
    """With falling logits the last id kept tells how many there are, ties among them."""
    logits = logits_of(kind, len(fields), vocab, seed).sort(-1, descending=True).values
    rows = [row(**{**one, "seed": LAST, "num_generated": 0}) for one in fields]
    found = draw(logits, tensors_of(rows, vocab), FILTERED).ids_R.tolist()
    expected = sample(logits, rows).tolist()
    for one, line, want, token in zip(rows, logits, expected, found, strict=True):
        assert token == want or token in allowed(line, one)


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_nuclei_of_every_size(spread: float) -> None:
    logits_V = logits_of("flat", 1, 190, 11)[0].sort(descending=True).values * 10 * spread
    sizes = [0.02, 0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999]
    rows = [row(seed=LAST, top_p=top_p) for top_p in sizes]
    logits = logits_V.expand(len(rows), -1).contiguous()
    found = draw(logits, tensors_of(rows, 190), FILTERED).ids_R.tolist()
    assert found == sample(logits, rows).tolist()


@pytest.mark.parametrize(
    ("kind", "vocab"),
    [("equal", 1), ("flat", 40), ("equal", 120), ("two levels", 120), ("flat", 100)],
)
def test_edges_among_thousands_of_equals_are_found_in_the_whole_row(kind: str, vocab: int) -> None:
    """More equal tokens at the edge than are collected: 16 here."""
    logits = logits_of(kind, 6, vocab, 5)
    rows = [
        row(seed=1, top_k=30),
        row(seed=2, top_p=0.7),
        row(seed=3, top_k=60, top_p=0.5),
        row(seed=4, top_k=70, top_p=0.9, min_p=0.3),
        row(seed=5, top_k=119, masked_ids=(0, 7 % vocab) if vocab > 1 else ()),
        row(seed=6, min_p=0.9),
    ]
    found = draw(logits, tensors_of(rows, vocab), EVERYTHING).ids_R.tolist()
    for one, line, token in zip(rows, logits, found, strict=True):
        assert token in allowed(line, one)


def test_a_row_depends_on_nothing_beside_it() -> None:
    logits = logits_of("peaked", 5, 201, 3)
    logits[1] = torch.nan
    logits[4, 200] = torch.inf
    rows = [row(seed=9), row(), row(top_p=0.8, seed=8), row(temperature=0.0), row()]
    tensors = tensors_of(rows, 201)
    together = draw(logits, tensors, FILTERED)
    assert together.is_finite_R.tolist() == [True, False, True, True, False]
    order = [3, 1, -1, 0, 2]
    mixed = draw(logits[[3, 1, 4, 0, 2]], tensors, FILTERED, order)
    assert mixed.ids_R.tolist() == [0 if slot < 0 else int(together.ids_R[slot]) for slot in order]
    assert mixed.is_finite_R.tolist() == [True, False, True, True, True]
    plain = draw(logits[[0, 3]], tensors, SamplingFeatures(any_random=True), [0, 3])
    assert plain.ids_R.tolist() == [int(together.ids_R[0]), int(together.ids_R[3])]
    greedy = draw(logits, tensors, SamplingFeatures(), [3] * 5).ids_R
    assert greedy[[0, 2, 3]].tolist() == logits[[0, 2, 3]].argmax(-1).tolist()
    assert all(0 <= token < 201 for token in [*together.ids_R.tolist(), *greedy.tolist()])


def test_features_may_promise_more_than_a_row_uses_but_change_nothing() -> None:
    logits = logits_of("peaked", 1, 90, 4)
    cases = [
        (row(temperature=0.0), SamplingFeatures()),
        (row(seed=3), SamplingFeatures(any_random=True)),
        (row(seed=3, logit_bias=((2, 9.0),)), SamplingFeatures(any_random=True, any_biased=True)),
        (row(temperature=0.0, masked_ids=(1, 2)), SamplingFeatures(any_biased=True)),
        (
            row(temperature=0.0, frequency_penalty=2.0, output_counts={3: 4}),
            SamplingFeatures(any_penalty=True),
        ),
    ]
    for one, least in cases:
        few = draw(logits, tensors_of([one], 90), least).ids_R
        assert few.tolist() == sample(logits, [one]).tolist()
        assert draw(logits, tensors_of([one], 90), EVERYTHING).ids_R.equal(few)


def test_drawn_tokens_are_counted() -> None:
    logits = torch.zeros(4, 70)
    logits[:, 65] = 9.0
    logits[2, 0] = torch.nan
    rows = [row(temperature=0.0, output_counts={65: 2**15 - 1}), *[row(temperature=0.0)] * 3]
    tensors = tensors_of(rows, 70)
    assert tensors.history is not None
    features = SamplingFeatures(any_penalty=True)
    assert draw(logits, tensors, features, [0, 1, 2, -1]).ids_R.tolist() == [65, 65, 0, 0]
    counts = tensors.history.counts_NV
    assert counts[:, 65].tolist() == [2**15 - 1, 1, 0, 0]
    assert int(counts.sum()) == 2**15


def test_a_history_replaces_what_a_slot_held() -> None:
    history = History.empty(2, 40, "cpu")
    history.write(1, [0, 31, 32, 39], {3: 70000})
    assert history.prompt_mask_NW[1].tolist() == [-(2**31) + 1, 2**7 + 1]
    assert history.counts_NV[1, 3] == 2**15 - 1
    history.write(1, [1], {})
    assert history.prompt_mask_NW.tolist() == [[0, 0], [2, 0]]
    assert not history.counts_NV.any()


@pytest.mark.parametrize("num_top", [0, 3, 40])
def test_logprobs_ranks_and_alternatives(num_top: int) -> None:
    logits = torch.cat([logits_of("ties", 2, 130, 1), logits_of("peaked", 1, 130, 1)])
    logits[0, 5], logits[0, 9] = 0.0, -0.0
    logits[1, 129] = -3e38
    ids = torch.tensor([9, 129, 4])
    found = launch.row_logprobs_triton(logits, ids, num_top, Workspace("cpu"))
    expected = reference.row_logprobs(logits, ids, num_top)
    torch.testing.assert_close(found.chosen_R, expected.chosen_R)
    torch.testing.assert_close(found.top_values_RK, expected.top_values_RK)
    assert found.chosen_R[1] == reference.FLOOR
    assert torch.equal(found.rank_R, expected.rank_R)
    assert torch.equal(found.top_ids_RK, expected.top_ids_RK)


def test_logprobs_of_a_step_are_of_the_raw_logits() -> None:
    logits = logits_of("peaked", 3, 90, 2)
    rows = [row(logprobs=2, logit_bias=((80, 1e4),)), row(), row(logprobs=0, temperature=0.0)]
    features = replace(EVERYTHING, num_logprobs=2)
    drawn = draw(logits, tensors_of(rows, 90), features)
    expected = reference.row_logprobs(logits, drawn.ids_R, 2)
    assert drawn.ids_R[0] == 80
    assert drawn.logprobs is not None
    asked = [0, 2]
    torch.testing.assert_close(drawn.logprobs.chosen_R[asked], expected.chosen_R[asked])
    assert torch.equal(drawn.logprobs.rank_R[asked], expected.rank_R[asked])
    assert torch.equal(drawn.logprobs.top_ids_RK[asked], expected.top_ids_RK[asked])


@triton.jit
def uniform_kernel(longs_ptr, ints_ptr, out_ptr):
    slot = tl.program_id(0)
    tl.store(out_ptr + slot, uniform(longs_ptr, ints_ptr, slot))


def test_random_numbers_have_the_same_bits() -> None:
    seeds = [-(2**63), -1, 0, 1, 0x299F31D0A4093822, 2**63 - 1]
    places = [0, 1, 2**31 - 1, 12345, 7, 99]
    rows = [row(seed=s, num_generated=n) for s, n in zip(seeds, places, strict=True)]
    tensors = tensors_of(rows, 8)
    out = torch.full((6,), torch.nan, dtype=torch.float64)
    uniform_kernel[(6,)](tensors.rows_N16.view(torch.int64), tensors.rows_N16, out)
    assert out.tolist() == reference.uniforms(np.array(seeds), np.array(places)).tolist()
