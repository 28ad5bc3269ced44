"""Which kernel and tile a W8A16 product gets, where no table was measured."""

from __future__ import annotations

from dataclasses import replace

from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.choose import fixed_tile, gemv_tile, small_tile
from runtime.kernels.dense.product import Tile

MANY_ROWS = 512


def choose_tile(
    shape: tuple[int, int, int],
    group: int,
    has_zero_points: bool,
    deterministic: bool,
    target: KernelTarget,
) -> Tile:
    """Tile for (M, N, K); BLOCK_K never exceeds the group."""
    num_rows, num_channels, width = shape
    if deterministic:
        return _fit(fixed_tile(2, target), group)
    if num_rows > MANY_ROWS:
        return Tile(kernel="torch")
    if num_rows == 1 and not (has_zero_points and group == 0):
        tile = gemv_tile(width, 1)
        return replace(tile, block_k=max(tile.block_k, group))
    return _fit(small_tile(num_rows, num_channels, width, 1, target), group)


def _fit(tile: Tile, group: int) -> Tile:
    block_k = min(tile.block_k, 128)
    return replace(tile, block_k=min(block_k, group) if group else block_k)
