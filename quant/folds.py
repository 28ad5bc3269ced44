"""Where a scale per channel can move between two tensors of a decoder layer without changing what
the layer computes.

A producer's output channel is divided by s_j and the columns of its readers multiplied by s_j. The
mappings are data: the readers share one input, and the producer is a norm (whose weight the scale
goes into) or a linear (its rows). v_proj -> o_proj holds under grouped-query attention when the
heads of a group share the scales of their v head; up_proj -> down_proj because up is a factor of
act(gate) * up.

Knows the names and the arithmetic, not why anyone would want the scales.

Shape legend: C channels of the producer, I input columns of the readers (C, or heads times as many
behind v_proj).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldMapping:
    """One place to fold: the producer (a norm or a linear) and the linears that read it.

    offset: what the norm adds to its weight (Gemma computes x * (1 + w)); heads: whether the
    readers' columns are attention heads that share the producer's channels group by group.
    """

    producer: str
    readers: tuple[str, ...]
    is_norm: bool
    offset: float = 0.0
    heads: bool = False


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def _layer(
    mlp_norm: str = "post_attention_layernorm", offset: float = 0.0
) -> tuple[FoldMapping, ...]:
    return (
        FoldMapping(producer="input_layernorm", readers=_QKV, is_norm=True, offset=offset),
        FoldMapping(
            producer="self_attn.v_proj", readers=("self_attn.o_proj",), is_norm=False, heads=True
        ),
        FoldMapping(producer=mlp_norm, readers=_GATE_UP, is_norm=True, offset=offset),
        FoldMapping(producer="mlp.up_proj", readers=("mlp.down_proj",), is_norm=False),
    )


# By the architecture that config.json names. A family that is not here is not smoothed.
MAPPINGS: dict[str, tuple[FoldMapping, ...]] = {
    "LlamaForCausalLM": _layer(),
    "MistralForCausalLM": _layer(),
    "Qwen2ForCausalLM": _layer(),
    "Qwen3ForCausalLM": _layer(),
    "SmolLM3ForCausalLM": _layer(),
    "Gemma3ForCausalLM": _layer("pre_feedforward_layernorm", offset=1.0),
}


def column_channels(mapping: FoldMapping, channels: int, columns: int, head_dim: int) -> Tensor:
    """For each input column [I] of the readers, the producer's channel that it carries."""
    if not mapping.heads:
        assert channels == columns
        return torch.arange(columns)
    repeats = columns // channels
    heads = torch.arange(columns) // head_dim
    return (heads // repeats) * head_dim + torch.arange(columns) % head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """New tensors by name (within the layer) and the scale [C] that was folded."""

    tensors: dict[str, Tensor]
    scale: Tensor


def fold(
    mapping: FoldMapping,
    tensors: Mapping[str, Tensor],
    scale: Tensor,
    channels: Tensor,
    dtype: torch.dtype,
) -> Fold:
    """`mapping` with `scale` [C] (> 0) folded in; `tensors` are the layer's, by name in it.

    What stays dense is stored in `dtype`, so the scale is moved to the nearest one that is exact
    there: for a norm the stored weight is rounded first and the scale taken from it, for a linear
    with a bias the scale is a power of two. Readers come out as float32.
    """
    producer = f"{mapping.producer}.weight"
    changed: dict[str, Tensor] = {}
    if mapping.is_norm:
        changed[producer], scale = _fold_norm(tensors[producer], scale, mapping.offset, dtype)
    else:
        bias = f"{mapping.producer}.bias"
        if bias in tensors:
            scale = torch.exp2(scale.log2().round())
            changed[bias] = (tensors[bias].float() / scale).to(tensors[bias].dtype)
        changed[producer] = tensors[producer].float() / scale[:, None]
    spread = scale[channels.to(scale.device)]
    for reader in mapping.readers:
        changed[f"{reader}.weight"] = tensors[f"{reader}.weight"].float() * spread
    return Fold(tensors=changed, scale=scale)


def _fold_norm(
    weight: Tensor, scale: Tensor, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The norm's weight as stored, and the scale that it stands for; 1 where that is no number."""
    old = weight.float() + offset
    stored = (old / scale - offset).to(dtype)
    exact = old / (stored.float() + offset)
    usable = torch.isfinite(exact) & (exact > 0) & torch.isfinite(stored.float())
    kept = torch.where(usable, stored, weight.to(dtype))
    return kept, torch.where(usable, exact, torch.ones_like(exact))
