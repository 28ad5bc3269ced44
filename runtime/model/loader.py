"""From an artifact to a Decoder: check every name and shape, fuse, repack once.

Everything is checked against the spec before the first weight is read, so that a missing, misshapen
or unknown tensor stops the start by name. No placeholder ever exists: a Linear is made from its
tensors. One layer's tensors are read at a time; what is kept is the packed form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from quant.artifact.errors import IntegrityError
from quant.artifact.layout import QuantizedWeight, from_tensors, tensor_names, tensor_shapes
from quant.artifact.scheme import DENSE, Scheme
from runtime.model.decoder import Decoder, DecoderLayer, Norms
from runtime.model.linear import Linear
from runtime.model.spec import LayerSpec, ModelSpec

# Buffers that old checkpoints carry along; their content follows from the config.
_DERIVED = ("rotary_emb.inv_freq",)


class WeightSource(Protocol):
    """Where tensors come from: an artifact's reader, or a dictionary in tests."""

    @property
    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...


class ArtifactLike(Protocol):
    """The part of `quant.artifact.artifact.Artifact` that loading needs."""

    @property
    def config(self) -> Mapping[str, object]: ...

    @property
    def reader(self) -> WeightSource: ...

    def schemes(self) -> Mapping[str, Scheme]: ...

    def kv_scales(self, layer: int) -> tuple[float, float] | None: ...
