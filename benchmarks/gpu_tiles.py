"""Time tiles on a GPU and keep the fastest in the card's tile table.

    python -m benchmarks.gpu_tiles --op w4a16 --shapes 6144x4096,4096x4096 --rows 1,8,16,32,64 \\
        --budget-s 90 --processes 12 --into runtime/kernels/tiles/h200.json --out sweep.json
    python -m benchmarks.gpu_tiles --op w8a16 --shapes 6144x4096 --group 128 --dry-run

Shapes are NxK of weights [out, in]; a row count M stands for all down to the next smaller one in
the table. Candidates (benchmarks.gpu_tile_candidates) are compiled side by side, compared with
float32, timed in random order by graph replay with weights past the L2 cache; the best are timed
again, with what is launched today beside them. An entry gives way only to a tile that is more than
1 % faster. --out keeps every figure, so that a run cut short goes on where it ended: delete it
when a kernel has changed. The exit code is 1 when a shape got no result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.gpu_tile_candidates import (
    TABLES,
    Op,
    Problem,
    Tile,
    candidates,
    constants_of,
    current_tile,
)
from benchmarks.gpu_tile_run import (
    DeviceMeter,
    Job,
    Meter,
    compile_ahead,
    shared_bytes_of,
    signature,
)
from benchmarks.gpu_tile_table import (
    Table,
    TilesError,
    merged,
    read_json,
    read_table,
    rendered,
    write,
)
from benchmarks.gpu_timing import BYTES_PER_US
from runtime.kernels.backend import KernelTarget, target_of
from runtime.kernels.tiles import card_key

TOLERANCE = 3e-3  # of a bfloat16 output, whose rounding alone is 1.7e-3
MIN_GAIN = 0.01
NUM_FINALISTS = 4
REPEATS, FINAL_REPEATS = 5, 15
COMPILE_SHARE = 0.5
GROUPS = (0, 32, 64, 128)
H200 = KernelTarget(
    name="NVIDIA H200", arch=90, num_sms=132, has_pdl=True, has_fp8=True, has_ptx=True
)
H200_SHARED_BYTES = 227 * 1024


class DeviceLostError(Exception):
    """A kernel took the CUDA context down: this process can launch nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One entry of a table: a problem and a row count.

    current: what is launched today; is_entry: the table says so for just this row count.
    """

    problem: Problem
    rows: int
    current: Tile
    is_entry: bool
    tiles: tuple[Tile, ...]

    @property
    def name(self) -> str:
        return f"{TABLES[self.problem.op]} {self.problem.key} M={self.rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """ranked: finalists from the fastest on, (us, tile). current_us: None where it failed."""

    slot: Slot
    ranked: tuple[tuple[float, Tile], ...]
    current_us: float | None
    num_timed: int
    num_left_out: int
    failures: tuple[str, ...]

    @property
    def chosen(self) -> Tile:
        """The fastest, unless what is launched today is within MIN_GAIN of it."""
        us, tile = self.ranked[0]
        is_gain = self.current_us is None or self.current_us - us > MIN_GAIN * self.current_us
        return tile if is_gain else self.slot.current

    @property
    def is_change(self) -> bool:
        return not self.slot.is_entry or self.chosen != self.slot.current


@dataclass(slots=True)
class Ledger:
    """Every figure of every candidate: slot -> tile -> {"us"} or {"failed"}."""

    card: str
    path: Path | None = None
    slots: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, card: str) -> Ledger:
        if path is None or not path.is_file():
            return cls(card=card, path=path)
        found = read_json(path)
        if not isinstance(found, dict) or set(found) != {"card", "slots"}:
            raise TilesError(f"{path} is not a sweep's --out; name another file")
        if found["card"] != card:
            raise TilesError(f"{path} is of {found['card']!r}, not {card!r}; name another file")
        return cls(card=card, path=path, slots=found["slots"])

    def of(self, slot: Slot) -> dict[str, dict[str, Any]]:
        return self.slots.setdefault(slot.name, {})

    def save(self) -> None:
        if self.path is not None:
            write(self.path, json.dumps({"card": self.card, "slots": self.slots}, indent=1) + "\n")


def spelled(tile: Tile) -> str:
    return json.dumps(constants_of(tile))


def sweep(
    slot: Slot,
    meter: Meter,
    ledger: Ledger,
    until: float,
    is_ready: Callable[[Tile], bool] = lambda tile: True,
    clock: Callable[[], float] = time.time,
) -> Outcome | None:
    """Time the slot's candidates until `until`, what is launched today first and in any case. None
    where nothing could be launched. DeviceLostError once the figures so far are saved."""
    num_before = len(ledger.of(slot))
    try:
        left_out = _time_all(slot, meter, ledger, lambda tile: clock() <= until and is_ready(tile))
        finals = _finals(slot, meter, ledger)
    finally:
        ledger.save()
    if not finals:
        return None
    times = {tile: us for us, tile in finals}
    known = ledger.of(slot)
    return Outcome(
        slot=slot, ranked=tuple(finals), current_us=times.get(slot.current),
        num_timed=len(known) - num_before, num_left_out=left_out,
        failures=tuple(f"{t}: {f['failed']}" for t, f in known.items() if "failed" in f),
    )  # fmt: skip


def _time_all(slot: Slot, meter: Meter, ledger: Ledger, may: Callable[[Tile], bool]) -> int:
    """Fill the ledger; the number of tiles left out."""
    known = ledger.of(slot)
    order = [tile for tile in slot.tiles if tile != slot.current]
    random.Random(slot.name).shuffle(order)
    left_out = 0
    for tile in (slot.current, *order):
        if spelled(tile) in known:
            continue
        if tile == slot.current or may(tile):
            known[spelled(tile)] = _measured(slot, tile, meter, ledger)
        else:
            left_out += 1
    return left_out


def _measured(slot: Slot, tile: Tile, meter: Meter, ledger: Ledger) -> dict[str, Any]:
    """{"us", "error"}, or {"failed"} for a tile that is wrong or cannot be launched."""
    try:
        error = meter.error(slot.rows, tile)
        if not error < TOLERANCE:
            return {"failed": f"off by {error:.2g}"}
        return {"us": round(meter.us(slot.rows, tile, REPEATS), 3), "error": float(f"{error:.3g}")}
    except Exception as problem:  # one tile's failure is a finding, not the end of the sweep
        found = {"failed": _first_line(problem)}
    ledger.of(slot)[spelled(tile)] = found
    _check_device(meter, slot, tile)
    return found


def _check_device(meter: Meter, slot: Slot, tile: Tile) -> None:
    try:
        meter.synchronize()
    except Exception as problem:  # whatever the driver calls it
        raise DeviceLostError(f"{slot.name} {spelled(tile)}: {_first_line(problem)}") from problem


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:160] if lines else ''}"


def _finals(slot: Slot, meter: Meter, ledger: Ledger) -> list[tuple[float, Tile]]:
    """The best few timed again, the present one among them, from the fastest on."""
    known = ledger.of(slot)
    timed = [tile for tile in (slot.current, *slot.tiles) if "us" in known.get(spelled(tile), {})]
    timed = sorted(dict.fromkeys(timed), key=lambda tile: known[spelled(tile)]["us"])
    chosen = [t for i, t in enumerate(timed) if i < NUM_FINALISTS or t == slot.current]
    finals = []
    for tile in chosen:
        try:
            finals.append((meter.us(slot.rows, tile, FINAL_REPEATS), tile))
        except Exception as problem:  # as above
            known[spelled(tile)] = {"failed": _first_line(problem)}
            _check_device(meter, slot, tile)
    return sorted(finals, key=lambda final: final[0])


def slots_of(
    problems: Sequence[Problem], rows: Sequence[int], table: Table, target: KernelTarget,
    shared_bytes: int,
) -> list[Slot]:  # fmt: skip
    """Problem by problem, few rows first; what is launched today is read from `table` alone."""
    slots = []
    for problem in problems:
        for m in sorted(set(rows)):
            current, is_entry = current_tile(problem, m, table, target)
            tiles = candidates(problem, m, target, shared_bytes)
            slots.append(
                Slot(problem=problem, rows=m, current=current, is_entry=is_entry, tiles=tiles)
            )
    return slots


def brief(tile: Tile) -> str:
    """A tile in a cell: kernel, numbers with the first letters of their names."""
    found = constants_of(tile)
    short = {"block_m": "m", "block_n": "n", "block_k": "k", "split_k": "/", "splits": "/",
             "num_warps": "w", "num_stages": "s", "scaling": "", "split_tail": "tail", "join": "j",
             "max_registers": "r", "k_blocks": "kb"}  # fmt: skip
    parts = [name + ("" if found[key] is True else str(found[key]))
             for key, name in short.items() if key in found]  # fmt: skip
    return " ".join([str(tile.kernel), *parts])


def line(outcome: Outcome) -> str:
    """Best, second and present tile in us, the floor of bytes, and what was not measured."""
    slot = outcome.slot
    cells = [f"{us:.2f} us {brief(tile)}" for us, tile in outcome.ranked[:2]]
    old = "failed" if outcome.current_us is None else f"{outcome.current_us:.2f} us"
    what = "kept" if not outcome.is_change else "replaced" if slot.is_entry else "added"
    where = "entry" if slot.is_entry else "no entry"
    return (
        f"{slot.name}: best {' | second '.join(cells)} | now {old} {brief(slot.current)} ({where})"
        f" | floor {slot.problem.num_bytes / BYTES_PER_US:.2f} us | {what}; {outcome.num_timed} "
        f"timed, {len(outcome.failures)} failed, {outcome.num_left_out} left out"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace, device: torch.device) -> int:
    """Sweep every slot; tables are written after each."""
    end = time.time() + args.budget_s
    target = target_of(device)
    card = card_key(target.name)
    table, ledger = read_table(args.into, card), Ledger.open(args.out, target.name)
    slots = slots_of(args.problems, args.rows, table, target, shared_bytes_of(device))
    is_ready = _compiled(slots, ledger, args)
    missing = []
    meter: DeviceMeter | None = None
    for i, slot in enumerate(slots):
        if time.time() > end:
            missing.append(slot.name)
            continue
        if meter is None or meter.problem != slot.problem:
            meter = None  # its weights go before the next ones come
            meter = DeviceMeter(slot.problem, device)
        until = time.time() + (end - time.time()) / (len(slots) - i)
        outcome = sweep(slot, meter, ledger, until, partial(is_ready, slot))
        if outcome is None:
            missing.append(slot.name)
            continue
        table = report(outcome, table, args.into)
    for name in missing:
        say(f"no result: {name}")
    return 1 if missing else 0


def report(outcome: Outcome, table: Table, into: Path | None) -> Table:
    """Say what came out and keep it; the table as it is now."""
    print(line(outcome), flush=True)
    for failure in outcome.failures:
        say(f"  failed: {failure}")
    if into is None or not outcome.is_change:
        return table
    table = merged(table, outcome.slot.problem, outcome.slot.rows, outcome.chosen)
    write(into, rendered(table))
    return table


def _compiled(
    slots: Sequence[Slot], ledger: Ledger, args: argparse.Namespace
) -> Callable[[Slot, Tile], bool]:
    """Whether a tile's kernel is in the cache; all of them where nothing is compiled ahead."""
    if args.processes == 0:
        return lambda slot, tile: True
    jobs: list[Job] = [
        (slot.problem, slot.rows, tile)
        for slot in slots
        for tile in (slot.current, *slot.tiles)
        if spelled(tile) not in ledger.of(slot)
    ]
    random.Random(0).shuffle(jobs)
    began = time.time()
    done, remark = compile_ahead(jobs, args.processes, began + COMPILE_SHARE * args.budget_s)
    say(f"compiled {len(done)} of {len(set(map(signature, jobs)))} kernels "
        f"in {time.time() - began:.0f} s{'; ' + remark if remark else ''}")  # fmt: skip
    return lambda slot, tile: signature((slot.problem, slot.rows, tile)) in done


