"""Opening an artifact: the one door through which the runtime and the gate see one.

`open_artifact` refuses anything incomplete, altered or unfinished before a weight is used, and
names the file, tensor or module. It does not repack, place or run anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quant.artifact.errors import ArtifactError, IntegrityError, ManifestError
from quant.artifact.integrity import (
    CONFIG_NAME,
    MISSING,
    Problem,
    check_config,
    check_files,
    check_modules,
    check_tensors,
    refusal,
)
from quant.artifact.jsonio import parse_object
from quant.artifact.layout import QuantizedWeight, from_tensors, tensor_names
from quant.artifact.manifest import MANIFEST_NAME, Manifest, ModuleRecord, read_manifest
from quant.artifact.scheme import Scheme
from quant.artifact.stamp import Stamp, read_stamp
from quant.artifact.store import CheckpointReader

__all__ = ["Artifact", "Problem", "open_artifact", "verify"]

STAGING_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A checked artifact. Tensors are read lazily; nothing here is ever written to."""

    path: Path
    manifest: Manifest
    config: dict[str, Any]  # config.json, including quantization_config
    reader: CheckpointReader
    digest: str  # sha256 of artifact.json, which lists the sha256 of every other file

    def schemes(self) -> dict[str, Scheme]:
        """The scheme of every linear, lm_head included, by checkpoint name."""
        return self.manifest.module_schemes()

    def scheme(self, module: str) -> Scheme:
        """The scheme of one linear; IntegrityError when the artifact has no such module."""
        return self.manifest.schemes[self._record(module).scheme].scheme()

    def weight(
        self, module: str, read: Callable[[str], Tensor] | None = None
    ) -> QuantizedWeight | Tensor:
        """The weight [out, in] of a linear: codes and scales, or a tensor when it is dense.

        `read` gives stored tensors by name where they do not come from the mapped files: those
        that are on a device already, say.
        """
        record, scheme, get = self._record(module), self.scheme(module), read or self.reader.tensor
        if scheme.is_dense:
            return get(record.tied_to or f"{module}.weight")
        stored = {leaf: get(f"{module}.{leaf}") for leaf in tensor_names(scheme)}
        try:
            qw = from_tensors(stored, scheme)
        except IntegrityError as error:
            raise IntegrityError(f"{self.path}: module {module}: {error}") from None
        if qw.shape != record.shape:
            raise IntegrityError(
                f"{self.path}: {module}.weight_shape says {list(qw.shape)}, "
                f"{MANIFEST_NAME} says {list(record.shape)}"
            )
        if not bool((torch.isfinite(qw.scale) & (qw.scale > 0)).all()):
            raise IntegrityError(f"{self.path}: {module}.weight_scale has NaN, Inf or values <= 0")
        return qw

    def kv_scales(self, layer: int) -> tuple[float, float] | Tensor | None:
        """The scales of the layer's fp8 KV cache: (k, v), or float32 [2, kv heads] where each head
        has its own; None when none are stored, for this layer or for any."""
        kv = self.manifest.kv_cache
        if kv is None or not kv.scheme().has_stored_scales or layer in self.kv_kept_layers:
            return None
        module = {_layer_of(name): name for name in kv.modules}.get(layer)
        if module is None:
            raise IntegrityError(f"{self.path}: no KV scales for layer {layer}")
        k, v = (self._kv_scale(f"{module}.{leaf}") for leaf in ("k_scale", "v_scale"))
        return (float(k), float(v)) if kv.strategy == "tensor" else torch.stack((k, v))

    @property
    def kv_cache_dtype(self) -> Literal["fp8", "int8"] | None:
        """The element type of the quantized KV cache that the artifact declares, if it does."""
        kv = self.manifest.kv_cache
        return None if kv is None else "fp8" if kv.kind == "float" else "int8"

    @property
    def kv_kept_layers(self) -> frozenset[int]:
        """Layers that the declared KV cache leaves in the compute type; none without one."""
        kv = self.manifest.kv_cache
        if kv is None:
            return frozenset()
        layers = {_layer_of(name) for name in self.manifest.modules if ".self_attn." in name}
        return frozenset(layers - {_layer_of(name) for name in kv.modules})

    def tensor_digests(self) -> dict[str, str]:
        """sha256, in hex, of the raw bytes of each tensor, as sealed."""
        return {name: record.sha256 for name, record in self.manifest.tensors.items()}

    @property
    def stamp(self) -> Stamp | None:
        """The verdict in gate.json when it was given on exactly these bytes, else None."""
        stamp = read_stamp(self.path)
        return stamp if stamp is not None and stamp.artifact_digest == self.digest else None

    def _record(self, module: str) -> ModuleRecord:
        if module not in self.manifest.modules:
            raise IntegrityError(f"{self.path} has no module {module}")
        return self.manifest.modules[module]

    def _kv_scale(self, name: str) -> Tensor:
        """The scales, float32 [n]."""
        scales = self.reader.tensor(name).float().flatten()
        for scale in scales.tolist():
            if not 0 < scale < float("inf"):
                raise IntegrityError(f"{self.path}: {name} is {scale}, expected a positive number")
        return scales


