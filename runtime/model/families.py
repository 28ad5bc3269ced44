"""The families the decoder knows, as one table: what is special about each is a value here.

A row mirrors what transformers' modelling code of that family does and the defaults of its
configuration class (older checkpoints leave fields out). Adding a family is adding a row, if the
decoder already computes all it needs; a parity test against transformers belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WindowRule = Literal["none", "every_layer", "last_layers", "pattern", "rope_free_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row.

    Attributes:
        defaults: the configuration class's values for fields that config.json may leave out.
        biases: "qkv" on these three only; "config" where `attention_bias` (then the output
            projection has one too) and `mlp_bias` say so.
        ropes: rope kinds this family's modelling code accepts; empty means all of them.
        window: which layers have a sliding window.
        sandwich_norms: a norm after attention and after the MLP too.
        norm_offset: added to every norm weight (Gemma stores w for 1 + w).
        scaled_embeddings: embeddings are multiplied by sqrt(hidden), rounded to the compute type.
        scaled_scores: `query_pre_attn_scalar` and `final_logit_softcapping` count; transformers
            ignores them in the other families.
        qkv, gate_up: checkpoint modules that make up the fused projections, in row order.
        prefixes: where the decoder's tensors may lie in the checkpoint.
        ignored_prefixes: tensors of towers that text does not pass through.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    biases: Literal["none", "qkv", "config"] = "none"
    window: WindowRule = "none"
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    scaled_embeddings: bool = False
    scaled_scores: bool = False
    partial_rotary: bool = False
    ropes: tuple[str, ...] = ()
    activation_key: str = "hidden_act"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    prefixes: tuple[str, ...] = ("model.",)
    ignored_prefixes: tuple[str, ...] = ()


_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA3 = Family(
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    window="pattern",
    qk_norm=True,
    sandwich_norms=True,
    norm_offset=1.0,
    scaled_embeddings=True,
    scaled_scores=True,
    activation_key="hidden_activation",
    prefixes=("model.", "language_model.model.", "model.language_model."),
    ignored_prefixes=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(defaults={"max_position_embeddings": 2048, "eos_token_id": 2}, biases="config"),
    "mistral": Family(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        window="every_layer",
    ),
    "qwen2": Family(defaults=_QWEN_DEFAULTS, biases="qkv", window="last_layers"),
    "qwen3": Family(
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        biases="config",
        window="last_layers",
        qk_norm=True,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "smollm3": Family(
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
        },
        biases="config",
        window="rope_free_layers",
    ),
    "phi3": Family(
        defaults={
            "max_position_embeddings": 4096,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
        window="every_layer",
        partial_rotary=True,
        ropes=("default",),
        qkv=("self_attn.qkv_proj",),
        gate_up=("mlp.gate_up_proj",),
    ),
}
