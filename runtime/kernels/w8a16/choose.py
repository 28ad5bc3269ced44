"""Which kernel and tile a W8A16 product gets, where no table was measured."""

from __future__ import annotations

from dataclasses import replace

from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.choose import fixed_tile, gemv_tile, small_tile
from runtime.kernels.dense.product import Tile

MANY_ROWS = 512


def choose_tile(shape: tuple[int, int, int], deterministic: bool, target: KernelTarget) -> Tile:
    """Tile for (M, N, K). A gemm goes by the weight's own blocks of columns, not by block_k."""
    num_rows, num_channels, width = shape
    if deterministic:
        return fixed_tile(2, target)
    if num_rows > MANY_ROWS:
        return Tile(kernel="torch")
    if num_rows == 1:
        return gemv_tile(width, 1)
    return replace(small_tile(num_rows, num_channels, width, 1, target), block_k=128)
