"""Gradient rounding: it begins at any codes, scales find the closed form's optimum, codes move only
when wanted for long, and what is kept is never worse than where it began."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quant.artifact.layout import (
    QuantizedWeight,
    dequantize,
    fake_quantize_activations,
    round_scale,
)
from quant.artifact.scheme import Scheme, preset, with_group_size
from quant.capture import Stream, make_batches
from quant.held_out import hold_out
from quant.layer_job import install
from quant.methods.gptq import GPTQSettings, gptq
from quant.methods.gradient import Adam, begin
from quant.methods.rtn import rtn
from quant.tune_layer import LayerParts, Tuned, TuneSettings, tune_layer

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
    for learns_offsets in (True, False):
        rounding = begin(weight, start, learns_offsets=learns_offsets)
        ones = torch.ones(rounding.num_scales)
        rounding.move(torch.zeros_like(weight), 0.1)
        result = rounding.result(ones)
        assert torch.equal(result.codes.float(), start.codes.float())
        assert torch.equal(result.scale, start.scale)
        assert torch.equal(rounding.values(ones), dequantize(start).float())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_what_is_stored_is_what_the_loss_saw_however_far_it_went(scheme: Scheme) -> None:
    weight, _ = example(1)
    scheme = fitted(scheme)
    weight[2, : 64 if scheme.layout != "pack-quantized" else 32] = 0
    rounding = begin(weight, rtn(weight, scheme, torch.bfloat16), learns_offsets=True)
    ones = torch.ones(rounding.num_scales)
    before = rounding.result(ones)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        rounding.move(torch.randn(weight.shape, generator=generator) - 0.5 * weight.sign(), 0.02)
    factors = (torch.rand(len(ones), generator=generator) - 0.5).exp()
    after = rounding.result(factors)
    assert torch.equal(dequantize(after).float(), rounding.values(factors))
    assert torch.equal(after.scale, round_scale(after.scale.float(), torch.bfloat16))
    assert not torch.equal(after.codes.float(), before.codes.float())
    assert bool((rounding.values(factors)[2, :32] == 0).all())


def test_a_code_moves_once_it_was_wanted_long_enough() -> None:
    """Against the gradient's sign, by one at most, and not by a few steps of noise."""
    weight, _ = example(2)
    start = rtn(weight, SYM, torch.bfloat16, scale_search=True)
    rounding = begin(weight, start, learns_offsets=True)
    before, ones = start.codes.int(), torch.ones(rounding.num_scales)
    signs = torch.sign(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    for step in range(100):
        rounding.move(signs * (-1) ** step, 0.01)
    assert torch.equal(rounding.result(ones).codes.int(), before)
    for _ in range(80):
        rounding.move(signs, 0.01)
    moved = rounding.result(ones).codes.int() - before
    assert bool((moved.abs() <= 1).all())
    assert bool((moved * signs <= 0).all())
    # The others lie on the other side of their code, or at the end of their range: a weight is
    # rounded up or down, never further off.
    assert 0.4 < float((moved != 0).float().mean()) < 0.6


@pytest.mark.parametrize("scheme", [SYM, ASYM], ids=lambda s: s.label)
def test_scales_find_the_closed_forms_least_squares(scheme: Scheme) -> None:
    """One group per row and fixed codes: the best scale is <c, w> / <c, c>."""
    weight, _ = example(4, rows=16, columns=32)
    wanted = weight * torch.linspace(0.85, 1.15, 16)[:, None]
    rounding = begin(weight, rtn(weight, scheme, torch.float32), learns_offsets=False)
    logs = Adam.zeros(16, weight.device)
    for step in range(300):
        slopes = rounding.slopes(rounding.values(logs.value.exp()) - wanted, logs.value.exp())
        logs.step(slopes, 0.01 * (1 - step / 300))
    stored = rounding.result(logs.value.exp())
    codes = stored.codes.float()
    if stored.zero_point is not None:
        codes = codes - stored.zero_point.float()
    best = (codes * wanted).sum(1) / codes.square().sum(1)
    assert torch.allclose(stored.scale[:, 0], best, rtol=2**-7)


def windows_of(inputs: Tensor) -> tuple[Stream, list[Tensor]]:
    """Inputs [N, I] as windows of 16 tokens, a batch each."""
    hidden = list(inputs.reshape(-1, 1, 16, inputs.shape[1]))
    ids = [[0] * 16] * len(hidden)
    batches = [replace(b, samples=(i,)) for i, b in enumerate(make_batches(ids, 16))]
    return Stream(batches=batches, hidden=hidden), hidden


def tune(
    weight: Tensor, start: QuantizedWeight, inputs: Tensor, steps: int, *, offsets: bool = True
) -> Tuned:
    """One linear as the whole layer."""
    stream, hidden = windows_of(inputs)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False)
    install(linear, start)
    parts = LayerParts(
        linears={"m": linear}, originals={"m": weight}, starts={"m": start}, norms={},
        dtype=torch.bfloat16,
    )  # fmt: skip
    settings = TuneSettings(steps=steps, tokens=64, offsets=offsets)
    targets = replace(stream, hidden=[h @ weight.T for h in hidden])
    return tune_layer(parts, stream, targets, lambda h, _: linear(h), settings)


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
    rows = torch.cat([states[0] for states in hold_out(windows_of(inputs)[0])[1].hidden])

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
