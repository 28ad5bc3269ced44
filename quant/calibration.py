"""Calibration data: JSONL rows -> token windows, and an account of what became of every row.

Rows are {"text"}, {"messages"} or {"prompt", "completion"}, with optional "id", "source", "lang"
(and "tools" beside all but text). Chat rows go through the model's chat template exactly once and
get no second BOS. Long rows are cut into windows, never dropped; exact duplicates count once.

Which windows are used is decided by a hash of content and seed, so the order of rows and files does
not matter. Sources take turns, and within a source its short, medium and long thirds do; a row
gives a second window only when every row has given one. Knows nothing of models or recipes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quant.artifact.overlap import Sketch, Text, make_sketch, telling_ids
from quant.calibration_rows import SHAPES, Row, RowCounts, read_rows
from quant.coverage import Coverage, SourceCoverage, length_histogram, shared_prefix
from quant.errors import CalibrationError
from quant.recipe_keys import CalibrationSettings

# A last window shorter than this share of max_tokens is dropped (and counted); whole short rows
# are always kept.
MIN_TAIL = 0.25


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: str | list[str], **kwargs: Any) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Token windows in a fixed order, their digest (sha256 over lengths and ids), the coverage.

    sketch: the rows that gave them as hashes, for the gate's check; None for windows given as ids.
    long_samples: the beginnings of the longest rows, for what depends on length; in the digest too.
    """

    samples: list[list[int]]
    digest: str
    coverage: Coverage
    sketch: Sketch | None = None
    long_samples: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A rendered row, ready to tokenize; `key` is the hash that orders it."""

    row: Row
    text: str
    is_chat: bool
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Windows:
    """The windows of one document, best first, and how many tokens of it came from the template."""

    document: _Document
    windows: list[list[int]]
    num_tokens: int
    template_tokens: int
    tail_tokens: int


def load_calibration(
    paths: Path | Sequence[Path],
    tokenizer: Tokenizer,
    settings: CalibrationSettings,
    *,
    longest: int = 0,
) -> Calibration:
    """Read one or more JSONL files into at most `settings.samples` windows of <= `max_tokens` ids.

    Rows longer than a window also give `kv_samples` long ones of up to `longest` ids (0: none).

    Raises CalibrationError with file and line for rows that cannot be used, and when no row can.
    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    counts = RowCounts()
    rows = [row for path in files for row in read_rows(path, counts)]
    if not rows:
        names = ", ".join(map(str, files))
        raise CalibrationError(
            f"{names}: no usable row: all {counts.rows} are blank (empty lines, or empty text, "
            "messages or completion)"
            if counts.rows
            else f"{names}: empty, expected one JSON object a line: {SHAPES}"
        )
    documents = _distinct([_render(row, tokenizer, settings.seed) for row in rows])
    cut = [_cut(document, tokenizer, settings) for document in _draw(documents, settings.samples)]
    used = _take(cut, settings.samples)
    long_samples = _long_windows(cut, tokenizer, settings, longest)
    found = _account(files, counts, len(rows), documents, cut, used, settings)
    if not long_samples:
        return found
    return replace(
        found, long_samples=long_samples, digest=_digest([*found.samples, *long_samples])
    )


def count_tokens(row: Row, tokenizer: Tokenizer) -> int:
    """Tokens that calibrating on a row reads, chat template and BOS included."""
    document = _render(row, tokenizer, seed=0)
    return len(_tokenize(tokenizer, document.text, add_special_tokens=not document.is_chat))


def windows_from_token_lists(token_lists: Iterable[Sequence[int]]) -> Calibration:
    """Ready-made windows, used as they are (benchmarks that fix their own windows)."""
    samples = [list(ids) for ids in token_lists]
    if not samples or not all(samples):
        raise CalibrationError("expected at least one window, and at least one id in each")
    tokens = sum(map(len, samples))
    source = SourceCoverage(
        rows=len(samples), used=len(samples), samples=len(samples), tokens=tokens
    )
    coverage = Coverage(
        rows=len(samples),
        used=len(samples),
        samples=len(samples),
        tokens=tokens,
        by_source={"given windows": source},
        length_histogram=length_histogram(samples),
    )
    return Calibration(samples=samples, digest=_digest(samples), coverage=coverage)


