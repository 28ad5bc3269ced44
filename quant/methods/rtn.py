"""Round to nearest: the method that needs no data, and the baseline of every other one."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.artifact.layout import QuantizedWeight, min_max_qparams, quantize
from quant.artifact.scheme import Scheme
from quant.methods.scales import search_scales


def rtn(
    weight: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    *,
    importance: Tensor | None = None,
    scale_search: bool = False,
) -> QuantizedWeight:
    """`weight` [out, in], each value rounded to its nearest code. The weight is not changed.

    Scales are min-max (compressed-tensors' arithmetic). With `scale_search`, each group takes the
    candidate scale of least squared error, weighted by `importance` [in] (mean square of the
    inputs) where given; blocks keep min-max scales. Raises SchemeError when a scale does not fit
    `scale_dtype`.
    """
    assert scheme.weights is not None
    values = weight.float()
    if (scale_search or importance is not None) and scheme.weights.scale_rows == 1:
        scale, zero = search_scales(values, scheme.weights, scale_dtype, importance)
    else:
        scale, zero = min_max_qparams(values, scheme.weights, scale_dtype)
    return quantize(values, scale, zero, scheme)
