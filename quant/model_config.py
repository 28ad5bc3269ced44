"""What a model's config.json says of it, before anything is planned: architecture, tied head,
experts, and whether it is quantized already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quant.errors import AlreadyQuantizedError, UnsupportedModelError

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def architecture_of(config: Mapping[str, Any]) -> str:
    """The model class, or what comes nearest to it."""
    names = config.get("architectures") or [config.get("model_type", "unknown architecture")]
    return str(names[0])


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that describes other parts too."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def ties_by_default(text: Mapping[str, Any]) -> bool:
    """Gemma's config.json leaves the key out and means true; elsewhere absent means false."""
    return bool(text.get("tie_word_embeddings", str(text.get("model_type")).startswith("gemma")))


def check_not_quantized(config: Mapping[str, Any]) -> None:
    """Raise AlreadyQuantizedError if `config` has a quantization section, naming its scheme."""
    section = config.get("quantization_config") or text_config(config).get("quantization_config")
    if section:
        raise AlreadyQuantizedError(
            f"the model is already quantized ({describe_quantization(section)}); its codes "
            "cannot be quantized again: give the original checkpoint"
        )


def describe_quantization(section: Any) -> str:
    """What a quantization section of config.json says, in a few words."""
    if not isinstance(section, Mapping):
        return str(section)
    keys = ("quant_method", "format", "bits", "num_bits", "group_size")
    said = [f"{key} {section[key]}" for key in keys if section.get(key) is not None]
    return ", ".join(said) or "by what, its quantization section does not say"


def check_experts(config: Mapping[str, Any], modules: Mapping[str, Any]) -> None:
    """UnsupportedModelError for a mixture whose experts are not linears of their own here."""
    text = text_config(config)
    key = next((key for key in _EXPERT_KEYS if text.get(key)), None)
    if key and not any(".experts." in name for name in modules):
        raise UnsupportedModelError(
            f"{architecture_of(config)} is a mixture of experts ({key} = {text[key]}), but no "
            "module is named `experts.N`; supported are Qwen3MoeForCausalLM and MixtralForCausalLM"
        )
