"""Which ids end a text: the union of all places where a checkpoint says so.

config.json, generation_config.json and tokenizer_config.json often name different ones; a chat
model's end of turn may be in a single one of them, and a missed one means an answer that runs on
into the next role. Reads JSON only; knows no tokenizer library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quant.artifact.errors import ManifestError


def end_of_text_ids(
    directory: Path, config: Mapping[str, Any], vocab: int
) -> dict[int, tuple[str, ...]]:
    """id -> the files that name it, in rising order. Ids at or above `vocab` can never be drawn
    and are left out."""
    named = {
        "config.json": _ids(config, "config.json"),
        "config.json text_config": _ids(config.get("text_config") or {}, "config.json"),
        "generation_config.json": _ids(
            _read(directory / "generation_config.json"), "generation_config.json"
        ),
        "tokenizer_config.json": _tokenizer_ids(directory),
    }
    found: dict[int, tuple[str, ...]] = {}
    for source, ids in named.items():
        for token in ids:
            if 0 <= token < vocab:
                found[token] = (*found.get(token, ()), source)
    return dict(sorted(found.items()))


def _ids(config: Mapping[str, Any], file: str) -> list[int]:
    """`eos_token_id` as a list; ManifestError for what is neither an id nor a list of ids."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise ManifestError(f"{file}: eos_token_id is {value!r}, expected an id or a list of ids")
    return values


def _tokenizer_ids(directory: Path) -> list[int]:
    config = _read(directory / "tokenizer_config.json")
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return []
    for ids in _token_tables(directory, config):
        if text in ids:
            return [ids[text]]
    return []


def _token_tables(directory: Path, config: Mapping[str, Any]) -> Iterable[dict[str, int]]:
    """Text -> id, the small tables first."""
    added = config.get("added_tokens_decoder") or {}
    yield {entry["content"]: int(token) for token, entry in added.items()}
    tokenizer = _read(directory / "tokenizer.json")
    yield {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
    vocab = (tokenizer.get("model") or {}).get("vocab")
    yield vocab if isinstance(vocab, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file is absent. ManifestError if it is garbled."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ManifestError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ManifestError(f"{path.name} holds a {type(value).__name__}, not an object")
    return value
