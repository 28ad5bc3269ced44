"""`python -m benchmarks.gpu_tiles` without a GPU: candidates, choice, merge, resume, refusals."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks import gpu_tiles
from benchmarks.gpu_tile_candidates import (
    TABLES,
    Op,
    Problem,
    Tile,
    candidates,
    constants_of,
    current_tile,
    staged_bytes,
    tile_of,
)
from benchmarks.gpu_tile_run import DeviceMeter, compile_ahead, signature
from benchmarks.gpu_tile_table import Table, TilesError, merged, read_table, rendered
from benchmarks.gpu_tiles import (
    H200,
    H200_SHARED_BYTES,
    DeviceLostError,
    Ledger,
    Outcome,
    Slot,
    line,
    slots_of,
    spelled,
    sweep,
)
from runtime.kernels.backend import KernelTarget
from runtime.kernels.w4a16.tile import Tile as W4Tile

if not torch.cuda.is_available():  # before triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

FILE = Path(gpu_tiles.__file__).parents[1] / "runtime/kernels/tiles/h200.json"
TABLE = json.loads(FILE.read_text())
OPS: tuple[Op, ...] = get_args(Op)
OP_OF = {table: op for op, table in TABLES.items()}
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (576, 1536))
ROWS = (1, 2, 8, 16, 17, 32, 64, 128, 256, 512, 8192)
QKV = Problem(op="w4a16", n=6144, k=4096, group=128)


def entries() -> Iterator[tuple[Problem, int, Tile]]:
    """Everything in the table that was measured."""
    for table, problems in TABLE.items():
        for key, by_rows in problems.items():
            shape, _, unit = key.partition(" ")
            n, k = map(int, shape.split("x"))
            group = int(unit[1:]) if unit.startswith("g") else 0
            problem = Problem(op=OP_OF[table], n=n, k=k, group=group)
            assert problem.key == key
            for rows, constants in by_rows.items():
                yield problem, int(rows), tile_of(problem.op, constants)


@pytest.mark.parametrize("op", OPS)
def test_candidates_are_valid_tiles(op: Op) -> None:
    for n, k in SHAPES:
        problem = Problem(op=op, n=n, k=k, group=128 if op == "w4a16" else 0)
        for rows in ROWS:
            found = candidates(problem, rows, H200, H200_SHARED_BYTES)
            assert found
            assert len(set(found)) == len(found)
            for tile in found:
                check_tile(tile, rows)
                assert staged_bytes(op, tile) <= H200_SHARED_BYTES
                assert tile_of(op, constants_of(tile)) == tile


def check_tile(tile: Tile, rows: int) -> None:
    sizes = (tile.block_m, tile.block_n, tile.num_warps)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert tile.kernel != "gemv" or rows == 1
    assert tile.kernel not in ("few", "warp") or rows <= tile.block_m
    if isinstance(tile, W4Tile) and tile.kernel == "gemv":
        assert tile.block_n <= 16
        assert tile.k_blocks * tile.block_n >= tile.num_warps * 4


@pytest.mark.parametrize("op", OPS)
def test_smaller_cards_get_smaller_tiles(op: Op) -> None:
    ampere = KernelTarget(
        name="NVIDIA A10", arch=86, num_sms=72, has_pdl=False, has_fp8=False, has_ptx=True
    )
    problem = Problem(op=op, n=4096, k=4096, group=128 if op == "w4a16" else 0)
    rows = 64 if op == "dense" else 256
    found = candidates(problem, rows, ampere, 99 * 1024)
    assert all(staged_bytes(op, tile) <= 99 * 1024 for tile in found)
    assert all(tile.kernel != "tma" for tile in found)
    assert len(found) < len(candidates(problem, rows, H200, H200_SHARED_BYTES))


@pytest.mark.parametrize(
    ("kernel", "block_m", "block_n", "num_warps", "num_stages", "compiled"),
    [
        ("tile", 128, 256, 8, 4, 183296),
        ("tile", 64, 128, 4, 4, 90624),
        ("tile", 16, 64, 4, 3, 20480),
        ("warp", 16, 64, 4, 4, 99328),
        ("warp", 8, 32, 2, 4, 24832),
        ("few", 8, 32, 4, 4, 49152),
    ],
)
def test_shared_memory_is_what_the_compiler_allots(
    kernel: str, block_m: int, block_n: int, num_warps: int, num_stages: int, compiled: int
) -> None:
    """Never more, or tiles that fit would be left out. The figures are those of sm_90."""
    sizes = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps}
    tile = tile_of("w4a16", {"kernel": kernel, "num_stages": num_stages, "k_blocks": 1, **sizes})
    assert compiled - 4096 <= staged_bytes("w4a16", tile) <= compiled


def test_what_won_so_far_is_a_candidate() -> None:
    """And every entry is spelled just as the tool would spell it."""
    for problem, rows, tile in entries():
        assert tile in candidates(problem, rows, H200, H200_SHARED_BYTES), (problem, rows, tile)
        kept = TABLE[TABLES[problem.op]][problem.key][str(rows)]
        assert spelled(tile) == json.dumps(kept)
        assert current_tile(problem, rows, TABLE, H200) == (tile, True)


@pytest.mark.parametrize("op", OPS)
def test_without_an_entry_the_next_one_or_the_rule_is_what_is_launched(op: Op) -> None:
    problem = Problem(op=op, n=4096, k=4096, group=128 if op == "w4a16" else 0)
    by_rule, is_entry = current_tile(problem, 16, {}, H200)
    assert not is_entry
    entry = candidates(problem, 16, H200, H200_SHARED_BYTES)[-1]
    assert entry != by_rule
    table = {TABLES[op]: {problem.key: {"16": constants_of(entry)}}}
    assert current_tile(problem, 9, table, H200) == (entry, False)
    assert not current_tile(problem, 17, table, H200)[1]


class FakeMeter:
    """Times by a table of tiles; everything else takes `other` microseconds."""

    def __init__(self, times: dict[Tile, float], other: float = 50.0) -> None:
        self.times, self.other = times, other
        self.checked: list[Tile] = []
        self.repeats: list[int] = []
        self.wrong: set[Tile] = set()
        self.broken: set[Tile] = set()
        self.deadly: Tile | None = None
        self.problem: Problem = QKV

    def error(self, rows: int, tile: Tile) -> float:
        self.checked.append(tile)
        if tile in self.broken or tile == self.deadly:
            raise RuntimeError("out of resource: shared memory\nmore")
        return 0.5 if tile in self.wrong else 1e-3

    def us(self, rows: int, tile: Tile, repeats: int) -> float:
        assert tile not in self.wrong | self.broken
        self.repeats.append(repeats)
        return self.times.get(tile, self.other)

    def synchronize(self) -> None:
        if self.deadly in self.checked:
            raise RuntimeError("an illegal memory access was encountered")


def slot_of(rows: int = 8, table: Table = TABLE) -> Slot:
    return slots_of([QKV], [rows], table, H200, H200_SHARED_BYTES)[0]


def swept(
    slot: Slot, meter: FakeMeter, ledger: Ledger | None = None, until: float = 1.0
) -> Outcome:
    found = sweep(slot, meter, ledger or Ledger(card="h200"), until, clock=lambda: 0.0)
    assert found is not None
    return found


def others(slot: Slot) -> list[Tile]:
    return [tile for tile in slot.tiles if tile != slot.current]


def test_the_fastest_is_found_and_timed_again() -> None:
    slot = slot_of()
    best, second = others(slot)[3], others(slot)[-1]
    meter = FakeMeter({best: 9.0, second: 9.5, slot.current: 10.0})
    found = swept(slot, meter)
    assert [tile for _, tile in found.ranked[:3]] == [best, second, slot.current]
    assert found.chosen == best
    assert found.is_change
    assert set(meter.checked) == set(slot.tiles)
    assert meter.checked[0] == slot.current
    assert meter.checked[1:] != others(slot), "in random order"
    assert meter.repeats.count(gpu_tiles.FINAL_REPEATS) == gpu_tiles.NUM_FINALISTS
    assert "replaced" in line(found)


@pytest.mark.parametrize(("us", "is_replaced"), [(9.91, False), (9.9, False), (9.89, True)])
def test_an_entry_gives_way_only_to_more_than_one_percent(us: float, is_replaced: bool) -> None:
    slot = slot_of()
    best = others(slot)[0]
    found = swept(slot, FakeMeter({best: us, slot.current: 10.0}))
    assert found.ranked[0][1] == best
    assert found.chosen == (best if is_replaced else slot.current)
    assert found.is_change == is_replaced
    assert ("replaced" in line(found)) == is_replaced


def test_without_an_entry_what_is_launched_today_is_written_down() -> None:
    """Or an entry of more rows, written next, would take its place."""
    slot = slot_of(8, {})
    found = swept(slot, FakeMeter({slot.current: 10.0}, other=10.05))
    assert found.chosen == slot.current
    assert found.is_change
    assert "added" in line(found)


def test_a_slow_present_tile_is_a_finalist_all_the_same() -> None:
    slot = slot_of()
    found = swept(slot, FakeMeter({slot.current: 99.0}))
    assert found.current_us == 99.0
    assert len(found.ranked) == gpu_tiles.NUM_FINALISTS + 1


def test_wrong_and_broken_tiles_are_named_and_never_chosen() -> None:
    slot = slot_of()
    wrong, broken = others(slot)[0], others(slot)[1]
    meter = FakeMeter({wrong: 1.0, broken: 1.0, slot.current: 10.0})
    meter.wrong, meter.broken = {wrong, slot.current}, {broken}
    found = swept(slot, meter)
    assert found.current_us is None
    assert found.chosen not in (wrong, broken, slot.current)
    assert sorted(found.failures) == sorted(
        [
            f"{spelled(wrong)}: off by 0.5",
            f"{spelled(slot.current)}: off by 0.5",
            f"{spelled(broken)}: RuntimeError: out of resource: shared memory",
        ]
    )
    meter.wrong = set(slot.tiles)
    assert sweep(slot, meter, Ledger(card="h200"), 1.0, clock=lambda: 0.0) is None


def test_a_run_cut_short_goes_on_where_it_ended(tmp_path: Path) -> None:
    slot, path = slot_of(), tmp_path / "sweep.json"
    best = others(slot)[-1]
    times = {best: 9.0, slot.current: 10.0}
    ticks = iter(range(10_000))
    first = FakeMeter(times)
    cut = sweep(slot, first, Ledger.open(path, "h200"), 4.5, clock=lambda: float(next(ticks)))
    assert cut is not None
    assert (cut.num_timed, cut.num_left_out) == (6, len(slot.tiles) - 6)
    second = FakeMeter(times)
    found = swept(slot, second, Ledger.open(path, "h200"))
    assert not set(first.checked) & set(second.checked)
    assert set(first.checked) | set(second.checked) == set(slot.tiles)
    assert (found.chosen, found.num_left_out) == (best, 0)
    third = FakeMeter(times)
    assert swept(slot, third, Ledger.open(path, "h200")).chosen == best
    assert third.checked == []
    with pytest.raises(TilesError, match="another file"):
        Ledger.open(path, "a100")


def test_tiles_not_compiled_in_time_are_left_out() -> None:
    slot = slot_of()
    meter = FakeMeter({})
    found = sweep(slot, meter, Ledger(card="h200"), 1.0, lambda tile: False, lambda: 0.0)
    assert found is not None
    assert meter.checked == [slot.current]
    assert found.num_left_out == len(slot.tiles) - 1


def test_a_lost_device_ends_the_sweep_and_its_tile_is_not_tried_again(tmp_path: Path) -> None:
    slot, path = slot_of(), tmp_path / "sweep.json"
    meter = FakeMeter({})
    meter.deadly = others(slot)[5]
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        swept(slot, meter, Ledger.open(path, "h200"))
    again = FakeMeter({})
    swept(slot, again, Ledger.open(path, "h200"))
    assert meter.deadly not in again.checked


def test_the_table_is_spelled_as_it_is_kept() -> None:
    assert rendered(TABLE) == FILE.read_text()


def test_merging_leaves_every_other_entry_as_it_was(tmp_path: Path) -> None:
    slot = slot_of()
    best = others(slot)[0]
    found = swept(slot, FakeMeter({best: 5.0, slot.current: 10.0}))
    path = tmp_path / "h200.json"
    path.write_text(FILE.read_text())
    gpu_tiles.report(found, TABLE, path)
    before, after = FILE.read_text().splitlines(), path.read_text().splitlines()
    changed = [b for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [f'      "8": {spelled(best)},']
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(FILE.read_text()) == TABLE


def test_a_new_card_problem_and_row_count_find_their_place() -> None:
    table: Table = {}
    for rows in (64, 8, 128):
        slot = slot_of(rows, table)
        table = merged(table, QKV, rows, swept(slot, FakeMeter({slot.current: 1.0})).chosen)
    assert list(table["w4a16"]["6144x4096 g128"]) == ["8", "64", "128"]
    assert json.loads(rendered(table)) == table


def test_kernels_are_compiled_once_for_all_shapes_they_serve() -> None:
    tile = slot_of().current
    wide = Problem(op="w4a16", n=28672, k=4096, group=128)
    assert signature((QKV, 16, tile)) == signature((wide, 256, tile))
    assert signature((QKV, 16, tile)) != signature((QKV, 8, tile))
    narrow = Problem(op="w4a16", n=6160, k=4096, group=128)
    assert signature((QKV, 16, tile)) != signature((narrow, 16, tile))


def test_a_compiling_process_that_fails_is_named() -> None:
    """Here every one does: there is no device."""
    if torch.cuda.is_available():
        pytest.skip("compiles for real on a GPU")
    done, remark = compile_ahead([(QKV, 8, slot_of().current)], 1, time.time() + 60)
    assert done == set()
    assert remark.startswith("a compiling process failed: ")


def test_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shapes, one of them new to the table, and a second run that has nothing left to do."""
    meters: list[FakeMeter] = []

    best = {"kernel": "gemv", "block_n": 8, "num_warps": 4, "k_blocks": 16}

    def meter_of(problem: Problem, device: torch.device) -> FakeMeter:
        meter = FakeMeter({tile_of("w4a16", best): 4.0})
        meter.problem = problem
        meters.append(meter)
        return meter

    monkeypatch.setattr(gpu_tiles, "DeviceMeter", meter_of)
    monkeypatch.setattr(gpu_tiles, "target_of", lambda device: H200)
    monkeypatch.setattr(gpu_tiles, "shared_bytes_of", lambda device: H200_SHARED_BYTES)
    into, out = tmp_path / "h200.json", tmp_path / "sweep.json"
    into.write_text(FILE.read_text())
    arguments = [
        "--op", "w4a16", "--shapes", "6144x4096,5120x5120", "--rows", "1,8", "--processes", "0",
        "--into", str(into), "--out", str(out),
    ]  # fmt: skip
    args = gpu_tiles.parse_arguments(arguments)
    assert gpu_tiles.run(args, torch.device("cpu")) == 0
    found = json.loads(into.read_text())
    assert found["w4a16"]["6144x4096 g128"]["1"] == best
    assert list(found["w4a16"]["5120x5120 g128"]) == ["1", "8"]
    assert found["w8a16"] == TABLE["w8a16"]
    said = capsys.readouterr().out.splitlines()
    assert [text.rpartition("; ")[0].rpartition("| ")[2] for text in said] == [
        "replaced", "kept", "added", "added",
    ]  # fmt: skip
    assert len(meters) == 2
    text = into.read_text()
    assert gpu_tiles.run(args, torch.device("cpu")) == 0
    assert into.read_text() == text
    assert all(not meter.checked for meter in meters[2:])
    args.budget_s = -1.0
    assert gpu_tiles.run(args, torch.device("cpu")) == 1
    assert "no result: w4a16 6144x4096 g128 M=1" in capsys.readouterr().err


