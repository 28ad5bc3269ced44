"""Sampling on a real card: real vocabularies, bf16, graphs, and draws by the thousand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.kernels.sampling import (
    Drawn,
    History,
    SamplingFeatures,
    SamplingTensors,
    pack_row,
    reference,
    row_logprobs,
    sample_rows,
)
from runtime.kernels.workspace import Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EDGE = 2e-6  # float32 sums may move an edge by this much of the total
EVERYTHING = SamplingFeatures(
    any_random=True, any_filtered=True, any_penalty=True, any_biased=True, num_logprobs=20
)
ROWS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "num_logprobs": 5},
    {"temperature": 1.0, "top_p": 0.95, "num_logprobs": 20},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1, "num_logprobs": 0},
    {"temperature": 1.0, "top_k": 3000},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1e-4},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 2**40, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "top_p": 0.9},
    {"frequency_penalty": 1.5, "num_logprobs": 20},
    {"temperature": 1.5, "top_k": 1500, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 700, "top_p": 0.7, "min_p": 0.001},
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory holds a useful value by chance."""
    real = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        memory = real(*size, **options)
        return memory.fill_(torch.nan if memory.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)


def logits_of(kind: str, num_rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(vocab + num_rows)
    noise = torch.randn(num_rows, vocab, device="cuda", generator=generator)
    if kind == "flat":
        return (noise * 0.6).to(dtype)
    rank = torch.rand(num_rows, vocab, device="cuda", generator=generator).argsort(1) + 1
    return (22.0 - 1.6 * rank.log() + 0.3 * noise).to(dtype)


def tensors_of(rows: list[dict[str, Any]], vocab: int, *, biased: bool = True) -> SamplingTensors:
    """Row i is slot i, each with a history of its own; two slots have a bias or masked ids."""
    tensors = SamplingTensors.empty(len(rows), "cuda", max_bias=3, max_masked=2)
    history = History.empty(len(rows), vocab, "cuda")
    generator = torch.Generator().manual_seed(len(rows))
    for slot, one in enumerate(rows):
        words = pack_row(**{"seed": 77 + slot, "num_generated": slot % 9, "min_tokens": 9, **one})
        tensors.rows_N16[slot] = torch.frombuffer(bytearray(words), dtype=torch.int32)
        ids = torch.randint(0, vocab, (60,), generator=generator).tolist()
        history.write(slot, ids[:40], {token: 1 + token % 5 for token in ids[20:]})
    if biased and len(rows) > 3:
        tensors.bias_ids_NB[3, :2] = torch.tensor([5, vocab - 1], dtype=torch.int32)
        tensors.bias_values_NB[3, :2] = torch.tensor([9.0, -3.0])
        tensors.masked_ids_NM[2, 0] = 7
    return replace(tensors, history=history)


def with_counts(tensors: SamplingTensors, counts_NV: Tensor) -> SamplingTensors:
    assert tensors.history is not None
    return replace(tensors, history=replace(tensors.history, counts_NV=counts_NV))


def moved(tensors: SamplingTensors, by: tuple[float, float]) -> SamplingTensors:
    """The same parameters with top_p and min_p a rounding error off."""
    copy = replace(tensors, rows_N16=tensors.rows_N16.clone())
    top_p = copy.field("top_p")
    top_p.copy_(torch.where(top_p < 1.0, top_p * (1 + by[0]), top_p))
    copy.field("min_p").mul_(1 + by[1])
    return copy


def allowed(
    logits_RV: Tensor, tensors: SamplingTensors, slots_R: Tensor, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """What the reference draws with every edge a rounding error further left or right."""
    assert tensors.history is not None
    counts_NV = tensors.history.counts_NV
    uniforms, found = reference.uniforms, []
    moves = [(a, b, c) for a in (-EDGE, EDGE) for b in (-EDGE, EDGE) for c in (-EDGE, 0.0, EDGE)]
    for *by, by_draw in moves:

        def nudged(
            seeds: Any, places: Any, shift: float = by_draw
        ) -> np.ndarray[Any, np.dtype[np.float64]]:
            return np.clip(uniforms(seeds, places) + shift, 0, 1 - 2**-40)

        monkeypatch.setattr(reference, "uniforms", nudged)
        twin = with_counts(moved(tensors, (by[0], by[1])), counts_NV.clone())
        features = replace(EVERYTHING, num_logprobs=None)
        found.append(reference.sample_rows(logits_RV, twin, slots_R, features).ids_R)
    monkeypatch.setattr(reference, "uniforms", uniforms)
    return found


@pytest.mark.parametrize("num_rows", [1, 7, 64, 256])
@pytest.mark.parametrize(
    ("vocab", "dtype", "kind"),
    [
        (128256, torch.bfloat16, "peaked"),
        (128256, torch.bfloat16, "flat"),
        (128256, torch.float32, "flat"),
        (151936, torch.float32, "peaked"),
        (49152, torch.bfloat16, "peaked"),
        (1001, torch.float16, "flat"),
    ],
)
def test_rows_of_a_mixed_batch_against_the_reference(
    vocab: int, dtype: torch.dtype, kind: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [ROWS[(slot + num_rows) % len(ROWS)] for slot in range(num_rows)]
    tensors = tensors_of(rows, vocab)
    assert tensors.history is not None
    logits = logits_of(kind, num_rows, vocab, dtype)
    slots = torch.randperm(num_rows).to("cuda", torch.int32)
    if num_rows > 1:
        slots[num_rows // 2] = -1
        logits[-1, vocab // 2] = torch.nan
    counts_NV = tensors.history.counts_NV
    runs, counted = [], []
    for _ in range(3):
        twin = with_counts(tensors, counts_NV.clone())
        workspace = Workspace("cuda")
        runs.append(sample_rows(logits, twin, slots, features=EVERYTHING, workspace=workspace))
        assert not workspace.counters(2 * num_rows).any()
        assert twin.history is not None
        counted.append(twin.history.counts_NV)
    asked = tensors.field("num_logprobs")[slots.clamp(min=0).long()] >= 0
    asked &= (slots >= 0) & runs[0].is_finite_R
    for again, counts in zip(runs[1:], counted[1:], strict=True):
        assert torch.equal(counts, counted[0])
        assert_same(again, runs[0], asked)
    twin = with_counts(tensors, counts_NV.clone())
    expected = reference.sample_rows(logits, twin, slots, EVERYTHING)
    assert torch.equal(expected.is_finite_R, runs[0].is_finite_R)
    differ = expected.ids_R != runs[0].ids_R
    if differ.any():
        near = allowed(logits, tensors, slots, monkeypatch)
        is_near = torch.stack([ids == runs[0].ids_R for ids in near]).any(0)
        assert is_near[differ].all(), [rows[slot] for slot in slots[differ & ~is_near].tolist()]
        assert differ.sum() <= 1 + num_rows // 50
    assert runs[0].logprobs is not None
    told = reference.row_logprobs(logits.nan_to_num(), runs[0].ids_R, 20)
    assert torch.equal(runs[0].logprobs.rank_R[asked], told.rank_R[asked])
    assert torch.equal(runs[0].logprobs.top_ids_RK[asked], told.top_ids_RK[asked])
    for name in ("chosen_R", "top_values_RK"):
        mine, theirs = (getattr(x, name)[asked] for x in (runs[0].logprobs, told))
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def assert_same(one: Drawn, two: Drawn, asked: Tensor) -> None:
    assert torch.equal(one.ids_R, two.ids_R)
    assert one.logprobs is not None
    assert two.logprobs is not None
    for name in ("chosen_R", "rank_R", "top_ids_RK", "top_values_RK"):
        mine, theirs = (getattr(x.logprobs, name)[asked] for x in (one, two))
        assert torch.equal(mine, theirs), name


def test_a_row_alone_gives_the_bits_it_gives_among_others() -> None:
    num_rows, vocab = 48, 128256
    rows = [{"num_logprobs": 20, **ROWS[slot % len(ROWS)]} for slot in range(num_rows)]
    tensors = tensors_of(rows, vocab)
    assert tensors.history is not None
    counts_NV = tensors.history.counts_NV
    logits = logits_of("peaked", num_rows, vocab, torch.bfloat16)
    every = torch.ones(1, dtype=torch.bool, device="cuda")
    workspace = Workspace("cuda")
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")

    def draw(which: slice) -> Drawn:
        twin = with_counts(tensors, counts_NV.clone())
        return sample_rows(
            logits[which], twin, slots[which], features=EVERYTHING, workspace=workspace
        )

    together = draw(slice(None))
    assert together.logprobs is not None
    for slot in range(num_rows):
        part = slice(slot, slot + 1)
        names = ("chosen_R", "rank_R", "top_ids_RK", "top_values_RK")
        logprobs = replace(
            together.logprobs, **{name: getattr(together.logprobs, name)[part] for name in names}
        )
        expected = replace(together, ids_R=together.ids_R[part], logprobs=logprobs)
        assert_same(draw(part), expected, every)


@pytest.mark.parametrize("fields", [*ROWS, {"biased": True}], ids=str)
def test_the_least_features_draw_what_all_draw(fields: dict[str, Any]) -> None:
    """Each set of features compiles kernels of its own."""
    vocab, is_biased = 128256, "biased" in fields
    one = {name: value for name, value in fields.items() if name != "biased"}
    tensors = tensors_of([one] * 5, vocab, biased=is_biased)
    assert tensors.history is not None
    counts_NV = tensors.history.counts_NV
    least = SamplingFeatures(
        any_random="temperature" in one,
        any_filtered=bool({"top_k", "top_p", "min_p"} & one.keys()),
        any_penalty=any(name.endswith("penalty") for name in one),
        any_biased=is_biased,
        num_logprobs=one.get("num_logprobs"),
    )
    logits = logits_of("peaked", 5, vocab, torch.bfloat16)
    slots = torch.arange(5, dtype=torch.int32, device="cuda")
    ids = []
    for features in (least, EVERYTHING):
        twin = with_counts(tensors, counts_NV.clone())
        drawn = sample_rows(logits, twin, slots, features=features, workspace=Workspace("cuda"))
        ids.append(drawn.ids_R)
    assert torch.equal(*ids)


def test_a_captured_call_follows_its_inputs() -> None:
    num_rows, vocab = 16, 128256
    tensors = tensors_of(ROWS, vocab)
    assert tensors.history is not None
    logits = logits_of("peaked", num_rows, vocab, torch.bfloat16)
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    workspace = Workspace("cuda")

    def draw() -> Drawn:
        return sample_rows(logits, tensors, slots, features=EVERYTHING, workspace=workspace)

    counts_NV = tensors.history.counts_NV.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        draw()
    torch.cuda.synchronize()
    settled = workspace.num_bytes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = draw()
    assert workspace.num_bytes == settled
    seen = set()
    for step in range(6):
        tensors.num_generated_N.fill_(step)
        logits.copy_(logits.roll(step, 1))
        tensors.history.counts_NV.copy_(counts_NV)
        graph.replay()
        replayed = captured.ids_R.tolist()
        tensors.history.counts_NV.copy_(counts_NV)
        assert draw().ids_R.tolist() == replayed
        seen.add(tuple(replayed))
    assert len(seen) == 6


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}],
    ids=str,
)
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    """Chi-square over 25600 draws with at most 7 degrees of freedom: 30 is beyond 99.99 %."""
    vocab, num_rows, num_steps = 49152, 256, 100
    logits_V = torch.full((vocab,), -30.0, device="cuda")
    places = torch.tensor([3, 700, 2047, 2048, 9000, 30000, 49150, 49151], device="cuda")
    logits_V[places] = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, 2.0, 0.5], device="cuda")
    rows = [{"temperature": 0.8, "seed": 1000 + slot, **fields} for slot in range(num_rows)]
    tensors = tensors_of(rows, vocab, biased=False)
    logits = logits_V.expand(num_rows, -1).contiguous()
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    features = SamplingFeatures(any_random=True, any_filtered=bool(fields))
    workspace = Workspace("cuda")
    counts_V = torch.zeros(vocab, dtype=torch.float64, device="cuda")
    for step in range(num_steps):
        tensors.num_generated_N.fill_(step)
        drawn = sample_rows(logits, tensors, slots, features=features, workspace=workspace)
        counts_V += torch.bincount(drawn.ids_R.long(), minlength=vocab)
    scores_1V = ((logits_V - logits_V.max()) / 0.8).unsqueeze(0)
    kept_V = reference.keep_likely(
        scores_1V,
        torch.tensor([fields.get("top_k", 0)], device="cuda"),
        torch.tensor([fields.get("top_p", 1.0)], dtype=torch.float64, device="cuda"),
        torch.tensor([fields.get("min_p", 0.0)], dtype=torch.float64, device="cuda"),
    )[0]
    expected_V = kept_V.double().softmax(0) * num_rows * num_steps
    is_kept = expected_V > 1.0
    assert counts_V[~is_kept].sum() <= 3
    assert counts_V[expected_V == 0].sum() == 0
    squares = (counts_V - expected_V)[is_kept] ** 2 / expected_V[is_kept]
    assert squares.sum() < 30.0


@pytest.mark.parametrize("num_top", [0, 1, 20, 100])
def test_logprobs_of_prompts(num_top: int) -> None:
    logits = logits_of("flat", 130, 128256, torch.bfloat16)
    ids = torch.randint(0, 128256, (130,), device="cuda")
    found = row_logprobs(logits, ids, num_top, workspace=Workspace("cuda"))
    told = reference.row_logprobs(logits.float(), ids, num_top)
    assert torch.equal(found.rank_R, told.rank_R)
    assert torch.equal(found.top_ids_RK, told.top_ids_RK)
    torch.testing.assert_close(found.chosen_R, told.chosen_R, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.top_values_RK, told.top_values_RK, rtol=1e-5, atol=1e-5)
