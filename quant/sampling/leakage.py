"""Does a calibration row hold what the gate will ask? Suites are read as data; `eval` is not used.

What a leak is, `quant.artifact.overlap` says, to this command and to `evaluate` alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quant.artifact import overlap
from quant.artifact.overlap import Text, text_of_row
from quant.errors import CalibrationError
from quant.sampling.readers import find_files, read_items


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A row (by its index) and the gate document it repeats."""

    row: int
    gate: str
    sign: str


def read_gate(paths: Sequence[Path]) -> list[Text]:
    """Every row of suite files (JSONL, text, ...); CalibrationError for one that is unreadable."""
    found = []
    for path in find_files(paths):
        for where, item in read_items(path):
            if isinstance(item, CalibrationError):
                raise item
            if item is not None:
                found.append(replace(text_of_row(where, item), where=where))
    if not found:
        raise CalibrationError(f"--against {', '.join(map(str, paths))}: holds no row")
    return found


def find_leaks(
    rows: Sequence[Mapping[str, Any]], texts: Sequence[str], gate: Sequence[Text]
) -> list[Leak]:
    """At most one leak a row. rows: calibration rows; texts: all that is written in each."""
    read = (
        replace(text_of_row("", row), where=str(index), content=text)
        for index, (row, text) in enumerate(zip(rows, texts, strict=True))
    )
    return [
        Leak(row=int(leak.row), gate=leak.gate, sign=leak.sign)
        for leak in overlap.find_leaks(gate, read)
    ]
