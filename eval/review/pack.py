"""The pack that raters see, and the key that says what they saw. Start at `seal` and `open_pack`.

PACK/pack.json     what the pack is, its rules, sha256 of items.jsonl and of the key
PACK/items.jsonl   per item the conversation and the answers A and B, in an order that says nothing
PACK/ratings/      one append-only file a rater (eval.review.ratings)
PACK.key.json      beside the pack, never in it: the sides, the controls, the weights

The key lies apart rather than encrypted in the pack: whoever scores would hold the password as well
as the file, and a file that was never handed out cannot be opened. The commitment in pack.json
proves later that the key is the one the pack was made with. Its secret makes the commitment
impossible to guess at, and sides come from the secret, not from the seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eval.errors import EvaluationError, UsageError
from eval.places import beside
from eval.review.controls import plant
from eval.review.draw import Draw, Drawn
from eval.review.rules import Rules
from eval.review.samples import Message, Sample, explain
from quant.artifact.redact import Redactor
from quant.artifact.staging import leftovers, remove, sole_writer, staged

PACK_NAME, ITEMS_NAME, RATINGS_NAME = "pack.json", "items.jsonl", "ratings"
SECRET_BYTES = 32

Label = Literal["a", "b"]
Kind = Literal["request", "identical", "planted"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PackInfo(BaseModel):
    """pack.json."""

    model_config = _STRICT
    format_version: Literal[1] = 1
    created_at: str
    num_items: int
    redacted: bool
    rules: Rules
    items_sha256: Sha256
    key_sha256: Sha256


class Item(BaseModel):
    """What a rater sees: a line of items.jsonl."""

    model_config = _STRICT
    id: str
    source: str
    lang: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    a: str
    b: str


class KeyEntry(BaseModel):
    """What an item was. better: the candidate's side of a request, the sound one of a control."""

    model_config = _STRICT
    id: str
    kind: Kind
    sample: str
    doc: str
    task: str
    source: str
    lang: str
    weight: Annotated[float, Field(ge=0)] = 0.0
    is_longest: bool = False
    candidate: Label | None = None
    sound: Label | None = None
    defect: str | None = None


