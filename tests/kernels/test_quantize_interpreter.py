"""Per-token quantization in Triton's interpreter: the very codes of the artifact's definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.artifact.scheme import ActivationScheme
from runtime.kernels.backend import INTERPRETER
from runtime.kernels.quantize import QuantizedActivations, code_dtype, quantize
from runtime.kernels.quantize.reference import quantize_reference

pytest.importorskip("triton")
INT8 = ActivationScheme()


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from runtime.kernels.quantize.kernel import launch_quantize

    codes = torch.empty(x.shape, dtype=torch.int8)
    scale = torch.empty(x.shape[0])
    launch_quantize(x, codes, scale, INTERPRETER)
    return codes, scale


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.sampled_from([1, 16, 63, 576, 1000]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    magnitude=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 2**31),
)
def test_codes_and_scales_are_the_definitions(
    rows: int, width: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, width, generator=generator) * magnitude).to(dtype)
    codes, scale = run(x)
    expected_codes, expected_scale = quantize_reference(x, INT8)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected_codes)


def test_ties_go_to_even_and_the_ends_are_clamped() -> None:
    x = torch.tensor([[127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -127.5, 126.5]])
    codes, scale = run(x)
    assert scale.tolist() == [1.0]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -128, 126]]


def test_a_row_of_zeros_has_the_scale_epsilon() -> None:
    codes, scale = run(torch.zeros(2, 16))
    assert scale.tolist() == [torch.finfo(torch.float32).eps] * 2
    assert not codes.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_bad_value_shows_in_its_rows_scale_alone(bad: float) -> None:
    x = torch.randn(3, 32)
    x[1, 7] = bad
    _, scale = run(x)
    assert scale.isfinite().tolist() == [True, False, True]


def test_no_rows() -> None:
    codes, scale = run(torch.empty(0, 32))
    assert codes.shape == (0, 32)
    assert scale.shape == (0,)


def test_front_door_without_triton() -> None:
    x = torch.randn(3, 32)
    for kind in ("int", "float"):
        scheme = ActivationScheme(kind=kind)
        result = quantize(x, scheme)
        assert isinstance(result, QuantizedActivations)
        assert result.codes_TK.dtype == code_dtype(scheme)
        assert result.dtype == torch.float32
        codes, scale = quantize_reference(x, scheme)
        assert torch.equal(result.codes_TK.float(), codes.float())
        assert torch.equal(result.scale_T, scale)
