"""Rotary position embeddings as data: a RopeSpec and the frequencies it stands for.

Reads both spellings of config.json: `rope_theta` + `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5). A kind that is not in `ROPE_KINDS` is refused: a wrong rope
gives fluent text that slowly drifts, and nobody notices.

`dynamic` is, in its source, a function of the sequence's length, which no cache of rotated keys
can follow. The rule here: position p is rotated with the base of a sequence of p + 1 tokens. That
is what `transformers.generate` computes token by token; it makes the rotation a function of the
position alone (so blocks can be shared and prompts cut), and up to the trained length it is
exactly the unscaled rope.

Shapes: T tokens, F = rotary_dim / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from runtime.model.errors import ModelConfigError, UnsupportedModelError

# Rows of a table made at once, which bounds what is held beside it.
_TABLE_ROWS = 16_384

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rope: which dimensions to rotate, and by how much per position.

    The first `rotary_dim` dimensions of each head are rotated. `trained_positions` is the length
    before scaling. `attention_factor` multiplies cos and sin (yarn, arXiv 2309.00071 section 3.4).
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    trained_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def parse_rope(
    params: Mapping[str, Any], *, theta: float, rotary_dim: int, max_positions: int
) -> RopeSpec:
    """The RopeSpec of one parameter mapping; `theta` stands in when it names none.

    Raises:
        UnsupportedModelError: unknown kind, odd number of rotated dimensions.
        ModelConfigError: a parameter that the kind needs is absent or out of range.
    """
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    if rotary_dim % 2 or rotary_dim < 2:
        raise UnsupportedModelError(f"rope rotates {rotary_dim} dimensions; it needs an even count")
    trained = max_positions
    if kind in ("llama3", "yarn"):
        trained = int(params.get("original_max_position_embeddings") or max_positions)
    spec = RopeSpec(
        kind=cast(RopeKind, kind),
        theta=float(params.get("rope_theta") or theta),
        rotary_dim=rotary_dim,
        trained_positions=trained,
    )
    if kind == "default":
        return spec
    spec = replace(spec, factor=_factor(params, kind, max_positions / trained))
    if kind == "llama3":
        return _with_llama3(spec, params)
    return _with_yarn(spec, params) if kind == "yarn" else spec


def _number(params: Mapping[str, Any], kind: str, key: str) -> float:
    value = params.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelConfigError(f"rope type {kind!r} needs a number {key!r}; found {value!r}")
    return float(value)


def _factor(params: Mapping[str, Any], kind: str, ratio: float) -> float:
    """The stretch. Only yarn may leave it out (null): then it is the ratio of the two lengths."""
    if kind == "yarn" and "factor" in params and params["factor"] is None:
        return ratio
    factor = _number(params, kind, "factor")
    if factor < 1.0:
        raise ModelConfigError(f"rope type {kind!r}: factor {factor} is below 1")
    return factor


def _with_llama3(spec: RopeSpec, params: Mapping[str, Any]) -> RopeSpec:
    low = _number(params, "llama3", "low_freq_factor")
    high = _number(params, "llama3", "high_freq_factor")
    if high <= low:
        raise ModelConfigError(
            f"rope type 'llama3': high_freq_factor {high} must exceed low_freq_factor {low}"
        )
    return replace(spec, low_freq_factor=low, high_freq_factor=high)


def _with_yarn(spec: RopeSpec, params: Mapping[str, Any]) -> RopeSpec:
    def mscale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    attention, top, bottom = (
        params.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if attention is None:
        attention = mscale(top) / mscale(bottom) if top and bottom else mscale(1.0)
    return replace(
        spec,
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=float(attention),
    )


def cos_sin(
    spec: RopeSpec, positions_T: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and *signed* sin, each [T, 1, rotary_dim]: see `runtime.kernels.rope`.

    The angles are float32 whatever `dtype` is; the first half of sin is negated, so that rotating
    is `x * cos + swap_halves(x) * sin`.
    """
    cos_TF, sin_TF = _angles(spec, positions_T)
    cos = torch.cat((cos_TF, cos_TF), dim=-1) * spec.attention_factor
    sin = torch.cat((-sin_TF, sin_TF), dim=-1) * spec.attention_factor
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def cos_sin_table(spec: RopeSpec, num_positions: int, device: torch.device | str) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: by position the F cosines, then the F sines.

    What the kernel of `runtime.kernels.rope_kv` reads; built once, as long as the longest context.
    """
    table = torch.empty(num_positions, spec.rotary_dim, dtype=torch.float32, device=device)
    for first in range(0, num_positions, _TABLE_ROWS):
        last = min(first + _TABLE_ROWS, num_positions)
        cos_TF, sin_TF = _angles(spec, torch.arange(first, last, device=device))
        torch.cat((cos_TF, sin_TF), dim=-1, out=table[first:last])
    return table.mul_(spec.attention_factor)


def _angles(spec: RopeSpec, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, F], float32."""
    angles_TF = positions_T[:, None].float() * _inverse_frequencies(spec, positions_T)
    return angles_TF.cos(), angles_TF.sin()


def _inverse_frequencies(spec: RopeSpec, positions_T: torch.Tensor) -> torch.Tensor:
    """Radians per position: [F], or [T, F] where they depend on the position (dynamic)."""
    exponents_F = torch.arange(0, spec.rotary_dim, 2, device=positions_T.device) / spec.rotary_dim
    if spec.kind == "dynamic":
        return _dynamic(spec, exponents_F, positions_T)
    frequencies_F = 1.0 / (spec.theta**exponents_F)
    if spec.kind == "linear":
        return frequencies_F / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, frequencies_F)
    return _yarn(spec, frequencies_F) if spec.kind == "yarn" else frequencies_F


def _dynamic(spec: RopeSpec, exponents_F: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """NTK-aware base of a sequence that ends at each position (see the module's docstring)."""
    lengths_T = (positions_T + 1).clamp(min=spec.trained_positions).to(torch.float64)
    stretch_T = spec.factor * lengths_T / spec.trained_positions - (spec.factor - 1.0)
    bases_T = spec.theta * stretch_T ** (spec.rotary_dim / (spec.rotary_dim - 2))
    return 1.0 / (bases_T.float()[:, None] ** exponents_F)


def _llama3(spec: RopeSpec, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Long waves divided by `factor`, short ones kept, a linear blend between (Llama 3.1)."""
    turns_F = spec.trained_positions * frequencies_F / (2 * math.pi)
    keep_F = (turns_F - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep_F = keep_F.clamp(0.0, 1.0)
    return keep_F * frequencies_F + (1.0 - keep_F) * frequencies_F / spec.factor


def _yarn(spec: RopeSpec, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Interpolate slow dimensions, extrapolate fast ones, a ramp between (arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        ratio = spec.trained_positions / (rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    steps_F = torch.arange(len(frequencies_F), device=frequencies_F.device, dtype=torch.float32)
    # Equal bounds would divide by zero; the source widens them by this much.
    ramp_F = ((steps_F - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return frequencies_F / spec.factor * ramp_F + frequencies_F * (1.0 - ramp_F)
