"""Reading safetensors checkpoints: lazy, sharded, sizes checked before a byte is mapped.

Serves artifacts and plain Hugging Face checkpoints alike. A file that is empty, truncated, has
junk appended, or disagrees with the index is refused with its name and both sizes. Pickle
checkpoints are refused. Knows nothing of schemes or of what the tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from safetensors import safe_open
from torch import Tensor

from quant.artifact.errors import (
    ArtifactError,
    IntegrityError,
    StorageError,
    UnsafeCheckpointError,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies: file name, dtype, shape, and its byte range in the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes [start, stop) of the file
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class CheckpointReader:
    """A checkpoint directory: one `model.safetensors`, or shards named by an index.

    Every header is read and checked on construction; tensor data is only touched by `tensor`.
    Raises IntegrityError (missing, truncated, altered or inconsistent files) and
    UnsafeCheckpointError (only pickle weights).
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.files, weight_map = _find_files(self.directory)
        self._stored: dict[str, StoredTensor] = {}
        for file in self.files:
            stored = read_header(self.directory / file)
            _check_against_index(file, stored, weight_map)
            self._stored.update(stored)
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._stored))

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def stored(self, name: str) -> StoredTensor:
        """File, dtype, shape and byte range of a tensor; IntegrityError when it is absent."""
        if name not in self._stored:
            raise IntegrityError(f"{self.directory}: tensor {name} is missing from the checkpoint")
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.stored(name).dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor, on the CPU, backed by the mapped file: do not write to it."""
        file = self.stored(name).file
        if file not in self._open:
            self._open[file] = safe_open(self.directory / file, framework="pt", device="cpu")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Drop the mappings; they are made anew when a tensor is asked for."""
        self._open.clear()


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that their bytes fill it exactly.

    IntegrityError names the file, its size and the size its header asks for.
    """
    size = _size(path)
    length = _header_length(path, size)
    with path.open("rb") as file:
        file.seek(8)
        header = _parse_header(path, file.read(length))
    data_start = 8 + length
    stored = {
        name: _stored_tensor(path, name, entry, data_start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_layout(path, stored, data_start, size)
    return stored


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing; fetch or quantize the model again") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from None


def _header_length(path: Path, size: int) -> int:
    if size < 8:
        raise IntegrityError(
            f"{path} has {size} bytes; a safetensors file has at least 8: it is truncated or empty"
        )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise IntegrityError(f"{path} is not a safetensors file (header of {length} bytes)")
    if 8 + length > size:
        raise IntegrityError(
            f"{path} has {size} bytes, its header alone needs {8 + length}: it is truncated"
        )
    return length


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} has a garbled safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise IntegrityError(f"{path} has a garbled safetensors header: not a JSON object")
    return header


class _HeaderEntry(BaseModel):
    model_config = ConfigDict(strict=True)

    dtype: str
    shape: list[NonNegativeInt]
    data_offsets: list[NonNegativeInt] = Field(min_length=2, max_length=2)


def _stored_tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        parsed = _HeaderEntry.model_validate(entry)
    except ValidationError:
        raise IntegrityError(f"{path}: garbled header entry for tensor {name}") from None
    code, shape, (start, stop) = parsed.dtype, tuple(parsed.shape), parsed.data_offsets
    if code not in DTYPES:
        raise IntegrityError(
            f"{path}: tensor {name} has dtype {code}, which this build cannot read; "
            f"known: {', '.join(DTYPES)}"
        )
    num_bytes = DTYPES[code].itemsize * prod(shape)
    if stop - start != num_bytes:
        raise IntegrityError(
            f"{path}: tensor {name} is {code} {list(shape)} = {num_bytes} bytes, "
            f"but the header gives it {stop - start}"
        )
    return StoredTensor(
        file=path.name,
        dtype=DTYPES[code],
        shape=shape,
        start=data_start + start,
        stop=data_start + stop,
    )


def _check_layout(path: Path, stored: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """The byte ranges tile [start, size) without gap or overlap."""
    end = start
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise IntegrityError(f"{path}: gap or overlap before tensor {name} at byte {end}")
        end = tensor.stop
    if end != size:
        what = "truncated" if size < end else "followed by junk"
        raise IntegrityError(
            f"{path} has {size} bytes, its header asks for {end}: it is {what}; "
            "fetch or quantize the model again"
        )


def _find_files(directory: Path) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """File names, sorted, and the index's tensor-to-file map (None without an index)."""
    if not directory.is_dir():
        raise ArtifactError(f"{directory} is not a directory")
    if (directory / INDEX_NAME).is_file():
        weight_map = _read_index(directory / INDEX_NAME)
        return tuple(sorted(set(weight_map.values()))), weight_map
    if (directory / SINGLE_NAME).is_file():
        return (SINGLE_NAME,), None
    raise _nothing_to_read(directory)


def _nothing_to_read(directory: Path) -> ArtifactError:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return UnsafeCheckpointError(
            f"{directory} holds only pickle weights ({pickles[0]}); loading them can execute "
            "code, so they are refused. Convert the checkpoint to safetensors where you trust it"
        )
    shards = sorted(p.name for p in directory.glob("*.safetensors"))
    if shards:
        return IntegrityError(f"{directory} holds {shards[0]} but {INDEX_NAME} is missing")
    return IntegrityError(f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        entries = dict(weight_map.items())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise IntegrityError(f"{path} is garbled: no JSON object with a weight_map") from None
    for name, file in entries.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise IntegrityError(f"{path}: tensor {name} lies in {file!r}, not a plain file name")
        if Path(file).suffix in PICKLE_SUFFIXES:
            raise UnsafeCheckpointError(f"{path} names the pickle file {file}: refused")
    if not entries:
        raise IntegrityError(f"{path} names no tensors")
    return entries


def _check_against_index(
    file: str, stored: Mapping[str, StoredTensor], weight_map: Mapping[str, str] | None
) -> None:
    if weight_map is None:
        return
    promised = {name for name, where in weight_map.items() if where == file}
    for name in sorted(promised - stored.keys()):
        raise IntegrityError(f"tensor {name} is missing from {file}, where {INDEX_NAME} puts it")
    for name in sorted(stored.keys() - promised):
        raise IntegrityError(f"{file} holds tensor {name}, which {INDEX_NAME} does not put there")
