"""Choosing scales: one per group or channel, by min-max or by searching for the least error.

Pure functions on one weight [out, in]. What a code means is defined by `quant.artifact.layout`;
`encode` and `decode` here are the same arithmetic on a slice, for loops that work column by column
(a test holds them to the layout's bits). Knows nothing of models, statistics or files.

Shape legend: O output rows, I input columns, G groups per row (1 for per-channel), S = I / G.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant.artifact.layout import FP8, code_range, min_max_qparams, num_groups, round_scale
from quant.artifact.scheme import WeightScheme

# Multiples of the min-max scale that are tried. Above 1: a symmetric min-max scale maps absmax to
# 7.5, which no int4 code reaches; 7.5 / 7 is the scale that reaches it. Below 1: clipping.
SHRINK_FACTORS = tuple(1.10 - 0.02 * i for i in range(31))

# Values that a CPU searches at once: they and the three tensors made of them stay in its caches.
_SEARCHED_AT_ONCE = 1 << 16


def encode(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: WeightScheme
) -> Tensor:
    """Codes of `weight`, as float32 values; scale and zero point broadcast against it."""
    low, high = code_range(scheme)
    shifted = weight / scale.float()
    if zero_point is not None:
        shifted += zero_point.float()
    clamped = shifted.clamp_(low, high)
    if scheme.kind == "float":
        return clamped.to(FP8).float()
    return clamped.round_()


def decode(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """What the runtime reconstructs from float32 `codes`, as float32.

    The product is rounded to the scale's dtype, as `layout.dequantize` does.
    """
    shifted = codes if zero_point is None else codes - zero_point.float()
    if scale.dtype == torch.float32:
        return shifted * scale
    return shifted.to(scale.dtype).mul_(scale).float()


def store_codes(codes: Tensor, scheme: WeightScheme) -> Tensor:
    """Float32 codes in the dtype that the layout stores."""
    return codes.to(FP8 if scheme.kind == "float" else torch.int8)


def grouped(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """[O, I] seen as [O, G, S]."""
    return weight.reshape(weight.shape[0], num_groups(scheme, weight.shape[1]), -1)


def search_scales(
    weight: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
    *,
    factors: Sequence[float] = SHRINK_FACTORS,
) -> tuple[Tensor, Tensor | None]:
    """Scale [O, G] (and zero point) of least weighted squared error over `factors`.

    weight [O, I] float32; importance [I], e.g. E[x^2] or diag(H) of the inputs (None: all equal),
    or [G, S, S], the blocks of H = X^T X on its diagonal: a group's error is then that of the
    output it contributes to (`quant.methods.clip`).
    Each candidate is rounded to `scale_dtype` before it is judged, and judged on what is
    reconstructed. The min-max scale is the first candidate, so the search can't lose to it.

    The weighting is that of "activation-aware" scale search (e.g. llama.cpp's importance matrix);
    the grid is ours.
    """
    low, high = _extremes(weight, scheme)
    trials = [min_max_qparams(weight, scheme, scale_dtype)]
    trials += [_qparams(low * factor, high * factor, scheme, scale_dtype) for factor in factors]
    at_once = len(weight) if weight.is_cuda else max(1, _SEARCHED_AT_ONCE // weight.shape[1])
    parts = []
    for start in range(0, len(weight), at_once):
        rows = slice(start, start + at_once)
        own = [(scale[rows], None if zero is None else zero[rows]) for scale, zero in trials]
        parts.append(_least_error(weight[rows], own, scheme, importance))
    zeros = [zero for _, zero in parts if zero is not None]
    return torch.cat([scale for scale, _ in parts]), torch.cat(zeros) if zeros else None


def _least_error(
    weight: Tensor,
    trials: Sequence[tuple[Tensor, Tensor | None]],
    scheme: WeightScheme,
    importance: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Of each group the first of `trials`, scales and zero points [O, G], with the least error."""
    scale, zero_point = trials[0]
    best = _group_error(weight, scale, zero_point, scheme, importance)
    for trial, trial_zero in trials[1:]:
        error = _group_error(weight, trial, trial_zero, scheme, importance)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, trial, scale)
        if zero_point is not None and trial_zero is not None:
            zero_point = torch.where(better, trial_zero, zero_point)
    return scale, zero_point


def revive_squares(mean_square: Tensor) -> Tensor:
    """E[x^2] [I] with the mean of the others in place of zeros: an input that calibration never
    used may be used later."""
    alive = mean_square > 0
    mean = mean_square[alive].mean() if bool(alive.any()) else mean_square.new_ones(())
    return torch.where(alive, mean_square, mean)


def _extremes(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group [O, G], extended to include zero."""
    groups = grouped(weight, scheme)
    return groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)


def _qparams(
    low: Tensor, high: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point that cover [low, high]: `min_max_qparams` on given extremes."""
    q_min, q_max = code_range(scheme)
    span = high - low if not scheme.symmetric else 2 * torch.maximum(-low, high)
    scale = round_scale(within(span / (q_max - q_min), scale_dtype), scale_dtype)
    if scheme.symmetric:
        return scale, None
    zero = (q_min - low / scale.float()).clamp(q_min, q_max).round()
    return scale, torch.where(high == low, 0.0, zero).to(torch.int8)


def within(scale: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """A candidate moved into the range of `scale_dtype`: only the min-max scale itself may fail."""
    limits = torch.finfo(scale_dtype)
    inside = scale.clamp(limits.tiny, limits.max)
    return torch.where(scale == 0, scale, inside)


def _group_error(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: WeightScheme,
    importance: Tensor | None,
) -> Tensor:
    """Weighted squared reconstruction error of each group, [O, G]."""
    groups = grouped(weight, scheme)
    zero = None if zero_point is None else zero_point[..., None]
    codes = encode(groups, scale[..., None], zero, scheme)
    error = decode(codes, scale[..., None], zero).sub_(groups)
    if importance is None:
        return error.square_().sum(-1)
    if importance.ndim == 3:
        by_group = error.transpose(0, 1)
        return (by_group @ importance).mul_(by_group).sum(-1).T
    return error.square_().mul_(importance.reshape(1, groups.shape[1], -1)).sum(-1)