def _layer_of(name: str) -> int:
    """The decoder layer in a checkpoint name."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def open_artifact(path: Path, *, verify: Literal["full", "fast"] = "fast") -> Artifact:
    """Check and open the artifact in directory `path`.

    fast: every file is there with its size, everything but weight files has its sha256, weight
    headers match the manifest, and every module has all its tensors. full: also hashes weights.
    Raises the ArtifactError of the first thing that is wrong, naming it.
    """
    artifact = _open(Path(path))
    problems = list(_problems(artifact, hash_weights=verify == "full"))
    if problems:
        raise refusal(artifact.path, problems)
    return artifact


def verify(path: Path) -> list[Problem]:
    """Everything wrong with the artifact in `path`, after hashing all of it; [] when sound.

    Raises (ManifestError and so on) only when there is no readable artifact.json to check against.
    """
    directory = Path(path)
    manifest, _ = _read_manifest(directory)
    found = list(check_files(directory, manifest, hash_weights=True))
    try:
        artifact = _open(directory)
    except ArtifactError as error:
        if any(problem.message == MISSING and problem.subject in str(error) for problem in found):
            return found  # it could not be opened for want of a file that is already listed
        unreadable = Problem(subject=directory.name, message=str(error), error=type(error))
        return [*found, unreadable]
    checked = _problems(artifact, hash_weights=False)
    return list(dict.fromkeys(chain(found, checked)))


def _problems(artifact: Artifact, *, hash_weights: bool) -> Iterator[Problem]:
    manifest = artifact.manifest
    yield from check_files(artifact.path, manifest, hash_weights=hash_weights)
    yield from check_tensors(artifact.reader, manifest)
    yield from check_modules(manifest)
    yield from check_config(artifact.config, manifest)


def _open(directory: Path) -> Artifact:
    manifest, digest = _read_manifest(directory)
    return Artifact(
        path=directory,
        manifest=manifest,
        config=parse_object(directory / CONFIG_NAME),
        reader=CheckpointReader(directory),
        digest=digest,
    )


def _read_manifest(directory: Path) -> tuple[Manifest, str]:
    if not (directory / MANIFEST_NAME).is_file():
        raise ManifestError(_why_no_artifact(directory))
    return read_manifest(directory / MANIFEST_NAME)


def _why_no_artifact(path: Path) -> str:
    if path.suffix == ".gguf":
        return f"{path} is a GGUF file, not an artifact; make one: `quantize --model {path} ...`"
    if not path.is_dir():
        unfinished = path.with_name(path.name + STAGING_SUFFIX)
        more = f", but {unfinished} is an unfinished one: run its `quantize` command again"
        return f"{path} is not an artifact: there is no such directory" + (
            more if unfinished.is_dir() else ""
        )
    if path.name.endswith(STAGING_SUFFIX) or path.parent.name.endswith(STAGING_SUFFIX):
        return f"{path} is unfinished; run the same `quantize` command again to complete it"
    if not (path / CONFIG_NAME).is_file():
        return f"{path} is not an artifact: it has no {MANIFEST_NAME}"
    found = parse_object(path / CONFIG_NAME).get("quantization_config")
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else None
    if method is not None:
        return (
            f"{path} is a {method} checkpoint without {MANIFEST_NAME}; make an artifact of its "
            f"codes with `quantize convert {path}`"
        )
    return (
        f"{path} is a plain checkpoint, not an artifact; make one with `quantize --model {path}` "
        "(`method: none` in the recipe keeps it dense)"
    )
