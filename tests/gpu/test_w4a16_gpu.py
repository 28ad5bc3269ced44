"""W4A16 on a real card: random shapes, groups and row counts against a float64 product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quant.artifact.layout import QuantizedWeight, dequantize
from quant.artifact.scheme import preset, with_group_size
from runtime.kernels.gate import Activation, gate
from runtime.kernels.w4a16 import (
    pack_w4a16,
    unpack_w4a16,
    w4a16_add_,
    w4a16_can_add,
    w4a16_gate_up,
    w4a16_linear,
)
from runtime.kernels.w4a16.launch import launch
from runtime.kernels.w4a16.slices import dequantized
from runtime.kernels.w4a16.tile import Tile
from runtime.kernels.w4a16.wide import launch_wide
from runtime.kernels.workspace import KernelOptions, Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 3e-3
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (1024, 4096), (48, 96), (6144, 4096)]
WIDE = Tile(kernel="wide", block_m=128, block_n=256, num_stages=4)
needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the kernel is Hopper's",
)
SPLIT = Tile(kernel="tile", block_m=16, block_n=64, split_k=4, scaling="sums")

FEW = [
    Tile(kernel="few", block_m=8, block_n=16, num_warps=8, num_stages=1, k_blocks=2),
    Tile(kernel="few", block_m=8, block_n=64, split_k=2, num_stages=1, prefetch=1, k_blocks=1),
    Tile(kernel="few", block_m=16, block_n=32, num_stages=2, scaling="centered", k_blocks=1),
    Tile(kernel="few", block_m=8, block_n=32, num_stages=3, prefetch=1, k_blocks=1),
    Tile(kernel="few", block_m=16, row_warps=2, num_stages=1, scaling="centered", k_blocks=1),
]


@pytest.fixture(scope="module")
def options() -> KernelOptions:
    return KernelOptions(workspace=Workspace("cuda"))


def random_weight(
    shape: tuple[int, int], group_size: int | None, symmetric: bool, dtype: torch.dtype
) -> QuantizedWeight:
    scheme = with_group_size(preset("w4a16"), group_size)
    assert scheme.weights is not None
    scheme = replace(scheme, weights=replace(scheme.weights, symmetric=symmetric))
    groups = 1 if group_size is None else shape[1] // group_size

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(-8, 8, size, dtype=torch.int8, device="cuda")

    return QuantizedWeight(
        scheme=scheme,
        codes=codes(*shape),
        scale=(torch.rand(shape[0], groups, device="cuda") * 0.02 + 0.002).to(dtype),
        zero_point=None if symmetric else codes(shape[0], groups),
    )


@pytest.fixture
def _nan_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN: an element that nobody wrote fails every comparison."""
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = real(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def check(got: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor) -> None:
    expected = x.double() @ matrix.double().T + bias.double()
    error = float((got.double() - expected).norm() / expected.norm())
    assert error < TOLERANCE, f"relative error {error:.1e}"


@given(
    shape=st.sampled_from(SHAPES),
    group_size=st.sampled_from([None, 32, 64, 128]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    num_rows=st.one_of(st.integers(1, 70), st.integers(1, 4097)),
    seed=st.integers(0, 1 << 16),
    deterministic=st.booleans(),
)
@example(
    shape=(576, 576),
    group_size=64,
    symmetric=False,
    dtype=torch.bfloat16,
    num_rows=4097,
    seed=0,
    deterministic=False,
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.usefixtures("_nan_empty")
def test_linear_matches_float64(
    options: KernelOptions,
    shape: tuple[int, int],
    group_size: int | None,
    symmetric: bool,
    dtype: torch.dtype,
    num_rows: int,
    seed: int,
    deterministic: bool,
) -> None:
    if group_size and shape[1] % group_size:
        group_size = 32
    torch.manual_seed(seed)
    weight = random_weight(shape, group_size, symmetric, dtype)
    chosen = replace(options, deterministic=deterministic)
    packed = pack_w4a16(weight, dtype, torch.device("cuda"), chosen)
    x_TK = torch.randn(num_rows, shape[1], dtype=dtype, device="cuda") + 0.2
    bias = torch.randn(shape[0], dtype=dtype, device="cuda")
    got = w4a16_linear(x_TK, packed, bias)
    check(got, x_TK, dequantize(weight), bias)
    assert torch.equal(got, w4a16_linear(x_TK, packed, bias)), "same inputs, other bits"
    assert not options.workspace.counters(64).any()


@pytest.mark.parametrize(
    ("shape", "group_size", "symmetric", "dtype"),
    [
        ((576, 1536), 128, True, torch.bfloat16),
        ((192, 576), 64, False, torch.float16),
        ((80, 544), 32, False, torch.bfloat16),
        ((1056, 200), None, True, torch.float16),
    ],
)
@pytest.mark.usefixtures("_nan_empty")
def test_few_rows(
    options: KernelOptions,
    shape: tuple[int, int],
    group_size: int | None,
    symmetric: bool,
    dtype: torch.dtype,
) -> None:
    """Every way of `few_rows` through the K-blocks, whole and ragged."""
    weight = random_weight(shape, group_size, symmetric, dtype)
    packed = pack_w4a16(weight, dtype, torch.device("cuda"), options)
    bias = torch.randn(shape[0], dtype=dtype, device="cuda")
    for tile in FEW:
        for num_rows in (1, tile.block_m - 1, tile.block_m):
            x_TK = torch.randn(num_rows, shape[1], dtype=dtype, device="cuda") + 0.2
            got = launch(x_TK, packed, bias, tile)
            check(got, x_TK, dequantize(weight), bias)
            assert torch.equal(got, launch(x_TK, packed, bias, tile)), "same inputs, other bits"
    assert not options.workspace.counters(64).any()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group_size", [None, 32, 64, 128])
def test_unpacking_is_exact(
    options: KernelOptions, group_size: int | None, symmetric: bool
) -> None:
    weight = random_weight((192, 640), group_size, symmetric, torch.bfloat16)
    packed = pack_w4a16(weight, torch.bfloat16, torch.device("cuda"), options)
    assert torch.equal(dequantized(packed), dequantize(weight))
    assert torch.equal(unpack_w4a16(packed), dequantize(weight))


def test_split_sums_repeat_under_load(options: KernelOptions) -> None:
    """Arrival order of the splits must not show: many launches, one answer."""
    weight = random_weight((1024, 4096), 128, True, torch.bfloat16)
    packed = pack_w4a16(weight, torch.bfloat16, torch.device("cuda"), options)
    x_TK = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    first = launch(x_TK, packed, None, SPLIT)
    assert all(torch.equal(first, launch(x_TK, packed, None, SPLIT)) for _ in range(200))


def test_graph_replay_follows_its_inputs(options: KernelOptions) -> None:
    weight = random_weight((1024, 4096), 128, True, torch.bfloat16)
    packed = pack_w4a16(weight, torch.bfloat16, torch.device("cuda"), options)
    x_TK = torch.randn(4, 4096, dtype=torch.bfloat16, device="cuda")
    pad = torch.nn.functional.pad
    w4a16_linear(x_TK, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = w4a16_linear(x_TK, packed)
        out = w4a16_linear(pad(hidden, (0, 3072)), packed)
    for _ in range(3):
        x_TK.normal_()
        graph.replay()
        hidden_now = w4a16_linear(x_TK, packed)
        assert torch.equal(out, w4a16_linear(pad(hidden_now, (0, 3072)), packed))


def test_deterministic_rows_do_not_see_each_other(options: KernelOptions) -> None:
    weight = random_weight((576, 1536), 64, False, torch.bfloat16)
    fixed = replace(options, deterministic=True)
    packed = pack_w4a16(weight, torch.bfloat16, torch.device("cuda"), fixed)
    x_TK = torch.randn(700, 1536, dtype=torch.bfloat16, device="cuda")
    whole = w4a16_linear(x_TK, packed)
    for first, last in [(0, 1), (5, 13), (100, 150), (300, 700)]:
        assert torch.equal(w4a16_linear(x_TK[first:last], packed), whole[first:last])


@pytest.mark.parametrize("num_rows", [513, 1000, 4096, 4500])
@pytest.mark.parametrize("shape", [(6144, 1024), (1056, 4096), (96, 14336)])
@pytest.mark.usefixtures("_nan_empty")
def test_prompts(options: KernelOptions, shape: tuple[int, int], num_rows: int) -> None:
    """Tiles that hang over both ends; with a bias, added to a sum, gated; by our own kernel where
    the card has one, and by a library's product beyond 4096 rows."""
    weight = random_weight(shape, 128, True, torch.bfloat16)
    packed = pack_w4a16(weight, torch.bfloat16, torch.device("cuda"), options)
    x_TK = torch.randn(num_rows, shape[1], dtype=torch.bfloat16, device="cuda")
    matrix = dequantize(weight)
    bias = torch.randn(shape[0], dtype=torch.bfloat16, device="cuda")
    got = w4a16_linear(x_TK, packed, bias)
    check(got, x_TK, matrix, bias)
    assert torch.equal(got, w4a16_linear(x_TK, packed, bias)), "same inputs, other bits"
    total = got.clone()
    assert w4a16_can_add(x_TK, packed)
    w4a16_add_(total, x_TK, packed)
    expected = got.double() + x_TK.double() @ matrix.double().T
    assert float((total.double() - expected).norm() / expected.norm()) < TOLERANCE
    pairs = x_TK.float() @ matrix.float().T
    gated, expected = w4a16_gate_up(x_TK, packed, "silu"), gate(pairs, "silu").double()
    assert float((gated.double() - expected).norm() / expected.norm()) < 2 * TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 7, 33, 100, 250])
def test_gated_product_has_the_bits_of_two_steps(options: KernelOptions, num_rows: int) -> None:
    weight = random_weight((3072, 1024), 128, True, torch.bfloat16)
    packed = pack_w4a16(weight, torch.bfloat16, torch.device("cuda"), options)
    x_TK = torch.randn(num_rows, 1024, dtype=torch.bfloat16, device="cuda")
    expected = gate(w4a16_linear(x_TK, packed), "silu")
    assert torch.equal(w4a16_gate_up(x_TK, packed, "silu"), expected)


@needs_hopper
@pytest.mark.parametrize(
    ("group_size", "symmetric", "dtype"),
    [
        (128, True, torch.bfloat16),
        (32, False, torch.float16),
        (64, False, torch.bfloat16),
        (None, True, torch.float16),
    ],
)
@pytest.mark.usefixtures("_nan_empty")
def test_wide_matches_float64(
    options: KernelOptions, group_size: int | None, symmetric: bool, dtype: torch.dtype
) -> None:
    """Edges of rows and of the weight; for the usual weight also whole tiles beside shared ones."""
    for shape in [(1000, 1280), (16384, 1024)][: 2 if symmetric and group_size else 1]:
        weight = random_weight(shape, group_size, symmetric, dtype)
        packed = pack_w4a16(weight, dtype, torch.device("cuda"), options)
        bias = torch.randn(shape[0], dtype=dtype, device="cuda")
        for num_rows in (17, 300, 400):
            x_TK = torch.randn(num_rows, shape[1], dtype=dtype, device="cuda") + 0.2
            got = launch(x_TK, packed, bias, WIDE)
            check(got, x_TK, dequantize(weight), bias)
            for _ in range(20):
                assert torch.equal(got, launch(x_TK, packed, bias, WIDE)), "other bits"
    assert not options.workspace.counters(264).any()


@needs_hopper
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_wide_gates_with_the_bits_of_two_steps(options: KernelOptions, act: Activation) -> None:
    weight = random_weight((3072, 1024), 128, True, torch.bfloat16)
    packed = pack_w4a16(weight, torch.bfloat16, torch.device("cuda"), options)
    for num_rows in (33, 300):
        x_TK = torch.randn(num_rows, 1024, dtype=torch.bfloat16, device="cuda")
        expected = gate(launch(x_TK, packed, None, WIDE), act)
        assert torch.equal(launch(x_TK, packed, None, WIDE, act), expected)


@needs_hopper
@pytest.mark.parametrize("num_rows", [40, 300])
def test_wide_adds_with_the_bits_of_two_steps(options: KernelOptions, num_rows: int) -> None:
    """Onto a residual, by whole tiles and by shared ones."""
    for shape in [(1024, 512), (1024, 4096)]:
        weight = random_weight(shape, 128, True, torch.bfloat16)
        packed = pack_w4a16(weight, torch.bfloat16, torch.device("cuda"), options)
        x_TK = torch.randn(num_rows, shape[1], dtype=torch.bfloat16, device="cuda")
        sum_TN = torch.randn(num_rows, shape[0], dtype=torch.bfloat16, device="cuda")
        expected = sum_TN + launch(x_TK, packed, None, WIDE)
        launch_wide(x_TK, packed, None, sum_TN, WIDE, adds=True)
        assert torch.equal(sum_TN, expected)
