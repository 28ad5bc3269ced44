"""gate | up in slices of rows: what the whole gives."""

from __future__ import annotations

import pytest
import torch
from test_w4a16_interpreter import random_weight

import runtime.kernels.w4a16.slices as slices
from runtime.kernels.gate import gate
from runtime.kernels.w4a16 import pack_w4a16, unpack_w4a16
from runtime.kernels.workspace import KernelOptions


@pytest.mark.parametrize("num_rows", [1, 8, 19])
def test_slices_make_the_whole(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_ROWS", 8)
    device = torch.device("cpu")
    packed = pack_w4a16(random_weight(96, 128, 64, True), torch.float16, device, KernelOptions())
    x_TK = torch.randn(num_rows, 128, dtype=torch.float16)
    expected = gate(torch.nn.functional.linear(x_TK, unpack_w4a16(packed)), "silu")
    found = slices.gated_in_slices(x_TK, packed, "silu")
    assert found.shape == (num_rows, 48)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
