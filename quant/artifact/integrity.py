"""What can be wrong with an artifact on disk: a list of problems, most telling first.

Pure checks of a directory against its manifest. `artifact.open_artifact` raises the first problem,
`artifact.verify` returns them all. No tensor is interpreted here beyond its name, dtype and shape.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.artifact.dialect import dialect_kv, parse_kv_scheme, parse_quantization_config
from quant.artifact.errors import (
    ArtifactError,
    IntegrityError,
    ManifestError,
    UnsafeCheckpointError,
)
from quant.artifact.layout import allowed_dtypes, tensor_shapes
from quant.artifact.manifest import MANIFEST_NAME, Manifest, TensorRecord, is_outside_digest
from quant.artifact.store import DTYPE_CODES, PICKLE_SUFFIXES, CheckpointReader

CONFIG_NAME = "config.json"
MISSING = "the file is missing"
_CHUNK_BYTES = 1 << 22
_FLOATS = ("F32", "BF16", "F16")
# What some loader would pick up from the folder, so that it may not lie there unlisted.
_LOADABLE_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong: with which file, tensor or module, and what."""

    subject: str
    message: str
    error: type[ArtifactError] = IntegrityError

    def __str__(self) -> str:
        return f"{self.subject}: {self.message}"


def refusal(path: Path, problems: Sequence[Problem]) -> ArtifactError:
    """The error for an artifact with `problems`, at least one: the first, and what to do."""
    rest = len(problems) - 1
    more = f" ({rest} more problem{'s' if rest > 1 else ''})" if rest else ""
    return problems[0].error(
        f"{path}: {problems[0]}{more}; do not use this copy: fetch or quantize it again "
        "(`quantize verify` lists everything)"
    )


def check_files(directory: Path, manifest: Manifest, *, hash_weights: bool) -> Iterator[Problem]:
    """Presence, size and sha256 of every listed file, and files that should not be there.

    Weight files are hashed only when asked to: they can take minutes.
    """
    to_hash = []
    for name, record in sorted(manifest.files.items()):
        path = directory / name
        if not path.is_file():
            yield Problem(subject=name, message=MISSING)
        elif (size := path.stat().st_size) != record.size:
            expected = f"{MANIFEST_NAME} says {record.size}"
            yield Problem(subject=name, message=f"has {size} bytes, {expected}")
        elif hash_weights or path.suffix != ".safetensors":
            to_hash.append(name)
    to_hash.sort(key=lambda name: -manifest.files[name].size)  # the longest decides the time
    with ThreadPoolExecutor(_num_threads()) as pool:
        digests = pool.map(lambda name: sha256_of(directory / name), to_hash)
        for name, digest in sorted(zip(to_hash, digests, strict=True)):
            if digest != manifest.files[name].sha256:
                yield _altered(directory, manifest, name, digest)
    yield from _unlisted(directory, manifest)


def check_digests(reader: CheckpointReader, digests: Mapping[str, str]) -> Iterator[Problem]:
    """The bytes of every tensor have the sha256 (hex) given for it; hashed in parallel."""

    def found(name: str) -> str:
        where = reader.stored(name)
        return sha256_of(reader.directory / where.file, where.start, where.stop)

    names = sorted(digests, key=lambda name: -reader.stored(name).num_bytes)
    with ThreadPoolExecutor(_num_threads()) as pool:
        for name, digest in zip(names, pool.map(found, names), strict=True):
            if digest != digests[name]:
                yield altered_tensor(reader, name, digest, digests[name])


def altered_tensor(reader: CheckpointReader, name: str, found: str, expected: str) -> Problem:
    """A tensor whose bytes are not the ones that were sealed."""
    message = f"sha256 in {reader.stored(name).file} is {found}, {MANIFEST_NAME} says {expected}"
    return Problem(subject=name, message=message)


def _num_threads() -> int:
    """Hashing releases the interpreter lock; more threads than whole cores slow the longest."""
    return min(8, os.cpu_count() or 1)


def _altered(directory: Path, manifest: Manifest, name: str, digest: str) -> Problem:
    """An altered file, with the tensors that changed when it is a readable weight file."""
    message = f"sha256 is {digest}, {MANIFEST_NAME} says {manifest.files[name].sha256}"
    changed = []
    if name.endswith(".safetensors"):
        changed = list(_changed_tensors(directory, manifest, name))
    if changed:
        message += f"; altered tensors: {', '.join(changed[:3])}"
        message += f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return Problem(subject=name, message=message)


def _changed_tensors(directory: Path, manifest: Manifest, file: str) -> Iterator[str]:
    try:
        reader = CheckpointReader(directory)
    except ArtifactError:
        return
    for name, record in sorted(manifest.tensors.items()):
        if record.file == file and name in reader:
            where = reader.stored(name)
            if sha256_of(directory / file, where.start, where.stop) != record.sha256:
                yield name


