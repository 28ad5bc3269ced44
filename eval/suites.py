"""Suites: the gate half of the data as checked values, and a seeded, balanced pick from it.

A suite is a directory with `text.jsonl` (held-out text) and one or more other `*.jsonl` files of
tasks: prompts with what their answers are checked for. Knows no tokenizer and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

from referencing.exceptions import Unresolvable

from eval.checks import choice, fields, schema, state
from eval.checks.base import Check
from eval.checks.patience import TooSlowError, at_most
from eval.checks.registry import read_checks
from eval.errors import SuiteError
from eval.rows import object_of

TEXT_FILE = "text.jsonl"
ROLES = ("system", "user", "assistant", "tool")
# A row of tasks has one of these three; the last is the older shape of extraction.jsonl.
_SHAPES = ("checks", "turns", "schema")
_KEYS = {"id", "doc", "source", "lang", "task", "gold", "max_tokens", "golden"}


class Row(Protocol):
    """What every row of a suite has: an identity, its stratum, and what the models read of it."""

    @property
    def id(self) -> str: ...
    @property
    def stratum(self) -> tuple[str, ...]: ...
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
    def stratum(self) -> tuple[str, ...]:
        """Picked from in turn."""
        return self.source, self.lang

    @property
    def content(self) -> tuple[str, ...]:
        """What the models read."""
        return (self.text,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskItem:
    """One prompt and what its answer is checked for.

    doc: the document or dialog it was made from; items of one doc are not independent. messages:
    [{"role", "content"}, ...], for a later turn of a dialog only those since the last answer.
    tools: declarations for the chat template, or None. gold: a right answer to show, or None.
    max_tokens: the row's own limit, or None. golden: no answer of it that the base gets right may
    be lost. follows: the id of the turn before this one; its
    conversation, with the model's own answer, stands before `messages`.
    """

    id: str
    doc: str
    source: str
    lang: str
    messages: list[dict[str, str]]
    checks: tuple[Check, ...]
    tools: list[dict[str, Any]] | None = None
    gold: Any = None
    max_tokens: int | None = None
    follows: str | None = None
    golden: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """The continuations, for an item that is answered by likelihood."""
        found = [c.options for c in self.checks if isinstance(c.options, choice.Options)]
        return found[0].choices if found else ()

    @property
    def gold_text(self) -> str | None:
        """A right answer as text, None where the row gives none."""
        if self.gold is None or isinstance(self.gold, str):
            return self.gold
        return json.dumps(self.gold, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One row of a task file: a single item, or the turns of a dialog in order."""

    id: str
    stratum: tuple[str, ...]
    items: tuple[TaskItem, ...]

    @property
    def content(self) -> tuple[str, ...]:
        """What the models read."""
        asked = (text for i in self.items for m in i.messages for text in (m["role"], m["content"]))
        return (*asked, *self.items[0].choices, json.dumps(self.items[0].tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The rows of one suite, tasks by file; `digests` maps each file to the sha256 of its bytes."""

    directory: Path
    documents: tuple[Document, ...]
    tasks: dict[str, tuple[TaskRow, ...]]
    digests: dict[str, str]

    @property
    def items(self) -> tuple[TaskItem, ...]:
        """Every item of every task file."""
        return tuple(i for rows in self.tasks.values() for row in rows for i in row.items)

    @property
    def largest_file(self) -> int:
        """Rows of the task file that holds most."""
        return max(map(len, self.tasks.values()))

    def pick(self, count: int, seed: int) -> list[TaskItem]:
        """The items of `count` rows of each task file, dialogs whole and their turns in order."""
        rows = (row for rows in self.tasks.values() for row in pick(rows, count, seed))
        return [item for row in rows for item in row.items]


R = TypeVar("R", bound=Row)


def load_suite(directory: Path) -> Suite:
    """Read all files of a suite; SuiteError names the file, the line and what was expected."""
    if not directory.is_dir():
        raise SuiteError(f"no suite at {directory}: expected a directory with {TEXT_FILE}")
    documents = _read(directory / TEXT_FILE, _document)
    names = sorted(p.name for p in directory.glob("*.jsonl") if p.name != TEXT_FILE)
    if not names:
        raise SuiteError(
            f"{directory} holds no tasks: expected a *.jsonl file beside {TEXT_FILE}, such as "
            "extraction.jsonl"
        )
    tasks = {name: _read(directory / name, _task_row) for name in names}
    _refuse_shared_ids(directory, tasks)
    return Suite(
        directory=directory,
        documents=documents,
        tasks=tasks,
        digests={
            name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
            for name in (TEXT_FILE, *names)
        },
    )


def _refuse_shared_ids(directory: Path, tasks: dict[str, tuple[TaskRow, ...]]) -> None:
    seen: dict[str, str] = {}
    for name, rows in tasks.items():
        for row in rows:
            if (other := seen.setdefault(row.id, name)) != name:
                raise SuiteError(f"{directory / name}: the id {row.id!r} stands in {other} too")


def pick(rows: Sequence[R], count: int, seed: int) -> list[R]:
    """`count` rows, taken in turn from each stratum, in an order that the seed shuffles.

    A larger count only adds rows, and a row's place does not depend on its neighbours in the file.
    """
    strata: dict[tuple[str, ...], list[R]] = {}
    for row in sorted(rows, key=lambda row: _shuffle_key(row.id, seed)):
        strata.setdefault(row.stratum, []).append(row)
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
    value = object_of(line, constants=False)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is not text; write whole characters") from None
    return value


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
    named = {key: _field(row, key, str) for key in ("id", "source", "lang")}
    for key, name in named.items():
        if not name.isprintable():
            raise ValueError(f"expected {key!r} to be printable, for reports, found {name!r}")
    return named


def _document(row: dict[str, Any]) -> Document:
    return Document(**_domains(row), text=_field(row, "text", str))


def _task_row(row: dict[str, Any]) -> TaskRow:
    shape = next((key for key in _SHAPES if key in row), None)
    if shape is None:
        raise ValueError(f"expected one of the keys {', '.join(_SHAPES)}, found {sorted(row)}")
    named = _domains(row)
    named["doc"] = _field(row, "doc", str) if "doc" in row else named["id"]
    if shape == "schema":
        return TaskRow(
            id=named["id"],
            stratum=(named["source"], named["lang"]),
            items=(_extraction(row, named),),
        )
    task = row.get("task", "")
    if not isinstance(task, str):
        raise ValueError(f"expected 'task' to be text, found {task!r}")
    if shape == "checks":
        _only(row, *_KEYS, "checks", "messages", "tools")
        items: tuple[TaskItem, ...] = (_item(row, named),)
    else:
        _only(row, *_KEYS - {"gold"}, "turns")
        items = _turns(row, named)
    return TaskRow(id=named["id"], stratum=(named["source"], named["lang"], task), items=items)


def _only(row: dict[str, Any], *known: str) -> None:
    """A key that would have no effect is refused: its author believes that it has one."""
    if unknown := sorted(set(row) - set(known)):
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")


def _item(row: dict[str, Any], named: dict[str, str], follows: str | None = None) -> TaskItem:
    tools = row.get("tools")
    if tools is not None and (not isinstance(tools, list) or not tools):
        raise ValueError(f"expected 'tools' to be a non-empty list, found {tools!r}")
    limit = row.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"expected 'max_tokens' to be a positive integer, found {limit!r}")
    checks = read_checks(row.get("checks"))
    _require_possible(checks)
    return TaskItem(
        **named,
        messages=_messages(row),
        checks=checks,
        tools=tools,
        gold=row.get("gold", _gold_of(checks)),
        max_tokens=limit,
        follows=follows,
        golden=_golden(row),
    )


def _golden(row: dict[str, Any]) -> bool:
    golden = row.get("golden", False)
    if not isinstance(golden, bool):
        raise ValueError(f"expected 'golden' to be true or false, found {golden!r}")
    return golden


def _turns(row: dict[str, Any], named: dict[str, str]) -> tuple[TaskItem, ...]:
    turns, items = _field(row, "turns", list), list[TaskItem]()
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number}: expected an object, found {turn!r}")
        try:
            _only(turn, "messages", "checks", "gold", "max_tokens", "golden")
            last = items[-1].id if items else None
            item = _item(
                {"max_tokens": row.get("max_tokens"), "golden": row.get("golden", False), **turn},
                {**named, "id": f"{named['id']}#{number + 1}"},
                last,
            )
        except ValueError as error:
            raise ValueError(f"turn {number + 1}: {error}") from error
        if item.choices:
            raise ValueError(f"turn {number + 1}: 'choice' leaves no answer for the next turn")
        items.append(item)
    return tuple(items)


def _extraction(row: dict[str, Any], named: dict[str, str]) -> TaskItem:
    """The older shape: a schema and a gold object make three checks."""
    _field(row, "schema", dict), _field(row, "gold", dict)
    checks = read_checks(
        [
            {"kind": "json_valid"},
            {"kind": "schema_valid", "schema": row["schema"]},
            {"kind": "fields", "gold": row["gold"], "critical": row.get("critical", [])},
        ]
    )
    _require_possible(checks)
    asked = {"messages": _messages(row), "checks": checks, "gold": row["gold"]}
    return TaskItem(**{**named, **asked, "golden": _golden(row)})


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    messages = _field(row, "messages", list)
    if not all(_is_message(message) for message in messages):
        raise ValueError("every message needs 'role' and 'content', both of them text")
    return list(messages)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def _gold_of(checks: Sequence[Check]) -> Any:
    """A right answer that the checks themselves name."""
    for check in checks:
        if isinstance(check.options, fields.Options | state.Options):
            return check.options.gold
        if isinstance(check.options, choice.Options):
            return check.options.choices[check.options.gold]
        if isinstance(gold := getattr(check.options, "gold", None), tuple) and gold:
            return gold[0] if isinstance(gold[0], str) else None
    return None


def _require_possible(checks: Sequence[Check]) -> None:
    """A gold answer that breaks the row's own schema would make every right answer wrong."""
    schemas = [c.options.schema for c in checks if isinstance(c.options, schema.Options)]
    golds = [c.options.gold for c in checks if isinstance(c.options, fields.Options)]
    for wanted in schemas:
        checker = schema.checker(wanted)
        try:
            with at_most(schema.PATIENCE_S):
                broken = next((e for g in golds or [{}] for e in checker.iter_errors(g)), None)
        except TooSlowError:
            raise ValueError(schema.endless(wanted, golds)) from None
        except Unresolvable as error:
            raise ValueError(
                f"the JSON Schema refers to {error.ref!r}, which it does not hold"
            ) from error
        except RecursionError:
            raise ValueError("the JSON Schema refers to itself without an end") from None
        if golds and broken is not None:
            raise ValueError(f"gold breaks its own schema: {broken.message}")
