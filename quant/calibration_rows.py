"""Reads calibration rows from JSONL, gzipped too, and says exactly what is wrong with a line.

Streams: one line is in memory at a time. Knows the three row shapes, not tokenizers.
"""

from __future__ import annotations

import difflib
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from quant.errors import CalibrationError

SHAPES = '{"text"}, {"messages"} or {"prompt", "completion"}'
# What a file raises that the system, or the end or the bytes of an archive, keep from being read.
UNREADABLE = (OSError, EOFError, zlib.error)
_CONTENT = {"text", "messages", "prompt", "completion"}
_KNOWN = _CONTENT | {"id", "doc", "source", "lang", "tools"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One usable row. Either `messages`, or `text` (the prompt when there is a `completion`)."""

    where: str
    source: str
    text: str = ""
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    id: str | None = None
    doc: str | None = None
    lang: str | None = None

    def contents(self) -> Iterator[str]:
        """What people wrote, without what a chat template adds."""
        if self.messages is None:
            yield from (self.text, self.completion or "")
            return
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, str):
                yield content
            elif content is not None or message.get("tool_calls"):
                yield json.dumps(content or message["tool_calls"], ensure_ascii=False)


# What `quantize sample` reads and this does not.
OF_LOGS = frozenset({".parquet", ".arrow", ".csv"})


@dataclass(slots=True, kw_only=True)
class RowCounts:
    """What `read_rows` met, over all files."""

    rows: int = 0
    blank: int = 0
    ignored_keys: Counter[str] = field(default_factory=Counter)


def read_rows(path: Path, counts: RowCounts) -> Iterator[Row]:
    """Usable rows of a file, counting all of them; CalibrationError names file and line.

    `source` is the row's own, else the file's name without its suffix.
    """
    stem = Path(path.name.removesuffix(".gz")).stem
    for number, line in _lines(path):
        counts.rows += 1
        where = f"{path}:{number}"
        row = _parse(line, where, stem, counts) if line.strip() else None
        if row is None:
            counts.blank += 1
        else:
            yield row


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if path.is_dir():
        raise CalibrationError(f"{path}: is a directory, expected a JSONL file (one row a line)")
    if path.suffix.lower() in OF_LOGS:
        raise CalibrationError(
            f"{path}: expected a JSONL file (one row a line); draw one from it: "
            f"quantize sample --from {path} --out calib.jsonl"
        )
    try:
        with open_lines(path) as file:
            for number, raw in enumerate(file, start=1):
                yield number, decode_line(raw, f"{path}:{number}", first=number == 1)
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise CalibrationError(f"{path}: cannot read calibration rows: {reason}") from error


def open_lines(path: Path) -> gzip.GzipFile | BufferedReader:
    """A file's lines as bytes; what is called .gz is unpacked. Reading raises UNREADABLE."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def decode_line(raw: bytes, where: str, *, first: bool) -> str:
    """UTF-8 text of a line (a byte order mark may begin the `first`), or CalibrationError."""
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{where}: not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}; "
            "save the file as UTF-8"
        ) from error


def _parse(line: str, where: str, stem: str, counts: RowCounts) -> Row | None:
    data = parse_object(line, where)
    counts.ignored_keys.update(data.keys() - (_KNOWN - {"tools"} if "text" in data else _KNOWN))
    return parse_row(data, where, stem)


def parse_object(line: str, where: str) -> dict[str, Any]:
    """The JSON object on one line; CalibrationError says what else was found at `where`."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where}: not JSON: {_json_fault(line, error)}") from error
    if "\\ud" in line.lower():
        _refuse_half_surrogates(data, where)
    if not isinstance(data, dict):
        raise CalibrationError(
            f"{where}: found {_name(data)}, expected one JSON object a line: {SHAPES}"
        )
    return data


def _refuse_half_surrogates(data: Any, where: str) -> None:
    r"""A lone "\ud83d" is valid JSON but no character; tokenizers cannot take it."""
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(
            f"{where}: found half of a surrogate pair (\\ud800 to \\udfff alone), expected whole "
            "characters; write the row again with an encoder that keeps pairs together"
        ) from error


def _json_fault(line: str, error: Exception) -> str:
    start = line.strip()
    shown = start if len(start) <= 60 else start[:57] + "..."
    if start in ("[", "{"):
        return f"found {start!r} alone; expected the whole row on one line (JSONL), not spread out"
    at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return f"{reason}{at}; found {shown}"


def parse_row(data: dict[str, Any], where: str, stem: str) -> Row | None:
    """A row of one of the three shapes, None when it is blank; CalibrationError otherwise."""
    fields = _CONTENT & data.keys()
    common: dict[str, Any] = {
        "where": where,
        "source": _tag(data, "source", where) or stem,
        "id": _tag(data, "id", where),
        "doc": _tag(data, "doc", where),
        "lang": _tag(data, "lang", where),
    }
    if fields == {"text"}:
        text = _string(data, "text", where)
        return Row(text=text, **common) if text.strip() else None
    common["tools"] = _tools(data.get("tools"), where)
    if fields == {"messages"}:
        messages = _messages(data["messages"], where)
        return Row(messages=messages, **common) if messages else None
    if fields == {"prompt", "completion"}:
        return _pair(data, where, common)
    raise CalibrationError(f"{where}: {_wrong_fields(data, fields)}")


def _pair(data: dict[str, Any], where: str, common: dict[str, Any]) -> Row | None:
    prompt, completion = data["prompt"], data["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = _messages([*prompt, *completion], where)
        return Row(messages=messages, **common) if messages else None
    prompt, completion = (_string(data, key, where) for key in ("prompt", "completion"))
    if not (prompt + completion).strip():
        return None
    return Row(text=prompt, completion=completion, **common)


def _wrong_fields(data: dict[str, Any], fields: set[str]) -> str:
    found = ", ".join(sorted(map(str, data))) or "none"
    if len(fields) > 1:
        return f"found the fields {found}, which mix two shapes; expected exactly one of {SHAPES}"
    close = [
        f"{key!r} looks like {match[0]!r}"
        for key in sorted(data.keys() - _KNOWN)
        if (match := difflib.get_close_matches(key.lower(), sorted(_CONTENT), n=1))
    ]
    hint = f" ({'; '.join(close)})" if close else ""
    return f"found the fields {found}, expected {SHAPES}{hint}"


def _string(data: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(data[key], str):
        raise CalibrationError(f"{where}: {key}: found {_name(data[key])}, expected a string")
    return str(data[key])


def _tag(data: dict[str, Any], key: str, where: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str | int):
        raise CalibrationError(f"{where}: {key}: found {_name(value)}, expected a string")
    return None if value is None else str(value)


def _tools(value: Any, where: str) -> list[Any] | None:
    if value is not None and not isinstance(value, list):
        raise CalibrationError(f"{where}: tools: found {_name(value)}, expected a list")
    return value or None


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """The checked messages; [] when none of them says anything."""
    if not isinstance(value, list):
        raise CalibrationError(f"{where}: messages: found {_name(value)}, expected a list")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CalibrationError(
                f"{where}: messages[{i}]: expected an object with a role and a content, "
                f'as in {{"role": "user", "content": "..."}}'
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise CalibrationError(f"{where}: messages[{i}]: has no content")
        if content is not None and not isinstance(content, str | list):
            raise CalibrationError(
                f"{where}: messages[{i}].content: found {_name(content)}, expected a string"
            )
    says = (m.get("content") or m.get("tool_calls") for m in value)
    return value if any(s.strip() if isinstance(s, str) else s for s in says) else []


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true/false"}
    return "null" if value is None else names.get(type(value), "a number")
