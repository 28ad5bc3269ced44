"""Scales of an FP8 KV cache: for keys (after rope) and for values, of a layer or of each KV head.

A power of two leaves the mantissa as it is: a scale below 1 rounds no value of the range it covers
worse than a scale of 1 does, one above 1 only values next to zero. So the first guess (`scale_for`)
only decides where e4m3's 17 octaves lie. A scale of 1 serves while the largest calibrated value
keeps a factor of two (448 / 2); above, the scale restores that factor, since what saturates is
lost. It serves down to 1 / 8 as well: the coarse numbers next to zero are then off by 2^-10 at
most, less than values of usual size are. Below, the scale falls with the values and keeps a factor
of 16 for what longer texts may bring.

Where the grid's lines fall between two powers of two matters too, since keys have channels that
hardly vary: `quant.kv_search` tries scales around the guess and keeps the one whose attention
output is off the least. A scale of 1 is among them wherever it covers the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quant.artifact.errors import SchemeError
from quant.artifact.layout import FP8_MAX
from quant.capture import Stream, collect_kv
from quant.kv_search import KEY, VALUE, Trial, round_to_fp8
from quant.modelling import KVTap
from quant.straight_through import straight_through

HEADROOM = 2.0
SMALL = 0.125
HEADROOM_OF_SMALL = 16.0
# Octaves tried, the guess's own included, and scales tried in the best of them.
OCTAVES = 5
STEPS = 16
INT8_MAX = 127.0


def scale_names(layer_prefix: str) -> tuple[str, str]:
    """Checkpoint names of a layer's key and value scale."""
    return f"{layer_prefix}self_attn.k_scale", f"{layer_prefix}self_attn.v_scale"


def scale_for(absmax: float) -> float:
    """The scale for values up to `absmax`."""
    limit = FP8_MAX / (HEADROOM if absmax >= SMALL else HEADROOM_OF_SMALL)
    if absmax == 0 or SMALL <= absmax <= limit:
        return 1.0
    return 2.0 ** math.ceil(math.log2(absmax / limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScales:
    """Scales of one layer as they are stored, [1] each or [kv heads, 1, 1], and what they cost:
    rms error of the attention output over its rms, with these scales and with scales of 1, on
    texts of up to `longest_text` tokens."""

    key: Tensor
    value: Tensor
    error: float
    error_of_one: float
    longest_text: int


def choose_scales(
    layer: nn.Module,
    streams: Sequence[Stream],
    run: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype,
    *,
    by_head: bool = False,
) -> LayerScales:
    """The scales in `dtype`, from the valid tokens of all `streams`; the last one has the longest
    texts, on which scales are tried."""
    attention = layer.get_submodule("self_attn")
    reader = attention.get_submodule("o_proj")
    found = [collect_kv(attention, reader, stream, run) for stream in streams]
    trial = Trial.of(attention, reader, streams[-1], run)
    sides = []
    for side in (KEY, VALUE):
        absmax_K = torch.stack([largest[side] for largest in found]).amax(0)
        sides.append(_choose_side(trial, side, absmax_K, dtype, by_head))
    return LayerScales(
        key=sides[0].scales, value=sides[1].scales,
        error=trial.relative(sum(s.error for s in sides)),
        error_of_one=trial.relative(sum(s.error_of_one for s in sides)),
        longest_text=trial.longest_text,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Keys or values of a layer: stored scales, and summed square errors of the output."""

    scales: Tensor
    error: float
    error_of_one: float


def _choose_side(
    trial: Trial, side: int, absmax_K: Tensor, dtype: torch.dtype, by_head: bool
) -> _Side:
    """Try octaves, then the scales between two of them; the least error wins, the first of equals.

    Heads that share a scale are tried together: one column, whose error is their sum.
    """
    tops = (absmax_K if by_head else absmax_K.max()[None]).tolist()

    def tried(columns: list[list[float]]) -> tuple[Tensor, Tensor]:
        scales = torch.tensor(columns).T.to(dtype)
        errors_CK = trial.errors(side, scales.float().expand(-1, len(absmax_K)))
        return scales, errors_CK if by_head else errors_CK.sum(1, keepdim=True)

    octaves, coarse = tried([_octaves(_guess(top, dtype), top) for top in tops])
    best = octaves.gather(0, coarse.argmin(0, keepdim=True))[0]
    between, fine = tried([_between(scale) for scale in best.tolist()])
    errors = torch.cat((coarse, fine))
    at = errors.argmin(0, keepdim=True)
    scales = torch.cat((octaves, between)).gather(0, at)[0]
    return _Side(
        scales=scales[:, None, None] if by_head else scales,
        error=float(errors.gather(0, at).sum()),
        error_of_one=float(trial.errors(side, torch.ones(1, len(absmax_K))).sum()),
    )


def _octaves(guess: float, absmax: float) -> list[float]:
    """A scale of 1 where it covers the values, the guess, and the powers of two below that leave
    the values the room that small ones are given. (What a scale does not cover may be in other
    texts than the ones it is tried on, so it is not left to the trial.)"""
    lowest = absmax * HEADROOM_OF_SMALL / FP8_MAX
    below = [guess / 2**i for i in range(1, OCTAVES)]
    return [
        1.0 if absmax <= FP8_MAX else guess,
        guess,
        *(scale if scale >= lowest else guess for scale in below),
    ]


def _between(scale: float) -> list[float]:
    """Scales from `scale` up to its double: none takes room from the values."""
    return [scale * 2 ** (i / STEPS) for i in range(1, STEPS)]


def _guess(absmax: float, dtype: torch.dtype) -> float:
    """`scale_for`; SchemeError when the dtype it is kept in cannot hold it."""
    scale = scale_for(absmax)
    stored = torch.tensor(scale, dtype=dtype)
    if not bool(torch.isfinite(stored) and stored > 0):
        raise SchemeError(
            f"keys or values reach {absmax:.4g}, whose fp8 scale {scale:.4g} does not fit {dtype}; "
            "set `dtype: bfloat16`, or `kv_cache: none`"
        )
    return float(stored)


def fake_quantize_kv(key_scale: Tensor, value_scale: Tensor) -> KVTap:
    """A tap that rounds keys and values [B, kv heads, T, head dim] to what the cache will hold;
    scales are [1] or [kv heads, 1, 1]. Gradients pass as if nothing were rounded."""

    return lambda key, value: (
        straight_through(key, lambda states: round_to_fp8(states, key_scale)),
        straight_through(value, lambda states: round_to_fp8(states, value_scale)),
    )


def round_kv_to_int8(states: Tensor) -> Tensor:
    """`states` [B, kv heads, T, D] as an int8 cache holds them: a scale of largest / 127 for each
    token and head."""
    values = states.float()
    scale = values.abs().amax(-1, keepdim=True) / INT8_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    return ((values / scale).round() * scale).to(states.dtype)


def fake_quantize_kv_to_int8() -> KVTap:
    """A tap that rounds keys and values as an int8 cache will."""
    return lambda key, value: (
        straight_through(key, round_kv_to_int8),
        straight_through(value, round_kv_to_int8),
    )
