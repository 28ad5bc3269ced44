"""Scales that the outputs want: never worse than plain rounding, and the best of a brute search."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quant.artifact.layout import QuantizedWeight, dequantize, min_max_qparams
from quant.artifact.scheme import Scheme, preset, with_group_size
from quant.methods.clip import DAMPING, clip, diagonal_blocks
from quant.methods.rtn import rtn
from quant.methods.scales import SHRINK_FACTORS, decode, encode, search_scales

SYM = with_group_size(preset("w4a16"), 32)
assert SYM.weights is not None
ASYM = replace(SYM, weights=replace(SYM.weights, symmetric=False))
W3 = with_group_size(preset("w3a16"), 32)
SCHEMES = [SYM, ASYM, W3, preset("w8a8"), preset("fp8")]


def example(seed: int, rows: int = 12, columns: int = 96) -> tuple[Tensor, Tensor]:
    """A weight with heavy tails and inputs [N, I] whose channels move together."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) ** 3
    mixed = torch.randn(columns, columns, generator=generator)
    return weight, torch.randn(200, columns, generator=generator) @ mixed


def row_errors(weight: Tensor, result: QuantizedWeight, inputs: Tensor) -> Tensor:
    """Squared error of each row's outputs, from the inputs themselves."""
    moved = inputs.double() @ (weight - dequantize(result).float()).double().T
    return moved.square().sum(0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_no_row_is_worse_than_plain_rounding(scheme: Scheme, seed: int) -> None:
    weight, inputs = example(seed)
    clipped = clip(weight, inputs.T @ inputs, scheme, torch.bfloat16)
    plain = rtn(weight, scheme, torch.bfloat16)
    allowed = row_errors(weight, plain, inputs) * (1 + 1e-4)
    assert bool((row_errors(weight, clipped, inputs) <= allowed).all())


@pytest.mark.parametrize("scheme", [SYM, ASYM, W3], ids=lambda s: s.label)
def test_it_pays_at_few_bits(scheme: Scheme) -> None:
    weight, inputs = example(3, rows=64)
    square = inputs.T @ inputs
    found = [
        clip(weight, square, scheme, torch.bfloat16),
        rtn(weight, scheme, torch.bfloat16, importance=square.diagonal()),
        rtn(weight, scheme, torch.bfloat16),
    ]
    outputs, weighted, plain = (float(row_errors(weight, q, inputs).sum()) for q in found)
    assert outputs < weighted
    assert outputs < 0.95 * plain


def test_groups_are_judged_by_their_share_of_the_outputs() -> None:
    """Brute force over one group: the scale chosen is that of least |X_g e|^2 in the grid."""
    weight, inputs = example(5, rows=6, columns=32)
    assert SYM.weights is not None
    square = inputs.T @ inputs
    blocks = diagonal_blocks(square, 1)
    scale, _ = search_scales(weight, SYM.weights, torch.float32, blocks)
    smallest, _ = min_max_qparams(weight, SYM.weights, torch.float32)
    ridge = (DAMPING * square.diagonal().mean()).sqrt() * torch.eye(32)
    padded = torch.cat([inputs, ridge])  # the damping, as tokens
    for row in range(6):
        tried = [smallest[row], *((f * smallest[row]).bfloat16().float() for f in SHRINK_FACTORS)]
        errors = []
        for trial in tried:
            value = decode(encode(weight[row], trial, None, SYM.weights), trial, None)
            errors.append(float((padded @ (value - weight[row])).square().sum()))
        best = tried[min(range(len(tried)), key=errors.__getitem__)]
        assert float(scale[row]) == pytest.approx(float(best), rel=1e-6)


def test_inputs_never_seen_are_not_sacrificed() -> None:
    """A channel that was always 0 holds the largest weights: clipping it away costs nothing in
    calibration, and everything later."""
    weight, inputs = example(7)
    inputs[:, 5] = 0
    weight[:, 5] = 30 * weight.abs().amax(1)
    result = dequantize(clip(weight, inputs.T @ inputs, SYM, torch.float32)).float()
    assert bool(((result - weight)[:, 5].abs() < 0.1 * weight[:, 5].abs()).all())
