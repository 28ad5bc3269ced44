"""Gradient rounding: it begins at any codes, scales find the closed form's optimum, codes move only
when wanted for long, and what is kept is never worse than where it began."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quant.artifact.layout import QuantizedWeight, dequantize, fake_quantize_activations
from quant.artifact.scheme import Scheme, preset, with_group_size
from quant.capture import Stream, make_batches
from quant.layer_job import install
from quant.methods.gptq import GPTQSettings, gptq
from quant.methods.gradient import begin
from quant.methods.rtn import rtn
from quant.tune_layer import LayerParts, Tuned, TuneSettings, split_chunks, tune_layer

SYM = with_group_size(preset("w4a16"), 32)
assert SYM.weights is not None
ASYM = replace(SYM, weights=replace(SYM.weights, symmetric=False))
W3 = with_group_size(preset("w3a16"), 32)
SCHEMES = [SYM, ASYM, W3, preset("w8a8"), preset("fp8"), preset("w4a8")]


def example(seed: int, rows: int = 8, columns: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(256, columns, generator=generator) @ mixed
    return torch.randn(rows, columns, generator=generator), inputs


def fitted(scheme: Scheme) -> Scheme:
    return with_group_size(scheme, 32) if scheme.layout == "pack-quantized" else scheme


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@given(seed=st.integers(0, 10**6), method=st.sampled_from(["rtn", "gptq"]))
@settings(max_examples=8, deadline=None)
def test_it_begins_at_the_codes_it_was_given(
    scheme: Scheme, dtype: torch.dtype, seed: int, method: str
) -> None:
    weight, inputs = example(seed)
    scheme = fitted(scheme)
    weight[3, :32] = 0
    start = rtn(weight, scheme, dtype)
    if method == "gptq":
        start, _ = gptq(weight, inputs.T @ inputs, scheme, dtype, GPTQSettings())
    rounding = begin(weight, start)
    result = rounding.result()
    assert torch.equal(result.codes.float(), start.codes.float())
    assert torch.equal(result.scale, start.scale)
    assert torch.equal(rounding.values(), dequantize(start).float())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_what_is_stored_is_what_the_loss_saw_however_far_it_went(scheme: Scheme) -> None:
    weight, _ = example(1)
    scheme = fitted(scheme)
    weight[2, : 64 if scheme.layout != "pack-quantized" else 32] = 0
    rounding = begin(weight, rtn(weight, scheme, torch.bfloat16))
    before = rounding.result()
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        slope = torch.randn(weight.shape, generator=generator) - 0.5 * weight.sign()
        rounding.step(slope, shift_rate=0.02, scale_rate=0.01)
    after = rounding.result()
    assert torch.equal(dequantize(after).float(), rounding.values())
    assert not torch.equal(after.codes.float(), before.codes.float())
    assert not torch.equal(after.scale, before.scale)
    assert bool((rounding.values()[2, :32] == 0).all())
    assert bool((after.scale > 0).all())


def test_a_code_moves_once_it_was_wanted_long_enough() -> None:
    """Against the gradient's sign, by one at most, and not by a few steps of noise."""
    weight, _ = example(2)
    rounding = begin(weight, rtn(weight, SYM, torch.bfloat16, scale_search=True))
    before = rounding.result().codes.int()
    signs = torch.sign(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    for step in range(100):
        rounding.step(signs * (-1) ** step, shift_rate=0.01, scale_rate=0.0)
    assert torch.equal(rounding.result().codes.int(), before)
    for _ in range(80):
        rounding.step(signs, shift_rate=0.01, scale_rate=0.0)
    moved = rounding.result().codes.int() - before
    assert bool((moved.abs() <= 1).all())
    assert bool((moved * signs <= 0).all())
    # The others lie on the other side of their code, or at the end of their range: a weight is
    # rounded up or down, never further off.
    assert 0.4 < float((moved != 0).float().mean()) < 0.6


def test_scales_find_the_closed_forms_least_squares() -> None:
    """One group per row and fixed codes: the best factor is <c, w> / <c, c> over the scale."""
    weight, _ = example(4, rows=16, columns=32)
    wanted = weight * torch.linspace(0.85, 1.15, 16)[:, None]
    rounding = begin(weight, rtn(weight, SYM, torch.float32))
    for step in range(300):
        slope = rounding.values() - wanted
        rounding.step(slope, shift_rate=0.0, scale_rate=0.01 * (1 - step / 300))
    codes = rounding.result().codes.float()
    best = (codes * wanted).sum(1) / codes.square().sum(1)
    assert torch.allclose(rounding.result().scale[:, 0], best, rtol=2**-7)


def windows_of(inputs: Tensor) -> tuple[Stream, list[Tensor]]:
    """Inputs [N, I] as windows of 16 tokens, a batch each."""
    hidden = list(inputs.reshape(-1, 1, 16, inputs.shape[1]))
    ids = [[0] * 16] * len(hidden)
    batches = [replace(b, samples=(i,)) for i, b in enumerate(make_batches(ids, 16))]
    return Stream(batches=batches, hidden=hidden), hidden


def tune(weight: Tensor, start: QuantizedWeight, inputs: Tensor, steps: int) -> Tuned:
    """One linear as the whole layer."""
    stream, hidden = windows_of(inputs)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False)
    install(linear, start)
    parts = LayerParts(
        linears={"m": linear}, originals={"m": weight}, starts={"m": start}, norms={},
        dtype=torch.bfloat16,
    )  # fmt: skip
    settings = TuneSettings(steps=steps, tokens=64)
    return tune_layer(
        parts, stream, [h @ weight.T for h in hidden], lambda h, _: linear(h), settings
    )


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(
    "scheme", [SYM, ASYM, W3, preset("w4a8"), preset("fp8")], ids=lambda s: s.label
)
def test_the_result_is_never_worse_than_its_start(scheme: Scheme, method: str) -> None:
    """Judged here by its own arithmetic: the windows that no step saw, per token."""
    weight, inputs = example(6, rows=32)
    scheme = fitted(scheme)
    start = rtn(weight, scheme, torch.bfloat16)
    if method == "gptq":
        start, _ = gptq(weight, inputs.T @ inputs, scheme, torch.bfloat16, GPTQSettings())
    found = tune(weight, start, inputs, 64)
    stream, hidden = windows_of(inputs)
    _, judge = split_chunks(stream.batches, 64)
    rows = torch.cat([hidden[c.batch][0] for c in judge])

    def error(stored: QuantizedWeight) -> float:
        act = scheme.activations
        seen = rows if act is None else fake_quantize_activations(rows, act)
        wanted = rows @ weight.T
        missed = (seen @ dequantize(stored).float().T - wanted).square().mean(1)
        return float((missed / wanted.square().mean(1)).mean().sqrt())

    assert found.error_before == pytest.approx(error(start), rel=1e-4)
    assert found.error_after == pytest.approx(error(found.weights["m"]), rel=1e-4)
    assert found.error_after <= found.error_before
    if method == "rtn" and scheme.weights is not None and scheme.weights.kind == "int":
        assert found.error_after < 0.98 * found.error_before
        assert found.best_step > 0


def test_where_nothing_helps_the_start_is_kept() -> None:
    weight, inputs = example(7)
    exact = rtn(weight, SYM, torch.bfloat16)
    found = tune(dequantize(exact).float(), exact, inputs, 16)
    assert found.best_step == 0
    assert torch.equal(found.weights["m"].codes, exact.codes)
    assert found.error_after == found.error_before < 1e-6


def test_judging_windows_are_kept_out_of_the_steps() -> None:
    windows = [[1] * (8 + i % 3) for i in range(40)]
    batches = make_batches(windows, 40)
    train, judge = split_chunks(batches, 20)
    seen = {(c.batch, row) for c in train for row in c.rows}
    kept = {(c.batch, row) for c in judge for row in c.rows}
    assert not seen & kept
    assert len(seen) + len(kept) == 40
    assert len(kept) == 2
    assert all(len(c.rows) * batches[c.batch].mask.shape[1] <= 20 for c in (*train, *judge))
    train, judge = split_chunks(make_batches([[1] * 8] * 3, 8), 8)
    assert len(train) == len(judge) == 3
