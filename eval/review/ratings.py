"""Ratings on disk: one append-only file a rater, every line synced before it is answered.

Each line holds the sha256 of the line before it, so a line that was changed, taken out or put in
shows. (It does not show who wrote a file: someone who rewrites all of it can make it whole again.)
A line that a power cut left unfinished is dropped. Several processes may append at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from eval.errors import EvaluationError, UsageError
from eval.review.pack import Label, Pack, Sha256, parse

Choice = Literal["a", "tie", "b"]
LONGEST_NAME = 40

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Rating(BaseModel):
    """What one rater says of one item. seconds: how long it was looked at."""

    model_config = _STRICT
    choice: Choice
    critical: Annotated[list[Label], Field(max_length=2)] = []
    note: Annotated[str, Field(max_length=2000)] = ""
    seconds: Annotated[float, Field(ge=0, le=1e6)] = 0.0


class Header(BaseModel):
    """The first line: whose ratings of which pack these are."""

    model_config = _STRICT
    format_version: Literal[1] = 1
    pack: Sha256
    rater: str


class Entry(BaseModel):
    """Any other line. A rating of null withdraws; `undoes` marks a step back."""

    model_config = _STRICT
    previous: Sha256
    at: str
    item: str
    rating: Rating | None
    undoes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that one rater did. `current` is what holds; `steps` are what an undo would take back."""

    rater: str
    current: Mapping[str, Rating]
    steps: tuple[tuple[str, Rating | None], ...] = ()


def rater_name(name: str) -> str:
    """The name as it is kept. UsageError unless it is 1 to 40 printable characters."""
    clean = " ".join(unicodedata.normalize("NFC", name).split())
    if not clean or len(clean) > LONGEST_NAME or not clean.isprintable():
        raise UsageError(
            f"a rater's name has 1 to {LONGEST_NAME} printable characters, found {name!r}"
        )
    return clean


def ratings_path(pack: Pack, rater: str) -> Path:
    """The rater's file: readable, and its own even where names look alike to a file system."""
    readable = re.sub(r"[^a-z0-9]+", "-", rater.casefold()).strip("-")[:24] or "rater"
    own = hashlib.sha256(rater.casefold().encode()).hexdigest()[:8]
    return pack.ratings / f"{readable}-{own}.jsonl"


def append(pack: Pack, rater: str, item: str, rating: Rating) -> History:
    """Add a rating durably; returns what holds now. UsageError when the disk refuses."""
    _check_item(pack, item)
    with _opened(pack, rater) as (file, history, digest):
        _add(file, Entry(previous=digest, at=_now(), item=item, rating=rating))
        return _after(history, item, rating)


def undo(pack: Pack, rater: str) -> tuple[str, History] | None:
    """Take the last step back, durably; the item concerned, or None when there is no step."""
    with _opened(pack, rater) as (file, history, digest):
        if not history.steps:
            return None
        item, before = history.steps[-1]
        _add(file, Entry(previous=digest, at=_now(), item=item, rating=before, undoes=True))
        return item, _back(history)


def read_history(pack: Pack, rater: str) -> History:
    """What a rater did so far; nothing yet when there is no file."""
    path = ratings_path(pack, rater)
    if not path.exists():
        return History(rater=rater, current={})
    return _parse(pack, path, _whole_lines(_bytes(path)))[0]


def read_all(pack: Pack) -> list[History]:
    """Everybody's ratings. EvaluationError names a file that is not as it was written."""
    histories = []
    for path in sorted(pack.ratings.glob("*.jsonl")):
        lines = _whole_lines(_bytes(path))
        if lines:
            histories.append(_parse(pack, path, lines)[0])
    names = [history.rater.casefold() for history in histories]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise EvaluationError(f"{pack.ratings} has two files of the rater {twice[0]!r}")
    return histories


def _check_item(pack: Pack, item: str) -> None:
    if item not in pack.items:
        raise UsageError(f"the pack has no item {item!r}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def _opened(pack: Pack, rater: str) -> Iterator[tuple[IO[bytes], History, str]]:
    """The rater's file, locked, cut after its last whole line, at its end."""
    path = ratings_path(pack, rater)
    try:
        pack.ratings.mkdir(exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            lines = _whole_lines(file.read())
            file.truncate(sum(map(len, lines)))
            if not lines:
                lines = [_add(file, Header(pack=pack.digest, rater=rater))]
                _sync_folder(path.parent)
            yield file, *_parse(pack, path, lines)
    except OSError as error:
        raise UsageError(f"the rating was not saved: {path}: {error.strerror}") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EvaluationError(f"cannot read the ratings {path}: {error.strerror}") from error


def _whole_lines(data: bytes) -> list[bytes]:
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def _add(file: IO[bytes], line: BaseModel) -> bytes:
    data = line.model_dump_json().encode() + b"\n"
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    return data


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _parse(pack: Pack, path: Path, lines: list[bytes]) -> tuple[History, str]:
    """The history in a file and the digest of its last line."""
    header = parse(Header, lines[0], path)
    if header.pack != pack.digest:
        raise EvaluationError(f"{path} rates another pack than {pack.path}, or pack.json changed")
    if ratings_path(pack, header.rater).name != path.name:
        raise EvaluationError(f"{path} is not the file of its rater, {header.rater!r}")
    history, digest = History(rater=header.rater, current={}), _sha256(lines[0])
    for number, line in enumerate(lines[1:], start=2):
        entry = parse(Entry, line, path)
        if entry.previous != digest or entry.item not in pack.items:
            raise EvaluationError(
                f"{path}:{number} does not follow from the line before it: the file was changed "
                "by something else than `evaluate review serve`"
            )
        if entry.undoes and not history.steps:
            raise EvaluationError(f"{path}:{number} undoes a rating that was never made")
        history = _next(history, entry)
        digest = _sha256(line)
    return history, digest


def _next(history: History, entry: Entry) -> History:
    if entry.undoes:
        return _back(history)
    return _after(history, entry.item, entry.rating)


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _after(history: History, item: str, rating: Rating | None) -> History:
    before = history.current.get(item)
    return History(
        rater=history.rater,
        current=_with(history.current, item, rating),
        steps=(*history.steps, (item, before)),
    )


def _back(history: History) -> History:
    item, before = history.steps[-1]
    return History(
        rater=history.rater,
        current=_with(history.current, item, before),
        steps=history.steps[:-1],
    )


def _with(current: Mapping[str, Rating], item: str, rating: Rating | None) -> dict[str, Rating]:
    rest = {name: value for name, value in current.items() if name != item}
    return rest if rating is None else {**rest, item: rating}


def order(pack: Pack, rater: str) -> list[str]:
    """The items in the rater's own order.

    A quarter that is the same for everybody comes first, so that two raters who stop early still
    overlap; each part is shuffled by the rater's name.
    """
    common = sorted(pack.items, key=lambda item: _place(pack, "", item))[: -(-len(pack.items) // 4)]
    first = set(common)
    return sorted(
        pack.items,
        key=lambda item: (item not in first, _place(pack, rater.casefold(), item)),
    )


def _place(pack: Pack, rater: str, item: str) -> str:
    return hashlib.sha256(f"{pack.digest}:{rater}:{item}".encode()).hexdigest()
