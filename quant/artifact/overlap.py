"""Do two sets of texts share what is not boilerplate? What calibrates must never judge.

The unit is a run of RUN tokens as a 64-bit hash. Runs that more than COMMON documents of the two
sides together hold are templates, instructions and forms, and count for nothing. `quantize` keeps
a sketch of the calibration rows' runs in artifact.json, and `evaluate` holds the gate's documents
to it, or to the rows themselves. Broder, "On the resemblance and containment of documents",
1997; keeping one hash in `keep` leaves containment unbiased (Irber et al., "FracMinHash", 2022).

Pure; knows no file format. A run of ten words cannot be read back from its hash, but whoever has a
text can tell whether it was among the rows.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from quant.artifact.text_runs import U64, ngrams, normalised, rolling, tokens

RUN = 10
COMMON = 5
# A document is repeated when this share of its own runs stands in one row, and at least so many.
CONTAINED = 0.3
LEAST_RUNS = 8
# So many shared runs are a passage, whatever share of either side they are. (Rare clauses of one
# template have up to 60.)
PASSAGE_RUNS = 100
# A gold answer says which document it is of when its telling values have so many characters.
_SHORTEST_VALUE, _TELLING_VALUES, _TELLING_CHARACTERS = 4, 2, 16
_SKETCH_RUNS = 1 << 16
_SMALLEST_KEEP = 4
_CHUNK_ROWS = 2048
_FILTER_BITS = 24

# Row -> (gate document, sign).
_Found = dict[int, tuple[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A document or a row. ids: names that identify it (row and document); content: all it says.

    values: what a gold answer fills in, strings. group: documents of one group count once when it
    is asked how common a run is; "" is a group of its own.
    """

    where: str
    content: str
    ids: frozenset[str] = frozenset()
    values: tuple[str, ...] = ()
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A calibration row that repeats a gate document, and the sign of it in words."""

    row: str
    gate: str
    sign: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """Calibration rows as hashes: one run in `keep`, its upper 32 bits. ids: hashed names.

    documents: [n] uint32 each, sorted.
    """

    keep: int
    documents: tuple[NDArray[np.uint32], ...]
    ids: frozenset[str]


# Keys of a row that hold no text of its document: names, and what is the same in a whole task.
_NO_TEXT = frozenset({"id", "doc", "source", "lang", "task", "schema", "critical", "role", "kind",
                      "tools", "gold", "checks", "golden"})  # fmt: skip


def text_of_row(where: str, row: Mapping[str, Any]) -> Text:
    """A JSONL row of calibration data or of a suite, whatever its shape."""
    names = [row[key] for key in ("id", "doc") if isinstance(row.get(key), str)]
    gold = [row.get("gold"), *(check.get("gold") for check in _checks(row))]
    document = row.get("doc")
    return Text(
        where=f"{where} ({names[0]})" if names else where,
        content="\n".join(_strings({k: v for k, v in row.items() if k not in _NO_TEXT})),
        ids=telling_ids(*names),
        values=tuple(value for answer in gold for value in _strings(answer)),
        group=document if isinstance(document, str) else "",
    )


def _checks(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    checks = row.get("checks")
    return [c for c in checks if isinstance(c, Mapping)] if isinstance(checks, list) else []


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _NO_TEXT:
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def telling_ids(*names: Any) -> frozenset[str]:
    """Those that name a document; a mere number or a short name says nothing in another file."""
    texts = (name for name in names if isinstance(name, str))
    return frozenset(name for name in texts if len(name) >= 6 and not name.isdigit())


def make_sketch(rows: Iterable[Text]) -> Sketch:
    """The sketch of calibration rows, at most about _SKETCH_RUNS hashes."""
    groups: dict[str, list[U64]] = {}
    ids: set[str] = set()
    for row in rows:
        groups.setdefault(_group(row), []).append(ngrams(normalised(row.content), RUN))
        ids.update(map(hashed_id, row.ids))
    runs = [np.unique(np.concatenate(parts)) for parts in groups.values()]
    keep = _SMALLEST_KEEP
    while sum(map(len, runs)) > keep * _SKETCH_RUNS:
        keep *= 2
    documents = sorted((_kept(r, keep) for r in runs), key=encode)
    return Sketch(keep=keep, documents=tuple(documents), ids=frozenset(ids))


def _group(text: Text) -> str:
    """The document a text belongs to; texts that say the same are one."""
    return f"doc:{text.group}" if text.group else f"text:{hashed_id(text.content)}"


def _kept(runs: U64, keep: int) -> NDArray[np.uint32]:
    chosen = runs[runs % np.uint64(keep) == 0]
    return np.unique((chosen >> np.uint64(32)).astype(np.uint32))


def hashed_id(name: str) -> str:
    """The first half of the sha256 of a document's name."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def encode(hashes: NDArray[np.uint32]) -> str:
    """Little-endian base64, as artifact.json holds them."""
    return base64.b64encode(hashes.astype("<u4").tobytes()).decode("ascii")


