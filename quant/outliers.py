"""How far single values stick out: of weights within the group that shares a scale, of a linear's
inputs over the calibration tokens. What makes a module hard to quantize, in a few numbers.

Pure; statistics in, plain numbers out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.artifact.scheme import WeightScheme

_WORST = 3


def weight_outliers(weight: Tensor, scheme: WeightScheme) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum of max|w| / rms(w) over the groups of `weight` [O, I].

    A group is what shares one scale; groups of nothing but zeros are left out (all 0: no group).
    """
    size = scheme.group_size or weight.shape[1]
    groups = weight.float().reshape(-1, size)
    rms = groups.square().mean(1).sqrt()
    ratios = (groups.abs().amax(1) / rms)[rms > 0]
    if ratios.numel() == 0:
        return 0.0, 0.0, 0.0
    ordered = ratios.sort().values
    last = len(ordered) - 1
    middle, high = ordered[last // 2], ordered[round(0.99 * last)]
    return float(middle), float(high), float(ordered[last])


def input_outliers(absmax: Tensor, mean_square: Tensor) -> tuple[tuple[int, float], ...]:
    """The channels whose largest value is farthest above the rms of the whole input, worst first.

    absmax, mean_square: [I], over valid tokens. Returns up to three (channel, absmax / rms).
    """
    rms = mean_square.double().mean().sqrt()
    if not bool(rms > 0):
        return ()
    ratios = (absmax.double() / rms).cpu()
    top = torch.topk(ratios, min(_WORST, len(ratios)))
    return tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