def _render(row: Row, tokenizer: Tokenizer, seed: int) -> _Document:
    messages = row.messages
    if messages is None and row.completion is not None and tokenizer.chat_template:
        messages = [
            {"role": "user", "content": row.text},
            {"role": "assistant", "content": row.completion},
        ]
    text = row.text + (row.completion or "") if messages is None else ""
    if messages is not None:
        text = _apply_template(row, messages, tokenizer)
    kind = "chat" if messages is not None else "text"
    key = hashlib.sha256(f"{seed}\0{kind}\0{text}".encode()).digest()
    return _Document(row=row, text=text, is_chat=messages is not None, key=key)


def _apply_template(row: Row, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    if not tokenizer.chat_template:
        raise CalibrationError(
            f"{row.where}: found messages, but this model's tokenizer has no chat template; "
            'give {"text"} rows'
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                [_with_objects(message) for message in messages],
                tools=row.tools, tokenize=False, add_generation_prompt=False,
            )
        )  # fmt: skip
    except Exception as error:  # templates raise whatever jinja and their authors like
        raise CalibrationError(
            f"{row.where}: the model's chat template refuses these messages: {error}"
        ) from error


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its tool calls' arguments as objects. The API sends them as JSON text, which
    templates would quote once more; servers parse it before they apply one."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _distinct(documents: list[_Document]) -> list[_Document]:
    """One document per content; among equals the first by source and id, whatever the order."""
    ordered = sorted(
        documents, key=lambda d: (d.key, d.row.source, d.row.id or "", d.row.lang or "")
    )
    return list({document.key: document for document in reversed(ordered)}.values())[::-1]


def _draw(documents: Sequence[_Document], limit: int) -> list[_Document]:
    """At most `limit` documents: sources take turns, and in each its short, medium, long third."""
    by_source: dict[str, list[_Document]] = defaultdict(list)
    for document in documents:
        by_source[document.row.source].append(document)
    turns = [_turns(_length_thirds(by_source[source])) for source in sorted(by_source)]
    return _turns(turns)[:limit]


