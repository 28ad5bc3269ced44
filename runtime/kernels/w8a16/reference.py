"""W8A16 as defined: inputs times the dequantized weight."""

from __future__ import annotations

from torch import Tensor

from quant.artifact.layout import QuantizedWeight, dequantize
from runtime.kernels.dense.reference import product_reference


def w8a16_reference(x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None = None) -> Tensor:
    """`x` [T, in] -> float32 [T, out]."""
    return product_reference(x_TK, dequantize(weight), bias_N=bias_N)
