"""Candidates of a self-test: the base itself as a dense artifact, and copies with a fault planted.

They are written layer by layer through the artifact's own writer, so that the engine and the gate
open them by the door that every artifact comes through. Knows no gate and no suite.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.errors import TargetError
from eval.targets.checkpoint import Checkpoint
from eval.targets.reference import load_tokenizer, load_weights
from quant.artifact.artifact import Artifact
from quant.artifact.integrity import CONFIG_NAME
from quant.artifact.jsonio import parse_object
from quant.artifact.manifest import (
    MANIFEST_NAME,
    Manifest,
    ModuleRecord,
    RecipeRecord,
    SourceRecord,
    is_outside_digest,
    scheme_tables,
)
from quant.artifact.scheme import DENSE
from quant.artifact.store import INDEX_NAME, CheckpointReader
from quant.artifact.writer import ArtifactWriter

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TOWERS = ("vision", "multi_modal", "audio")
_DERIVED = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")
_COPIED = (".json", ".jinja", ".model", ".txt")
_RECIPE = "method: none\n"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# What becomes of a tensor: (name, value) -> value, the same object where nothing is done to it.
Change = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A base as it lies on disk: config.json's content, tensors by name, files beside them."""

    config: Mapping[str, Any]
    names: tuple[str, ...]
    read: Callable[[str], Tensor]
    files: Mapping[str, bytes]


def read_base(checkpoint: Checkpoint) -> BaseModel:
    """The base to be written as an artifact. TargetError: it cannot be loaded."""
    if checkpoint.kind == "gguf":
        config, tensors = load_weights(checkpoint)
        return BaseModel(
            config=config,
            names=tuple(tensors),
            read=tensors.__getitem__,
            files=_gguf_files(checkpoint, config),
        )
    folder = checkpoint.directory
    reader = CheckpointReader(folder)
    return BaseModel(
        config=parse_object(folder / CONFIG_NAME),
        names=reader.names,
        read=reader.tensor,
        files={path.name: path.read_bytes() for path in folder.iterdir() if _is_copied(path)},
    )


def _is_copied(path: Path) -> bool:
    ours = (CONFIG_NAME, MANIFEST_NAME, INDEX_NAME)
    is_known = path.name in ours or is_outside_digest(path.name) or path.name.startswith(".")
    return path.is_file() and path.suffix in _COPIED and not is_known


def _gguf_files(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        load_tokenizer(checkpoint).save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {key: config[key] for key in keys if config.get(key) is not None}
    return {**files, "generation_config.json": json.dumps(generation).encode()}


def write_sound(base: BaseModel, checkpoint: Checkpoint, out: Path) -> Artifact:
    """The base as a dense artifact at `out`. TargetError: it is none that the engine could run."""
    embedding = next((n for n in base.names if n.endswith("embed_tokens.weight")), None)
    if embedding is None:
        raise TargetError(f"{checkpoint.name} holds no embed_tokens.weight; is it a decoder?")
    head = f"{embedding.removesuffix('model.embed_tokens.weight')}lm_head"
    tied = _is_tied(base, embedding, head)
    dropped = {f"{head}.weight"} if tied else set()
    names = [n for n in base.names if n not in dropped and not n.endswith(_DERIVED)]
    dtype = base.read(embedding).dtype
    if dtype not in _FLOATS:
        raise TargetError(f"{checkpoint.name} is stored as {dtype}; expected 16 or 32 bit floats")
    shapes = {name: tuple(base.read(name).shape) for name in names}
    modules = {name.removesuffix(".weight"): shapes[name] for name in names
               if is_linear(name, len(shapes[name]))}  # fmt: skip
    records = {m: _record(shape) for m, shape in modules.items()}
    if tied:
        records[head] = _record(shapes[embedding], tied_to=embedding)
    stored_as = str(dtype).removeprefix("torch.")
    config = {k: v for k, v in base.config.items() if k not in ("torch_dtype", "_name_or_path")}
    manifest = Manifest(
        created_by="weighbridge evaluate self-test",
        architecture=(base.config.get("architectures") or ["unknown"])[0],
        dtype=stored_as,
        schemes=scheme_tables({"all": DENSE}),
        modules=records,
        source=SourceRecord(
            path=checkpoint.name, kind=checkpoint.kind, digest=checkpoint.digest, dtype=stored_as
        ),
        recipe=RecipeRecord(text=_RECIPE, sha256=hashlib.sha256(_RECIPE.encode()).hexdigest()),
    )
    config |= {"dtype": stored_as, "tie_word_embeddings": tied}
    return _write(out, manifest, config, base.files, names, base.read)


def _is_tied(base: BaseModel, embedding: str, head: str) -> bool:
    """As config.json says; where it says nothing, whether both are the same numbers."""
    stored = f"{head}.weight"
    said = base.config.get("tie_word_embeddings")
    if stored not in base.names or isinstance(said, bool):
        return stored not in base.names or bool(said)
    return torch.equal(base.read(stored), base.read(embedding))


def _record(shape: tuple[int, ...], tied_to: str | None = None) -> ModuleRecord:
    out, width = shape
    return ModuleRecord(scheme=DENSE.label, shape=(out, width), tied_to=tied_to)


def is_linear(name: str, rank: int) -> bool:
    """Whether the tensor is the weight of a linear of the decoder, output head included."""
    in_layer = _LAYER.search(name) is not None
    return rank == 2 and name.endswith(".weight") and (in_layer or name.endswith("lm_head.weight"))


def layer_of(name: str) -> int | None:
    """The decoder layer of a tensor; None outside the layers and in other towers."""
    found = _LAYER.search(name)
    return int(found[1]) if found and not any(tower in name for tower in _TOWERS) else None


def num_layers(sound: Artifact) -> int:
    """Decoder layers of the artifact."""
    return len({layer_of(name) for name in sound.manifest.modules} - {None})


def write_damaged(sound: Artifact, out: Path, change: Change) -> Artifact:
    """A copy of the artifact with `change` done to its tensors."""
    config = {k: v for k, v in sound.config.items() if k != "quantization_config"}
    files = plain_files(sound)
    return _write(
        out, sound.manifest, config, files, sound.reader.names,
        lambda name: change(name, sound.reader.tensor(name)),
    )  # fmt: skip


def plain_files(sound: Artifact) -> dict[str, bytes]:
    """Everything of an artifact but weights, config.json, index and manifest."""
    ours = (CONFIG_NAME, INDEX_NAME)
    return {
        name: (sound.path / name).read_bytes()
        for name in sound.manifest.files
        if name not in ours and not name.endswith(".safetensors")
    }


def _write(
    out: Path,
    manifest: Manifest,
    config: Mapping[str, Any],
    files: Mapping[str, bytes],
    names: Iterable[str],
    read: Callable[[str], Tensor],
) -> Artifact:
    """One shard a layer, so that no more than a layer is in memory."""
    shards: dict[int | None, list[str]] = {}
    for name in sorted(names):
        shards.setdefault(layer_of(name), []).append(name)
    with ArtifactWriter(out, num_shards=len(shards), job={"self-test": out.name}) as writer:
        for name, data in files.items():
            writer.write_file(name, data)
        for index, members in enumerate(shards.values()):
            writer.write_shard(index, {n: read(n).contiguous() for n in members})
        return writer.seal(manifest, config)
