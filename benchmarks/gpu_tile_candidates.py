"""Which tiles are worth timing for a product: families that won or nearly won on an H200, as data.

Knows what a tile may look like, not how fast it is; touches no GPU. To look further, add a row to a
family: whatever does not fit the card's shared memory or the shape falls out by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

import torch

from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.choose import gemv_tile
from runtime.kernels.dense.product import Tile as DenseTile
from runtime.kernels.tiles import Constants, sorted_rows
from runtime.kernels.w4a16.tile import Tile as W4Tile
from runtime.kernels.w4a16.tile import problem_of
from runtime.kernels.w4a16.tile import rule as w4a16_rule

Op = Literal["w4a16", "w8a8", "fp8", "w8a16", "dense"]
Tile = W4Tile | DenseTile
# The names of ops in a tile table.
TABLES: dict[Op, str] = {
    "w4a16": "w4a16", "w8a8": "w8a8_int8", "fp8": "w8a8_fp8", "w8a16": "w8a16", "dense": "dense",
}  # fmt: skip
# Bytes of one number of the inputs, and bits of one of the weights, where they wait in shared
# memory.
INPUT_BYTES: dict[Op, int] = {"w4a16": 2, "w8a8": 1, "fp8": 1, "w8a16": 2, "dense": 2}
WEIGHT_BITS: dict[Op, int] = {"w4a16": 4, "w8a8": 8, "fp8": 8, "w8a16": 8, "dense": 16}
W4A16_BLOCK_K = 128

# Of a W4A16 "gemv": k_blocks, num_warps, block_n. A thread holds 8 to 16 words, a warp has 8 to 16
# K-blocks in a step.
GEMV_STEPS = tuple(
    (kb, warps, bn)
    for kb, warps, bn in product((8, 16, 32, 64), (1, 2, 4, 8), (2, 4, 8))
    if 8 <= kb * bn * 16 // (warps * 32) <= 16 and 4 * warps <= kb <= 16 * warps
)
# "warp", by block_m: block_n, num_warps, num_stages; each with every split of K below.
WARP_TILES = ((32, 4, 4), (32, 2, 4), (64, 4, 2), (64, 4, 4))
WARP_SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class FewFamily:
    """W4A16 "few" kernels, each with every split of K: `rows` of weights a warp."""

    rows: int
    num_warps: int
    k_blocks: int = 1
    num_stages: int = 1
    row_warps: int = 1
    registers: int | None = None


FEW_SPLITS = (1, 2, 4, 7)
FEW_FAMILIES = (
    FewFamily(rows=16, num_warps=4, k_blocks=4),
    FewFamily(rows=32, num_warps=4, k_blocks=2),
    FewFamily(rows=32, num_warps=8, k_blocks=2),
    FewFamily(rows=64, num_warps=4, k_blocks=2, registers=128),
    FewFamily(rows=64, num_warps=4, registers=128),
    FewFamily(rows=32, num_warps=4, num_stages=2),
    FewFamily(rows=32, num_warps=8, num_stages=2),
    FewFamily(rows=32, num_warps=4, num_stages=4),
    FewFamily(rows=64, num_warps=4, num_stages=3, registers=128),
    FewFamily(rows=32, num_warps=4, k_blocks=2, row_warps=2, registers=128),
    FewFamily(rows=32, num_warps=8, row_warps=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Family:
    """W4A16 "tile" kernels up to `rows` rows: the product of everything below.

    tails: splits of the tiles beyond the last full wave. registers: limits per thread.
    """

    rows: tuple[int, int]
    block_m: int
    block_n: tuple[int, ...]
    num_warps: tuple[int, ...] = (4,)
    num_stages: tuple[int, ...] = (3, 4)
    scalings: tuple[Literal["sums", "centered", "weights"], ...] = ("centered",)
    joins: tuple[Literal[1, 2, 4], ...] = (2, 4)
    splits: tuple[int, ...] = (1, 2, 4, 8)
    tails: tuple[int, ...] = ()
    registers: tuple[int | None, ...] = (None,)


# "wide": block_n, block_m, num_stages.
WIDE_TILES = (
    (256, 128, 3), (256, 128, 4), (128, 128, 5), (128, 256, 3), (256, 64, 5), (256, 32, 6),
)  # fmt: skip

MANY = 1 << 30
W4_FAMILIES = (
    W4Family(rows=(2, 8), block_m=8, block_n=(64, 128), scalings=("sums", "centered"),
             joins=(1, 4)),
    W4Family(rows=(2, 16), block_m=16, block_n=(64, 128), num_warps=(4, 8), joins=(4,)),
    W4Family(rows=(17, 32), block_m=32, block_n=(64, 128), num_warps=(4, 8)),
    W4Family(rows=(33, 128), block_m=64, block_n=(64, 128), num_warps=(4, 8), splits=(1, 2, 4)),
    W4Family(rows=(33, 128), block_m=64, block_n=(128,), scalings=("weights",), splits=(1, 2, 4)),
    W4Family(rows=(33, 256), block_m=64, block_n=(256,), num_warps=(8,), num_stages=(3,),
             scalings=("weights",), joins=(2,), splits=(1, 2, 4)),
    W4Family(rows=(65, MANY), block_m=128, block_n=(64, 128), num_stages=(2, 3),
             scalings=("weights",), joins=(1, 2), splits=(1, 2, 4), tails=(2, 4)),
    W4Family(rows=(65, MANY), block_m=128, block_n=(128,), num_warps=(8,), num_stages=(3, 4),
             scalings=("weights",), joins=(2,), splits=(1, 2), tails=(2,), registers=(None, 128)),
    W4Family(rows=(65, MANY), block_m=128, block_n=(256,), num_warps=(8,), num_stages=(3, 4),
             scalings=("weights",), joins=(1, 2), splits=(1, 2, 4), tails=(2,)),
)  # fmt: skip

# Of a gemv over 8- and 16-bit weights: block_n, bytes of a block's columns, num_warps.
GEMV_BLOCKS = (
    (4, 4096, 4), (2, 4096, 4), (4, 2048, 4), (8, 2048, 4), (8, 1024, 4), (16, 1024, 4),
    (4, 1024, 2), (8, 1024, 2), (2, 2048, 2), (2, 2048, 4), (2, 1024, 2),
)  # fmt: skip
Row = tuple[
    Literal["gemm", "tma"], int, int, int, int, int
]  # kernel, block_m, block_n, block_k, warps, stages
# W8A8 and FP8 up to so many rows; each with every split of K.
W8A8_TILES: tuple[tuple[int, tuple[Row, ...]], ...] = (
    (32, (
        ("gemm", 16, 64, 128, 4, 5), ("gemm", 16, 64, 256, 4, 4), ("gemm", 16, 64, 512, 4, 3),
        ("gemm", 16, 128, 128, 4, 5), ("tma", 16, 64, 128, 4, 6), ("tma", 16, 64, 256, 4, 4),
        ("tma", 16, 128, 128, 4, 4),
    )),
    (64, (
        ("gemm", 64, 64, 256, 4, 3), ("gemm", 64, 128, 128, 4, 4), ("tma", 64, 64, 128, 4, 4),
        ("tma", 64, 64, 256, 4, 3), ("tma", 64, 128, 128, 4, 3), ("tma", 64, 128, 128, 4, 4),
        ("tma", 64, 128, 256, 4, 3), ("tma", 64, 256, 128, 8, 4), ("tma", 64, 32, 256, 4, 4),
        ("tma", 64, 32, 256, 4, 5), ("gemm", 64, 64, 256, 4, 6),
    )),
    (128, (
        ("gemm", 128, 64, 128, 4, 4), ("gemm", 128, 128, 128, 4, 3), ("tma", 128, 64, 128, 4, 4),
        ("tma", 128, 64, 256, 4, 3), ("tma", 128, 128, 128, 4, 3), ("tma", 128, 256, 128, 8, 3),
        ("tma", 64, 128, 128, 4, 3),
    )),
    (MANY, (
        ("gemm", 128, 64, 128, 4, 4), ("gemm", 128, 128, 128, 4, 3), ("gemm", 128, 64, 128, 4, 3),
        ("tma", 128, 64, 128, 4, 4), ("tma", 128, 64, 256, 4, 3), ("tma", 128, 128, 128, 4, 3),
        ("tma", 128, 128, 128, 8, 4), ("tma", 128, 256, 128, 8, 3), ("tma", 256, 64, 128, 8, 4),
        ("tma", 256, 128, 128, 8, 3),
    )),
)  # fmt: skip
# W8A16: block_k is the weight's own.
W8A16_TILES: tuple[tuple[int, tuple[Row, ...]], ...] = (
    (32, (
        ("gemm", 16, 64, 128, 4, 4), ("gemm", 16, 64, 128, 4, 6), ("gemm", 16, 128, 128, 4, 4),
        ("gemm", 16, 128, 128, 4, 6), ("gemm", 16, 128, 128, 8, 4), ("gemm", 16, 128, 128, 8, 6),
    )),
    (64, (
        ("gemm", 64, 64, 128, 4, 4), ("gemm", 64, 128, 128, 4, 4), ("gemm", 64, 128, 128, 8, 3),
        ("gemm", 64, 128, 128, 8, 4),
    )),
    (MANY, (
        ("gemm", 64, 128, 128, 8, 3), ("gemm", 128, 64, 128, 4, 3), ("gemm", 128, 128, 128, 4, 4),
        ("gemm", 128, 128, 128, 8, 3), ("gemm", 128, 128, 128, 8, 4), ("gemm", 128, 256, 128, 8, 3),
    )),
)  # fmt: skip
DENSE_TILES: tuple[tuple[int, tuple[Row, ...]], ...] = (
    (64, (
        ("gemm", 16, 64, 128, 4, 4), ("gemm", 16, 128, 64, 4, 5), ("gemm", 16, 128, 128, 4, 3),
        ("gemm", 16, 128, 128, 8, 3), ("gemm", 16, 64, 64, 4, 6), ("gemm", 16, 128, 64, 4, 4),
    )),
)  # fmt: skip
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A weight [n, k]; group: columns that share a scale, 0 where a whole row does."""

    op: Op
    n: int
    k: int
    group: int = 0

    @property
    def key(self) -> str:
        """As a tile table spells it."""
        if self.op == "w4a16":
            return problem_of((self.n, self.k), self.group or None)
        return f"{self.n}x{self.k}" + (f" g{self.group}" if self.group else "")

    @property
    def num_bytes(self) -> int:
        """Codes and 16-bit scales: what has to be read at least."""
        scales = 0 if self.op == "dense" else self.n * (self.k // self.group if self.group else 1)
        return self.n * self.k * WEIGHT_BITS[self.op] // 8 + 2 * scales


def candidates(
    problem: Problem, rows: int, target: KernelTarget, shared_bytes: int
) -> tuple[Tile, ...]:
    """Tiles that can be launched for `rows` rows of inputs and may be the fastest, each once."""
    found = (
        _w4a16(problem, rows, target) if problem.op == "w4a16" else _others(problem, rows, target)
    )
    fitting = (tile for tile in found if staged_bytes(problem.op, tile) <= shared_bytes)
    return tuple(dict.fromkeys(fitting))


def _w4a16(problem: Problem, rows: int, target: KernelTarget) -> Iterator[Tile]:
    if rows == 1:
        for k_blocks, warps, block_n in GEMV_STEPS:
            yield W4Tile(kernel="gemv", k_blocks=k_blocks, num_warps=warps, block_n=block_n)
    if rows <= 16:
        yield from _few(problem, rows, target)
        yield from _warps(problem, rows, target)
    for family in W4_FAMILIES:
        if family.rows[0] <= max(rows, 2) <= family.rows[1]:
            yield from _family(family, problem, rows, target)
    if rows > 16 and target.arch == 90 and problem.k % W4A16_BLOCK_K == 0:
        for block_n, block_m, stages in WIDE_TILES:
            yield W4Tile(kernel="wide", block_m=block_m, block_n=block_n, num_stages=stages)
    if rows >= 256:
        yield W4Tile(kernel="dense")


def _few(problem: Problem, rows: int, target: KernelTarget) -> Iterator[Tile]:
    block_m = 8 if rows <= 8 else 16
    scalings: tuple[Literal["sums", "centered"], ...] = ("sums", "centered")
    for family, split in product(FEW_FAMILIES, FEW_SPLITS):
        block_n = family.rows * family.row_warps
        turn = family.num_warps // family.row_warps * family.k_blocks
        has_work = problem.k // W4A16_BLOCK_K >= split * turn
        if split > 1 and not (has_work and _fits(-(-problem.n // block_n) * split, target)):
            continue
        for scaling, prefetch in product(scalings[: block_m // 8], (0, 1)):
            yield W4Tile(
                kernel="few", block_m=block_m, block_n=block_n, split_k=split,
                num_warps=family.num_warps, num_stages=family.num_stages, scaling=scaling,
                max_registers=family.registers, prefetch=prefetch, k_blocks=family.k_blocks,
                row_warps=family.row_warps,
            )  # fmt: skip


def _warps(problem: Problem, rows: int, target: KernelTarget) -> Iterator[Tile]:
    for (block_n, warps, stages), split in product(WARP_TILES, WARP_SPLITS):
        has_work = problem.k // W4A16_BLOCK_K >= split * warps
        if split == 1 or (has_work and _fits(-(-problem.n // block_n) * split, target)):
            yield W4Tile(
                kernel="warp", block_m=8 if rows <= 8 else 16, block_n=block_n, split_k=split,
                num_warps=warps, num_stages=stages, prefetch=128,
            )  # fmt: skip


def _family(family: W4Family, problem: Problem, rows: int, target: KernelTarget) -> Iterator[Tile]:
    for block_n, warps, stages, scaling, join, registers in product(
        family.block_n, family.num_warps, family.num_stages, family.scalings, family.joins,
        family.registers,
    ):  # fmt: skip
        plain = W4Tile(
            kernel="tile", block_m=family.block_m, block_n=block_n, num_warps=warps,
            num_stages=stages, scaling=scaling, join=join, max_registers=registers, prefetch=128,
        )  # fmt: skip
        num_tiles = -(-problem.n // block_n) * -(-rows // family.block_m)
        for split in family.splits:
            has_work = problem.k // W4A16_BLOCK_K // split >= 4
            if split == 1 or (has_work and _fits(num_tiles * split, target)):
                yield replace(plain, split_k=split)
        if num_tiles > target.num_sms and num_tiles % target.num_sms:
            yield from (replace(plain, split_k=split, split_tail=True) for split in family.tails)


def _fits(num_programs: int, target: KernelTarget) -> bool:
    """More programs than this wait for each other, and a split of K has nothing to fill."""
    return num_programs <= 7 * target.num_sms


def _others(problem: Problem, rows: int, target: KernelTarget) -> Iterator[Tile]:
    if problem.op != "w8a8" and (problem.op != "fp8" or target.arch >= 90):
        yield DenseTile(kernel="torch")
    item = WEIGHT_BITS[problem.op] // 8
    if rows == 1:
        yield gemv_tile(problem.k, item)
        for block_n, num_bytes, warps in GEMV_BLOCKS:
            yield DenseTile(
                kernel="gemv", block_n=block_n, block_k=num_bytes // item, num_warps=warps
            )
    per_sm = 8 if rows < 1024 else 2  # one stores its tile while the other multiplies
    families = {"dense": DENSE_TILES, "w8a16": W8A16_TILES}.get(problem.op, W8A8_TILES)
    tiles = next((tiles for limit, tiles in families if rows <= limit), ())
    for (kernel, block_m, block_n, block_k, warps, stages), split in product(tiles, SPLITS):
        if kernel == "tma" and target.arch < 90:
            continue
        size = max(block_m, 32) if 16 < rows <= 32 else block_m
        size = 64 if problem.op == "dense" and rows > 32 else size
        num_tiles = -(-problem.n // block_n) * -(-rows // size)
        has_work = problem.k // (4 * block_k) >= split
        if split == 1 or (has_work and _fits(num_tiles * split, target)):
            yield DenseTile(
                kernel=kernel, block_m=size, block_n=block_n, block_k=block_k, splits=split,
                num_warps=warps, num_stages=stages, per_sm=per_sm if kernel == "tma" else 1,
            )  # fmt: skip


def staged_bytes(op: Op, tile: Tile) -> int:
    """Shared memory of the blocks of inputs and weights under way; what little else a kernel needs
    there is found out when it is launched. Of W4A16 it is what Triton allots on sm_90, less up to
    4 KB: weights pass through registers, and a "warp" has blocks of its own."""
    if tile.kernel in ("gemv", "dense", "torch"):
        return 0
    inputs, weights = tile.block_m * INPUT_BYTES[op], tile.block_n * WEIGHT_BITS[op] // 8
    under_way = tile.num_stages - 1
    if tile.kernel == "wide":
        return (inputs + weights) * W4A16_BLOCK_K * tile.num_stages
    if isinstance(tile, W4Tile) and tile.kernel == "few":
        if tile.num_stages < 3:
            return 0
        weights //= tile.row_warps
        return (inputs + weights) * W4A16_BLOCK_K * under_way * tile.num_warps * tile.k_blocks
    if tile.kernel == "warp":
        return (inputs + weights) * W4A16_BLOCK_K * under_way * tile.num_warps
    if isinstance(tile, W4Tile):
        return (inputs * tile.num_stages + weights * under_way) * W4A16_BLOCK_K
    return (inputs + weights) * tile.block_k * tile.num_stages


# What a kernel reads of a tile; the rest would be noise in a table.
_W4_FIELDS = ("block_m", "block_n", "split_k", "num_warps", "num_stages", "scaling", "split_tail",
              "join", "max_registers", "prefetch")  # fmt: skip
_GEMM_FIELDS = ("block_n", "block_m", "block_k", "splits", "num_warps", "num_stages")
FIELDS: dict[tuple[type, str], tuple[str, ...]] = {
    (W4Tile, "gemv"): ("block_n", "num_warps", "k_blocks"),
    (W4Tile, "warp"): _W4_FIELDS,
    (W4Tile, "tile"): _W4_FIELDS,
    (W4Tile, "few"): ("block_m", "block_n", "split_k", "num_warps", "num_stages", "scaling",
                      "max_registers", "prefetch", "k_blocks", "row_warps"),
    (W4Tile, "wide"): ("block_m", "block_n", "num_stages"),
    (DenseTile, "gemv"): ("block_n", "block_k", "num_warps"),
    (DenseTile, "gemm"): _GEMM_FIELDS,
    (DenseTile, "tma"): (*_GEMM_FIELDS, "per_sm"),
}  # fmt: skip


def constants_of(tile: Tile) -> Constants:
    """A tile as a table spells it; `tile_of` reads it back."""
    values: dict[str, Any] = asdict(tile)
    names = ("kernel", *FIELDS.get((type(tile), tile.kernel), ()))
    kept = (name for name in names if values[name] is not None and values[name] is not False)
    return {name: values[name] for name in kept}


def tile_of(op: Op, constants: Constants) -> Tile:
    return W4Tile(**constants) if op == "w4a16" else DenseTile(**constants)


def current_tile(
    problem: Problem, rows: int, table: dict[str, Any], target: KernelTarget
) -> tuple[Tile, bool]:
    """What is launched today, and whether the table has an entry for just this row count."""
    by_rows = table.get(TABLES[problem.op], {}).get(problem.key, {})
    for count, constants in sorted_rows(by_rows):
        if rows <= int(count):
            return tile_of(problem.op, constants), rows == int(count)
    return _rule(problem, rows, replace(target, name="")), False


def _rule(problem: Problem, rows: int, target: KernelTarget) -> Tile:
    """`target` has no name, and so no table."""
    from runtime.kernels.w8a8 import tile_for
    from runtime.kernels.w8a16.choose import choose_tile

    shape = (rows, problem.n, problem.k)
    if problem.op == "w4a16":
        return w4a16_rule(rows, shape[1:], problem.group or None, target)
    if problem.op == "w8a16":
        return choose_tile(shape, problem.group, False, target)
    if problem.op == "dense":
        return gemv_tile(problem.k, 2) if rows == 1 else DenseTile(kernel="torch")
    return tile_for(shape, problem.op == "fp8", torch.bfloat16, False, target)
