"""Suites: the gate half of the data as checked values, and a seeded, balanced pick from it.

A suite is a directory with `text.jsonl` (held-out text) and `extraction.jsonl` (prompts with a
JSON Schema and a gold answer). Knows no tokenizer and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from eval.errors import SuiteError

TEXT_FILE, EXTRACTION_FILE = "text.jsonl", "extraction.jsonl"


class Row(Protocol):
    """What every row of a suite has: an identity, its domains, and what the models read of it."""

    @property
    def id(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def lang(self) -> str: ...
    @property
    def content(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One held-out text."""

    id: str
    source: str
    lang: str
    text: str

    @property
    def content(self) -> tuple[str, ...]:
        """What the models read."""
        return (self.text,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionItem:
    """One prompt whose right answer is the JSON object `gold`, which satisfies `schema`.

    messages: the conversation so far, [{"role", "content"}, ...]. critical: names of top-level
    fields that must be exactly right.
    """

    id: str
    source: str
    lang: str
    messages: list[dict[str, str]]
    schema: dict[str, Any]
    gold: dict[str, Any]
    critical: tuple[str, ...]

    @property
    def content(self) -> tuple[str, ...]:
        """What the models read."""
        return tuple(text for m in self.messages for text in (m["role"], m["content"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The rows of one suite; `digests` maps each file to the sha256 of its bytes."""

    directory: Path
    documents: tuple[Document, ...]
    items: tuple[ExtractionItem, ...]
    digests: dict[str, str]


R = TypeVar("R", bound=Row)


def load_suite(directory: Path) -> Suite:
    """Read both files of a suite; SuiteError names the file, the line and what was expected."""
    if not directory.is_dir():
        raise SuiteError(f"no suite at {directory}: expected a directory with {TEXT_FILE}")
    documents = _read(directory / TEXT_FILE, _document)
    items = _read(directory / EXTRACTION_FILE, _item)
    return Suite(
        directory=directory,
        documents=documents,
        items=items,
        digests={
            name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
            for name in (TEXT_FILE, EXTRACTION_FILE)
        },
    )


def pick(rows: Sequence[R], count: int, seed: int) -> list[R]:
    """`count` rows, taken in turn from each (source, lang), in an order that the seed shuffles.

    A larger count only adds rows, and a row's place does not depend on its neighbours in the file.
    """
    strata: dict[tuple[str, str], list[R]] = {}
    for row in sorted(rows, key=lambda row: _shuffle_key(row.id, seed)):
        strata.setdefault((row.source, row.lang), []).append(row)
    turns = zip_longest(*(strata[key] for key in sorted(strata)))
    return [row for row in chain.from_iterable(turns) if row is not None][:count]


def _shuffle_key(row_id: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{row_id}".encode()).hexdigest()


T = TypeVar("T", bound=Row)


def _read(path: Path, parse: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    rows: list[T] = []
    seen: dict[Any, int] = {}
    for number, line in _lines(path):
        try:
            row = parse(_object(line))
        except ValueError as error:
            raise SuiteError(f"{path}:{number}: {error}") from error
        for key, what in ((row.id, f"the id {row.id!r}"), (row.content, "the same content")):
            if first := seen.get(key):
                raise SuiteError(
                    f"{path}:{number}: {what} stands in line {first} too; a row said twice would "
                    "count as two independent samples"
                )
        seen[row.id] = seen[row.content] = number
        rows.append(row)
    if not rows:
        raise SuiteError(f"{path} holds no rows")
    return tuple(rows)


def _object(line: str) -> dict[str, Any]:
    """One line as a JSON object; ValueError for anything else, NaN and lone surrogates included."""
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is not text; write whole characters") from None
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SuiteError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SuiteError(f"{path}: not UTF-8 at byte {error.start}") from error
    return ((n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip())


def _field(row: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(row.get(key), kind) or not row[key]:
        raise ValueError(f"expected a non-empty {key!r} ({kind.__name__}), found {row.get(key)!r}")
    return row[key]


def _domains(row: dict[str, Any]) -> dict[str, str]:
    return {key: _field(row, key, str) for key in ("id", "source", "lang")}


def _document(row: dict[str, Any]) -> Document:
    return Document(**_domains(row), text=_field(row, "text", str))


def _item(row: dict[str, Any]) -> ExtractionItem:
    schema, gold = _field(row, "schema", dict), _field(row, "gold", dict)
    critical = row.get("critical", [])
    if not isinstance(critical, list) or not all(isinstance(name, str) for name in critical):
        raise ValueError(f"expected 'critical' to be a list of field names, found {critical!r}")
    if missing := [name for name in critical if name not in gold]:
        raise ValueError(f"critical fields {missing} are not in gold")
    _check_gold(schema, gold)
    messages = _field(row, "messages", list)
    if not all(_is_message(message) for message in messages):
        raise ValueError("every message needs 'role' and 'content', both of them text")
    return ExtractionItem(
        **_domains(row), messages=messages, schema=schema, gold=gold, critical=tuple(critical)
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def _check_gold(schema: dict[str, Any], gold: dict[str, Any]) -> None:
    """A gold answer that breaks its own schema would make every right answer wrong."""
    validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the JSON Schema is not valid: {error.message}") from error
    checker = validator(schema, format_checker=validator.FORMAT_CHECKER, registry=Registry())
    try:
        broken = next(checker.iter_errors(gold), None)
    except Unresolvable as error:
        raise ValueError(
            f"the JSON Schema refers to {error.ref!r}, which it does not hold"
        ) from error
    if broken is not None:
        raise ValueError(f"gold breaks its own schema: {broken.message}")
