"""Which kernel and tile a product of one shape gets, where no table was measured."""

from __future__ import annotations

from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.product import Tile

FEW_ROWS = 16
SLOTS_PER_SM = 2


def small_tile(
    num_rows: int, num_channels: int, width: int, item_bytes: int, target: KernelTarget
) -> Tile:
    """A weight-streaming tile for up to a few hundred rows.

    The weights are read once, so what counts is that every multiprocessor has loads in flight: K is
    split until there are about two programs for each.
    """
    num_rows = max(1, num_rows)
    block_m = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    block_n = 64 if num_channels < 64 * SLOTS_PER_SM * target.num_sms else 128
    block_k = 256 // item_bytes if block_m <= 32 else 128 // item_bytes
    num_tiles = -(-num_channels // block_n) * -(-num_rows // block_m)
    splits = max(1, min(8, SLOTS_PER_SM * target.num_sms // num_tiles, width // (4 * block_k)))
    stages = 4 if target.arch >= 90 else 3
    return Tile(
        kernel="gemm",
        block_n=block_n,
        block_m=block_m,
        block_k=max(32, block_k),
        splits=splits,
        num_warps=8 if block_m * block_n > 8192 else 4,
        num_stages=stages,
    )


def fixed_tile(item_bytes: int, target: KernelTarget) -> Tile:
    """One tile for every number of rows: a row's sums then depend on that row alone."""
    return Tile(
        kernel="gemm",
        block_n=64,
        block_m=64,
        block_k=128 // item_bytes,
        num_warps=4,
        num_stages=4 if target.arch >= 90 else 3,
    )


def gemv_tile(width: int, item_bytes: int) -> Tile:
    """Four channels by 8 KiB at a time and 256 threads: 128 bytes a thread in flight."""
    block_k = min(1 << (width - 1).bit_length(), 8192 // item_bytes)
    return Tile(kernel="gemv", block_n=4, block_k=block_k, num_warps=8 if block_k >= 4096 else 4)
