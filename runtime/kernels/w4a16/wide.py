"""Launches of `wide_kernel`: many rows of inputs on Hopper."""

from __future__ import annotations

from math import prod

from torch import Tensor

from runtime.kernels.backend import target_of
from runtime.kernels.w4a16.pack import ROWS, W4A16Weight
from runtime.kernels.w4a16.tile import WIDE_BLOCK_K, Tile, share_out

PIECE_ROWS, PIECES = 64, 4
"""Rows of gate and of up that lie together in a tile, by turns, and how often they do."""
_KINDS: dict[str | None, int] = {None: 1, "adds": 2, "silu": 4, "gelu": 8, "gelu_tanh": 16}


def serves(weight: W4A16Weight) -> bool:
    """Whether the kernel can multiply by this weight: its K-blocks are whole, its scales as wide
    as its compute type."""
    return weight.block_k == WIDE_BLOCK_K and weight.scale.dtype == weight.dtype


def gates(num_rows: int, weight: W4A16Weight, tile: Tile, num_sms: int) -> bool:
    """Whether the kernel makes act(gate) * up of this weight gate | up with `tile`, and quicker
    than two kernels would: each warpgroup takes as many rows of either, and no tile is shared.
    Pieces of zero points would be too short to copy."""
    if tile.kernel != "wide" or tile.block_n != PIECES * PIECE_ROWS:
        return False
    if weight.zero_point is not None or weight.shape[0] % tile.block_n:
        return False
    tiles = weight.shape[0] // tile.block_n * -(-num_rows // tile.block_m)
    return share_out(tiles, weight.num_blocks, num_sms).max_parts == 1


def launch_wide(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, out_TN: Tensor, tile: Tile,
    act: str | None = None, *, adds: bool = False,
) -> None:  # fmt: skip
    """Fill `out` [T, out], or add to it with `adds`, or with `act` fill [T, out / 2]; a tile and a
    weight as `gates` has them."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from runtime.kernels.w4a16.wide_kernel import CONSUMERS, wide_kernel

    def blocks_of(values: Tensor, block: list[int], swizzle: int) -> TensorDescriptor:
        layout = NVMMASharedLayout(swizzle, 8 * values.element_size(), rank=values.ndim)
        # A dimension of one may have any stride.
        strides = [prod(values.shape[dim + 1 :]) for dim in range(values.ndim)]
        return TensorDescriptor(values, list(values.shape), strides, block, layout)

    assert serves(weight)
    assert act is None or (bias is None and weight.shape[0] % (PIECES * PIECE_ROWS) == 0)
    num_rows, target = x_TK.shape[0], target_of(x_TK.device)
    out, num_kb = weight.shape[0], weight.num_blocks
    sixteens = (tile.block_n if act is None else PIECE_ROWS) // ROWS
    codes = weight.codes.view(weight.codes.shape[0], num_kb * ROWS, WIDE_BLOCK_K // 4)
    m_tiles, n_tiles = -(-num_rows // tile.block_m), -(-out // tile.block_n)
    shares = share_out(m_tiles * n_tiles, num_kb, target.num_sms)
    column, zero_point = [sixteens, 1, ROWS], weight.zero_point
    workspace = weight.options.workspace
    wide_kernel[(shares.programs,)](
        blocks_of(x_TK, [tile.block_m, 64], 128),
        blocks_of(codes, [sixteens, ROWS, WIDE_BLOCK_K // 4], 64),
        blocks_of(weight.scale, column, 0),
        None if zero_point is None else blocks_of(zero_point, column, 0),
        *(bias, out_TN),
        workspace.partials(2 * shares.programs * tile.block_m * tile.block_n),
        workspace.counters(CONSUMERS.value * shares.programs),
        *(num_rows, out_TN.shape[1], num_kb, weight.groups_per_block, m_tiles, m_tiles * n_tiles),
        num_sharers=shares.sharers,
        up=out // 2 // ROWS,
        BLOCK_N=tile.block_n,
        PER_BLOCK=max(weight.groups_per_block, 1),
        MAX_PARTS=shares.max_parts,
        ACT=_KINDS["adds" if adds else act],
        STAGES=tile.num_stages,
        PDL=target.has_pdl,
        num_warps=4,
        **({"launch_pdl": True} if target.has_pdl else {}),
    )
