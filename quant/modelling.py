"""The only file that knows transformers' modelling code: families, layers, and how to run them.

A `Skeleton` is the transformers model on the meta device (no memory) whose decoder layers are
stand-ins that hand their input on. To run decoder layer i, the real layer is put in its place and
the *model's own* forward is called with hidden states instead of token ids: masks (causal, sliding
window), rotary embeddings and per-layer keyword arguments are made by transformers itself, so a
layer-wise pass is the full forward, cut into pieces. Families differ in data only (`FAMILIES`).

It does not know where weights come from, nor what quantization is.

Shape legend: B sequences of a batch, T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quant.errors import SourceError, UnsupportedModelError, first_line
from quant.experts import Expert, ExpertLeaves, Experts

ATTENTION = "weighbridge_tap"

# Modules of a decoder layer that read the same input, in the order in which a layer computes them.
Stages = tuple[tuple[str, ...], ...]
ATTENTION_STAGES: Stages = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
)
MLP_STAGES: Stages = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureNames:
    """What checkpoints call a mixture of experts: its block in a layer, and in an expert the gate,
    up and down projection. The router is the block's `gate`."""

    block: str
    leaves: ExpertLeaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: the class that config.json must name, its experts if it has any, and the
    stages of its attention and of a dense MLP, in checkpoint names."""

    architecture: str
    mixture: MixtureNames | None = None
    attention: Stages = ATTENTION_STAGES
    mlp: Stages = MLP_STAGES


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(architecture="MistralForCausalLM"),
    "qwen2": Family(architecture="Qwen2ForCausalLM"),
    "qwen3": Family(architecture="Qwen3ForCausalLM"),
    "gemma3_text": Family(architecture="Gemma3ForCausalLM"),
    "smollm3": Family(architecture="SmolLM3ForCausalLM"),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        attention=(("self_attn.qkv_proj",), ("self_attn.o_proj",)),
        mlp=(("mlp.gate_up_proj",), ("mlp.down_proj",)),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        mixture=MixtureNames(block="mlp", leaves=("gate_proj", "up_proj", "down_proj")),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        mixture=MixtureNames(block="block_sparse_moe", leaves=("w1", "w3", "w2")),
    ),
}

# Models at least this wide compute in bfloat16 on a GPU while they are calibrated: float32 has no
# tensor cores, and twice the memory. Smaller ones take seconds anyway.
BFLOAT16_FROM = 2048


def compute_dtype(config: Mapping[str, Any], device: str) -> torch.dtype:
    """What layers compute in on that device, and what hidden states between them are kept in."""
    is_wide = int(config.get("hidden_size", 0)) >= BFLOAT16_FROM
    is_gpu = torch.device(device).type == "cuda"
    return torch.bfloat16 if is_wide and is_gpu else torch.float32


KVTap = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def check_family(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json; UnsupportedModelError names the supported ones."""
    family = FAMILIES.get(str(config.get("model_type")))
    architectures = config.get("architectures") or ([family.architecture] if family else [None])
    if family is None or architectures != [family.architecture]:
        known = ", ".join(f"{f.architecture} ({name})" for name, f in FAMILIES.items())
        raise UnsupportedModelError(
            f"{where}: architecture {architectures[0]} (model_type "
            f"{config.get('model_type')!r}) is not supported; supported are {known}"
        )
    return family


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a layer's attention was called with, so that some of its queries can be answered again.

    query [B, heads, T, D], key and value [B, kv heads, T, D] after rope; mask [B or 1, 1, T, T],
    True where a query sees a key; options: whatever else the family's attention is told.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    options: Mapping[str, Any]

    def answer(self, rows: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Output [B, R, heads, D] float32 of the queries at `rows` [R] with these keys and values,
        shaped as the call's own."""
        output, _ = sdpa_attention_forward(
            self.module, self.query[:, :, rows].float(), key.float(), value.float(),
            self.mask[:, :, rows], **self.options, is_causal=False,
        )  # fmt: skip
        answer: Tensor = output
        return answer


def tapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA attention with two holes in it, attributes of the module where there are any.

    `kv_tap` is shown post-rope keys and values [B, kv heads, T, head dim] and returns what
    attention shall use. `attention_watch` is told the whole call before.
    """
    watch: Callable[[AttentionCall], None] | None = getattr(module, "attention_watch", None)
    if watch is not None:
        watch(_call(module, query, key, value, attention_mask, kwargs))
    tap: KVTap | None = getattr(module, "kv_tap", None)
    if tap is not None:
        key, value = tap(key, value)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output, None


def _call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: Mapping[str, Any],
) -> AttentionCall:
    if mask is None:  # every token sees itself and all before it
        size = query.shape[2]
        mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()[None, None]
    others = {name: value for name, value in options.items() if name != "is_causal"}
    return AttentionCall(
        module=module, query=query, key=key, value=value, mask=mask, options=others
    )


AttentionInterface.register(ATTENTION, tapped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class PassThrough(nn.Module):
    """Stands where a decoder layer is not loaded: hands its input on."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class Skeleton:
    """The model without its layers. Embedding and head are loaded when asked for, then dropped."""

    def __init__(
        self, config: Mapping[str, Any], device: str = "cpu", *, where: str = "the model"
    ) -> None:
        self._model = _empty_model(config, where)
        hf_config = self._model.config
        self._family = FAMILIES[str(config["model_type"])]
        self.architecture = self._family.architecture
        self.mixture = self._family.mixture
        routers: dict[str, tuple[int, int]] = {}
        for index, decoder in enumerate(self._model.model.layers):
            if self.mixture is not None and _is_mixture(decoder):
                _unfuse(decoder, self.mixture)
                router = f"{self.layer_prefix(index)}{self.mixture.block}.gate"
                routers[router] = tuple(decoder.mlp.gate.weight.shape)
        self.routers = frozenset(routers)
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype(config, device)
        self.is_tied = bool(hf_config.tie_word_embeddings)
        self.num_layers: int = hf_config.num_hidden_layers
        heads: int = hf_config.num_attention_heads
        self.head_dim: int = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
        self.num_kv_heads: int = getattr(hf_config, "num_key_value_heads", None) or heads
        self.parameter_shapes = {
            name: tuple(p.shape) for name, p in self._model.named_parameters(remove_duplicate=False)
        }
        self.linear_shapes: dict[str, tuple[int, int]] = {
            name: (module.out_features, module.in_features)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear)
        } | routers
        self._blueprints = list(self._model.model.layers)
        self._norm = self._model.model.norm
        self._model.model.layers = nn.ModuleList(PassThrough() for _ in self._blueprints)
        self._model.model.norm = nn.Identity()
        self._restore_buffers()

    def _restore_buffers(self) -> None:
        """Give the modules outside the layers their computed buffers (rope frequencies, ...)."""
        for module in self._model.modules():
            if any(True for _ in module.buffers(recurse=False)):
                weights = dict(module.named_parameters(recurse=False))
                for name in weights:
                    delattr(module, name)
                module.to_empty(device=self.device, recurse=False)
                for name, weight in weights.items():
                    weight._is_hf_initialized = True
                    module.register_parameter(name, weight)
                with torch.no_grad():
                    self._model._init_weights(module)

    def layer_prefix(self, index: int) -> str:
        """What the names of a layer's tensors start with."""
        return f"model.layers.{index}."

    def stages(self, index: int) -> Stages:
        """Linears of a layer (names after its prefix), in the order in which it computes them.

        All of a stage are quantized before the next one's inputs are looked at. They share their
        input, but for experts: there gate and up of one expert do.
        """
        blueprint = self._blueprints[index]
        if self.mixture is None or not _is_mixture(blueprint):
            return (*self._family.attention, *self._family.mlp)
        names = [f"{self.mixture.block}.experts.{e}" for e in range(len(blueprint.mlp.experts))]
        gate, up, down = self.mixture.leaves
        read_hidden = tuple(f"{name}.{leaf}" for name in names for leaf in (gate, up))
        return (*self._family.attention, read_hidden, tuple(f"{name}.{down}" for name in names))

    def experts_of(self, layer: nn.Module) -> Experts | None:
        """The experts of a built layer, None where its MLP is dense."""
        if self.mixture is None or not _is_mixture(layer):
            return None
        experts = layer.get_submodule(f"{self.mixture.block}.experts")
        assert isinstance(experts, Experts)
        return experts

    def layer_names(self, index: int) -> tuple[str, ...]:
        """Checkpoint names of every tensor of a layer."""
        prefix = self.layer_prefix(index)
        return tuple(name for name in self.parameter_shapes if name.startswith(prefix))

    def outer_names(self) -> tuple[str, ...]:
        """Checkpoint names of every tensor outside the layers (without a tied head)."""
        return tuple(
            name
            for name in self.parameter_shapes
            if not name.startswith("model.layers.") and not (self.is_tied and name == HEAD_WEIGHT)
        )

    def build_layer(self, index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Decoder layer `index` with `tensors` (checkpoint names) in `compute_dtype`."""
        prefix = self.layer_prefix(index)
        layer: nn.Module = copy.deepcopy(self._blueprints[index])
        state = {
            name.removeprefix(prefix): tensor.to(self.device, self.compute_dtype)
            for name, tensor in tensors.items()
        }
        layer.load_state_dict(state, assign=True, strict=True)
        layer.requires_grad_(False)
        return layer

    def embed(self, weights: Mapping[str, Tensor], token_ids: Sequence[Tensor]) -> Iterator[Tensor]:
        """Hidden states [B, T, H] that enter layer 0, in `compute_dtype`, of each [B, T] ids."""
        table = self._model.model.embed_tokens
        placeholder = table.weight
        table.weight = _parameter(weights[EMBEDDING_WEIGHT], self.device)
        try:
            for ids in token_ids:
                yield table(ids.to(self.device)).to(self.compute_dtype)
        finally:
            table.weight = placeholder

    def run_layer(
        self,
        index: int,
        layer: nn.Module,
        hidden: Tensor,
        mask: Tensor,
        *,
        needs_grad: bool = False,
    ) -> Tensor:
        """Output [B, T, H] of decoder layer `index`; mask [B, T] is True on real tokens.

        With `needs_grad` the output can be differentiated by `hidden`.
        """
        inner = self._model.model
        inner.layers[index] = layer
        try:
            with torch.set_grad_enabled(needs_grad):
                output = inner(
                    inputs_embeds=hidden.to(self.device),
                    attention_mask=mask.to(self.device),
                    use_cache=False,
                )
        finally:
            inner.layers[index] = PassThrough()
        result: Tensor = output.last_hidden_state
        return result

    @contextmanager
    def head(self, weights: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """Final norm and lm_head loaded: a module to call as `head(inputs_embeds=[B, T, H])`.

        Its `lm_head` may be hooked; logits [B, T, V] (soft-capped where the family does) come out.
        """
        model = self._model
        identity, placeholder = model.model.norm, model.lm_head.weight
        norm = copy.deepcopy(self._norm)
        norm.weight = _parameter(weights["model.norm.weight"], self.device)
        name = EMBEDDING_WEIGHT if self.is_tied else HEAD_WEIGHT
        model.model.norm = norm
        model.lm_head.weight = _parameter(weights[name], self.device)
        try:
            yield model
        finally:
            model.model.norm, model.lm_head.weight = identity, placeholder


HEAD_WEIGHT = f"{HEAD}.weight"
EMBEDDING_WEIGHT = "model.embed_tokens.weight"


def _is_mixture(layer: Any) -> bool:
    """Whether the layer's MLP has experts (Qwen3-MoE may have dense layers among the others)."""
    return hasattr(layer.mlp, "experts")


def _unfuse(layer: Any, names: MixtureNames) -> None:
    """Give the layer's mixture a linear per expert and projection, and its checkpoint name.

    Router and block stay transformers' own. Where the checkpoint calls the block otherwise than the
    layer's forward does, the layer keeps a plain reference under `mlp`: no module has two names.
    """
    block = layer.mlp
    stacked = block.experts
    count, hidden, inner = stacked.down_proj.shape
    with torch.device("meta"):
        block.experts = Experts(
            Expert(hidden, inner, names.leaves, stacked.act_fn) for _ in range(count)
        )
    if names.block != "mlp":
        del layer.mlp
        layer.add_module(names.block, block)
        layer.__dict__["mlp"] = block


def _empty_model(config: Mapping[str, Any], where: str) -> Any:
    """The transformers model of a config.json on the meta device; SourceError if it makes none."""
    try:
        hf_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        hf_config._attn_implementation = ATTENTION
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    except Exception as error:  # transformers checks a config in as many ways as it has fields
        raise SourceError(
            f"{where}: config.json describes no model that can be built "
            f"({type(error).__name__}: {first_line(error)}); fetch it again"
        ) from error
    if hf_config.num_hidden_layers < 1:
        raise SourceError(
            f"{where}: config.json has num_hidden_layers {hf_config.num_hidden_layers}, expected "
            "at least 1"
        )
    return model


def _parameter(tensor: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(tensor.to(device).float(), requires_grad=False)


def load_tokenizer(path: Path, **options: Any) -> Any:
    """The tokenizer of a directory (by `gguf_file`: of a file in it); SourceError if unusable."""
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except Exception as error:  # each tokenizer class raises what its file format raises
        raise SourceError(
            f"{path}: the tokenizer cannot be loaded ({type(error).__name__}: "
            f"{first_line(error)}); fetch the tokenizer files again"
        ) from error


def linear_of(layer: nn.Module, leaf: str) -> nn.Linear:
    """The linear at `leaf` of a decoder layer."""
    module = layer.get_submodule(leaf)
    assert isinstance(module, nn.Linear)
    return module


def layer_of(name: str) -> int:
    """The decoder layer a tensor belongs to, -1 for those outside the layers."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def check_tensors(skeleton: Skeleton, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """SourceError unless the checkpoint has every tensor that the config promises, in its shape."""
    wanted = [*skeleton.outer_names()]
    for index in range(skeleton.num_layers):
        wanted.extend(skeleton.layer_names(index))
    missing = [name for name in wanted if name not in shapes]
    if missing:
        unknown = [name for name in shapes if name not in skeleton.parameter_shapes]
        instead = f" (found instead: {', '.join(unknown[:4])})" if unknown else ""
        raise SourceError(
            f"{where}: {len(missing)} tensors that config.json promises ({skeleton.architecture}) "
            f"are missing, the first is {missing[0]}{instead}; is this the whole checkpoint of "
            "that model?"
        )
    beyond = [name for name in shapes if layer_of(name) >= skeleton.num_layers]
    if beyond:
        raise SourceError(
            f"{where}: {len(beyond)} tensors lie beyond the {skeleton.num_layers} layers that "
            f"config.json promises, the first is {beyond[0]}; config.json is of another model"
        )
    for name in wanted:
        if tuple(shapes[name]) != skeleton.parameter_shapes[name]:
            raise SourceError(
                f"{where}: {name} has shape {list(shapes[name])}, config.json promises "
                f"{list(skeleton.parameter_shapes[name])}"
            )
