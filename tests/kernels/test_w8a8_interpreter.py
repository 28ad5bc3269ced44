"""W8A8 in Triton's interpreter. int8 sums are exact, so every kernel must give the same bits.

e4m3 does not exist in the interpreter; `tests/gpu` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from quant.artifact.layout import QuantizedWeight
from quant.artifact.scheme import preset
from runtime.kernels.backend import INTERPRETER, KernelTarget
from runtime.kernels.dense.product import Product, Tile
from runtime.kernels.gate import Activation
from runtime.kernels.linear.cpu import has_exact_int8
from runtime.kernels.quantize import quantize
from runtime.kernels.w8a8 import (
    can_gate,
    can_pack_w8a8,
    choose_tile,
    int_mm,
    pack_w8a8,
    product_of,
    unpack_w8a8,
    w8a8_gate_up,
)
from runtime.kernels.w8a8.reference import w8a8_reference
from runtime.kernels.workspace import KernelOptions, Workspace

pytest.importorskip("triton")
SCHEME = preset("w8a8")
H200 = KernelTarget(
    name="NVIDIA H200", arch=90, num_sms=132, has_pdl=True, has_fp8=True, has_ptx=True
)
KERNELS = {
    "gemv": Tile(kernel="gemv", block_n=4, block_k=128),
    "gemm": Tile(kernel="gemm", block_n=64, block_m=16, block_k=64, splits=2),
    "tma": Tile(kernel="tma", block_n=64, block_m=32, block_k=64),
}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def quantized_weight(
    channels: int, width: int, scheme: str = "w8a8", size: float = 1.0
) -> QuantizedWeight:
    chosen = preset(scheme)
    codes = torch.randint(-128, 128, (channels, width), dtype=torch.int8)
    return QuantizedWeight(
        scheme=chosen,
        codes=codes if scheme == "w8a8" else codes.to(torch.float8_e4m3fn),
        scale=size * (torch.rand(channels, 1) + 0.1),
    )


def product(num_rows: int, channels: int, width: int, *, has_bias: bool) -> Product:
    options = KernelOptions(workspace=Workspace("cpu"))
    weight = pack_w8a8(
        quantized_weight(channels, width), torch.float16, torch.device("cpu"), options
    )
    a = quantize(torch.randn(num_rows, width).half(), weight.activations)
    return Product(
        x_MK=a.codes_TK,
        w_NK=weight.codes_NK,
        dtype=torch.float32,
        options=options,
        row_scale_M=a.scale_T,
        channel_scale_N=weight.scale_N,
        bias_N=torch.randn(channels).half() if has_bias else None,
    )


@pytest.mark.parametrize(("kernel", "rows"), [("gemv", 1), ("gemm", 1), ("gemm", 21), ("tma", 37)])
@pytest.mark.parametrize(("channels", "width"), [(63, 208), (128, 256)])
def test_bits_are_the_references(kernel: str, rows: int, channels: int, width: int) -> None:
    from runtime.kernels.w8a8.launch import launch

    asked = product(rows, channels, width, has_bias=False)
    out = launch(asked, KERNELS[kernel], INTERPRETER)
    assert asked.row_scale_M is not None
    assert asked.channel_scale_N is not None
    expected = w8a8_reference(asked.x_MK, asked.row_scale_M, asked.w_NK, asked.channel_scale_N)
    assert torch.equal(out, expected)


def test_bias_and_the_library_fallback() -> None:
    """The fallback is for GPUs; a processor's own product may saturate without a word."""
    from runtime.kernels.w8a8.launch import launch

    asked = product(21, 64, 208, has_bias=True)
    out = launch(asked, KERNELS["gemm"], INTERPRETER)
    assert asked.row_scale_M is not None
    assert asked.channel_scale_N is not None
    assert asked.bias_N is not None
    plain = w8a8_reference(asked.x_MK, asked.row_scale_M, asked.w_NK, asked.channel_scale_N)
    torch.testing.assert_close(out, plain + asked.bias_N)
    if has_exact_int8():
        torch.testing.assert_close(out, int_mm(asked))