def plan(args: argparse.Namespace) -> str:
    """What would be timed on an H200."""
    table = read_table(args.into, card_key(H200.name))
    slots = slots_of(args.problems, args.rows, table, H200, H200_SHARED_BYTES)
    lines = [f"{slot.name}: {len(slot.tiles)} candidates, now {brief(slot.current)}"
             f"{'' if slot.is_entry else ' (no entry)'}" for slot in slots]  # fmt: skip
    return "\n".join([*lines, f"{sum(len(slot.tiles) for slot in slots)} candidates in all"])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_tiles", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--op", required=True, choices=get_args(Op))
    parser.add_argument("--shapes", required=True, type=_shapes, metavar="NxK,...")
    parser.add_argument("--group", type=int, choices=GROUPS,
                        help="columns that share a scale, 0: a whole row (default: 128 for w4a16, "
                             "else 0)")  # fmt: skip
    parser.add_argument(
        "--rows", type=_counts, default=(1, 8, 16, 32, 64, 128, 256), metavar="M,..."
    )
    parser.add_argument("--budget-s", type=float, default=90, help="seconds in all (default: 90)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1,
                        help="that compile ahead; 0: compile as needed")  # fmt: skip
    parser.add_argument("--into", type=Path, help="the card's table, <card>.json")
    parser.add_argument("--out", type=Path, help="JSON of all figures; read first, if it is there")
    parser.add_argument("--dry-run", action="store_true", help="name what would be timed; no GPU")
    args = parser.parse_args(argv)
    if args.budget_s <= 0 or args.processes < 0:
        parser.error("--budget-s must be above 0 and --processes not below")
    args.problems = _problems(parser, args)
    return args