def decode(text: str) -> NDArray[np.uint32]:
    """What `encode` wrote; ValueError for anything else."""
    data = base64.b64decode(text, validate=True)
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no list of 32-bit hashes")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def find_leaks(gate: Sequence[Text], rows: Iterable[Text]) -> list[Leak]:
    """At most one leak a row, in the rows' order."""
    index = _Index(gate)
    ids_of_gate = _by_id(gate)
    names: list[str] = []
    groups: list[str] = []
    lengths: list[NDArray[np.int64]] = []
    run_hits: list[NDArray[np.int64]] = []
    value_hits: list[NDArray[np.int64]] = []
    by_id: _Found = {}
    stream = iter(rows)
    while chunk := list(islice(stream, _CHUNK_ROWS)):
        start = len(names)
        names += [row.where for row in chunk]
        groups += [_group(row) for row in chunk]
        for number, row in enumerate(chunk, start):
            if same := sorted(row.ids & ids_of_gate.keys()):
                by_id[number] = (ids_of_gate[same[0]], f"the same id {same[0]}")
        hashed = _hash_rows([normalised(row.content) for row in chunk], index.longest)
        lengths.append(hashed.lengths)
        run_hits.append(index.runs.hits(hashed, RUN, start))
        value_hits += [table.hits(hashed, size, start) for size, table in index.values.items()]
    found = _contained(
        index.runs,
        np.concatenate([_NO_HITS, *run_hits]),
        np.concatenate([_NO_ROWS, *lengths]),
        _numbered(groups),
        1,
    )
    found = {**found, **_same_records(index, value_hits), **by_id}
    return [
        Leak(row=names[row], gate=gate[document].where, sign=sign)
        for row, (document, sign) in sorted(found.items())
    ]


def find_sketched_leaks(gate: Sequence[Text], sketch: Sketch) -> list[Leak]:
    """As find_leaks, with the sketch in place of the rows: by ids and by runs."""
    table = _Table.of(
        [_kept(ngrams(normalised(d.content), RUN), sketch.keep).astype(np.uint64) for d in gate],
        [_group(d) for d in gate],
    )
    rows = [d.astype(np.uint64) for d in sketch.documents]
    hits = [table.look_up(own, np.full(len(own), number)) for number, own in enumerate(rows)]
    lengths = np.array([len(own) * sketch.keep + RUN - 1 for own in rows], dtype=np.int64)
    alone = np.arange(len(rows))
    found = _contained(table, np.concatenate([_NO_HITS, *hits]), lengths, alone, sketch.keep)
    leaks = [
        Leak(row=f"calibration row {row + 1} of the sketch", gate=gate[document].where, sign=sign)
        for row, (document, sign) in sorted(found.items())
    ]
    known = {hashed_id(name): (name, d.where) for d in gate for name in d.ids}
    return leaks + [
        Leak(row="a calibration row", gate=known[i][1], sign=f"the same id {known[i][0]}")
        for i in sorted(known.keys() & sketch.ids)
    ]


def num_checkable(gate: Sequence[Text], keep: int) -> int:
    """How many gate documents have enough runs for a sketch to show a copy."""
    sizes = [len(_kept(ngrams(normalised(d.content), RUN), keep)) for d in gate]
    return sum(size >= _least(LEAST_RUNS, keep) for size in sizes)


def sketch_covers(sketch: Sketch, rows: Iterable[Text]) -> float:
    """The share of the sketch's hashes that stand in these rows: 1 for the rows it was made of."""
    wanted = np.unique(np.concatenate([np.empty(0, np.uint32), *sketch.documents]))
    missing = np.ones(len(wanted), dtype=bool)
    for row in rows:
        found = _kept(ngrams(normalised(row.content), RUN), sketch.keep)
        missing &= ~np.isin(wanted, found)
    return 1.0 - float(missing.mean()) if len(wanted) else 1.0