TINY: dict[Op, tuple[Tile, ...]] = {
    "w4a16": (W4Tile(kernel="tile", block_m=16, block_n=64, split_k=2, prefetch=0),),
    **{
        op: (tile_of(op, {"kernel": "gemm", "block_n": 64, "block_m": 16, "block_k": 128,
                          "splits": 2}),)  # fmt: skip
        for op in OPS if op != "w4a16"
    },
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_products_are_checked_against_float32(op: Op) -> None:
    """In Triton's interpreter, which runs the kernels that the device would, in float16: it has no
    bfloat16 products."""
    pytest.importorskip("triton")
    problem = Problem(op=op, n=64, k=256, group=128 if op == "w4a16" else 0)
    meter = DeviceMeter(problem, torch.device("cpu"), copies=2, dtype=torch.float16)
    for tile in TINY[op]:
        assert meter.error(3, tile) < gpu_tiles.TOLERANCE
    meter._matrix_NK = meter._matrix_NK.roll(1, 0)
    assert meter.error(3, TINY[op][0]) > 0.1


def test_a_librarys_product_is_timed_like_any_other() -> None:
    meter = DeviceMeter(Problem(op="dense", n=64, k=128), torch.device("cpu"))
    tile = tile_of("dense", {"kernel": "torch"})
    assert meter.error(2, tile) < gpu_tiles.TOLERANCE
    assert meter.us(2, tile, 3) > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--op w4a16 --shapes 6144", "not NxK"),
        ("--op w4a16 --shapes 6144x4000", "multiple of 16 and K of 128"),
        ("--op w4a16 --shapes 6144x4096 --rows 0,8", "row counts"),
        ("--op w4a16 --shapes 6144x4096 --group 96", "invalid choice"),
        ("--op fp8 --shapes 6144x4096 --group 128", "fp8 has no groups"),
        ("--op int8 --shapes 6144x4096", "invalid choice"),
        ("--op w4a16 --shapes 6144x4096 --budget-s 0", "above 0"),
        ("--op w4a16", "--shapes"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_tiles.main(arguments.split())
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_another_cards_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TilesError, match=r"this card's table is a100\.json"):
        read_table(FILE, "a100")
    with pytest.raises(TilesError, match="no folder"):
        read_table(tmp_path / "none" / "a100.json", "a100")
    assert read_table(tmp_path / "a100.json", "a100") == {}
    (tmp_path / "a100.json").write_text("{")
    with pytest.raises(TilesError, match="JSON"):
        read_table(tmp_path / "a100.json", "a100")


def test_a_dry_run_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--op", "w4a16", "--shapes", "6144x4096", "--rows", "1,8", "--into", str(FILE)]
    assert gpu_tiles.main([*arguments, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [text.split(":")[0] for text in lines[:2]] == [
        "w4a16 6144x4096 g128 M=1", "w4a16 6144x4096 g128 M=8",
    ]  # fmt: skip
    assert lines[2].endswith("candidates in all")


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_tiles.main(["--op", "w4a16", "--shapes", "6144x4096"]) == 1
    assert "no CUDA device" in capsys.readouterr().err
