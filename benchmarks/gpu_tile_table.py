"""A card's tile table and other JSON files of a sweep: read, changed by an entry, written whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu_tile_candidates import TABLES, Problem, Tile, constants_of
from runtime.kernels.tiles import sorted_rows

Table = dict[str, dict[str, dict[str, dict[str, Any]]]]


class TilesError(Exception):
    """What the user can mend; the message says how."""


def merged(table: Table, problem: Problem, rows: int, tile: Tile) -> Table:
    """`table` with the entry of `problem` and `rows`; every other entry as it was."""
    op, key = TABLES[problem.op], problem.key
    by_rows = {**table.get(op, {}).get(key, {}), str(rows): constants_of(tile)}
    return {**table, op: {**table.get(op, {}), key: dict(sorted_rows(by_rows))}}


def rendered(table: Table) -> str:
    """JSON with an entry a line."""
    ops = []
    for op, problems in table.items():
        parts = []
        for key, by_rows in problems.items():
            lines = [f'      "{rows}": {json.dumps(found)}' for rows, found in by_rows.items()]
            parts.append(f'    "{key}": {{\n' + ",\n".join(lines) + "\n    }")
        ops.append(f'  "{op}": {{\n' + ",\n".join(parts) + "\n  }")
    return "{\n" + ",\n".join(ops) + "\n}\n"


def write(path: Path, text: str) -> None:
    """All of it or nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise TilesError(f"{path} cannot be read as JSON: {problem}") from problem


def read_table(into: Path | None, card: str) -> Table:
    """The table to improve, empty for a card that has none. TilesError for another card's."""
    if into is None:
        return {}
    if into.name != f"{card}.json":
        raise TilesError(f"--into {into.name}: this card's table is {card}.json")
    if not into.parent.is_dir():
        raise TilesError(f"--into {into}: there is no folder {into.parent}")
    return read_json(into) if into.is_file() else {}
