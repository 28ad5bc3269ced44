"""Scales of an FP8 KV cache: for keys (after rope) and for values, of a layer or of each KV head.

Every scale is a power of two, which leaves the mantissa as it is: a scale below 1 rounds no value
of the range it covers worse than a scale of 1 does, one above 1 only values next to zero. What
remains to choose is where e4m3's 17 octaves lie. A scale of 1 serves while the largest calibrated
value keeps a factor of two (448 / 2); above, the scale restores that factor, since what saturates
is lost. It serves down to 1 / 8 as well: the coarse numbers next to zero are then off by 2^-10 at
most, less than values of usual size are. Below, the scale falls with the values and keeps a factor
of 16 for what longer texts may bring.
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
SMALL = 0.125
HEADROOM_OF_SMALL = 16.0


def scale_names(layer_prefix: str) -> tuple[str, str]:
    """Checkpoint names of a layer's key and value scale."""
    return f"{layer_prefix}self_attn.k_scale", f"{layer_prefix}self_attn.v_scale"


def scale_for(absmax: float) -> float:
    """The scale for values up to `absmax`."""
    limit = FP8_MAX / (HEADROOM if absmax >= SMALL else HEADROOM_OF_SMALL)
    if absmax == 0 or SMALL <= absmax <= limit:
        return 1.0
    return 2.0 ** math.ceil(math.log2(absmax / limit))


def choose_scales(
    layer: nn.Module,
    stream: Stream,
    run: Callable[[Tensor, Tensor], object],
    dtype: torch.dtype,
    *,
    by_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Key and value scale in `dtype`, [1] each or [kv heads, 1, 1], from valid tokens."""
    attention = layer.get_submodule("self_attn")
    largest = collect_kv(attention, attention.get_submodule("o_proj"), stream, run)
    key, value = (_scales(absmax, dtype, by_head) for absmax in largest)
    return key, value


def _scales(absmax_H: Tensor, dtype: torch.dtype, by_head: bool) -> Tensor:
    wanted = absmax_H if by_head else absmax_H.max()[None]
    scales = torch.cat([_stored(scale_for(x), x, dtype) for x in wanted.tolist()])
    return scales[:, None, None] if by_head else scales


def _stored(scale: float, absmax: float, dtype: torch.dtype) -> Tensor:
    """The scale, [1], in the dtype it is kept in; SchemeError when that cannot hold it."""
    stored = torch.tensor([scale], dtype=dtype)
    if not bool(torch.isfinite(stored).all() and (stored > 0).all()):
        raise SchemeError(
            f"keys or values reach {absmax:.4g}, whose fp8 scale {scale:.4g} does not fit {dtype}; "
            "set `dtype: bfloat16`, or `kv_cache: none`"
        )
    return stored


def fake_quantize_kv(key_scale: Tensor, value_scale: Tensor) -> KVTap:
    """A tap that rounds keys and values [B, kv heads, T, head dim] to what the cache will hold;
    scales are [1] or [kv heads, 1, 1]."""

    def rounded(states: Tensor, scale: Tensor) -> Tensor:
        factor = scale.to(states.device, torch.float32)
        codes = (states.float() / factor).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return (codes.float() * factor).to(states.dtype)

    return lambda key, value: (rounded(key, key_scale), rounded(value, value_scale))
