"""An artifact seen through a spec: which tensors there must be, how shaped, in which order.

Reads names and shapes only; `runtime.model.loader` makes a decoder out of the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from quant.artifact.errors import IntegrityError
from quant.artifact.layout import QuantizedWeight, tensor_shapes
from quant.artifact.scheme import DENSE, Scheme
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

    def kv_scales(self, layer: int) -> tuple[float, float] | Tensor | None: ...


class Checkpoint:
    """An artifact seen through a spec: the names and shapes it must have."""

    def __init__(self, spec: ModelSpec, artifact: ArtifactLike) -> None:
        self.spec, self.source = spec, artifact.reader
        self._schemes = artifact.schemes()
        self.names = frozenset(self.source.names)
        self.prefix = _prefix(spec, self.names)
        self.head = _head_module(self.prefix)

    def check(self) -> None:
        """Raise IntegrityError for the first missing, misshapen or unknown tensor."""
        expected = self._expected()
        for name, shape in expected.items():
            if name not in self.names:
                raise IntegrityError(
                    f"tensor {name} is missing from the artifact; make or fetch it again"
                )
            found = tuple(self.source.shape(name))
            if found != shape:
                raise IntegrityError(
                    f"tensor {name} has shape {list(found)}; config.json and artifact.json "
                    f"make it {list(shape)}"
                )
        unknown = sorted(n for n in self.names - expected.keys() if not self._may_ignore(n))
        if unknown:
            raise IntegrityError(
                f"tensor {unknown[0]} (and {len(unknown) - 1} more) has no place in a "
                f"{self.spec.family} decoder; the artifact does not fit its config.json"
            )

    def _may_ignore(self, name: str) -> bool:
        """KV scales come through the artifact; other towers and derived buffers serve nothing."""
        if name.endswith((".self_attn.k_scale", ".self_attn.v_scale", *_DERIVED)):
            return True
        return name.startswith(self.spec.ignored_prefixes) or (
            name == f"{self.head}.weight" and self.is_head_tied()
        )

    def _expected(self) -> dict[str, tuple[int, ...]]:
        spec = self.spec
        expected: dict[str, tuple[int, ...]] = {
            f"{self.prefix}embed_tokens.weight": (spec.vocab, spec.hidden)
        }
        expected[f"{self.prefix}norm.weight"] = (spec.hidden,)
        for i in range(spec.num_layers):
            for module, shape, has_bias in _linears(spec):
                expected |= self._linear_tensors(self.name(i, module), shape, has_bias)
            for module, width in _norms(spec):
                expected[f"{self.name(i, module)}.weight"] = (width,)
        if not self.is_head_tied():
            expected |= self._linear_tensors(self.head, (spec.vocab, spec.hidden), False)
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

    def name(self, layer: int, module: str) -> str:
        """The checkpoint's name of a module of a layer."""
        return f"{self.prefix}layers.{layer}.{module}"

    def is_head_tied(self) -> bool:
        """Whether the embedding serves as the output head."""
        return self.spec.tied and self._schemes.get(self.head, DENSE).is_dense

    def groups(self) -> tuple[list[list[str]], list[list[str]]]:
        """Names of the tensors that are used: those outside the layers, by module; by layer."""
        layers: list[list[str]] = [[] for _ in self.spec.layers]
        outside: dict[str, list[str]] = {}
        start = f"{self.prefix}layers."
        for name in self._expected():
            if name.startswith(start):
                layers[int(name.removeprefix(start).split(".", 1)[0])].append(name)
            else:
                outside.setdefault(name.rpartition(".")[0], []).append(name)
        return list(outside.values()), layers


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
