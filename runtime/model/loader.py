"""From an artifact to a Decoder: check every name and shape, fuse, repack once.

Everything is checked against the spec before the first weight is read, so that a missing, misshapen
or unknown tensor stops the start by name. No placeholder ever exists: a Linear is made from its
tensors. One layer's tensors are used at a time; what is kept is the packed form. On a GPU the next
layers are on their way meanwhile (`runtime.model.tensor_stream`), and weights are packed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quant.artifact.artifact import Artifact
from quant.artifact.errors import IntegrityError
from quant.artifact.integrity import check_digests, refusal
from quant.artifact.layout import QuantizedWeight
from quant.artifact.store import CheckpointReader
from runtime.kernels.backend import uses_triton
from runtime.kernels.workspace import KernelOptions, Workspace
from runtime.model.checkpoint import ArtifactLike, Checkpoint, WeightSource
from runtime.model.decoder import Decoder, DecoderLayer, Norms
from runtime.model.errors import UnsupportedModelError
from runtime.model.kv_cache import KVScales
from runtime.model.linear import Linear
from runtime.model.spec import ModelSpec
from runtime.model.tensor_stream import TensorStream

KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """`layers` of `num_layers` are packed."""

    layers: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensors:
    """Where stored tensors come from: the mapped files, or a stream onto the device."""

    get: Callable[[str], Tensor]
    weight: Callable[[str], QuantizedWeight | Tensor]
    finish: Callable[[], None] = lambda: None


def load_decoder(
    artifact: ArtifactLike,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    options: KernelOptions | None = None,
    num_positions: int | None = None,
    digests: Mapping[str, str] | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    is_streamed: bool | None = None,
) -> Decoder:
    """The decoder of an opened artifact, computing in `dtype` on `device`.

    Weights are cast from the artifact's type to `dtype`; norm weights and scales are kept float32.
    options: what kernels need beside the weights; None makes a workspace of its own.
    num_positions: the longest sequence that will be run; None takes the model's limit. digests
    (`Artifact.tensor_digests`): the sha256 that every tensor's bytes must have; None trusts them.
    progress is told after each layer. is_streamed: read ahead in threads; None does so on a GPU.

    Raises:
        ModelError: config.json describes nothing the decoder computes, or a weight overflows
            `dtype`.
        IntegrityError: a tensor is missing, misshapen, unknown or altered; the message names it.
        SchemeError: modules that are fused do not share a scheme.
    """
    spec, device = ModelSpec.from_config(artifact.config), torch.device(device)
    _check_head_dim(spec.head_dim, device, dtype)
    kv_scales = tuple(artifact.kv_scales(i) for i in range(spec.num_layers))
    _check_kv_heads(kv_scales, spec.kv_heads)
    checkpoint = Checkpoint(spec, artifact)
    checkpoint.check()
    if options is None:
        options = KernelOptions(workspace=Workspace(device))
    if is_streamed is None:
        is_streamed = device.type == "cuda" and isinstance(artifact, Artifact)
    with _tensors(artifact, checkpoint, device, digests, is_streamed) as tensors:
        weights = _Weights(checkpoint, tensors, device, dtype, options)
        decoder = Decoder(
            spec=spec,
            layers=tuple(_layers(weights, spec.num_layers, progress)),
            embedding_VE=weights.embedding(),
            final_norm=weights.norm(f"{checkpoint.prefix}norm"),
            head=weights.head(),
            kv_scales=kv_scales,
            options=options,
            num_positions=num_positions,
        )
        tensors.finish()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was on its way has other sizes than what will be needed
    return decoder


def _check_kv_heads(scales: tuple[KVScales | None, ...], kv_heads: int) -> None:
    found = {len(scale[0]) for scale in scales if isinstance(scale, Tensor)}
    if found - {kv_heads}:
        raise IntegrityError(
            f"the artifact has KV scales for {sorted(found)} heads of a layer, config.json gives "
            f"its layers {kv_heads} KV heads"
        )


def _check_head_dim(size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Kernels hold whole heads in tiles, whose sides are powers of two."""
    has_kernels = uses_triton(device) and dtype != torch.float32
    if has_kernels and size not in KERNEL_HEAD_DIMS:
        sizes = ", ".join(map(str, KERNEL_HEAD_DIMS))
        raise UnsupportedModelError(
            f"attention heads of {size}: the kernels for {device.type} serve {sizes}; "
            "serve this model with --device cpu"
        )


