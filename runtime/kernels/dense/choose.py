"""Which kernel and tile a product of one shape gets: the card's table, else a rule.

The rules were read off the sweeps on an H200 (`tiles/h200.json`).
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.product import Tile
from runtime.kernels.tiles import lookup
from runtime.kernels.workspace import Workspace

# From here on a tile's rows grow no more, and each tile more may be split another way.
MOST_BLOCKED = 512
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, *range(640, 16385, 128))


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
    block_m = max(16, min(128 if target.arch else 64, 1 << (num_rows - 1).bit_length()))
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
        num_stages=_stages(stages, target),
    )


def _stages(num_stages: int, target: KernelTarget) -> int:
    """Shared memory bounds them: 227 KB a program on sm_90, 99 KB on sm_86, 64 KB elsewhere."""
    if target.has_large_shared:
        return num_stages
    return 3 if target.arch else 2


def reserve(
    workspace: Workspace, shape: tuple[int, int], choose: Callable[[tuple[int, int, int]], Tile]
) -> None:
    """Make the scratch memory large enough for a weight [out, in] and every number of rows, so that
    no later product grows it under a captured graph."""
    for num_rows in ROW_COUNTS:
        tile = choose((num_rows, *shape))
        num_floats, num_tiles = scratch_size(tile, (num_rows, *shape))
        workspace.partials(num_floats)
        workspace.counters(num_tiles)
        if num_rows > MOST_BLOCKED and tile.splits == 1:
            return  # more tiles need no splits either


def scratch_size(tile: Tile, shape: tuple[int, int, int]) -> tuple[int, int]:
    """(partial sums, counters) of a product of shape (M, N, K)."""
    if tile.splits == 1 or tile.kernel not in ("gemm", "tma"):
        return 0, 0
    num_tiles = -(-shape[1] // tile.block_n) * -(-shape[0] // tile.block_m)
    return num_tiles * tile.splits * tile.block_n * tile.block_m, num_tiles


def fixed_tile(item_bytes: int, target: KernelTarget) -> Tile:
    """One tile for every number of rows: a row's sums then depend on that row alone."""
    return Tile(
        kernel="gemm",
        block_n=64,
        block_m=64,
        block_k=128 // item_bytes,
        num_warps=4,
        num_stages=_stages(4, target),
    )


def gemv_tile(width: int, item_bytes: int) -> Tile:
    """Four channels by 2 KiB of 8-bit codes, or 4 KiB of wider numbers, and 128 threads."""
    block_k = min(1 << (width - 1).bit_length(), 2048)
    return Tile(kernel="gemv", block_n=2 if item_bytes > 1 else 4, block_k=block_k, num_warps=4)
