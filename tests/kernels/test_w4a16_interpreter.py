"""W4A16: packing is lossless, and every kernel computes `x @ dequantize(w).T`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.artifact.layout import QuantizedWeight, dequantize
from quant.artifact.scheme import preset, with_group_size
from runtime.kernels.backend import INTERPRETER, KernelTarget
from runtime.kernels.gate import gate
from runtime.kernels.tiles import card_key, lookup
from runtime.kernels.w4a16 import (
    can_pack_w4a16,
    pack_w4a16,
    unpack_w4a16,
    w4a16_gate_up,
    w4a16_linear,
)
from runtime.kernels.w4a16.launch import launch
from runtime.kernels.w4a16.slices import dequantized
from runtime.kernels.w4a16.tile import Tile, choose, num_whole_tiles, scratch_of
from runtime.kernels.workspace import KernelOptions

CPU = torch.device("cpu")
H200 = KernelTarget(
    name="NVIDIA H200", arch=90, num_sms=132, has_pdl=True, has_fp8=True, has_ptx=True
)


def random_weight(
    rows: int,
    width: int,
    group_size: int | None,
    symmetric: bool,
    dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    scheme = with_group_size(preset("w4a16"), group_size)
    assert scheme.weights is not None
    scheme = replace(scheme, weights=replace(scheme.weights, symmetric=symmetric))
    groups = 1 if group_size is None else width // group_size

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 8, shape, dtype=torch.int8)

    return QuantizedWeight(
        scheme=scheme,
        codes=codes(rows, width),
        scale=(torch.rand(rows, groups) * 0.02 + 0.002).to(dtype),
        zero_point=None if symmetric else codes(rows, groups),
    )


@st.composite
def weights(draw: st.DrawFn) -> QuantizedWeight:
    group_size = draw(st.sampled_from([None, 32, 64, 128]))
    width = draw(st.integers(1, 5)) * group_size if group_size else draw(st.integers(1, 300))
    torch.manual_seed(draw(st.integers(0, 1 << 16)))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    return random_weight(draw(st.integers(1, 70)), width, group_size, draw(st.booleans()), dtype)


@given(weights(), st.sampled_from([torch.float16, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_packing_keeps_every_weight(weight: QuantizedWeight, dtype: torch.dtype) -> None:
    """Whatever the scale's type: one rounding, from the exact product to the compute type."""
    packed = pack_w4a16(weight, dtype, CPU, KernelOptions())
    exact = replace(weight, scale=weight.scale.double().float())
    assert torch.equal(unpack_w4a16(packed), dequantize(exact).to(dtype))
    assert packed.group_size == weight.scheme.weights.group_size  # type: ignore[union-attr]


SHAPES = [(64, 256, 128), (40, 192, 64), (48, 96, 32), (33, 100, None), (80, 576, 64)]
TILES = [
    (1, Tile(kernel="gemv", block_n=4, k_blocks=2)),
    (1, Tile(kernel="few", block_m=8, block_n=16, num_warps=4, num_stages=1, k_blocks=4)),
    (3, Tile(kernel="few", block_m=8, block_n=32, num_warps=1, num_stages=1, k_blocks=1)),
    (
        9,
        Tile(kernel="few", block_m=16, num_warps=4, row_warps=2, split_k=2, scaling="centered"),
    ),
    (7, Tile(kernel="few", block_m=8, block_n=32, num_warps=2, num_stages=3, k_blocks=1)),
    (17, Tile(kernel="few", block_m=32, num_warps=2, row_warps=2, num_stages=2, k_blocks=1)),
    (3, Tile(kernel="warp", block_m=8, block_n=16, num_warps=2)),
    (9, Tile(kernel="warp", block_m=16, block_n=32, num_warps=4, split_k=2)),
    (5, Tile(kernel="tile", block_m=16, block_n=64, split_k=2, scaling="sums")),
    (20, Tile(kernel="tile", block_m=16, block_n=64, scaling="centered", join=4)),
    (55, Tile(kernel="tile", block_m=16, block_n=32, split_k=2, split_tail=True)),
    (35, Tile(kernel="tile", block_m=32, block_n=32, split_k=3, scaling="weights", join=2)),
    (18, Tile(kernel="tile", block_m=16, block_n=32, num_warps=1, scaling="weights")),
]


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_kernel_matches_the_reference(
    shape: tuple[int, int, int | None], symmetric: bool, nan_empty: None
) -> None:
    torch.manual_seed(0)
    weight, options = random_weight(*shape, symmetric), KernelOptions()
    packed = pack_w4a16(weight, torch.float16, CPU, options)
    matrix = dequantize(weight)
    assert torch.equal(dequantized(packed), matrix)
    # Every shape meets a tile once, symmetric or not; over the shapes a tile has both.
    turn, step = (SHAPES.index(shape) + symmetric) % 2, 1 if shape[1] < 300 else 3
    for num_rows, tile in TILES[turn * step :: 2 * step]:
        x_TK = torch.randn(num_rows, shape[1], dtype=torch.float16) + 0.3
        bias = torch.randn(shape[0], dtype=torch.float16)
        expected = x_TK.float() @ matrix.float().T + bias.float()
        got = launch(x_TK, packed, bias, tile)
        error = (got.float() - expected).norm() / expected.norm()
        assert error < 6e-4, f"{tile}: {error:.1e}"
        if tile.split_k > 1:
            assert torch.equal(got, launch(x_TK, packed, bias, tile))
    assert not options.workspace.counters(64).any()