class Key(BaseModel):
    """The key file."""

    model_config = _STRICT
    format_version: Literal[1] = 1
    secret: Sha256
    seed: int
    items_sha256: Sha256
    samples_sha256: Sha256
    artifact_digest: str | None
    num_requests: int
    num_differing: int
    entries: list[KeyEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """An opened pack. digest: sha256 of pack.json, which every ratings file names."""

    path: Path
    info: PackInfo
    items: dict[str, Item]
    digest: str

    @property
    def ratings(self) -> Path:
        """Where the ratings lie."""
        return self.path / RATINGS_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a pack is made from."""

    samples_sha256: str
    artifact_digest: str | None
    seed: int


def key_path(pack: Path) -> Path:
    """Where the key of a pack is unless said otherwise: beside it."""
    return beside(pack, ".key.json")


def seal(draw: Draw, out: Path, origin: Origin, *, rules: Rules, redact: bool) -> Path:
    """Write a pack and its key, all or nothing; returns the key's path.

    Raises UsageError: something is there already, or it cannot be written.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    pairs = _arrange(draw, random.Random(secret))
    items = _lines(item for item, _ in (_redacted(pairs) if redact else pairs))
    key = Key(
        secret=secret.hex(),
        seed=origin.seed,
        items_sha256=_sha256(items),
        samples_sha256=origin.samples_sha256,
        artifact_digest=origin.artifact_digest,
        num_requests=draw.num_requests,
        num_differing=draw.num_differing,
        entries=[entry for _, entry in pairs],
    )
    key_bytes = _document(key)
    info = PackInfo(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_items=len(pairs),
        redacted=redact,
        rules=rules,
        items_sha256=key.items_sha256,
        key_sha256=_sha256(key_bytes),
    )
    _write(out, {ITEMS_NAME: items, PACK_NAME: _document(info)}, key_bytes)
    return key_path(out)


def _arrange(draw: Draw, chance: random.Random) -> list[tuple[Item, KeyEntry]]:
    """Items in random order, sides balanced: half of each kind has its better answer as A."""
    made = [
        *_sided([_request(drawn) for drawn in draw.drawn], chance),
        *_sided([_identical(sample) for sample in draw.identical], chance),
        *_sided([_planted(s, n) for n, s in enumerate(draw.planted)], chance),
    ]
    chance.shuffle(made)
    return [_numbered(n, *pair) for n, pair in enumerate(made, start=1)]


def _numbered(number: int, item: Item, entry: KeyEntry) -> tuple[Item, KeyEntry]:
    name = {"id": f"{number:03d}"}
    return item.model_copy(update=name), entry.model_copy(update=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsided:
    """An item before its sides are drawn; `first` is the candidate's or the sound answer."""

    sample: Sample
    first: str
    second: str
    about: dict[str, Any]
    marks: str | None


def _request(drawn: Drawn) -> _Unsided:
    s = drawn.sample
    about = {"kind": "request", "weight": drawn.weight, "is_longest": drawn.is_longest}
    return _Unsided(
        sample=s, first=s.candidate.text, second=s.base.text, about=about, marks="candidate"
    )


def _identical(sample: Sample) -> _Unsided:
    text = sample.base.text
    return _Unsided(sample=sample, first=text, second=text, about={"kind": "identical"}, marks=None)


def _planted(sample: Sample, turn: int) -> _Unsided:
    text = sample.base.text
    damaged, defect = plant(text, turn)
    about = {"kind": "planted", "defect": defect}
    return _Unsided(sample=sample, first=text, second=damaged, about=about, marks="sound")


def _sided(made: list[_Unsided], chance: random.Random) -> list[tuple[Item, KeyEntry]]:
    sides: list[Label] = ["a" if n % 2 else "b" for n in range(len(made))]
    # An odd one out must not always have the same side.
    if len(made) % 2 and chance.random() < 0.5:
        sides = ["b" if side == "a" else "a" for side in sides]
    chance.shuffle(sides)
    return [_sealed(unsided, side) for unsided, side in zip(made, sides, strict=True)]


def _sealed(u: _Unsided, side: Label) -> tuple[Item, KeyEntry]:
    a, b = (u.first, u.second) if side == "a" else (u.second, u.first)
    s = u.sample
    item = Item(id="", source=s.source, lang=s.lang, messages=s.messages, tools=s.tools, a=a, b=b)
    marked = {} if u.marks is None else {u.marks: side}
    about = {"id": "", "sample": s.id, "doc": s.doc, "task": s.task, "source": s.source}
    entry = KeyEntry.model_validate({**about, "lang": s.lang, **u.about, **marked})
    return item, entry


def _redacted(pairs: Iterable[tuple[Item, KeyEntry]]) -> list[tuple[Item, KeyEntry]]:
    """One redactor an item: a value has the same placeholder in the request and both answers."""
    done = []
    for item, entry in pairs:
        redactor = Redactor()
        hidden = redactor.value(item.model_dump(include={"messages", "tools", "a", "b"}))
        done.append((Item.model_validate({**item.model_dump(), **hidden}), entry))
    return done


def _lines(items: Iterable[Item]) -> bytes:
    return b"".join(
        json.dumps(item.model_dump(exclude_none=True), ensure_ascii=False).encode() + b"\n"
        for item in items
    )


def _document(model: BaseModel) -> bytes:
    return (json.dumps(model.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(out: Path, files: dict[str, bytes], key: bytes) -> None:
    """The pack under a temporary name first; the key before the pack gets its own."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with sole_writer(out.parent) as alone:
            if alone:
                _remove_unfinished(out)
            _refuse_taken(out)
            _place(out, files, key)
    except OSError as error:
        raise UsageError(f"cannot write the pack {out}: {error.strerror}") from error


def _place(out: Path, files: dict[str, bytes], key: bytes) -> None:
    made, made_key = staged(out), staged(key_path(out))
    try:
        made.mkdir()
        for name, data in files.items():
            _put(made / name, data, 0o644)
        (made / RATINGS_NAME).mkdir()
        _put(made_key, key, 0o600)
        made_key.rename(key_path(out))
        made.rename(out)
    except BaseException:
        _remove_staged(made, out)
        remove(made_key)
        raise


def _remove_unfinished(out: Path) -> None:
    """What killed makers of this pack left."""
    for path in leftovers(out):
        _remove_staged(path, out)
    for path in leftovers(key_path(out)):
        remove(path)


def _remove_staged(made: Path, out: Path) -> None:
    """A pack that did not get its name; before it the key, where that is its own."""
    key = key_path(out)
    with suppress(OSError, EvaluationError):
        info = parse(PackInfo, _read(made / PACK_NAME), made / PACK_NAME)
        if _sha256(key.read_bytes()) == info.key_sha256:
            key.unlink()
    remove(made)


def check_place(out: Path) -> None:
    """Refuse to touch a pack or key that is there: ratings are people's hours."""
    if out.parent.is_dir():
        with suppress(OSError), sole_writer(out.parent) as alone:
            if alone:
                _remove_unfinished(out)
    _refuse_taken(out)


def _refuse_taken(out: Path) -> None:
    for path in (out, key_path(out)):
        if path.exists():
            raise UsageError(f"{path} exists already; pass another --out or remove it first")


def _put(path: Path, data: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_pack(path: Path) -> Pack:
    """Read a pack and check it against itself.

    Raises UsageError when this is no pack, EvaluationError when it is not as it was made.
    """
    if not (path / PACK_NAME).is_file():
        raise UsageError(f"{path} is not a review pack: expected a folder with {PACK_NAME}")
    data = _read(path / PACK_NAME)
    info = parse(PackInfo, data, path / PACK_NAME)
    lines = _read(path / ITEMS_NAME)
    if _sha256(lines) != info.items_sha256:
        raise EvaluationError(
            f"{path / ITEMS_NAME} was changed after the pack was made (its sha256 is not "
            f"{PACK_NAME}'s); restore it, or make a new pack"
        )
    items = [parse(Item, line, path / ITEMS_NAME) for line in lines.splitlines()]
    return Pack(path=path, info=info, items={item.id: item for item in items}, digest=_sha256(data))


def open_key(path: Path, pack: Pack) -> Key:
    """Read the key of a pack. EvaluationError when it is not the one the pack was sealed with."""
    if not path.is_file():
        raise UsageError(
            f"no key at {path}: pass --key, the file that `evaluate review pack` wrote beside the "
            "pack; without it nobody can tell which side was which"
        )
    data = _read(path)
    if _sha256(data) != pack.info.key_sha256:
        raise EvaluationError(
            f"{path} is not the key that {pack.path} was sealed with, or one of them was changed"
        )
    key = parse(Key, data, path)
    if key.items_sha256 != pack.info.items_sha256 or {e.id for e in key.entries} != set(pack.items):
        raise EvaluationError(f"{path} and {pack.path} speak of different items")
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}") from error


M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], data: bytes, path: Path) -> M:
    """JSON as a model; EvaluationError names the file and the field."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise EvaluationError(f"{path}: {explain(error)}") from error
