"""W8A16 in Triton's interpreter: channel and groups, symmetric and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from quant.artifact.layout import QuantizedWeight, dequantize
from quant.artifact.scheme import Scheme, WeightScheme, preset
from runtime.kernels.backend import INTERPRETER
from runtime.kernels.dense.product import Tile
from runtime.kernels.w8a16 import can_pack_w8a16, pack_w8a16, unpack_w8a16
from runtime.kernels.w8a16.reference import w8a16_reference
from runtime.kernels.workspace import KernelOptions, Workspace

pytest.importorskip("triton")
RELATIVE_ERROR = 1e-3
GEMV = Tile(kernel="gemv", block_n=4, block_k=128)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def quantized_weight(
    shape: tuple[int, int], group: int | None, *, symmetric: bool = True
) -> QuantizedWeight:
    strategy: Literal["group", "channel"] = "group" if group else "channel"
    weights = WeightScheme(
        num_bits=8, kind="int", symmetric=symmetric, strategy=strategy, group_size=group
    )
    num_groups = shape[1] // group if group else 1
    zero_point = torch.randint(-128, 128, (shape[0], num_groups), dtype=torch.int8)
    return QuantizedWeight(
        scheme=Scheme(layout="pack-quantized", weights=weights),
        codes=torch.randint(-128, 128, shape, dtype=torch.int8),
        scale=torch.rand(shape[0], num_groups) + 0.1,
        zero_point=None if symmetric else zero_point,
    )


def gemm(splits: int = 1) -> Tile:
    return Tile(kernel="gemm", block_n=64, block_m=16, splits=splits)


@pytest.mark.parametrize(
    ("rows", "shape", "group", "symmetric", "tile"),
    [
        (1, (63, 224), None, True, GEMV),
        (1, (32, 192), 64, True, GEMV),
        (1, (33, 320), 32, False, GEMV),
        (1, (63, 224), None, False, gemm()),
        (5, (63, 224), None, True, gemm(splits=2)),
        (19, (70, 192), 64, True, gemm(splits=3)),
        (19, (70, 192), 64, False, gemm()),
        (3, (16, 576), 32, False, gemm(splits=4)),
    ],
)
def test_against_the_reference(
    rows: int, shape: tuple[int, int], group: int | None, symmetric: bool, tile: Tile
) -> None:
    from runtime.kernels.w8a16.launch import launch

    weight = quantized_weight(shape, group, symmetric=symmetric)
    options = KernelOptions(workspace=Workspace("cpu"))
    packed = pack_w8a16(weight, torch.float16, torch.device("cpu"), options)
    x, bias = torch.randn(rows, shape[1]).half(), torch.randn(shape[0]).half()
    out = launch(x, packed, bias, tile, INTERPRETER)
    expected = w8a16_reference(x, weight, bias)
    error = (out.float() - expected).norm() / expected.norm()
    assert float(error) < RELATIVE_ERROR


@pytest.mark.parametrize(("group", "symmetric"), [(None, True), (None, False), (64, False)])
def test_dequantized_and_unpacked(group: int | None, symmetric: bool) -> None:
    from runtime.kernels.w8a16.launch import dequantize as dequantize_packed

    weight = quantized_weight((5, 192), group, symmetric=symmetric)
    packed = pack_w8a16(weight, torch.float16, torch.device("cpu"), KernelOptions())
    assert torch.equal(unpack_w8a16(packed), dequantize(weight))
    assert torch.equal(dequantize_packed(packed), dequantize(weight).half())


def test_what_can_be_packed() -> None:
    assert can_pack_w8a16(quantized_weight((8, 32), None), torch.bfloat16)
    assert not can_pack_w8a16(quantized_weight((8, 32), None), torch.float32)
    assert not can_pack_w8a16(quantized_weight((8, 40), None), torch.bfloat16)
    int4 = QuantizedWeight(
        scheme=preset("w4a16"),
        codes=torch.zeros(8, 128, dtype=torch.int8),
        scale=torch.ones(8, 1),
    )
    assert not can_pack_w8a16(int4, torch.bfloat16)