_NO_HITS = np.empty((0, 2), np.int64)
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hashed:
    """Rows end to end. hashes[k - 1]: of runs of k words; row: of each word; lengths: words."""

    hashes: list[U64]
    row: NDArray[np.int64]
    lengths: NDArray[np.int64]


def _hash_rows(texts: Sequence[str], longest: int) -> _Hashed:
    known: dict[str, int] = {}
    codes: list[int] = []
    lengths = []
    for text in texts:
        found = tokens(text) or [text]
        lengths.append(len(found))
        for token in found:
            code = known.get(token)
            if code is None:
                code = known[token] = crc32(token.encode())
            codes.append(code)
    words = np.array(codes, dtype=np.uint64)
    row = np.repeat(np.arange(len(texts)), lengths)
    return _Hashed(
        hashes=list(rolling(words, min(longest, len(words)))),
        row=row,
        lengths=np.array(lengths, dtype=np.int64),
    )


def _numbered(groups: Sequence[str]) -> NDArray[np.int64]:
    numbers = {name: i for i, name in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[name] for name in groups], dtype=np.int64)


class _Table:
    """Which gate documents hold a hash. pairs [P, 2]: (hash's index, document), sorted."""

    def __init__(self, hashes: U64, pairs: NDArray[np.int64], num_documents: int) -> None:
        self.hashes, self.owners = hashes, pairs[:, 1]
        self.starts = np.searchsorted(pairs[:, 0], np.arange(len(hashes) + 1))
        self.sizes = np.bincount(self.owners, minlength=num_documents)
        self.holders = np.diff(self.starts)
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=bool)
        self._filter[self._slot(hashes)] = True

    @classmethod
    def of(cls, sets: Sequence[U64], groups: Sequence[str]) -> _Table:
        """Of the documents' distinct hashes, without those that more than COMMON groups hold."""
        owners = np.repeat(np.arange(len(sets)), [len(s) for s in sets])
        hashes, index = np.unique(
            np.concatenate([np.empty(0, np.uint64), *sets]), return_inverse=True
        )
        holders = _num_groups(index, _numbered(groups)[owners], len(hashes))
        is_rare = holders <= COMMON
        kept = is_rare[index]
        place = np.cumsum(is_rare) - 1
        pairs = np.stack([place[index[kept]], owners[kept]], axis=1)
        table = cls(hashes[is_rare], pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))], len(sets))
        table.holders = holders[is_rare]
        return table

    def hits(self, hashed: _Hashed, size: int, first_row: int) -> NDArray[np.int64]:
        """[H, 2]: (row, index of a hash) of every run of `size` words that the gate holds."""
        if size > len(hashed.hashes):
            return _NO_HITS
        value = hashed.hashes[size - 1]
        row = hashed.row[: len(value)]
        inside = row == hashed.row[size - 1 :]
        likely = np.flatnonzero(inside & self._filter[self._slot(value)])
        return self.look_up(value[likely], row[likely] + first_row)

    def look_up(self, values: U64, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[H, 2]: distinct (row, index of a hash) for the values that the gate holds."""
        at = np.searchsorted(self.hashes, values)
        at[at == len(self.hashes)] = 0
        held = self.hashes[at] == values if len(self.hashes) else np.zeros(len(values), dtype=bool)
        return np.unique(np.stack([rows[held], at[held]], axis=1).astype(np.int64), axis=0)

    def _slot(self, hashes: U64) -> NDArray[np.int64]:
        mixed = hashes ^ (hashes >> np.uint64(32))
        return (mixed & np.uint64((1 << _FILTER_BITS) - 1)).astype(np.int64)

    def owners_of(self, hits: NDArray[np.int64]) -> NDArray[np.int64]:
        """[P, 2]: (row, gate document) for each hit and each document that holds it."""
        first, last = self.starts[hits[:, 1]], self.starts[hits[:, 1] + 1]
        count = last - first
        rows = np.repeat(hits[:, 0], count)
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.stack([rows, self.owners[np.repeat(first, count) + offset]], axis=1)


def _num_groups(
    hashes: NDArray[np.int64], groups: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """[size]: how many different groups each hash stands in."""
    pairs = np.unique(np.stack([hashes, groups], axis=1), axis=0)
    return np.bincount(pairs[:, 0], minlength=size)


class _Index:
    """The gate as tables: of its runs, and of its gold values by their number of words."""

    def __init__(self, gate: Sequence[Text]) -> None:
        self.runs = _Table.of(
            [ngrams(normalised(d.content), RUN) for d in gate], [_group(d) for d in gate]
        )
        self.num_values = np.zeros(len(gate), dtype=np.int64)
        owned: dict[int, list[tuple[int, int]]] = {}
        for document, values in enumerate(_telling_records(gate)):
            self.num_values[document] = len(values)
            for value in values:
                words = value.split()
                owned.setdefault(len(words), []).append((int(_whole(words)), document))
        self.values = {size: _value_table(pairs, len(gate)) for size, pairs in owned.items()}
        self.longest = max([RUN, *self.values])


def _whole(words: Sequence[str]) -> np.uint64:
    codes = np.fromiter((crc32(w.encode()) for w in words), np.uint64, len(words))
    *_, value = rolling(codes, len(codes))
    return np.uint64(value[0])


def _value_table(pairs: Sequence[tuple[int, int]], num_documents: int) -> _Table:
    values = np.array([value for value, _ in pairs], dtype=np.uint64)
    hashes, index = np.unique(values, return_inverse=True)
    found = sorted({(int(i), document) for i, (_, document) in zip(index, pairs, strict=True)})
    return _Table(hashes, np.array(found, dtype=np.int64), num_documents)


def _telling_records(gate: Sequence[Text]) -> list[list[str]]:
    """Each document's gold values, none where they would fit many documents."""
    records = [_record_of(document) for document in gate]
    holders = Counter(value for record in records for value in record)

    def is_telling(record: list[str]) -> bool:
        telling = [value for value in record if holders[value] <= COMMON]
        return len(telling) >= _TELLING_VALUES and sum(map(len, telling)) >= _TELLING_CHARACTERS

    return [record if is_telling(record) else [] for record in records]


def _record_of(document: Text) -> list[str]:
    values = [normalised(value) for value in document.values]
    spelled = {" ".join(tokens(value)) for value in values if len(value) >= _SHORTEST_VALUE}
    return sorted(spelled - {""})


def _contained(
    table: _Table,
    hits: NDArray[np.int64],
    lengths: NDArray[np.int64],
    groups: NDArray[np.int64],
    keep: int,
) -> _Found:
    """Rows that share a large part with one gate document: row -> (document, sign).

    hits [H, 2]: (row, index of a hash). lengths, groups [rows]: words, and the row's document.
    """
    holders = table.holders + _num_groups(hits[:, 1], groups[hits[:, 0]], len(table.hashes))
    pairs = table.owners_of(hits[holders[hits[:, 1]] <= COMMON])
    if not len(pairs):
        return {}
    unique, shared = np.unique(pairs, axis=0, return_counts=True)
    of_gate = table.sizes[unique[:, 1]]
    of_row = np.maximum(lengths[unique[:, 0]] - RUN + 1, 1) / keep
    least = np.array([_least(min(LEAST_RUNS, size * keep), keep) for size in of_gate])
    is_leak = (shared >= CONTAINED * of_gate) & (shared >= least)
    is_leak |= (shared >= CONTAINED * of_row) & (shared >= _least(LEAST_RUNS, keep))
    is_leak |= shared >= _least(PASSAGE_RUNS, keep)
    share = shared / of_gate
    found: _Found = {}
    for at in np.flatnonzero(is_leak)[np.argsort(-share[is_leak], kind="stable")]:
        row, document = (int(number) for number in unique[at])
        sign = (
            f"{shared[at] * keep} runs of {RUN} words are the same, {share[at]:.0%} of what the "
            "gate row does not share with others"
        )
        found.setdefault(row, (document, sign))
    return found


def _least(runs: int, keep: int) -> int:
    """The least number of kept hashes that stand for `runs`; never one or two of a sketch."""
    return runs if keep == 1 else max(3, math.ceil(runs / keep))


def _same_records(index: _Index, hits: Sequence[NDArray[np.int64]]) -> _Found:
    """Rows that hold every value of a gate document's gold answer."""
    sizes = list(index.values)
    tables = [index.values[sizes[i % len(sizes)]] for i in range(len(hits))]
    pairs = [table.owners_of(found) for table, found in zip(tables, hits, strict=True)]
    unique, count = np.unique(np.concatenate([_NO_HITS, *pairs]), axis=0, return_counts=True)
    whole = count >= index.num_values[unique[:, 1]]
    return {int(row): (int(d), "the same filled-in record") for row, d in unique[whole][::-1]}


def _by_id(gate: Sequence[Text]) -> dict[str, int]:
    return {name: number for number, d in enumerate(gate) for name in d.ids}
