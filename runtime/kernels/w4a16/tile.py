"""Which kernel, with which constants, multiplies a given number of rows.

Measured entries come from `runtime.kernels.tiles` under "NxK gG" (or "NxK channel"); `choose` has
a rule for everything else. In deterministic mode the choice depends on the weight alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from runtime.kernels.backend import KernelTarget
from runtime.kernels.tiles import lookup

WIDE_BLOCK_K = 128
"""Inputs of the K-blocks that "wide" takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One choice.

    kernel: "gemv" (one row of inputs, no tensor cores), "few" (warps share out K, no shared
        memory), "warp" (warps share out K), "tile" (warps share out a tile), "wide" (a warp copies,
        two warpgroups multiply; Hopper only), "dense" (dequantize the weight, then a library's
        product).
    scaling: where scales are applied ("tile" and "few"): to "weights" ("tile" only), or to sums of
        weights that are "centered" or whose excess is taken off by "sums" of inputs.
    split_tail: only the tiles beyond the last full wave of programs are split ("tile" only).
    join: planes of a K-block in one matrix product ("tile" only): fewer waits, more registers.
    max_registers: a limit per thread, so that more programs share a multiprocessor.
    prefetch: K-blocks of a program's weights that are asked into L2 before it waits for inputs
        ("few": how many steps ahead a warp asks).
    num_stages: steps whose words are underway at once ("few": 1 and 2 in registers).
    k_blocks: K-blocks of a step of a program ("gemv") or of a warp ("few").
    row_warps: how many warps share out a program's rows, all others its K-blocks ("few" only).
    """

    kernel: Literal["gemv", "few", "warp", "tile", "wide", "dense"]
    block_m: int = 16
    block_n: int = 64
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    scaling: Literal["sums", "centered", "weights"] = "sums"
    split_tail: bool = False
    join: Literal[1, 2, 4] = 1
    max_registers: int | None = None
    prefetch: int = 32
    k_blocks: int = 32
    row_warps: int = 1


def problem_of(shape: tuple[int, int], group_size: int | None) -> str:
    """The key of a weight in a tile table."""
    unit = f"g{group_size}" if group_size else "channel"
    return f"{shape[0]}x{shape[1]} {unit}"


@lru_cache(maxsize=1 << 14)
def choose(
    num_rows: int,
    shape: tuple[int, int],
    group_size: int | None,
    target: KernelTarget,
    deterministic: bool = False,
) -> Tile:
    """The tile for `num_rows` rows of inputs and a weight of `shape` (out, in)."""
    if deterministic:
        return fixed(num_rows, target)
    measured = lookup(target.name, "w4a16", problem_of(shape, group_size), num_rows)
    if measured:
        return Tile(**measured)
    return rule(num_rows, shape, group_size, target)


def fixed(num_rows: int, target: KernelTarget) -> Tile:
    """The same products in the same order for any number of rows.

    Only the extent of a program's tile varies: what an element of it sums, and in which order,
    does not depend on the elements beside it. K is never split.
    """
    if num_rows <= 64:
        block_m = next(size for size in (16, 32, 64) if num_rows <= size)
        return Tile(
            kernel="tile", block_m=block_m, num_stages=_stages(target, 4), scaling="weights"
        )
    return Tile(
        kernel="tile",
        block_m=128,
        block_n=128,
        num_warps=8,
        num_stages=_stages(target, 4),
        scaling="weights",
    )


def num_whole_tiles(num_tiles: int, num_sms: int, tile: Tile) -> int:
    """How many tiles are not split: all, none, or with `split_tail` those of full waves."""
    if tile.split_k == 1:
        return num_tiles
    return num_tiles // num_sms * num_sms if tile.split_tail else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the programs of "wide" share out tiles.

    programs: each has as many whole tiles as the others.
    sharers: so many of them share the K-blocks of the tiles left over evenly.
    max_parts: no tile has more sharers; a power of two.
    """

    programs: int
    sharers: int
    max_parts: int