def _length_thirds(documents: Sequence[_Document]) -> list[list[_Document]]:
    """Three strata by text length, each in the order of the hash."""
    ranked = sorted(documents, key=lambda d: (len(d.text), d.key))
    bounds = [len(ranked) * part // 3 for part in range(4)]
    strata = [ranked[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
    return [sorted(stratum, key=lambda d: d.key) for stratum in strata]


def _turns(lists: Sequence[Sequence[_Document]]) -> list[_Document]:
    """The lists interleaved: first items, then second items, ..."""
    return [item for rank in zip_longest(*lists) for item in rank if item is not None]


def _cut(document: _Document, tokenizer: Tokenizer, settings: CalibrationSettings) -> _Windows:
    ids = _tokenize(tokenizer, document.text, add_special_tokens=not document.is_chat)
    if not ids:
        raise CalibrationError(f"{document.row.where}: the tokenizer makes no token of this row")
    head = _bos(tokenizer)
    windows, tail = _split(ids, settings.max_tokens, head if ids[:1] == head else [])
    template = 0
    if document.is_chat:
        content = sum(len(_tokenize(tokenizer, text, False)) for text in document.row.contents())
        template = max(len(ids) - content, 0)
    order = sorted(windows, key=lambda w: hashlib.sha256(document.key + _bytes(w)).digest())
    return _Windows(
        document=document,
        windows=order,
        num_tokens=len(ids),
        template_tokens=template,
        tail_tokens=tail,
    )


def _long_windows(
    cut: Sequence[_Windows], tokenizer: Tokenizer, settings: CalibrationSettings, longest: int
) -> list[list[int]]:
    """The first `longest` ids of each of the longest documents that a window does not hold."""
    if longest <= settings.max_tokens:
        return []
    held = [c for c in cut if c.num_tokens > settings.max_tokens]
    ranked = sorted(held, key=lambda c: (-c.num_tokens, c.document.key))[: settings.kv_samples]
    return [_tokenize(tokenizer, c.document.text, not c.document.is_chat)[:longest] for c in ranked]


def _tokenize(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoded["input_ids"])


def _bos(tokenizer: Tokenizer) -> list[int]:
    """[BOS] if this tokenizer starts plain text with it, else []."""
    ids = _tokenize(tokenizer, "", add_special_tokens=True)
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _split(ids: list[int], size: int, head: list[int]) -> tuple[list[list[int]], int]:
    """Windows of at most `size` ids, each starting with `head`, and the ids of a dropped tail."""
    body = ids[len(head) :]
    step = size - len(head)
    windows = [head + body[start : start + step] for start in range(0, len(body), step)] or [head]
    if len(windows) > 1 and len(windows[-1]) < MIN_TAIL * size:
        return windows[:-1], len(windows[-1]) - len(head)
    return windows, 0


def _take(cut: Sequence[_Windows], limit: int) -> list[tuple[_Windows, list[int]]]:
    """At most `limit` windows: every document's best one, then every second best, ..."""
    ranks = zip_longest(*(c.windows for c in cut))
    taken = ((cut[i], w) for rank in ranks for i, w in enumerate(rank) if w is not None)
    return [pair for pair, _ in zip(taken, range(limit), strict=False)]


def _account(
    files: Sequence[Path],
    counts: RowCounts,
    num_rows: int,
    documents: Sequence[_Document],
    cut: Sequence[_Windows],
    used: Sequence[tuple[_Windows, list[int]]],
    settings: CalibrationSettings,
) -> Calibration:
    samples = [window for _, window in used]
    chosen = {id(windows): windows for windows, _ in used}.values()
    total = sum(c.num_tokens for c in cut)
    coverage = Coverage(
        files=tuple(sorted(path.name for path in files)),
        rows=counts.rows,
        blank=counts.blank,
        duplicates=num_rows - len(documents),
        not_drawn=len(documents) - len(chosen),
        used=len(chosen),
        windowed=sum(c.num_tokens > settings.max_tokens for c in chosen),
        windows_left=sum(len(c.windows) for c in cut) - len(samples),
        tail_tokens=sum(c.tail_tokens for c in cut),
        samples_asked=settings.samples,
        samples=len(samples),
        tokens=sum(map(len, samples)),
        max_tokens=settings.max_tokens,
        template_share=sum(c.template_tokens for c in cut) / total,
        length_histogram=length_histogram(samples),
        by_source=_by_source(documents, used),
        by_lang=dict(sorted(Counter(c.document.row.lang or "unknown" for c, _ in used).items())),
        ignored_keys=dict(sorted(counts.ignored_keys.items())),
        shared_prefix=shared_prefix(samples),
    )
    sketch = make_sketch(_overlap_text(windows.document.row) for windows in chosen)
    return Calibration(samples=samples, digest=_digest(samples), coverage=coverage, sketch=sketch)


def _overlap_text(row: Row) -> Text:
    return Text(
        where=row.where,
        content="\n".join(row.contents()),
        ids=telling_ids(row.id, row.doc),
        group=row.doc or "",
    )


def _by_source(
    documents: Sequence[_Document], used: Sequence[tuple[_Windows, list[int]]]
) -> dict[str, SourceCoverage]:
    rows = Counter(document.row.source for document in documents)
    windows: dict[str, list[list[int]]] = defaultdict(list)
    drawn: dict[str, set[bytes]] = defaultdict(set)
    for cut, window in used:
        windows[cut.document.row.source].append(window)
        drawn[cut.document.row.source].add(cut.document.key)
    return {
        source: SourceCoverage(
            rows=rows[source],
            used=len(drawn[source]),
            samples=len(windows[source]),
            tokens=sum(map(len, windows[source])),
        )
        for source in sorted(rows)
    }


def _digest(samples: Iterable[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for piece in _digest_pieces(samples):
        digest.update(piece)
    return digest.hexdigest()


def _digest_pieces(samples: Iterable[Sequence[int]]) -> Iterator[bytes]:
    for ids in samples:
        yield len(ids).to_bytes(8, "little")
        yield _bytes(ids)


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()
