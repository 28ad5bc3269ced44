"""Launches of `wide_kernel`: many rows of inputs on Hopper."""

from __future__ import annotations

from math import prod

from torch import Tensor

from runtime.kernels.backend import target_of
from runtime.kernels.w4a16.pack import ROWS, W4A16Weight
from runtime.kernels.w4a16.tile import WIDE_BLOCK_K, Tile, num_programs


def serves(weight: W4A16Weight) -> bool:
    """Whether the kernel can multiply by this weight: its K-blocks are whole, its scales as wide
    as its compute type."""
    return weight.block_k == WIDE_BLOCK_K and weight.scale.dtype == weight.dtype


def launch_wide(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, out_TN: Tensor, tile: Tile
) -> None:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from runtime.kernels.w4a16.wide_kernel import CONSUMERS, wide_kernel

    def blocks_of(values: Tensor, block: list[int], swizzle: int) -> TensorDescriptor:
        layout = NVMMASharedLayout(swizzle, 8 * values.element_size(), rank=values.ndim)
        # A dimension of one may have any stride.
        strides = [prod(values.shape[dim + 1 :]) for dim in range(values.ndim)]
        return TensorDescriptor(values, list(values.shape), strides, block, layout)

    assert serves(weight)
    num_rows, target = x_TK.shape[0], target_of(x_TK.device)
    out, num_kb, sixteens = weight.shape[0], weight.num_blocks, tile.block_n // ROWS
    codes = weight.codes.view(weight.codes.shape[0], num_kb * ROWS, WIDE_BLOCK_K // 4)
    m_tiles, n_tiles = -(-num_rows // tile.block_m), -(-out // tile.block_n)
    programs = num_programs(m_tiles * n_tiles, num_kb, target.num_sms)
    column, zero_point = [sixteens, 1, ROWS], weight.zero_point
    workspace = weight.options.workspace
    wide_kernel[(programs,)](
        blocks_of(x_TK, [tile.block_m, 64], 128),
        blocks_of(codes, [sixteens, ROWS, WIDE_BLOCK_K // 4], 64),
        blocks_of(weight.scale, column, 0),
        None if zero_point is None else blocks_of(zero_point, column, 0),
        *(bias, out_TN),
        workspace.partials(2 * programs * tile.block_m * tile.block_n),
        workspace.counters(CONSUMERS.value * programs),
        *(num_rows, out, num_kb, weight.groups_per_block, m_tiles, m_tiles * n_tiles),
        PER_BLOCK=max(weight.groups_per_block, 1),
        STAGES=tile.num_stages,
        PDL=target.has_pdl,
        num_warps=4,
        **({"launch_pdl": True} if target.has_pdl else {}),
    )
