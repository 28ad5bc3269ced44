"""Weight clip: rounding to nearest with the scales that the module's *outputs* want.

The second half of AWQ (Lin et al., "AWQ", arXiv 2306.00978, section 3.2 and its code's clip search)
tries smaller and smaller largest values for each group and keeps the one whose product with the
inputs changes least. Clamping a weight at m and scaling by m are one thing here (`encode` clamps),
so the search is that of `quant.methods.scales` judged by e^T H_g e, where e is the group's rounding
error and H_g its block of X^T X: the squared error of the group's share of the outputs, summed over
all valid tokens rather than a sample of them.

What groups do to each other is not in that judgement. So each row keeps, of the candidates, the one
with the least error of the whole output: min-max scales are among them, and no row can lose to
plain rounding.

Shape legend: O output rows, I input columns, G groups per row, S = I / G.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant.artifact.layout import (
    QuantizedWeight,
    dequantize,
    min_max_qparams,
    num_groups,
    quantize,
)
from quant.artifact.scheme import Scheme
from quant.methods.gptq import revive_dead_columns
from quant.methods.scales import search_scales

QParams = tuple[Tensor, Tensor | None]

# Added to the diagonal when groups are judged, as a fraction of its mean: what the calibration
# inputs happen to leave out still counts for something.
DAMPING = 0.01


def clip(
    weight: Tensor, hessian: Tensor, scheme: Scheme, scale_dtype: torch.dtype
) -> QuantizedWeight:
    """`weight` [O, I] rounded to nearest with scales searched by output error.

    hessian [I, I]: X^T X over valid tokens, any constant factor. Neither is changed. The squared
    error of each row's outputs on those tokens is at most that of `rtn`. Raises SchemeError when a
    scale does not fit `scale_dtype`.
    """
    assert scheme.weights is not None
    values, exact = weight.float(), hessian.float()
    alive, _ = revive_dead_columns(exact)
    blocks = diagonal_blocks(alive, num_groups(scheme.weights, weight.shape[1]))
    candidates = [
        min_max_qparams(values, scheme.weights, scale_dtype),
        search_scales(values, scheme.weights, scale_dtype, alive.diagonal()),
        search_scales(values, scheme.weights, scale_dtype, blocks),
    ]
    scale, zero = best_by_row(values, exact, scheme, candidates)
    return quantize(values, scale, zero, scheme)


def diagonal_blocks(hessian: Tensor, groups: int) -> Tensor:
    """[G, S, S]: the square blocks on the diagonal of [I, I], damped."""
    width = len(hessian) // groups
    cut = hessian.reshape(groups, width, groups, width)
    blocks = cut.diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()
    blocks.diagonal(dim1=1, dim2=2).add_(DAMPING * hessian.diagonal().mean())
    return blocks


def best_by_row(
    weight: Tensor, hessian: Tensor, scheme: Scheme, candidates: Sequence[QParams]
) -> QParams:
    """For each row the candidate scales (and zero points) of least e^T H e; the first of equals."""
    scale, zero = candidates[0]
    least = _row_error(weight, hessian, scheme, candidates[0])
    for trial, trial_zero in candidates[1:]:
        error = _row_error(weight, hessian, scheme, (trial, trial_zero))
        better = (error < least)[:, None]
        least = torch.where(better[:, 0], error, least)
        scale = torch.where(better, trial, scale)
        if zero is not None and trial_zero is not None:
            zero = torch.where(better, trial_zero, zero)
    return scale, zero


def _row_error(weight: Tensor, hessian: Tensor, scheme: Scheme, qparams: QParams) -> Tensor:
    error = weight - dequantize(quantize(weight, *qparams, scheme)).float()
    return ((error @ hessian) * error).sum(-1)
