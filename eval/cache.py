"""Cache: what a base model said, by digest, so that a second evaluation need not ask it again.

Entries are small files named by the sha256 of everything that decides their content. They are
written atomically and begin with the sha256 of what follows, because a damaged entry would change
the numbers everything is held to: one that does not match is a miss. Deleting the folder loses
only time.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from quant.artifact.staging import replace_files

_VARIABLE = "WEIGHBRIDGE_CACHE"
_CHECKSUM_BYTES = 32


def default_directory() -> Path:
    """$WEIGHBRIDGE_CACHE, else ~/.cache/weighbridge (or under $XDG_CACHE_HOME)."""
    if given := os.environ.get(_VARIABLE):
        return Path(given).expanduser()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "weighbridge"


class Cache:
    """A folder of entries. `None` as directory keeps nothing."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory and directory / "eval"

    def json(self, key: list[Any]) -> Any | None:
        """The JSON value stored under `key`, None when there is none."""
        data = _read(self._path(key, "json"))
        return None if data is None else json.loads(data)

    def put_json(self, key: list[Any], value: Any) -> None:
        """Store a JSON value."""
        self._write(self._path(key, "json"), json.dumps(value).encode())

    def tensor(self, key: list[Any]) -> torch.Tensor | None:
        """The tensor stored under `key`, None when there is none."""
        data = _read(self._path(key, "tensor"))
        return None if data is None else load(data)["value"]

    def put_tensor(self, key: list[Any], value: torch.Tensor) -> None:
        """Store a tensor."""
        path = self._path(key, "tensor")
        if path is not None:
            self._write(path, save({"value": value.detach().cpu().contiguous()}))

    def _path(self, key: list[Any], suffix: str) -> Path | None:
        if self._directory is None:
            return None
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self._directory / name[:2] / f"{name}.{suffix}"

    def _write(self, path: Path | None, data: bytes) -> None:
        """Best effort: a cache that cannot be written costs time, not the evaluation."""
        if path is None:
            return
        stored = hashlib.sha256(data).digest() + data
        with suppress(OSError):
            replace_files(path.parent, {path.name: stored}, durable=False)


def _read(path: Path | None) -> bytes | None:
    """What an entry holds, None when there is none or it is damaged."""
    try:
        stored = b"" if path is None else path.read_bytes()
    except OSError:
        return None
    checksum, data = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    return data if checksum == hashlib.sha256(data).digest() else None
