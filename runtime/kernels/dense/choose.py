"""Which kernel and tile a product of one shape gets: the card's table, or a rule where it is silent.

The rules were read off the sweeps on an H200 (`tiles/h200.json`).
"""

from __future__ import annotations

from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.product import Tile
from runtime.kernels.tiles import lookup


def measured_tile(
    op: str, shape: tuple[int, int, int], target: KernelTarget, *, detail: str = ""
) -> Tile | None:
    """The tile of the card's table for (M, N, K), None where nobody measured."""
    num_rows, num_channels, width = shape
    found = lookup(target.name, op, f"{num_channels}x{width}{detail}", num_rows)
    return None if found is None else Tile(**found)


def small_tile(
    num_rows: int, num_channels: int, width: int, item_bytes: int, target: KernelTarget
) -> Tile:
    """A weight-streaming tile for up to a few hundred rows.

    The weights are read once, so what counts is that every multiprocessor has loads in flight: K is
    split until there are about two programs for each, but never into less than eight blocks.
    """
    num_rows = max(1, num_rows)
    block_m = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    num_slots = 2 * target.num_sms
    is_wide = num_channels >= 64 * num_slots
    block_n = 128 if is_wide and block_m >= 64 else 64
    block_k = max(32, (256 if block_n * block_m <= 4096 else 128) // item_bytes)
    num_tiles = -(-num_channels // block_n) * -(-num_rows // block_m)
    stages = 3 if block_n * block_m >= 16384 or block_m == 64 else 4
    return Tile(
        kernel="gemm",
        block_n=block_n,
        block_m=block_m,
        block_k=block_k,
        splits=max(1, min(num_slots // num_tiles, width // (8 * block_k))),
        num_warps=4,
        num_stages=stages if target.arch >= 90 else 3,
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
    """Four channels by 2 KiB of 8-bit codes, or 4 KiB of wider numbers, and 128 threads."""
    block_k = min(1 << (width - 1).bit_length(), 2048)
    return Tile(kernel="gemv", block_n=2 if item_bytes > 1 else 4, block_k=block_k, num_warps=4)