def _unlisted(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        is_known = name in manifest.files or name == MANIFEST_NAME or is_outside_digest(name)
        if is_known or name.startswith(".") or "/." in name or not path.is_file():
            continue
        if path.suffix in PICKLE_SUFFIXES:
            message = "pickle file that is not part of the artifact; remove it"
            yield Problem(subject=name, message=message, error=UnsafeCheckpointError)
        elif path.suffix in _LOADABLE_SUFFIXES:
            message = f"not listed in {MANIFEST_NAME}, so not part of the artifact; remove it"
            yield Problem(subject=name, message=message)


def check_tensors(reader: CheckpointReader, manifest: Manifest) -> Iterator[Problem]:
    """The tensors in the weight files are those listed, with the listed dtype, shape and file."""
    for name, record in sorted(manifest.tensors.items()):
        if name not in reader:
            yield Problem(subject=name, message=f"the tensor is missing from {record.file}")
            continue
        found = _describe(reader, name)
        expected = (record.dtype, list(record.shape), record.file)
        if found != expected:
            yield Problem(subject=name, message=f"the tensor is {found}, expected {expected}")
    for name in reader.names:
        if name not in manifest.tensors:
            yield Problem(subject=name, message=f"the tensor is not listed in {MANIFEST_NAME}")


def _describe(reader: CheckpointReader, name: str) -> tuple[str, list[int], str]:
    stored = reader.stored(name)
    return DTYPE_CODES[stored.dtype], list(stored.shape), stored.file


def check_modules(manifest: Manifest) -> Iterator[Problem]:
    """Every module has all the tensors of its scheme, with the right dtypes and shapes."""
    schemes = manifest.module_schemes()
    for module, record in sorted(manifest.modules.items()):
        scheme = schemes[module]
        for leaf, shape in tensor_shapes(scheme, record.shape).items():
            name = record.tied_to or f"{module}.{leaf}"
            dtypes = tuple(DTYPE_CODES[dtype] for dtype in allowed_dtypes(scheme, leaf))
            yield from _check_one(manifest.tensors, name, shape, dtypes)
        if record.tied_to is not None and f"{module}.weight" in manifest.tensors:
            message = f"is tied to {record.tied_to}, yet {module}.weight is stored"
            yield Problem(subject=module, message=message, error=ManifestError)
    yield from _check_kv(manifest)


def _check_kv(manifest: Manifest) -> Iterator[Problem]:
    """The attention modules with a quantized cache exist, and have their scales if any are due."""
    kv = manifest.kv_cache
    if kv is None:
        return
    parents = {name.rpartition(".")[0] for name in manifest.modules}
    for module in kv.modules:
        if module not in parents:
            message = "is listed in kv_cache, but has no linears"
            yield Problem(subject=module, message=message, error=ManifestError)
        for leaf in ("k_scale", "v_scale") if kv.scheme().has_stored_scales else ():
            shape = _kv_scale_shape(manifest)
            yield from _check_one(manifest.tensors, f"{module}.{leaf}", shape, _FLOATS)


def _kv_scale_shape(manifest: Manifest) -> tuple[int, ...]:
    """[1], or [kv heads, 1, 1]: as many heads as the first layer has scales."""
    assert manifest.kv_cache is not None
    if manifest.kv_cache.strategy == "tensor":
        return (1,)
    first = manifest.tensors.get(f"{manifest.kv_cache.modules[0]}.k_scale")
    return (first.shape[0] if first is not None and first.shape else 1, 1, 1)


def _check_one(
    tensors: Mapping[str, TensorRecord], name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> Iterator[Problem]:
    record = tensors.get(name)
    if record is None:
        yield Problem(subject=name, message="the tensor is missing from the artifact")
    elif record.shape != shape or record.dtype not in dtypes:
        message = (
            f"the tensor is {record.dtype} {list(record.shape)}, "
            f"expected {' or '.join(dtypes)} {list(shape)}"
        )
        yield Problem(subject=name, message=message)


def check_config(config: Mapping[str, Any], manifest: Manifest) -> Iterator[Problem]:
    """config.json's quantization_config says what the manifest says, module by module."""
    expected = manifest.module_schemes()
    quantization = config.get("quantization_config")
    try:
        found = parse_quantization_config(quantization, expected) if quantization else {}
        kv = parse_kv_scheme(quantization) if quantization else None
    except ArtifactError as error:
        yield Problem(subject=CONFIG_NAME, message=str(error), error=type(error))
        return
    for module, scheme in sorted(expected.items()):
        if found.get(module, scheme if scheme.is_dense else None) != scheme:
            other = found[module].label if module in found else "dense"
            message = f"{CONFIG_NAME} says {other}, {MANIFEST_NAME} says {scheme.label}"
            yield Problem(subject=module, message=message, error=ManifestError)
    if kv != dialect_kv(manifest.kv_scheme()):
        message = f"kv_cache_scheme and kv_cache of {MANIFEST_NAME} disagree"
        yield Problem(subject=CONFIG_NAME, message=message, error=ManifestError)
    yield from _check_tied(config, manifest)


def _check_tied(config: Mapping[str, Any], manifest: Manifest) -> Iterator[Problem]:
    """A head's own weight is ignored by loaders when config.json ties it, and the reverse."""
    is_tied = config.get("tie_word_embeddings")
    for name, record in manifest.modules.items():
        if name.rpartition(".")[2] != "lm_head":
            continue
        if is_tied is True and record.tied_to is None:
            message = f"tie_word_embeddings is true, but {name} has a weight of its own"
            yield Problem(subject=CONFIG_NAME, message=message, error=ManifestError)
        if is_tied is False and record.tied_to is not None:
            message = f"tie_word_embeddings is false, but {name} is tied to {record.tied_to}"
            yield Problem(subject=CONFIG_NAME, message=message, error=ManifestError)


def sha256_of(path: Path, start: int = 0, stop: int | None = None) -> str:
    """sha256, in hex, of the bytes [start, stop) of a file (to its end when stop is None)."""
    digest = hashlib.sha256()
    left = path.stat().st_size - start if stop is None else stop - start
    with path.open("rb") as file:
        file.seek(start)
        while left > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()
