"""The matrix kernels in Triton's interpreter: every kernel, ragged edges, splits of K."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.backend import INTERPRETER, KernelTarget
from runtime.kernels.dense import dense_linear
from runtime.kernels.dense.choose import measured_tile, reserve, scratch_size, small_tile
from runtime.kernels.dense.product import Product, Tile
from runtime.kernels.dense.reference import product_reference
from runtime.kernels.workspace import KernelOptions, Workspace

pytest.importorskip("triton")
RELATIVE_ERROR = 1e-3
H200 = KernelTarget(
    name="NVIDIA H200", arch=90, num_sms=132, has_pdl=True, has_fp8=True, has_ptx=True
)
L40S = KernelTarget(
    name="NVIDIA L40S", arch=89, num_sms=142, has_pdl=False, has_fp8=True, has_ptx=True
)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def check(product: Product, tile: Tile) -> torch.Tensor:
    from runtime.kernels.dense.launch import launch

    out = launch(product, tile, INTERPRETER)
    expected = product_reference(
        product.x_MK, product.w_NK, product.row_scale_M, product.channel_scale_N, product.bias_N
    )
    assert out.dtype == product.dtype
    assert relative_error(out, expected) < RELATIVE_ERROR
    return out


def product(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float16, *, has_bias: bool = False
) -> Product:
    num_rows, num_channels, width = shape
    return Product(
        x_MK=torch.randn(num_rows, width).to(dtype),
        w_NK=torch.randn(num_channels, width).to(dtype),
        dtype=dtype,
        options=KernelOptions(workspace=Workspace("cpu")),
        bias_N=torch.randn(num_channels).to(dtype) if has_bias else None,
    )


@pytest.mark.parametrize(
    ("channels", "width", "block_k"), [(63, 100, 64), (8, 128, 128), (33, 72, 128)]
)
def test_gemv(channels: int, width: int, block_k: int) -> None:
    tile = Tile(kernel="gemv", block_n=4, block_k=block_k)
    check(product((1, channels, width), has_bias=True), tile)


@settings(max_examples=8, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    channels=st.sampled_from([16, 63, 130]),
    width=st.sampled_from([32, 100, 256]),
    splits=st.integers(1, 4),
    has_bias=st.booleans(),
)
def test_gemm(num_rows: int, channels: int, width: int, splits: int, has_bias: bool) -> None:
    tile = Tile(kernel="gemm", block_n=64, block_m=16, block_k=32, splits=splits)
    asked = product((num_rows, channels, width), has_bias=has_bias)
    check(asked, tile)
    counters = asked.options.workspace.counters(1)
    assert not counters.any(), "a split product puts its counters back to zero"


def test_gemm_float32() -> None:
    tile = Tile(kernel="gemm", block_n=64, block_m=16, block_k=32, splits=2)
    check(product((5, 70, 96), torch.float32, has_bias=True), tile)


@pytest.mark.parametrize("per_sm", [1, 2])
def test_gemm_tma(per_sm: int) -> None:
    tile = Tile(kernel="tma", block_n=64, block_m=32, block_k=32, per_sm=per_sm)
    check(product((70, 136, 104), has_bias=True), tile)


@pytest.mark.parametrize("target", [H200, L40S], ids=["h200", "l40s"])
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 14336), (576, 576), (896, 4864), (192, 8192), (48, 96)]
)
def test_reserved_scratch_is_enough_for_every_number_of_rows(
    shape: tuple[int, int], target: KernelTarget
) -> None:
    """Between the counts that `reserve` tries, a product never needs more."""

    def choose(asked: tuple[int, int, int]) -> Tile:
        return small_tile(*asked, 1, target)

    workspace = Workspace("cpu")
    reserve(workspace, shape, choose)
    reserved = workspace.num_bytes
    for num_rows in (*range(1, 1025), *range(1025, 9000, 57)):
        num_floats, num_tiles = scratch_size(choose((num_rows, *shape)), (num_rows, *shape))
        workspace.partials(num_floats)
        workspace.counters(num_tiles)
    assert workspace.num_bytes == reserved


def test_blackwell_without_large_shared_memory_has_the_stages_of_ada() -> None:
    """sm_120 has 99 KB a program, as sm_89; sm_100 has Hopper's 227 KB."""
    ada, desk, server = (replace(L40S, arch=arch) for arch in (89, 120, 100))
    shape = (100, 6144, 4096)
    assert small_tile(*shape, 2, desk) == small_tile(*shape, 2, ada)
    assert small_tile(*shape, 2, server).num_stages > small_tile(*shape, 2, desk).num_stages


@pytest.mark.parametrize("op", ["dense", "w8a16", "w8a8_fp8", "w8a8_int8"])
def test_measured_tiles_can_be_launched(op: str) -> None:
    """What the tables say is a tile: known names, powers of two, blocks a tensor core takes."""
    file = resources.files("runtime.kernels").joinpath("tiles", "h200.json")
    for problem, by_rows in json.loads(file.read_text())[op].items():
        for num_rows, constants in by_rows.items():
            tile = Tile(**constants)
            sizes = (tile.block_n, tile.block_m, tile.block_k, tile.num_warps)
            assert all(size & (size - 1) == 0 for size in sizes), (problem, num_rows)
            assert tile.kernel != "gemv" or num_rows == "1"
            shape = (int(num_rows), *map(int, problem.partition(" ")[0].split("x")))
            detail = problem[len(problem.partition(" ")[0]) :]
            assert measured_tile(op, shape, H200, detail=detail) == tile


def test_no_rows() -> None:
    from runtime.kernels.dense.launch import launch

    tile = Tile(kernel="gemm", block_n=64, block_m=16, block_k=32)
    assert launch(product((0, 16, 32)), tile, INTERPRETER).shape == (0, 16)


def test_front_door_without_triton() -> None:
    x, w, bias = torch.randn(3, 32), torch.randn(8, 32), torch.randn(8)
    expected = torch.nn.functional.linear(x, w, bias)
    assert torch.equal(dense_linear(x, w, bias, KernelOptions()), expected)
