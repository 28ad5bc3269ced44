"""Products slice by slice: what the whole gives, whatever the slices."""

from __future__ import annotations

import pytest
import torch
from test_w4a16_interpreter import nan_empty, random_weight

import runtime.kernels.w4a16.slices as slices
from quant.artifact.layout import dequantize
from runtime.kernels.gate import gate
from runtime.kernels.w4a16 import W4A16Weight, pack_w4a16, unpack_w4a16
from runtime.kernels.w4a16.launch import launch
from runtime.kernels.w4a16.many import multiply_many
from runtime.kernels.w4a16.tile import Tile
from runtime.kernels.workspace import KernelOptions

__all__ = ["nan_empty"]

GROUPS = [None, 32, 64, 128]


def packed(out: int, width: int, group: int | None, *, symmetric: bool = True) -> W4A16Weight:
    weight = random_weight(out, width, group, symmetric)
    return pack_w4a16(weight, torch.float16, torch.device("cpu"), KernelOptions())


@pytest.fixture(params=[64, 48, 4096])
def slice_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of a slice: a divisor of nothing, too; and more than there are."""
    monkeypatch.setattr(slices, "SLICE_ROWS", request.param)
    return int(request.param)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", GROUPS)
def test_dequantized_is_the_definition(group: int | None, symmetric: bool) -> None:
    weight = random_weight(96, 256, group, symmetric)
    in_order = pack_w4a16(weight, torch.float16, torch.device("cpu"), KernelOptions())
    assert torch.equal(slices.dequantized(in_order), dequantize(weight))


@pytest.mark.parametrize(("group", "symmetric"), [(64, True), (32, False), (None, True)])
@pytest.mark.parametrize("num_rows", [1, 19])
@pytest.mark.usefixtures("slice_rows", "nan_empty")
def test_gated_slices_make_the_whole(num_rows: int, group: int | None, symmetric: bool) -> None:
    torch.manual_seed(0)
    weight = packed(224, 128, group, symmetric=symmetric)
    x_TK = torch.randn(num_rows, 128, dtype=torch.float16)
    expected = gate(torch.nn.functional.linear(x_TK, unpack_w4a16(weight)), "silu")
    found = slices.gated_in_slices(x_TK, weight, "silu")
    assert found.shape == (num_rows, 112)
    torch.testing.assert_close(found, expected, atol=8e-3, rtol=2e-3)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("widest", [0, 8192], ids=["whole", "slices"])
@pytest.mark.usefixtures("slice_rows", "nan_empty")
def test_slices_of_a_linear_make_the_whole(
    has_bias: bool, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(slices, "WIDEST", widest)
    weight = packed(208, 192, 64, symmetric=False)
    x_TK = torch.randn(7, 192, dtype=torch.float16)
    bias = torch.randn(208, dtype=torch.float16) if has_bias else None
    expected = torch.nn.functional.linear(x_TK, unpack_w4a16(weight), bias)
    found = launch(x_TK, weight, bias, Tile(kernel="dense"))
    torch.testing.assert_close(found, expected, atol=8e-3, rtol=2e-3)


@pytest.mark.usefixtures("slice_rows", "nan_empty")
def test_slices_are_added_to_what_is_there() -> None:
    torch.manual_seed(0)
    weight = packed(208, 192, 64, symmetric=False)
    x_TK, before = torch.randn(7, 192).half(), torch.randn(7, 208).half()
    expected = before + torch.nn.functional.linear(x_TK, unpack_w4a16(weight))
    total = before.clone()
    multiply_many(x_TK, weight, None, total, adds=True)
    torch.testing.assert_close(total, expected, atol=8e-3, rtol=2e-3)
