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
from quant.artifact.layout import QuantizedWeight, tensor_shapes
from quant.artifact.scheme import DENSE, Scheme
from runtime.model.decoder import Decoder, DecoderLayer, Norms
from runtime.model.errors import UnsupportedModelError
from runtime.model.linear import Linear
from runtime.model.spec import ModelSpec

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

    def weight(self, module: str) -> QuantizedWeight | Tensor: ...

    def kv_scales(self, layer: int) -> tuple[float, float] | None: ...


def load_decoder(
    artifact: ArtifactLike, *, device: torch.device | str, dtype: torch.dtype
) -> Decoder:
    """The decoder of an opened artifact, computing in `dtype` on `device`.

    Weights are cast from the artifact's type to `dtype`; norm weights and scales are kept float32.

    Raises:
        ModelError: config.json describes nothing the decoder computes, or a weight overflows
            `dtype`.
        IntegrityError: a tensor is missing, misshapen or unknown; the message names it.
        SchemeError: modules that are fused do not share a scheme.
    """
    spec = ModelSpec.from_config(artifact.config)
    kv_scales = tuple(artifact.kv_scales(i) for i in range(spec.num_layers))
    weights = _Weights(spec, artifact, torch.device(device), dtype)
    weights.check()
    return Decoder(
        spec=spec,
        layers=tuple(weights.layer(i) for i in range(spec.num_layers)),
        embedding_VE=weights.embedding(),
        final_norm=weights.norm(f"{weights.prefix}norm"),
        head=weights.head(),
        kv_scales=kv_scales,
    )


