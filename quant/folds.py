"""Where a scale per channel can move between two tensors of a decoder layer without changing what
the layer computes.

A producer's output channel is divided by s_j and the columns of its readers multiplied by s_j. The
mappings are data: the readers share one input, and the producer is a norm (whose weight the scale
goes into) or a linear (its rows). v_proj -> o_proj holds under grouped-query attention when the
heads of a group share the scales of their v head; up_proj -> down_proj because up is a factor of
act(gate) * up. Fused checkpoints keep q|k|v and gate|up in one linear: its last rows are then the
producer. The experts of a mixture share the norm before them with their router, which is not
quantized and takes the scale too.

Knows the names and the arithmetic, not why anyone would want the scales.

Shape legend: C channels of the producer, I input columns of the readers (C, or heads times as many
behind v_proj).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldMapping:
    """One place to fold: the producer (a norm or a linear) and the linears that read it.

    offset: what the norm adds to its weight (Gemma computes x * (1 + w)); heads: whether the
    readers' columns are attention heads that share the producer's channels group by group;
    is_tail: whether the channels are the last rows of a fused producer; followers: linears that
    read the same input, are never quantized and must be told of the scale. A `*` in a name stands
    for every expert's number.
    """

    producer: str
    readers: tuple[str, ...]
    is_norm: bool
    offset: float = 0.0
    heads: bool = False
    is_tail: bool = False
    followers: tuple[str, ...] = ()


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


def _fused_layer() -> tuple[FoldMapping, ...]:
    qkv, gate_up = "self_attn.qkv_proj", "mlp.gate_up_proj"
    norm = "post_attention_layernorm"
    return (
        FoldMapping(producer="input_layernorm", readers=(qkv,), is_norm=True),
        FoldMapping(
            producer=qkv, readers=("self_attn.o_proj",), is_norm=False, heads=True, is_tail=True
        ),
        FoldMapping(producer=norm, readers=(gate_up,), is_norm=True),
        FoldMapping(producer=gate_up, readers=("mlp.down_proj",), is_norm=False, is_tail=True),
    )


def _mixture(block: str, gate: str, up: str, down: str) -> tuple[FoldMapping, ...]:
    """Beside the mappings of a dense layer, which hold where a layer has no experts."""
    expert, norm = f"{block}.experts.*", "post_attention_layernorm"
    readers = (f"{expert}.{gate}", f"{expert}.{up}")
    return (
        *_layer(),
        FoldMapping(producer=norm, readers=readers, is_norm=True, followers=(f"{block}.gate",)),
        FoldMapping(producer=f"{expert}.{up}", readers=(f"{expert}.{down}",), is_norm=False),
    )


# By the architecture that config.json names. A family that is not here is not smoothed.
MAPPINGS: dict[str, tuple[FoldMapping, ...]] = {
    "LlamaForCausalLM": _layer(),
    "MistralForCausalLM": _layer(),
    "Qwen2ForCausalLM": _layer(),
    "Qwen3ForCausalLM": _layer(),
    "SmolLM3ForCausalLM": _layer(),
    "Gemma3ForCausalLM": _layer("pre_feedforward_layernorm", offset=1.0),
    "Phi3ForCausalLM": _fused_layer(),
    "Qwen3MoeForCausalLM": _mixture("mlp", "gate_proj", "up_proj", "down_proj"),
    "MixtralForCausalLM": _mixture("block_sparse_moe", "w1", "w3", "w2"),
}


def mappings_in(mappings: Sequence[FoldMapping], tensors: Collection[str]) -> list[FoldMapping]:
    """Those of `mappings` whose linears a layer with these tensors has, every expert named."""
    found: list[FoldMapping] = []
    for mapping in mappings:
        found += _expanded(mapping, tensors)
    return [m for m in found if {f"{n}.weight" for n in (m.producer, *m.readers)} <= set(tensors)]


def _expanded(mapping: FoldMapping, tensors: Collection[str]) -> list[FoldMapping]:
    head, star, _ = mapping.readers[0].partition("*")
    if not star:
        return [mapping]
    numbers = {name.removeprefix(head).split(".")[0] for name in tensors if name.startswith(head)}
    experts = sorted(numbers, key=int)
    if "*" not in mapping.producer:
        every = tuple(name.replace("*", e) for e in experts for name in mapping.readers)
        return [replace(mapping, readers=every)] if experts else []
    return [
        replace(
            mapping,
            producer=mapping.producer.replace("*", e),
            readers=tuple(name.replace("*", e) for name in mapping.readers),
        )
        for e in experts
    ]


def num_channels(mapping: FoldMapping, rows: int, columns: int) -> int:
    """C, of a producer with `rows` outputs and readers with `columns` inputs."""
    if not mapping.is_tail:
        return rows
    return (rows - columns) // 2 if mapping.heads else rows // 2  # q|k|v, gate|up


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
    with a bias, or where a follower takes the scale, it is a power of two. Readers come out as
    float32.
    """
    changed: dict[str, Tensor] = {}
    weight, bias = f"{mapping.producer}.weight", f"{mapping.producer}.bias"
    if needs_powers_of_two(mapping, tensors):
        scale = torch.exp2(scale.log2().round())
    if mapping.is_norm:
        changed[weight], scale = _fold_norm(tensors[weight], scale, mapping.offset, dtype)
    else:
        changed[weight] = _divided(tensors[weight].float(), scale)
        if bias in tensors:
            changed[bias] = _divided(tensors[bias].float(), scale).to(tensors[bias].dtype)
    spread = scale[channels.to(scale.device)]
    for name in (*mapping.readers, *mapping.followers):
        changed[f"{name}.weight"] = tensors[f"{name}.weight"].float() * spread
    for name in mapping.followers:
        changed[f"{name}.weight"] = changed[f"{name}.weight"].to(tensors[f"{name}.weight"].dtype)
    return Fold(tensors=changed, scale=scale)


def needs_powers_of_two(mapping: FoldMapping, tensors: Collection[str]) -> bool:
    """Whether something beside the norms that stays dense must take the scale exactly."""
    return bool(mapping.followers) or f"{mapping.producer}.bias" in tensors


def _divided(outputs: Tensor, scale: Tensor) -> Tensor:
    """A producer's rows [R, ...] (its last C, of a fused one) over `scale` [C]."""
    divided = outputs.clone()
    divided[len(outputs) - len(scale) :] /= scale.reshape(-1, *[1] * (outputs.dim() - 1))
    return divided


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