def _problems(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Problem]:
    group = args.group
    if group and args.op not in ("w4a16", "w8a16"):
        parser.error(f"--group {group}: {args.op} has no groups")
    if group is None:
        group = 128 if args.op == "w4a16" else 0
    return [Problem(op=args.op, n=n, k=k, group=group) for n, k in args.shapes]


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    shapes = []
    for part in text.split(","):
        n, _, k = part.partition("x")
        if not (n.isdigit() and k.isdigit() and int(n) and int(k)):
            raise argparse.ArgumentTypeError(f"{part!r} is not NxK, such as 6144x4096")
        if int(n) % 16 or int(k) % 128:
            raise argparse.ArgumentTypeError(
                f"{part}: N must be a multiple of 16 and K of 128; other shapes go by the rule"
            )
        shapes.append((int(n), int(k)))
    return tuple(dict.fromkeys(shapes))


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of row counts, such as 1,8,16")
    return tuple(sorted({int(part) for part in parts}))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        if args.dry_run:
            print(plan(args))
            return 0
        if not torch.cuda.is_available():
            raise TilesError("no CUDA device: tiles are timed on the card; see --dry-run")
        return run(args, torch.device("cuda", torch.cuda.current_device()))
    except TilesError as problem:
        say(f"error: {problem}")
    except DeviceLostError as problem:
        say(f"error: the device was lost at {problem}; run again with the same --out to go on "
            "without this tile")  # fmt: skip
    return 1


if __name__ == "__main__":
    sys.exit(main())
