"""Which kernel and tile a W8A16 product gets: the card's table, or a rule where it is silent."""

from __future__ import annotations

from dataclasses import replace

from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.choose import fixed_tile, gemv_tile, measured_tile, small_tile
from runtime.kernels.dense.product import Tile

MANY_ROWS = 512
# From here on reading the weights takes longer than what the tensor cores add to it.
WIDE = 16384


def choose_tile(
    shape: tuple[int, int, int], group: int, deterministic: bool, target: KernelTarget
) -> Tile:
    """Tile for (M, N, K). A gemm goes by the weight's own blocks of columns, not by block_k."""
    num_rows, num_channels, width = shape
    if deterministic:
        return fixed_tile(2, target)
    found = measured_tile("w8a16", shape, target, detail=f" g{group}" if group else "")
    if found is not None:
        return found
    if num_rows > MANY_ROWS:
        return Tile(kernel="torch")
    if num_rows == 1 and num_channels < WIDE:
        return replace(gemv_tile(width, 1), block_n=8)
    tile = small_tile(num_rows, num_channels, width, 2, target)
    block_n = 128 if num_channels >= WIDE else tile.block_n
    return replace(
        tile, block_k=128, block_n=block_n, num_warps=8 if block_n * tile.block_m >= 8192 else 4
    )
