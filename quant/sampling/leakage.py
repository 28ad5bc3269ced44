"""Does a calibration row hold what the gate will ask? Suites are read as data; `eval` is not used.

Three signs: the same document id; the same filled-in record (every value of a task's gold answer
stands in the row); and shared runs of words. Runs that more than five gate documents, or more than
five rows, have in common are boilerplate and count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quant.errors import CalibrationError
from quant.sampling.alike import U64, ngrams, normalised
from quant.sampling.readers import find_files, read_items

RUN = 10
COMMON = 5
CONTAINED = 0.3
_LEAST_RUNS = 8
_SKIPPED = frozenset({"id", "doc", "source", "lang", "task", "schema", "critical", "role"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A row (by its index) and the gate document it repeats."""

    row: int
    gate: str
    sign: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDocument:
    where: str
    ids: frozenset[str]
    values: tuple[str, ...]
    runs: U64


def read_gate(paths: Sequence[Path]) -> list[GateDocument]:
    """Every row of suite files (JSONL, text, ...); CalibrationError for one that is unreadable."""
    found = []
    for path in find_files(paths):
        for where, item in read_items(path):
            if isinstance(item, CalibrationError):
                raise item
            if item is not None:
                found.append(_document(where, item))
    if not found:
        raise CalibrationError(f"--against {', '.join(map(str, paths))}: holds no row")
    return found


def find_leaks(
    rows: Sequence[Mapping[str, Any]], texts: Sequence[str], gate: Sequence[GateDocument]
) -> list[Leak]:
    """At most one leak a row. rows: calibration rows; texts: all that is written in each."""
    runs = [ngrams(normalised(text), RUN) for text in texts]
    boilerplate = np.union1d(_common([d.runs for d in gate]), _common(runs))
    left = [np.setdiff1d(own, boilerplate, assume_unique=True) for own in runs]
    gate_left = [np.setdiff1d(d.runs, boilerplate, assume_unique=True) for d in gate]
    owners, table = _index(gate_left)
    leaks = []
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        found = _leak(row, normalised(text), left[index], gate, gate_left, owners, table)
        if found is not None:
            leaks.append(Leak(row=index, gate=found[0].where, sign=found[1]))
    return leaks


def _leak(
    row: Mapping[str, Any],
    text: str,
    runs: U64,
    gate: Sequence[GateDocument],
    gate_runs: Sequence[U64],
    owners: np.ndarray[Any, Any],
    table: U64,
) -> tuple[GateDocument, str] | None:
    ids = _ids(row)
    for document in gate:
        if ids & document.ids:
            return document, f"the same id {sorted(ids & document.ids)[0]}"
        if document.values and all(value in text for value in document.values):
            return document, "the same filled-in record"
    low, high = (np.searchsorted(table, runs, side) for side in ("left", "right"))
    hits = [owners[a:b] for a, b in zip(low, high, strict=True) if b > a]
    if not hits:
        return None
    shared = np.bincount(np.concatenate(hits), minlength=len(gate))
    best = int(shared.argmax())
    smaller = min(len(runs), len(gate_runs[best]))
    if shared[best] >= min(_LEAST_RUNS, smaller) and shared[best] >= CONTAINED * smaller:
        return gate[best], f"{shared[best] / smaller:.0%} of the runs of {RUN} words are the same"
    return None


def _common(sets: Sequence[U64]) -> U64:
    values, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *sets]), return_counts=True)
    return values[counts > COMMON]


def _index(sets: Sequence[U64]) -> tuple[np.ndarray[Any, Any], U64]:
    """(document of each run, all runs sorted)."""
    table = np.concatenate([np.empty(0, np.uint64), *sets])
    owners = np.repeat(np.arange(len(sets)), [len(s) for s in sets])
    order = np.argsort(table, kind="stable")
    return owners[order], table[order]


def _document(where: str, item: Mapping[str, Any]) -> GateDocument:
    texts = list(_strings({k: v for k, v in item.items() if k not in _SKIPPED and k != "gold"}))
    values = sorted({normalised(v) for v in _strings(item.get("gold"))}, key=len, reverse=True)
    values = [value for value in values if len(value) >= 4]
    telling = len(values) >= 3 and sum(map(len, values)) >= 24
    return GateDocument(
        where=where,
        ids=_ids(item),
        values=tuple(values) if telling else (),
        runs=ngrams(normalised("\n".join(texts)), RUN),
    )


def _ids(row: Mapping[str, Any]) -> frozenset[str]:
    """Ids that name a document; a mere number or a short name says nothing in another file."""
    found = (row[key] for key in ("id", "doc") if isinstance(row.get(key), str))
    return frozenset(name for name in found if len(name) >= 6 and not name.isdigit())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _SKIPPED:
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