class _Weights:
    """A checkpoint seen through a spec: expected names and shapes, and fused parts on demand."""

    def __init__(
        self,
        spec: ModelSpec,
        artifact: ArtifactLike,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
        self._weight, self._source = artifact.weight, artifact.reader
        self._schemes = artifact.schemes()
        self._names = frozenset(self._source.names)
        self.prefix = _prefix(spec, self._names)
        self._head = _head_module(self.prefix)

    def check(self) -> None:
        """Raise IntegrityError for the first missing, misshapen or unknown tensor."""
        expected = self._expected()
        for name, shape in expected.items():
            if name not in self._names:
                raise IntegrityError(
                    f"tensor {name} is missing from the artifact; make or fetch it again"
                )
            found = tuple(self._source.shape(name))
            if found != shape:
                raise IntegrityError(
                    f"tensor {name} has shape {list(found)}; config.json and artifact.json "
                    f"make it {list(shape)}"
                )
        unknown = sorted(n for n in self._names - expected.keys() if not self._may_ignore(n))
        if unknown:
            raise IntegrityError(
                f"tensor {unknown[0]} (and {len(unknown) - 1} more) has no place in a "
                f"{self._spec.family} decoder; the artifact does not fit its config.json"
            )

    def _may_ignore(self, name: str) -> bool:
        """KV scales come through the artifact; other towers and derived buffers serve nothing."""
        if name.endswith((".self_attn.k_scale", ".self_attn.v_scale", *_DERIVED)):
            return True
        return name.startswith(self._spec.ignored_prefixes) or (
            name == f"{self._head}.weight" and self._is_tied_head()
        )

    def _expected(self) -> dict[str, tuple[int, ...]]:
        spec = self._spec
        expected: dict[str, tuple[int, ...]] = {
            f"{self.prefix}embed_tokens.weight": (spec.vocab, spec.hidden)
        }
        expected[f"{self.prefix}norm.weight"] = (spec.hidden,)
        for i in range(spec.num_layers):
            for module, shape, has_bias in _linears(spec):
                expected |= self._linear_tensors(self._name(i, module), shape, has_bias)
            for module, width in _norms(spec):
                expected[f"{self._name(i, module)}.weight"] = (width,)
        if self._has_head():
            expected |= self._linear_tensors(self._head, (spec.vocab, spec.hidden), False)
        return expected

    def _linear_tensors(
        self, module: str, shape: tuple[int, int], has_bias: bool
    ) -> dict[str, tuple[int, ...]]:
        tensors = tensor_shapes(self._scheme(module), shape)
        if has_bias:
            tensors["bias"] = (shape[0],)
        return {f"{module}.{name}": expected for name, expected in tensors.items()}

    def _scheme(self, module: str) -> Scheme:
        if module not in self._schemes:
            raise IntegrityError(f"artifact.json names no scheme for module {module}")
        return self._schemes[module]

    def _name(self, layer: int, module: str) -> str:
        return f"{self.prefix}layers.{layer}.{module}"

    def _is_tied_head(self) -> bool:
        return self._spec.tied and self._schemes.get(self._head, DENSE).is_dense

    def _has_head(self) -> bool:
        return not self._is_tied_head()

    def layer(self, i: int) -> DecoderLayer:
        spec = self._spec
        return DecoderLayer(
            spec=spec.layers[i],
            qkv=self._linear(i, spec.qkv_modules, spec.qkv_bias),
            o=self._linear(i, ("self_attn.o_proj",), spec.o_bias),
            gate_up=self._linear(i, spec.gate_up_modules, spec.mlp_bias),
            down=self._linear(i, ("mlp.down_proj",), spec.mlp_bias),
            norms=self._layer_norms(i),
        )

    def _layer_norms(self, i: int) -> Norms:
        def get(module: str, is_there: bool = True) -> Tensor | None:
            return self.norm(self._name(i, module)) if is_there else None

        sandwich, qk = self._spec.sandwich_norms, self._spec.qk_norm
        before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        return Norms(
            attention=self.norm(self._name(i, "input_layernorm")),
            after_attention=get("post_attention_layernorm", sandwich),
            mlp=self.norm(self._name(i, before_mlp)),
            after_mlp=get("post_feedforward_layernorm", sandwich),
            q=get("self_attn.q_norm", qk),
            k=get("self_attn.k_norm", qk),
        )

    def norm(self, module: str) -> Tensor:
        """A norm's weight in float32 on the device, the family's offset added."""
        weight = self._source.tensor(f"{module}.weight").to(self._device, torch.float32)
        return weight + self._spec.norm_offset

    def embedding(self) -> Tensor:
        weight = self._source.tensor(f"{self.prefix}embed_tokens.weight")
        head = f"{self._head}.weight"
        if head in self._names and self._is_tied_head():
            self._check_same(head, weight)
        return _cast(weight, self._dtype, "embed_tokens").to(self._device, copy=True)

    def _check_same(self, head: str, embedding: Tensor) -> None:
        if not torch.equal(self._source.tensor(head), embedding):
            raise IntegrityError(
                f"tensor {head} differs from the embedding, but config.json ties the two"
            )

    def head(self) -> Linear | None:
        """The output head; None where the embedding serves."""
        if not self._has_head():
            return None
        return Linear.from_shards([self._shard(self._head)], [None], self._dtype, self._device)

    def _linear(self, layer: int, modules: tuple[str, ...], has_bias: bool) -> Linear:
        names = [self._name(layer, module) for module in modules]
        return Linear.from_shards(
            [self._shard(name) for name in names],
            [self._source.tensor(f"{name}.bias") if has_bias else None for name in names],
            self._dtype,
            self._device,
        )

    def _shard(self, module: str) -> QuantizedWeight | Tensor:
        weight = self._weight(module)
        return _cast(weight, self._dtype, module) if isinstance(weight, Tensor) else weight


def _prefix(spec: ModelSpec, names: frozenset[str]) -> str:
    found = [prefix for prefix in spec.prefixes if f"{prefix}embed_tokens.weight" in names]
    if len(found) != 1:
        wanted = " or ".join(f"{prefix}embed_tokens.weight" for prefix in spec.prefixes)
        raise IntegrityError(f"tensor {wanted} is missing from the artifact")
    return found[0]


def _head_module(prefix: str) -> str:
    return "language_model.lm_head" if prefix == "language_model.model." else "lm_head"


def _linears(spec: ModelSpec) -> list[tuple[str, tuple[int, int], bool]]:
    """(module, (out, in), has a bias) of a layer's linears, under checkpoint names."""
    qkv_rows = [spec.q_size, spec.kv_size, spec.kv_size]
    gate_rows = [spec.intermediate, spec.intermediate]
    qkv = _rows_per_module(spec.qkv_modules, qkv_rows)
    gate_up = _rows_per_module(spec.gate_up_modules, gate_rows)
    return [
        *((module, (rows, spec.hidden), spec.qkv_bias) for module, rows in qkv),
        ("self_attn.o_proj", (spec.hidden, spec.q_size), spec.o_bias),
        *((module, (rows, spec.hidden), spec.mlp_bias) for module, rows in gate_up),
        ("mlp.down_proj", (spec.hidden, spec.intermediate), spec.mlp_bias),
    ]


def _rows_per_module(modules: tuple[str, ...], rows: list[int]) -> list[tuple[str, int]]:
    """A checkpoint that is fused already has one module for all the rows."""
    return [(modules[0], sum(rows))] if len(modules) == 1 else list(zip(modules, rows, strict=True))


def _norms(spec: ModelSpec) -> list[tuple[str, int]]:
    """(module, width) of a layer's norms, under checkpoint names."""
    norms = [("input_layernorm", spec.hidden), ("post_attention_layernorm", spec.hidden)]
    if spec.sandwich_norms:
        norms += [
            ("pre_feedforward_layernorm", spec.hidden),
            ("post_feedforward_layernorm", spec.hidden),
        ]
    if spec.qk_norm:
        norms += [("self_attn.q_norm", spec.head_dim), ("self_attn.k_norm", spec.head_dim)]
    return norms


def _cast(weight: Tensor, dtype: torch.dtype, module: str) -> Tensor:
    """A dense weight in the compute type; float16 is the only one that real weights overflow."""
    if not weight.is_floating_point():
        raise IntegrityError(f"the weight of {module} is {weight.dtype}, expected a float type")
    cast = weight.to(dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(cast).all()):
        raise UnsupportedModelError(
            f"the weight of {module} does not fit float16; run with --dtype bfloat16 or float32"
        )
    return cast
