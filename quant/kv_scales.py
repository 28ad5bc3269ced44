"""Scales of an FP8 KV cache: one for keys (after rope) and one for values per layer.

e4m3 reaches 448 and keeps its relative precision far below that, so a scale of 1 loses nothing
unless values come near the end of the range. The scale is 1 while the largest calibrated value
leaves a factor of two (448 / 2), and otherwise the power of two that restores it: powers of two
leave the mantissa, and so the error of all other values, as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quant.artifact.errors import SchemeError
from quant.artifact.layout import FP8, FP8_MAX
from quant.capture import Stream, collect_kv
from quant.modelling import KVTap

HEADROOM = 2.0


def scale_names(layer_prefix: str) -> tuple[str, str]:
    """Checkpoint names of a layer's key and value scale."""
    return f"{layer_prefix}self_attn.k_scale", f"{layer_prefix}self_attn.v_scale"


def scale_for(absmax: float) -> float:
    """The scale for values up to `absmax`."""
    limit = FP8_MAX / HEADROOM
    return 1.0 if absmax <= limit else 2.0 ** math.ceil(math.log2(absmax / limit))


def choose_scales(
    layer: nn.Module,
    stream: Stream,
    run: Callable[[Tensor, Tensor], object],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Key and value scale, [1] each in `dtype`, from the valid tokens of `stream`."""
    attention = layer.get_submodule("self_attn")
    largest = collect_kv(attention, attention.get_submodule("o_proj"), stream, run)
    key, value = (_stored(scale_for(absmax), absmax, dtype) for absmax in largest)
    return key, value


def _stored(scale: float, absmax: float, dtype: torch.dtype) -> Tensor:
    """The scale, [1], in the dtype it is kept in; SchemeError when that cannot hold it."""
    stored = torch.tensor([scale], dtype=dtype)
    if not bool(torch.isfinite(stored).all()):
        raise SchemeError(
            f"keys or values reach {absmax:.4g}, whose fp8 scale {scale:.4g} does not fit {dtype}; "
            "set `dtype: bfloat16`, or `kv_cache: none`"
        )
    return stored


def fake_quantize_kv(key_scale: Tensor, value_scale: Tensor) -> KVTap:
    """A tap that rounds keys and values to what the cache will hold."""

    def rounded(states: Tensor, scale: Tensor) -> Tensor:
        factor = scale.to(states.device, torch.float32)
        codes = (states.float() / factor).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return (codes.float() * factor).to(states.dtype)

    return lambda key, value: (rounded(key, key_scale), rounded(value, value_scale))
