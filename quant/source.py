"""Where a model comes from: a Hugging Face directory, a hub id or a GGUF file, behind one face.

`open_source` checks everything that can be known without reading weights (files, architecture,
tensor names and shapes) and refuses what would run code or is quantized already. Weights are then
read tensor by tensor. It does not know how a layer computes (`quant.modelling`) nor what becomes of
the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.artifact.checkpoint_files import checkpoint_digest, files_of, is_copied
from quant.artifact.errors import UnsafeCheckpointError
from quant.artifact.shipped import local_path
from quant.artifact.store import PICKLE_SUFFIXES, CheckpointReader
from quant.checkpoint import Source, read_object
from quant.errors import AlreadyQuantizedError, SourceError
from quant.model_config import describe_quantization
from quant.modelling import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    Skeleton,
    check_family,
    check_tensors,
    load_tokenizer,
)
from quant.synthetic import SyntheticSource, is_synthetic

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

# What quantizers call codes, scales and zero points.
QUANTIZED_MARKS = (
    ".qweight", ".qzeros", ".scales", ".weight_packed", ".weight_scale", ".weight_scale_inv",
    ".weight_scales", ".weight_zero_point", ".input_scale", ".k_scale", ".v_scale", ".SCB",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A weight may also be stored wider than any model computes in.
WEIGHT_DTYPES = frozenset({*DTYPES.values(), torch.float64})


class HFSource(Source):
    """A directory with config.json, safetensors and tokenizer files."""

    kind = "hf"

    def __init__(
        self, path: Path, *, hub_id: str | None = None, revision: str | None = None
    ) -> None:
        self.path, self.hub_id, self.revision = path, hub_id, revision
        self.config = read_config(path)
        refuse_code(path, self.config)
        refuse_quantized(path, self.config)
        check_family(self.config, str(path))
        require_tokenizer(path)
        _refuse_pickle(path)
        self._reader = CheckpointReader(path)
        self.names = tuple(self._reader.names)
        _refuse_quantized_names(path, self.names)
        check_tensors(self.skeleton, {n: self.shape(n) for n in self.names}, str(path))
        _refuse_codes(path, self._reader, self.skeleton.parameter_shapes)
        check_tied_head(path, self._reader, self.skeleton)
        _check_generation_config(path)
        self.dtype = _stored_dtype(self._reader)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._reader.shape(name))

    def raw_tensor(self, name: str) -> Tensor:
        return self._reader.tensor(name)

    @property
    def num_bytes(self) -> int:
        return sum(self._reader.stored(name).num_bytes for name in self.names)

    @cached_property
    def digest(self) -> str:
        return checkpoint_digest(self.path)

    def files(self) -> dict[str, bytes]:
        return {name: path.read_bytes() for name, path in files_of(self.path) if is_copied(path)}

    def tokenizer(self) -> Any:
        return load_tokenizer(self.path, trust_remote_code=False)


def open_source(model: str) -> Source:
    """The source that `model` names: a directory, a GGUF file, or a hub id `owner/name`; or random
    weights of a real shape, `synth:SHAPE` (see `quant.synthetic`).

    Raises SourceError (nothing there, incomplete, unreadable), UnsupportedModelError,
    AlreadyQuantizedError, or UnsafeCheckpointError (pickle weights, remote code).
    """
    if is_synthetic(model):
        return SyntheticSource(model)
    try:
        path = local_path(model)
    except FileNotFoundError as error:
        raise SourceError(f"model {error}") from error
    if not model:
        raise SourceError("found an empty model name; expected a directory, .gguf file or hub id")
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    if path.is_file():
        raise SourceError(f"{path}: expected a model directory or a .gguf file")
    if path.is_dir():
        return _open_directory(path)
    if HUB_ID.fullmatch(model):
        return _open_hub(model)
    raise SourceError(f"{model}: no such file or directory, and no hub id (owner/name) either")


def _open_directory(path: Path, hub_id: str | None = None) -> Source:
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file():
        return HFSource(path, hub_id=hub_id, revision=_snapshot_revision(path))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    if ggufs:
        names = ", ".join(p.name for p in ggufs)
        raise SourceError(f"{path}: {len(ggufs)} GGUF files ({names}); name the one to read")
    raise SourceError(f"{path}: no config.json and no .gguf file; expected a model directory")


def _open_gguf(path: Path) -> Source:
    # Not at the top: it needs the gguf package, which a Hugging Face source does without.
    from quant.gguf_source import GGUFSource

    return GGUFSource(path)


def _open_hub(model: str) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        local = Path(snapshot_download(model, allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise SourceError(
            f"{model}: no such directory here, and the hub did not deliver it "
            f"({type(error).__name__}); check the name and the network, or give a local directory"
        ) from error
    return _open_directory(local, hub_id=model)


def _snapshot_revision(path: Path) -> str | None:
    """The commit, when `path` is a snapshot in the hub's cache."""
    is_commit = re.fullmatch(r"[0-9a-f]{40}", path.name) and path.parent.name == "snapshots"
    return path.name if is_commit else None