def _layers(
    weights: _Weights, num_layers: int, progress: Callable[[LoadProgress], None] | None
) -> Iterator[DecoderLayer]:
    for i in range(num_layers):
        yield weights.layer(i)
        if progress is not None:
            progress(LoadProgress(layers=i + 1, num_layers=num_layers))


@contextmanager
def _tensors(
    artifact: ArtifactLike,
    checkpoint: Checkpoint,
    device: torch.device,
    digests: Mapping[str, str] | None,
    is_streamed: bool,
) -> Iterator[_Tensors]:
    reader = artifact.reader
    if not is_streamed:
        if digests is not None:
            _check_mapped(reader, digests)
        yield _Tensors(get=reader.tensor, weight=artifact.weight)
        return
    assert isinstance(artifact, Artifact), "only files can be streamed"
    outside, layers = checkpoint.groups()
    with TensorStream(
        artifact.reader, [*outside, *layers], device, resident=len(outside), digests=digests
    ) as stream:
        yield _Tensors(
            get=stream.tensor,
            weight=partial(artifact.weight, read=stream.tensor),
            finish=stream.finish,
        )


def _check_mapped(reader: WeightSource, digests: Mapping[str, str]) -> None:
    assert isinstance(reader, CheckpointReader), "digests are of tensors in files"
    problems = list(check_digests(reader, digests))
    if problems:
        raise refusal(reader.directory, problems)


class _Weights:
    """Parts of the decoder on demand, fused and packed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: _Tensors,
        device: torch.device,
        dtype: torch.dtype,
        options: KernelOptions,
    ) -> None:
        self._checkpoint, self._spec, self.tensors = checkpoint, checkpoint.spec, tensors
        self._device, self._dtype, self._options = device, dtype, options

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
            return self.norm(self._checkpoint.name(i, module)) if is_there else None

        sandwich, qk = self._spec.sandwich_norms, self._spec.qk_norm
        before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        return Norms(
            attention=self.norm(self._checkpoint.name(i, "input_layernorm")),
            after_attention=get("post_attention_layernorm", sandwich),
            mlp=self.norm(self._checkpoint.name(i, before_mlp)),
            after_mlp=get("post_feedforward_layernorm", sandwich),
            q=get("self_attn.q_norm", qk),
            k=get("self_attn.k_norm", qk),
        )

    def norm(self, module: str) -> Tensor:
        """A norm's weight in float32 on the device, the family's offset added."""
        weight = self.tensors.get(f"{module}.weight").to(self._device, torch.float32)
        return weight + self._spec.norm_offset

    def embedding(self) -> Tensor:
        """[V, E] in the compute type; never the mapped file itself."""
        module = f"{self._checkpoint.prefix}embed_tokens"
        if self._checkpoint.is_head_tied():
            self._check_same(f"{self._checkpoint.head}.weight", f"{module}.weight")
        weight = self.tensors.get(f"{module}.weight")
        is_mapped = weight.device.type == "cpu"
        return _cast(weight, self._dtype, "embed_tokens").to(self._device, copy=is_mapped)

    def _check_same(self, head: str, embedding: str) -> None:
        source = self._checkpoint.source
        if head in self._checkpoint.names and not torch.equal(
            source.tensor(head), source.tensor(embedding)
        ):
            raise IntegrityError(
                f"tensor {head} differs from the embedding, but config.json ties the two"
            )

    def head(self) -> Linear | None:
        """The output head; None where the embedding serves."""
        if self._checkpoint.is_head_tied():
            return None
        return self._fused([self._checkpoint.head], False)

    def _linear(self, layer: int, modules: tuple[str, ...], has_bias: bool) -> Linear:
        return self._fused([self._checkpoint.name(layer, module) for module in modules], has_bias)

    def _fused(self, names: list[str], has_bias: bool) -> Linear:
        return Linear.from_shards(
            [self._shard(name) for name in names],
            [self.tensors.get(f"{name}.bias") if has_bias else None for name in names],
            self._dtype,
            self._device,
            self._options,
        )

    def _shard(self, module: str) -> QuantizedWeight | Tensor:
        """A module's weight where it will be packed."""
        weight = self.tensors.weight(module)
        if isinstance(weight, Tensor):
            return _cast(weight.to(self._device), self._dtype, module)
        zero = weight.zero_point
        return replace(
            weight,
            codes=weight.codes.to(self._device),
            scale=weight.scale.to(self._device),
            zero_point=None if zero is None else zero.to(self._device),
        )


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
