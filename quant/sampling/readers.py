"""Reads logs row by row: JSONL (also gzipped), text files and folders of them, CSV, parquet, arrow.

One row is in memory at a time. What cannot be read becomes a CalibrationError in the stream, so
that the caller can count it. Knows files, not what a row means.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quant.calibration_rows import UNREADABLE, decode_line, open_lines, parse_object
from quant.errors import CalibrationError

TEXT_SUFFIXES = (".txt", ".md")
TABLE_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".ndjson", ".csv", *TABLE_SUFFIXES, *TEXT_SUFFIXES)
# The csv module stops at 128 KiB by itself; long documents are what a draw wants.
_FIELD_BYTES = 1 << 30
Item = tuple[str, dict[str, Any] | CalibrationError | None]


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files that `paths` name, folders walked; CalibrationError for what is not there."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and _is_known(p)]
            if not inside:
                raise CalibrationError(f"{path}: no file in it ends in one of {_list(SUFFIXES)}")
            found += inside
        elif not path.is_file():
            raise CalibrationError(f"{path}: no such file or folder")
        elif not _is_known(path):
            raise CalibrationError(f"{path}: unknown kind, expected one of {_list(SUFFIXES)}")
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def left_out(paths: Sequence[Path]) -> list[Path]:
    """Files in folders among `paths` that are of no kind that is read; hidden ones do not count."""
    inside = (p for path in paths if path.is_dir() for p in sorted(path.rglob("*")))
    return [p for p in inside if p.is_file() and not _is_known(p) and not p.name.startswith(".")]


def read_items(path: Path, *, split_text: bool = False) -> Iterator[Item]:
    """(where, row | the error that it is | None when blank) of a file, in its order.

    split_text: blank lines part a text file into documents; otherwise a text file is one.
    """
    try:
        if path.suffix in TABLE_SUFFIXES:
            yield from _table(path)
        elif path.suffix == ".csv":
            yield from _csv(path)
        elif path.suffix in TEXT_SUFFIXES:
            yield from _text(path, split_text)
        else:
            yield from _jsonl(path)
    except (*UNREADABLE, csv.Error) as error:
        raise CalibrationError(f"{path}: cannot read: {error}") from error


def stem(path: Path) -> str:
    """The name a source gets that has no tag: the file without suffixes; for text, its folder."""
    if path.suffix in TEXT_SUFFIXES:
        return path.resolve().parent.name
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


def _jsonl(path: Path) -> Iterator[Item]:
    with open_lines(path) as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                line = decode_line(raw, where, first=number == 1)
                yield where, parse_object(line, where) if line.strip() else None
            except CalibrationError as error:
                yield where, error


def _csv(path: Path) -> Iterator[Item]:
    csv.field_size_limit(_FIELD_BYTES)
    with path.open("rb") as file:
        lines = (
            decode_line(raw, f"{path}:{number}", first=number == 1)
            for number, raw in enumerate(file, start=1)
        )
        reader = csv.DictReader(lines)
        for row in reader:
            where = f"{path}:{reader.line_num}"
            yield where, {k: v for k, v in row.items() if isinstance(k, str) and v}


def _text(path: Path, split_text: bool) -> Iterator[Item]:
    lines: list[str] = []
    start = 1
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = decode_line(raw, f"{path}:{number}", first=number == 1)
            except CalibrationError as error:
                yield f"{path}:{number}", error
                continue
            if split_text and not line.strip():
                if lines:
                    yield f"{path}:{start}", {"text": "".join(lines)}
                lines = []
                continue
            start = start if lines else number
            lines.append(line)
    if lines:
        yield f"{path}:{start}", {"text": "".join(lines)}


def _table(path: Path) -> Iterator[Item]:
    if find_spec("pyarrow") is None:
        raise CalibrationError(
            f"{path}: reading {path.suffix} needs pyarrow: pip install 'weighbridge[sample]', or "
            "write the rows as JSONL"
        )
    number = 0
    for batch in _batches(path):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}:{number}", {k: v for k, v in row.items() if v is not None}


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if path.suffix == ".parquet":
            yield from parquet.ParquetFile(path).iter_batches(batch_size=1024)
        else:  # what `datasets` saves is a stream
            with pyarrow.memory_map(str(path)) as file:
                yield from ipc.open_stream(file)
    except pyarrow.ArrowException as error:
        raise CalibrationError(f"{path}: not a readable {path.suffix} file: {error}") from error


def _is_known(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _list(suffixes: Sequence[str]) -> str:
    return " ".join(suffixes)
