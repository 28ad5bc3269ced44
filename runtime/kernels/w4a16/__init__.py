"""A linear with 4-bit weights and 16-bit inputs: repacked once at load, unpacked in registers."""

from __future__ import annotations

from torch import Tensor

from runtime.kernels.backend import target_of, uses_triton
from runtime.kernels.gate import Activation, gate
from runtime.kernels.w4a16.launch import launch
from runtime.kernels.w4a16.many import gated_many, multiply_many
from runtime.kernels.w4a16.pack import (
    HALF_DTYPES,
    W4A16Weight,
    can_pack_w4a16,
    pack_w4a16,
    unpack_w4a16,
)
from runtime.kernels.w4a16.reference import w4a16_linear_reference
from runtime.kernels.w4a16.tile import Tile, choose, rule
from runtime.kernels.w4a16.wide import gates, launch_wide, serves

__all__ = [
    "W4A16Weight",
    "can_pack_w4a16",
    "pack_w4a16",
    "unpack_w4a16",
    "w4a16_add_",
    "w4a16_can_add",
    "w4a16_gate_up",
    "w4a16_linear",
]


def w4a16_linear(x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None = None) -> Tensor:
    """x_TK [T, in] in the weight's compute type -> [T, out] in the same, float32 sums.

    Triton kernels by T on a GPU, the reference elsewhere and for float32. Capturable in a graph.
    Same inputs, same bits; with `options.deterministic` a row's bits do not depend on the other
    rows either.
    """
    tile = _tile(x_TK, weight)
    if tile is None:
        return w4a16_linear_reference(x_TK, weight, bias)
    return launch(x_TK.contiguous(), weight, bias, tile)


def w4a16_can_add(x_TK: Tensor, weight: W4A16Weight) -> bool:
    """Whether `w4a16_add_` serves: for many rows, where it saves reading the sum again."""
    tile = _tile(x_TK, weight)
    return tile is not None and tile.kernel in ("dense", "wide")


def w4a16_add_(sum_TN: Tensor, x_TK: Tensor, weight: W4A16Weight) -> None:
    """sum_TN [T, out] += the product with x_TK [T, in]; `w4a16_can_add` must have said yes."""
    tile = _tile(x_TK, weight)
    if tile is not None and tile.kernel == "wide":
        launch_wide(x_TK.contiguous(), weight, None, sum_TN, tile, adds=True)
    else:
        multiply_many(x_TK.contiguous(), weight, None, sum_TN, adds=True)


def w4a16_gate_up(x_TK: Tensor, weight: W4A16Weight, act: Activation) -> Tensor:
    """act(gate) * up of a gate | up weight [2 n, in]: [T, in] -> [T, n]. Of many rows both are made
    together, and where the tile can; few rows take two kernels, which was quicker than one that
    gates its tile. The bits are those of two kernels, but for many rows.
    """
    tile = _tile(x_TK, weight)
    num_sms = target_of(x_TK.device).num_sms
    if tile is not None and gates(len(x_TK), weight, tile, num_sms):
        return launch(x_TK.contiguous(), weight, None, tile, act)
    if tile is None or tile.kernel != "dense":
        return gate(w4a16_linear(x_TK, weight), act)
    return gated_many(x_TK.contiguous(), weight, act)


def _tile(x_TK: Tensor, weight: W4A16Weight) -> Tile | None:
    """The tile to launch, None where the reference serves."""
    if not uses_triton(x_TK.device) or x_TK.dtype not in HALF_DTYPES or x_TK.shape[0] == 0:
        return None
    num_rows, target = x_TK.shape[0], target_of(x_TK.device)
    tile = choose(num_rows, weight.shape, weight.group_size, target, weight.options.deterministic)
    if tile.kernel == "wide" and not serves(weight):
        return rule(num_rows, weight.shape, weight.group_size, target)
    return tile
