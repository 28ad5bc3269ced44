"""The definition of a linear over quantized weights: what the layout says, in float32."""

from __future__ import annotations

from torch import Tensor

from quant.artifact.layout import QuantizedWeight, dequantize, quantize_activations


def effective_weight(weight: QuantizedWeight) -> Tensor:
    """The matrix [out, in] float32 a kernel multiplies with.

    Weight-only schemes mean `dequantize(weight)`, rounded to the stored scale's type as
    compressed-tensors does, and so do weights in groups under quantized inputs (w4a8). Where
    inputs are quantized and a scale covers a row, the scales are applied to the sums (as every
    int8 and fp8 matmul does), so codes * scale is exact and not rounded.
    """
    if weight.scheme.activations is None or weight.scheme.layout == "pack-quantized":
        return dequantize(weight).float()
    return weight.codes.float() * weight.scale.float()


def linear_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`x` [T, in] times the weight [out, in], plus `bias` [out]: [T, out] float32."""
    activations = weight.scheme.activations
    if activations is None:
        y = x.float() @ effective_weight(weight).T
    else:
        codes, scale = quantize_activations(x, activations)
        if weight.scheme.layout == "pack-quantized":
            y = (codes.float() * scale) @ effective_weight(weight).T
        else:
            y = (codes.float() @ weight.codes.float().T) * scale * weight.scale.float().T
    return y if bias is None else y + bias.float()
