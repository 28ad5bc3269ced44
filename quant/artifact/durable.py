"""Putting bytes on disk so that they survive a kill or a power cut, or saying why they cannot be.

Files are written under a temporary name, synced and renamed; folders are synced; a full or
read-only disk becomes a StorageError that says how much was needed and how much is free.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quant.artifact.errors import StorageError
from quant.artifact.layout import as_bytes
from quant.artifact.store import DTYPE_CODES

_CHUNK_BYTES = 1 << 24
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard:
    """What was written: size and sha256 of the file; dtype, shape and sha256 of each tensor."""

    size: int
    sha256: str
    tensors: dict[str, tuple[str, tuple[int, ...], str]]


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` durably, replacing what was there; StorageError on failure."""
    with storage_errors(path, len(data)), _staged(path) as staged, staged.open("wb") as file:
        file.write(data)
        file.flush()
        _sync(file.fileno())


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenShard:
    """Write tensors as one safetensors file, durably, hashing on the way.

    The bytes depend on names, dtypes, shapes and values alone: tensors lie by falling item size,
    then by name. Memory beyond the tensors themselves is one chunk, which two threads hash while it
    is written. StorageError on failure.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header = _header({name: tensors[name] for name in ordered})
    size = len(header) + sum(t.numel() * t.dtype.itemsize for t in tensors.values())
    _check_free(path, size)
    whole = hashlib.sha256(header)
    written: dict[str, tuple[str, tuple[int, ...], str]] = {}
    with (
        storage_errors(path, size),
        _staged(path) as staged,
        staged.open("wb") as file,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        file.write(header)
        for name in ordered:
            own = hashlib.sha256()
            for chunk in _chunks(tensors[name]):
                hashing = [pool.submit(each.update, chunk) for each in (whole, own)]
                file.write(chunk)
                wait(hashing)
            tensor = tensors[name]
            written[name] = (DTYPE_CODES[tensor.dtype], tuple(tensor.shape), own.hexdigest())
        file.flush()
        _sync(file.fileno())
    return WrittenShard(size=size, sha256=whole.hexdigest(), tensors=written)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    raw = as_bytes(tensor.detach().cpu()).numpy().data
    for start in range(0, len(raw), _CHUNK_BYTES):
        yield raw[start : start + _CHUNK_BYTES]


def remove_unfinished(directory: Path) -> None:
    """Remove temporary files that a killed writer left in `directory` and below."""
    with storage_errors(directory):
        for path in directory.rglob(".*.tmp"):
            path.unlink()


def remove_tree(path: Path) -> None:
    """Remove a directory tree if it is there; StorageError when the disk refuses."""
    with storage_errors(path):
        if path.is_dir():
            shutil.rmtree(path)


def make_directory(path: Path) -> None:
    """Create `path` and its parents; StorageError when the disk refuses."""
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def move_into_place(staged: Path, out: Path, aside: Path) -> None:
    """Rename directory `staged` to `out`, atomically; an existing `out` ends up at `aside`.

    Where the system cannot exchange two directories in one step there is a moment in which `out`
    is absent; both versions are on disk all the same.
    """
    with storage_errors(out):
        if not out.exists():
            staged.rename(out)
        elif _exchange(staged, out):
            staged.rename(aside)
        else:
            out.rename(aside)
            staged.rename(out)
        sync_directory(out.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step (Linux renameat2); False where that is not to be had."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    done: int = rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    return done == 0


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it on success and removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.tmp")
    try:
        yield staged
        staged.replace(path)
        sync_directory(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def _check_free(path: Path, needed: int) -> None:
    free = _free_bytes(path)
    if free < needed:
        raise _disk_full(path, needed, free)


def _free_bytes(path: Path) -> int:
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    return shutil.disk_usage(existing).free


def _limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "a limit of the file system"
    return f"`ulimit -f`: {limit:,} bytes"


def _disk_full(path: Path, needed: int, free: int) -> StorageError:
    other = ", so inodes or a quota ran out" if free >= needed else ""
    return StorageError(
        f"the disk is full: {path} needs {needed:,} bytes, {free:,} are free{other}. Make room and "
        "run the same command again: finished shards are kept and it will resume after them"
    )


@contextmanager
def storage_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn an OSError into a StorageError that names `path` and, on a full disk, the sizes."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(path, needed, _free_bytes(path)) from error
        if error.errno == errno.EFBIG:
            raise StorageError(
                f"{path} needs {needed:,} bytes, more than a file may have ({_limit()}). Raise the "
                "limit and run the same command again: finished shards are kept"
            ) from error
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
