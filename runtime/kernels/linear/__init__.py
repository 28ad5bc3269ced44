"""Linear layers over dense and quantized weights: `pack_*` once at load, then `linear`.

What serves which weight, and what it costs in memory per weight:

| weight        | compute float32                        | compute bfloat16 / float16            |
|---------------|----------------------------------------|---------------------------------------|
| dense         | [in, out] matrix, 4 bytes              | [out, in] matrix, 2 bytes             |
| w4a16         | dequantized once, 4 bytes              | CPU, bfloat16, symmetric: torch's int4 |
|               |                                        | kernel, 1.1 bytes; else dequantized, 2 |
| w8a16         | dequantized once, 4 bytes              | dequantized once, 2 bytes             |
| w8a8 (int8)   | int8 matmul where exact, 1 byte; else  | the same, else the codes, 2 bytes     |
|               | float32 matmul over the codes, 4 bytes |                                       |
| fp8           | e4m3 codes as float32, 4 bytes         | e4m3 codes as bfloat16, 2 bytes       |

float32 means float32: torch's int4 kernel rounds inputs and outputs to bfloat16, so using it only
for small batches would make a row's result depend on the rows beside it. With compute type
bfloat16 every way rounds to bfloat16, and which one is taken changes no more than that.

A packed weight owns its memory: nothing refers to the (mapped) tensors it was made from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.artifact.layout import QuantizedWeight, dequantize, quantize_activations
from runtime.kernels.linear.cpu import (
    can_pack_int4,
    has_exact_int8,
    int4_linear,
    pack_int4,
    unpack_int4,
)
from runtime.kernels.linear.weights import (
    DenseWeight,
    DynamicWeight,
    PackedInt4Weight,
    PackedWeight,
)

__all__ = [
    "DenseWeight",
    "DynamicWeight",
    "PackedInt4Weight",
    "PackedWeight",
    "linear",
    "pack_dense",
    "pack_quantized",
    "reconstruct",
]


def pack_dense(weight: Tensor, dtype: torch.dtype, device: torch.device) -> DenseWeight:
    """A dense weight [out, in] in the compute type.

    On the CPU float32 products of a few rows are up to twice as fast with [in, out] in memory;
    low-precision ones are not.
    """
    if device.type == "cpu" and dtype == torch.float32:
        matrix = weight.to(dtype).T.clone(memory_format=torch.contiguous_format)
        return DenseWeight(matrix=matrix, is_transposed=True)
    matrix = weight.to(device=device, dtype=dtype, copy=True).contiguous()
    return DenseWeight(matrix=matrix, is_transposed=False)


def pack_quantized(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device
) -> PackedWeight:
    """A quantized weight in the form that serves this compute type on this device."""
    if weight.scheme.activations is not None:
        return _pack_dynamic(weight, dtype, device)
    if device.type == "cpu" and can_pack_int4(weight, dtype):
        return pack_int4(weight)
    return pack_dense(dequantize(weight), dtype, device)


def _pack_dynamic(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device
) -> DynamicWeight:
    activations = weight.scheme.activations
    assert activations is not None
    is_integer = activations.kind == "int" and device.type == "cpu" and has_exact_int8()
    return DynamicWeight(
        codes=weight.codes.clone() if is_integer else pack_dense(weight.codes, dtype, device),
        scale=weight.scale.flatten().to(device=device, dtype=torch.float32, copy=True),
        activations=activations,
    )


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x` [T, in] -> [T, out], both in the compute type; `bias` [out]."""
    if isinstance(weight, DenseWeight):
        return _dense_linear(x, weight, bias)
    y = int4_linear(x, weight) if isinstance(weight, PackedInt4Weight) else _dynamic(x, weight)
    return y if bias is None else y + bias


def _dense_linear(x: Tensor, weight: DenseWeight, bias: Tensor | None) -> Tensor:
    if not weight.is_transposed:
        return torch.nn.functional.linear(x, weight.matrix, bias)
    return x @ weight.matrix if bias is None else torch.addmm(bias, x, weight.matrix)


def _dynamic(x: Tensor, weight: DynamicWeight) -> Tensor:
    """Codes times codes, then both scales; sums in int32, or in float32 over the same integers.

    The float32 sums are exact up to in = 1040 for int8 (2^24 / 127^2) and off by 1e-7 beyond.
    """
    codes, scale_T1 = quantize_activations(x, weight.activations)
    if isinstance(weight.codes, Tensor):
        sums = torch._int_mm(codes, weight.codes.T).float()
    else:
        sums = _dense_linear(codes.to(x.dtype), weight.codes, None).float()
    return sums.mul_(scale_T1).mul_(weight.scale).to(x.dtype)


def reconstruct(weight: PackedWeight) -> Tensor:
    """The matrix [out, in] float32 that the kernel really multiplies with."""
    if isinstance(weight, DenseWeight):
        return (weight.matrix.T if weight.is_transposed else weight.matrix).float()
    if isinstance(weight, PackedInt4Weight):
        return unpack_int4(weight).float()
    codes = weight.codes
    values = codes.float() if isinstance(codes, Tensor) else reconstruct(codes)
    return values * weight.scale[:, None]
