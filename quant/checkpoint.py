"""`Source`: a model to quantize, in checkpoint names, whatever files it is stored in.

Implemented by `quant.source.HFSource` and `quant.gguf_source.GGUFSource`; `quant.adapter` changes
one on the way. It gives tensors by name
and the files beside them; it does not know how a layer computes (`quant.modelling`) nor what
becomes of the weights.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quant.artifact.manifest import AdapterRecord
from quant.errors import NonFiniteError, SourceError
from quant.modelling import HEAD_WEIGHT, Skeleton

# Source tensors that no artifact holds, and why: computed from config.json, or equal to another.
DROPPED_TENSORS = (
    (re.compile(r".*\.rotary_emb\.inv_freq"), "recomputed from config.json"),
    (re.compile(r".*\.self_attn\.(masked_)?bias"), "an old causal mask buffer"),
)


class Source(ABC):
    """A checkpoint in checkpoint names. Values are read when asked for and checked to be finite."""

    path: Path
    kind: Literal["hf", "gguf"]
    hub_id: str | None = None
    revision: str | None = None
    config: dict[str, Any]  # config.json's content
    dtype: torch.dtype  # what the weights are stored as; GGUF counts as float32
    names: tuple[str, ...]  # every tensor of the checkpoint, checkpoint names
    merged: AdapterRecord | None = None  # the LoRA adapter that is merged in

    @property
    def name(self) -> str:
        """What finds the model again: the hub id, or the absolute path."""
        return self.hub_id or str(self.path.resolve())

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all weights as they are stored."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """sha256 over all files that make up the model (hex)."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    @abstractmethod
    def raw_tensor(self, name: str) -> Tensor:
        """A tensor as stored (GGUF: dequantized to float32), unchecked."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Every file beside the weights that belongs to the model: tokenizer, template, ..."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """The transformers tokenizer of the model."""

    @cached_property
    def skeleton(self) -> Skeleton:
        """The model without its weights, on the meta device."""
        return Skeleton(self.config, where=str(self.path))

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.skeleton.num_layers

    @property
    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear, lm_head included, in the model's order."""
        return self.skeleton.linear_shapes

    def layer_prefix(self, index: int) -> str:
        """What the tensor names of a layer start with."""
        return self.skeleton.layer_prefix(index)

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored; NonFiniteError names it if it holds NaN or Inf."""
        value = self.raw_tensor(name)
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            count = int((~torch.isfinite(value)).sum())
            raise NonFiniteError(
                f"{self.path}: tensor {name} holds {count} NaN or Inf values; the checkpoint is "
                "damaged, fetch it again"
            )
        return value

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Several tensors by name."""
        return {name: self.tensor(name) for name in names}

    def dropped(self) -> dict[str, str]:
        """Tensors of the checkpoint that no artifact holds, each with the reason."""
        found = {
            name: reason
            for name in self.names
            for pattern, reason in DROPPED_TENSORS
            if pattern.fullmatch(name)
        }
        if self.skeleton.is_tied and HEAD_WEIGHT in self.names:
            found[HEAD_WEIGHT] = "tied to the embedding"
        return found

    def extra_names(self) -> tuple[str, ...]:
        """Tensors that the model class does not use; they are copied as they are."""
        used = set(self.skeleton.parameter_shapes) | set(self.dropped())
        return tuple(name for name in self.names if name not in used)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; SourceError when it is unreadable or something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        kind = "null" if data is None else type(data).__name__
        raise SourceError(f"{path}: found a JSON {kind}, expected an object")
    return data
