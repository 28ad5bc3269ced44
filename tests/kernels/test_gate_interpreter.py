"""The gated activation in Triton's interpreter, with and without quantization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from quant.artifact.scheme import ActivationScheme
from runtime.kernels.backend import INTERPRETER
from runtime.kernels.gate import Activation, gate
from runtime.kernels.gate.reference import gate_reference
from runtime.kernels.quantize import QuantizedActivations
from runtime.kernels.quantize.reference import quantize_reference

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(
    gate_up: torch.Tensor, act: str, *, is_quantized: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from runtime.kernels.gate.kernel import launch_gate

    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    out = torch.empty(shape, dtype=torch.int8 if is_quantized else gate_up.dtype)
    scale = torch.empty(shape[0]) if is_quantized else None
    launch_gate(gate_up, act, out, scale, INTERPRETER)
    return out, scale


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # gives 0
@pytest.mark.parametrize("act", get_args(Activation))
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(1, 63, torch.float32), (3, 576, torch.float16), (2, 1500, torch.float32)],
)
def test_against_the_reference(act: str, rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(rows, 2 * width)).to(dtype)
    out, _ = run(gate_up, act, is_quantized=False)
    rtol = 1e-3 if dtype == torch.float16 else 1e-5
    expected = gate_reference(gate_up, act)
    torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=1e-5)


def test_quantized_is_the_rounded_product_quantized() -> None:
    gate_up = torch.randn(3, 2 * 1500).half()
    product, _ = run(gate_up, "silu", is_quantized=False)
    codes, scale = run(gate_up, "silu", is_quantized=True)
    expected_codes, expected_scale = quantize_reference(product, ActivationScheme())
    assert scale is not None
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected_codes)


def test_front_door_without_triton() -> None:
    gate_up = torch.randn(3, 128)
    quantized = gate(gate_up, "silu", ActivationScheme())
    assert isinstance(quantized, QuantizedActivations)
    expected, _ = quantize_reference(gate(gate_up, "silu"), ActivationScheme())
    assert torch.equal(quantized.codes_TK, expected)
