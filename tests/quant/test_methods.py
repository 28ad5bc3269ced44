"""Methods as pure functions: codes on the layout's grid, scales that never lose to min-max."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.artifact.errors import SchemeError
from quant.artifact.layout import dequantize, min_max_qparams, quantize
from quant.artifact.scheme import Scheme, WeightScheme, preset, with_group_size
from quant.methods.rtn import rtn
from quant.methods.scales import decode, encode, search_scales

SYM = with_group_size(preset("w4a16"), 32)
ASYM = Scheme(
    layout="pack-quantized",
    weights=WeightScheme(
        num_bits=4, kind="int", symmetric=False, strategy="group", group_size=32
    ),
)  # fmt: skip
SCHEMES = [SYM, ASYM, preset("w8a8"), preset("fp8")]


def random_weight(rows: int = 24, columns: int = 96, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(columns, generator=generator)
    return torch.randn(rows, columns, generator=generator) * spread


def error(weight: torch.Tensor, result: torch.Tensor, importance: torch.Tensor) -> float:
    return float(((weight - result.float()).square() * importance).sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_encode_and_decode_are_the_layouts_arithmetic(scheme: Scheme, dtype: torch.dtype) -> None:
    assert scheme.weights is not None
    weight = random_weight()
    scale, zero = min_max_qparams(weight, scheme.weights, dtype)
    whole = quantize(weight, scale, zero, scheme)
    reconstructed = dequantize(whole).float()
    width = weight.shape[1] // scale.shape[1]
    for column in range(0, weight.shape[1], 7):
        group = column // width
        z = None if zero is None else zero[:, group]
        codes = encode(weight[:, column], scale[:, group], z, scheme.weights)
        assert torch.equal(codes, whole.codes[:, column].float())
        assert torch.equal(decode(codes, scale[:, group], z), reconstructed[:, column])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_plain_rtn_is_min_max(scheme: Scheme) -> None:
    assert scheme.weights is not None
    weight = random_weight()
    before = weight.clone()
    result = rtn(weight, scheme, torch.bfloat16)
    expected = quantize(weight, *min_max_qparams(weight, scheme.weights, torch.bfloat16), scheme)
    assert torch.equal(result.codes.float(), expected.codes.float())
    assert torch.equal(result.scale, expected.scale)
    assert torch.equal(weight, before)


@given(seed=st.integers(0, 10_000), scheme=st.sampled_from(SCHEMES))
@settings(max_examples=25, deadline=None)
def test_searched_scales_never_lose_to_min_max(seed: int, scheme: Scheme) -> None:
    weight = random_weight(8, 64, seed)
    importance = random_weight(1, 64, seed + 1)[0].square()
    plain = error(weight, dequantize(rtn(weight, scheme, torch.float32)), importance)
    searched = rtn(weight, scheme, torch.float32, importance=importance)
    assert error(weight, dequantize(searched), importance) <= plain * (1 + 1e-5)


def test_search_helps_four_bit() -> None:
    weight = random_weight(64, 256)
    plain = error(weight, dequantize(rtn(weight, SYM, torch.float32)), torch.ones(256))
    found = dequantize(rtn(weight, SYM, torch.float32, scale_search=True))
    assert error(weight, found, torch.ones(256)) < 0.9 * plain


@pytest.mark.parametrize(
    ("label", "expected"), [("w4a16", 0.111), ("w8a8", 0.0082), ("fp8", 0.0266)]
)
def test_relative_error_on_gaussian_weights(label: str, expected: float) -> None:
    """The field's figures for round-to-nearest on Gaussian bf16 weights, 1024 columns."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    result = dequantize(rtn(weight, preset(label), torch.bfloat16)).float()
    assert float((result - weight).norm() / weight.norm()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_all_zero_groups_rows_and_columns(scheme: Scheme) -> None:
    weight = random_weight()
    weight[3] = 0
    weight[:, 5] = 0
    weight[:, 32:64] = 0
    for search in (False, True):
        result = rtn(weight, scheme, torch.bfloat16, scale_search=search)
        assert bool(torch.isfinite(result.scale.float()).all())
        assert bool((result.scale > 0).all())
        values = dequantize(result).float()
        assert not values[3].any()
        assert not values[:, 5].any()
        assert not values[:, 32:64].any()


def test_scales_that_do_not_fit_float16_are_errors() -> None:
    weight = random_weight()
    weight[0, 0] = 1e6
    with pytest.raises(SchemeError, match="overflows float16"):
        rtn(weight, SYM, torch.float16)
    with pytest.raises(SchemeError, match="vanishes in float16"):
        rtn(torch.full((4, 32), 1e-9), SYM, torch.float16)
    assert bool(torch.isfinite(rtn(weight, SYM, torch.bfloat16).scale).all())


def test_search_at_the_edge_of_float16_keeps_to_what_fits() -> None:
    """Candidates above and below the min-max scale must not fail where that one is fine."""
    assert SYM.weights is not None
    weight = torch.full((4, 32), 7e-5)
    weight[1] = 6.1e4  # -8 * scale is then close to 65504, the largest float16
    scale, _ = search_scales(weight, SYM.weights, torch.float16)
    assert bool((scale > 0).all())
    assert bool(torch.isfinite(scale).all())