@lru_cache(maxsize=1 << 12)
def share_out(num_tiles: int, num_blocks: int, num_sms: int) -> Shares:
    """Tiles that do not fill the multiprocessors are shared, each by as many programs as the
    others where that is possible: then a part is a run of K-blocks of one tile. A share keeps at
    least four K-blocks, since it costs a round trip of float32 sums."""
    left, whole = num_tiles % num_sms, num_tiles // num_sms
    each = min(num_sms // left, num_blocks // 4, 8) if left else 1
    if each == 1 and 2 * left > num_sms and left * num_blocks >= 4 * num_sms and whole:
        # A share is longer than half of K, and so a tile in three of them at most.
        return Shares(programs=num_sms, sharers=num_sms, max_parts=4)
    each = max(1, each)
    programs = num_sms if whole else left * each
    return Shares(programs=programs, sharers=max(1, left * each), max_parts=_power(each))


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def scratch_of(
    shape: tuple[int, int], group_size: int | None, target: KernelTarget, deterministic: bool
) -> tuple[int, int]:
    """(partial sums, counters): the most that `choose` lets a weight of this shape need.

    The choice changes at the row counts below, and between them need grows with the rows.
    """
    sums, counters = 0, 0
    for num_rows in (1, 8, 16, 32, 64, 128, 256, 512, 1024):
        tile = choose(num_rows, shape, group_size, target, deterministic)
        if tile.kernel == "wide":
            sums = max(sums, 2 * target.num_sms * tile.block_m * tile.block_n)
            counters = max(counters, 2 * target.num_sms)
            # For weights that "wide" does not serve.
            tile = rule(num_rows, shape, group_size, target)
        if tile.kernel in ("dense", "gemv") or tile.split_k == 1:
            continue
        tiles = -(-shape[0] // tile.block_n) * -(-num_rows // tile.block_m)
        split = min(tiles, target.num_sms) if tile.split_tail else tiles
        sums = max(sums, split * tile.split_k * tile.block_m * tile.block_n)
        counters = max(counters, split)
    return sums, counters


def rule(
    num_rows: int, shape: tuple[int, int], group_size: int | None, target: KernelTarget
) -> Tile:
    """What the measured tables have in common.

    One row of a small weight: no tensor cores. Up to 16: small programs, everything in registers
    (other cards than NVIDIA's: narrow programs up to 8). Up to 256: tiles as wide as the rows, with
    K split until two programs share a multiprocessor, so that one unpacks while the other
    multiplies. More: the weight is dequantized once for all rows.
    """
    is_small = shape[0] * shape[1] <= 1 << 25 or not target.has_ptx
    if num_rows == 1 and shape[1] % 2 == 0 and is_small:
        return Tile(kernel="gemv", block_n=4, k_blocks=32, num_warps=4)
    if num_rows <= 16 and target.has_ptx:
        tile = _few(num_rows, shape, target)
        has_small_groups = group_size is not None and group_size < 128
        # Their scales take the registers of a second K-block and of a wider tile.
        return replace(tile, block_n=32, k_blocks=1) if has_small_groups else tile
    if num_rows <= 8:
        split = _split(shape, 32, 1, 4 * target.num_sms)
        return Tile(kernel="warp", block_m=8, block_n=32, split_k=split)
    if num_rows <= 256:
        return _wide(num_rows, shape, target)
    return Tile(kernel="dense")


def _few(num_rows: int, shape: tuple[int, int], target: KernelTarget) -> Tile:
    """Many small programs where there are rows for them, else more warps or splits of K."""
    block_m = 8 if num_rows <= 8 else 16
    small = Tile(
        kernel="few", block_m=block_m, num_stages=1, max_registers=128, prefetch=0, k_blocks=2
    )
    if shape[0] >= 128 * target.num_sms:
        return small if block_m == 8 else replace(small, block_n=32, num_stages=2, k_blocks=1)
    if shape[1] >= 8192 and block_m == 8:
        fill = 7 * target.num_sms // (2 * -(-shape[0] // 64))
        split = max(1, min(fill, shape[1] // 512))
        return replace(small, split_k=split, k_blocks=1)
    split = _split(shape, 32, 1, 2 * target.num_sms)
    return replace(small, block_n=32, num_warps=8, split_k=split)


def _wide(num_rows: int, shape: tuple[int, int], target: KernelTarget) -> Tile:
    block_m = next(size for size in (16, 32, 64, 128) if num_rows <= size or size == 128)
    m_tiles = -(-num_rows // block_m)
    if block_m == 128 and -(-shape[0] // 128) * m_tiles >= 3 * target.num_sms // 2:
        return Tile(
            kernel="tile",
            block_m=128,
            block_n=128,
            num_warps=8,
            num_stages=_stages(target, 3),
            scaling="weights",
            join=2,
            max_registers=128,
        )
    block_n = 128 if block_m <= 32 else 64
    return Tile(
        kernel="tile",
        block_m=block_m,
        block_n=block_n,
        split_k=_split(shape, block_n, m_tiles, 2 * target.num_sms),
        num_stages=_stages(target, 3),
        scaling="centered",
        join=4,
    )


def _stages(target: KernelTarget, on_hopper: int) -> int:
    """Cards before and beside Hopper have less shared memory for stages of wide tiles."""
    return on_hopper if target.has_large_shared else 2


def _split(shape: tuple[int, int], block_n: int, m_tiles: int, num_programs: int) -> int:
    """Splits of K, a power of two, that bring the tiles near `num_programs` programs.

    A split keeps at least four K-blocks: it costs a round trip of float32 sums.
    """
    tiles, split = -(-shape[0] // block_n) * m_tiles, 1
    while tiles * split * 2 <= num_programs and shape[1] // 128 // (split * 2) >= 4:
        split *= 2
    return split