def read_config(path: Path) -> dict[str, Any]:
    """config.json; SourceError unless it is of a transformers model."""
    config = read_object(path / "config.json")
    if "model_type" not in config:
        raise SourceError(f"{path / 'config.json'}: no model_type; is this a transformers model?")
    return config


def _check_generation_config(path: Path) -> None:
    """It is copied as it is, and would otherwise fail where the artifact is served."""
    if (path / "generation_config.json").is_file():
        read_object(path / "generation_config.json")


def refuse_code(path: Path, config: dict[str, Any]) -> None:
    """UnsafeCheckpointError if the model or its tokenizer comes with code to run."""
    settings = path / "tokenizer_config.json"
    found = "config.json" if "auto_map" in config else None
    if settings.is_file() and "auto_map" in read_object(settings):
        found = settings.name
    if found:
        raise UnsafeCheckpointError(
            f"{path}: {found} names code to run (auto_map); remote code is never executed, use a "
            "checkpoint of a supported architecture without it"
        )


def refuse_quantized(path: Path, config: dict[str, Any]) -> None:
    """AlreadyQuantizedError if config.json has a quantization section."""
    section = config.get("quantization_config") or config.get("compression_config")
    if section:
        ours = (path / "artifact.json").is_file()
        keep = "it is an artifact" if ours else "keep these codes: `quantize convert`"
        raise AlreadyQuantizedError(
            f"{path}: already quantized ({describe_quantization(section)}); start from the "
            f"original float checkpoint, or {'serve it as it is: ' if ours else ''}{keep}"
        )


def _refuse_quantized_names(path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if name.endswith(QUANTIZED_MARKS):
            raise AlreadyQuantizedError(
                f"{path}: tensor {name} holds codes or scales of a quantized model; start from the "
                "original float checkpoint"
            )


def _refuse_codes(path: Path, reader: CheckpointReader, used: Iterable[str]) -> None:
    for name in used:
        if name in reader and reader.dtype(name) not in WEIGHT_DTYPES:
            raise AlreadyQuantizedError(
                f"{path}: tensor {name} is {str(reader.dtype(name)).removeprefix('torch.')}, so it "
                "holds codes, not weights; start from the original float checkpoint"
            )


def require_tokenizer(path: Path) -> None:
    """SourceError if the directory has no tokenizer."""
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise SourceError(
            f"{path}: no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); copy the tokenizer "
            "files of the model into the directory"
        )


def check_tied_head(path: Path, reader: CheckpointReader, skeleton: Skeleton) -> None:
    """SourceError if a head is stored beside the embedding it is tied to and differs from it.

    transformers 4 drops such a head, transformers 5 keeps it: nobody knows which model was meant.
    """
    if not skeleton.is_tied or HEAD_WEIGHT not in reader:
        return
    head, embedding = reader.tensor(HEAD_WEIGHT), reader.tensor(EMBEDDING_WEIGHT)
    if not torch.equal(head, embedding):
        raise SourceError(
            f"{path}: {HEAD_WEIGHT} is stored and is not {EMBEDDING_WEIGHT}, yet config.json says "
            "tie_word_embeddings; write `tie_word_embeddings: false` there if the model has a head "
            "of its own, else remove the tensor"
        )


def _refuse_pickle(path: Path) -> None:
    pickles = [p.name for p in sorted(path.iterdir()) if p.suffix in PICKLE_SUFFIXES]
    if pickles and not any(path.glob("*.safetensors")):
        raise UnsafeCheckpointError(
            f"{path}: only pickle weights ({pickles[0]}); loading them would run code. Convert the "
            "checkpoint to safetensors first"
        )


def _stored_dtype(reader: CheckpointReader) -> torch.dtype:
    """The dtype of the embedding table; a family keeps all its linears in it."""
    dtype = reader.dtype(EMBEDDING_WEIGHT)
    if dtype not in DTYPES.values():
        raise SourceError(
            f"tensor {EMBEDDING_WEIGHT} is {dtype}; expected one of {', '.join(DTYPES)}"
        )
    return dtype