@pytest.fixture
def nan_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN: an element that nobody wrote fails every comparison."""
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = real(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def test_gated_product_without_triton() -> None:
    packed = pack_w4a16(random_weight(64, 64, 64, True), torch.float16, CPU, KernelOptions())
    x_TK = torch.randn(4, 64, dtype=torch.float16)
    expected = gate(w4a16_linear(x_TK, packed), "gelu_tanh")
    assert torch.equal(w4a16_gate_up(x_TK, packed, "gelu_tanh"), expected)


def test_linear_without_triton_is_the_reference() -> None:
    packed = pack_w4a16(random_weight(48, 96, 32, False), torch.float16, CPU, KernelOptions())
    x_TK, bias = torch.randn(4, 96, dtype=torch.float16), torch.randn(48, dtype=torch.float16)
    expected = torch.nn.functional.linear(x_TK, unpack_w4a16(packed), bias)
    assert torch.equal(w4a16_linear(x_TK, packed, bias), expected)


def test_only_four_bit_integers_are_packed() -> None:
    assert can_pack_w4a16(random_weight(16, 64, 64, True))
    eight_bit = replace(random_weight(16, 128, 128, True), scheme=preset("w8a16"))
    assert not can_pack_w4a16(eight_bit)


@given(st.integers(1, 5000), st.integers(1, 2000), st.integers(1, 500), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_choice_fits_any_problem(rows: int, out: int, blocks: int, on_h200: bool) -> None:
    target = H200 if on_h200 else INTERPRETER
    tile = choose(rows, (16 * out, 32 * blocks), 32, target)
    assert tile.kernel not in ("few", "warp") or rows <= tile.block_m
    assert 1 <= tile.split_k <= max(1, blocks // 4)


def test_deterministic_choice_varies_in_extent_only() -> None:
    extent = {"block_m": 0, "block_n": 0, "num_warps": 0}
    chosen = {
        replace(choose(rows, (4096, 4096), 128, H200, deterministic=True), **extent)
        for rows in (1, 17, 300, 4097)
    }
    assert len(chosen) == 1


@given(st.integers(1, 1100), st.sampled_from([(6144, 4096), (576, 576), (4096, 14336)]))
@settings(max_examples=100, deadline=None)
def test_scratch_covers_every_number_of_rows(rows: int, shape: tuple[int, int]) -> None:
    """What packing reserves is enough for any launch afterwards."""
    reserved, _ = scratch_of(shape, 128, H200, False)
    tile = choose(rows, shape, 128, H200)
    tiles = -(-shape[0] // tile.block_n) * -(-rows // tile.block_m)
    split = tiles - num_whole_tiles(tiles, H200.num_sms, tile)
    assert (
        tile.kernel in ("dense", "wide")
        or split * tile.split_k * tile.block_m * tile.block_n <= reserved
    )


def test_cards_are_known_by_their_first_word() -> None:
    assert card_key("NVIDIA H200") == "h200"
    assert card_key("NVIDIA A100-SXM4-80GB") == "a100"
    assert lookup("NVIDIA No-Such-Card", "w4a16", "4096x4096 g128", 1) is None