def test_extreme_codes_do_not_saturate() -> None:
    from runtime.kernels.w8a8.launch import launch

    ones = torch.ones(1)
    asked = Product(
        x_MK=torch.full((1, 256), -128, dtype=torch.int8),
        w_NK=torch.full((4, 256), -128, dtype=torch.int8),
        dtype=torch.float32,
        options=KernelOptions(workspace=Workspace("cpu")),
        row_scale_M=ones,
        channel_scale_N=ones.expand(4).contiguous(),
    )
    for tile in KERNELS.values():
        assert launch(asked, tile, INTERPRETER).tolist() == [[256.0 * 128 * 128] * 4]


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 208), (2, 64), (21, 208)])
def test_gate_up_has_the_bits_of_its_parts(act: Activation, rows: int, width: int) -> None:
    from runtime.kernels.gate.kernel import launch_gate
    from runtime.kernels.w8a8.launch import launch, launch_gate_up

    weight = quantized_weight(4096 + 64, width, size=1e-3)
    options = KernelOptions(workspace=Workspace("cpu"))
    packed = pack_w8a8(weight, torch.float16, torch.device("cpu"), options)
    a = quantize(torch.randn(rows, width).half(), packed.activations)
    asked = product_of(a, packed)
    tile = Tile(kernel="gemm", block_n=64, block_m=16, block_k=64)
    if rows == 1:  # the interpreter pays by the program: few of them, each wide
        tile = Tile(kernel="gemv", block_n=64, block_k=256)
    assert can_gate(tile, asked.shape)

    shape = (rows, (4096 + 64) // 2)
    codes, scale = torch.empty(shape, dtype=torch.int8), torch.empty(rows)
    launch_gate_up(asked, act, tile, codes, scale, INTERPRETER)
    expected_codes, expected_scale = torch.empty_like(codes), torch.empty_like(scale)
    gate_up = launch(asked, tile, INTERPRETER)
    launch_gate(gate_up, act, expected_codes, expected_scale, INTERPRETER)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected_codes)


def test_a_token_that_is_no_number_has_no_finite_scale() -> None:
    packed = pack_w8a8(
        quantized_weight(128, 64, size=1e-3), torch.float16, torch.device("cpu"), KernelOptions()
    )
    x = torch.randn(3, 64).half()
    x[1, 5] = torch.nan
    gated = w8a8_gate_up(quantize(x, packed.activations), packed, "silu", packed.activations)
    assert gated is not None
    assert gated.scale_T.isfinite().tolist() == [True, False, True]


def test_what_can_gate() -> None:
    tile = Tile(kernel="gemm", block_n=64, block_m=16, block_k=64)
    assert can_gate(tile, (8, 256, 64))
    assert not can_gate(tile, (8, 224, 64))
    assert not can_gate(replace(tile, splits=2), (8, 256, 64))
    assert not can_gate(replace(tile, kernel="tma"), (8, 256, 64))
    assert can_gate(KERNELS["gemv"], (1, 30, 64))
    assert not can_gate(KERNELS["gemv"], (1, 31, 64))


def test_what_is_packed_is_the_weight() -> None:
    weight = quantized_weight(8, 32)
    packed = pack_w8a8(weight, torch.float16, torch.device("cpu"), KernelOptions())
    assert torch.equal(unpack_w8a8(packed), weight.codes.float() * weight.scale)


def test_what_can_be_packed() -> None:
    ampere = KernelTarget(
        name="NVIDIA A100", arch=80, num_sms=108, has_pdl=False, has_fp8=False, has_ptx=True
    )
    assert can_pack_w8a8(quantized_weight(8, 32), ampere)
    assert can_pack_w8a8(quantized_weight(8, 32, "fp8"), H200)
    assert not can_pack_w8a8(quantized_weight(8, 32, "fp8"), ampere)
    assert not can_pack_w8a8(quantized_weight(8, 40), H200)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 300, 5000])
def test_deterministic_fp8_takes_one_tile(rows: int) -> None:
    asked = Product(
        x_MK=torch.zeros(rows, 64).to(torch.float8_e4m3fn),
        w_NK=torch.zeros(64, 64).to(torch.float8_e4m3fn),
        dtype=torch.bfloat16,
        options=KernelOptions(deterministic=True),
    )
    one = choose_tile(
        Product(x_MK=asked.x_MK[:1], w_NK=asked.w_NK, dtype=asked.dtype, options=asked.options),
        H200,
    )
    assert choose_tile(asked, H200) == one
