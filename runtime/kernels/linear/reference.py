"""The definition of a linear over quantized weights: what the layout says, in float32."""

from __future__ import annotations

from torch import Tensor

from quant.artifact.layout import (
    QuantizedWeight,
    dequantize,
    fake_quantize_activations,
    quantize_activations,
)


def effective_weight(weight: QuantizedWeight) -> Tensor:
    """The matrix [out, in] float32 a kernel multiplies with.

    Weight-only schemes mean `dequantize(weight)`, rounded to the stored scale's type as
    compressed-tensors does, and so do weights in groups or blocks under quantized inputs (w4a8,
    fp8-block). Where inputs are quantized and a scale covers a row, the scales are applied to the
    sums (as every int8 and fp8 matmul does), so codes * scale is exact and not rounded.
    """
    if weight.scheme.activations is None or _is_in_parts(weight):
        return dequantize(weight).float()
    return weight.codes.float() * weight.scale.float()


def linear_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`x` [T, in] times the weight [out, in], plus `bias` [out]: [T, out] float32."""
    activations = weight.scheme.activations
    if activations is None:
        y = x.float() @ effective_weight(weight).T
    else:
        codes, scale = quantize_activations(x, activations)
        if _is_in_parts(weight):
            y = fake_quantize_activations(x.float(), activations) @ effective_weight(weight).T
        else:
            y = (codes.float() @ weight.codes.float().T) * scale * weight.scale.float().T
    return y if bias is None else y + bias.float()


def _is_in_parts(weight: QuantizedWeight) -> bool:
    """Whether scales differ along `in`, so that they cannot be applied to whole sums."""
    assert weight.scheme.weights is not None
    return weight.scheme.layout == "pack-quantized" or weight.scheme.weights.strategy == "block"
