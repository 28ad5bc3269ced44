"""Linear layers over dense and quantized weights: `pack_*` once at load, then `linear`.

What serves which weight, and what it costs in memory per weight:

| weight        | compute float32                        | compute bfloat16 / float16            |
|---------------|----------------------------------------|---------------------------------------|
| dense         | [in, out] matrix, 4 bytes              | [out, in] matrix, 2 bytes             |
| w4a16         | dequantized once, 4 bytes              | CPU, bfloat16, symmetric: torch's int4 |
|               |                                        | kernel, 1.1 bytes; else dequantized, 2 |
| w8a16         | dequantized once, 4 bytes              | dequantized once, 2 bytes             |
| w8a8 (int8)   | int8 matmul where exact, 1 byte; else  | the same, else the codes, 2 bytes     |
|               | float32 matmul over the codes, 4 bytes | (float16: as float32, 4 bytes)        |
| fp8           | e4m3 codes as float32, 4 bytes         | e4m3 codes as bfloat16, 2 bytes       |
|               |                                        | (float16: as float32, 4 bytes)        |
| w3a16, w4a8,  | dequantized once, 4 bytes; inputs that | the same, 2 bytes: the speed and the  |
| w4a8-fp8,     | are quantized are rounded to their     | memory of a dense model               |
| fp8-block     | codes                                  |                                       |

float32 means float32: torch's int4 kernel rounds inputs and outputs to bfloat16, so using it only
for small batches would make a row's result depend on the rows beside it. With compute type
bfloat16 every way rounds to bfloat16, and which one is taken changes no more than that.

Where Triton serves the device (see `backend`), every scheme has kernels of its own: codes stay
codes (w4a16, w8a16, w8a8), and what none of them can hold is dequantized once.

A packed weight owns its memory: nothing refers to the (mapped) tensors it was made from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.artifact.layout import (
    QuantizedWeight,
    dequantize,
    fake_quantize_activations,
    quantize_activations,
)
from quant.artifact.scheme import ActivationScheme, Scheme
from runtime.kernels.backend import target_of, uses_triton
from runtime.kernels.dense import dense_linear
from runtime.kernels.gate import Activation, gate
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
    RoundedInputWeight,
)
from runtime.kernels.quantize import QuantizedActivations, quantize
from runtime.kernels.w4a16 import (
    W4A16Weight,
    can_pack_w4a16,
    pack_w4a16,
    unpack_w4a16,
    w4a16_add_,
    w4a16_can_add,
    w4a16_gate_up,
    w4a16_linear,
)
from runtime.kernels.w8a8 import (
    W8A8Weight,
    can_pack_w8a8,
    pack_w8a8,
    unpack_w8a8,
    w8a8_gate_up,
    w8a8_linear,
)
from runtime.kernels.w8a16 import (
    W8A16Weight,
    can_pack_w8a16,
    pack_w8a16,
    unpack_w8a16,
    w8a16_linear,
)
from runtime.kernels.workspace import KernelOptions

__all__ = [
    "DenseWeight",
    "DynamicWeight",
    "PackedInt4Weight",
    "PackedWeight",
    "RoundedInputWeight",
    "add_linear_",
    "can_add",
    "expected_activations",
    "gated_linear",
    "has_own_product",
    "is_served_rounded",
    "linear",
    "linear_in_float32",
    "pack_dense",
    "pack_quantized",
    "pack_rounded",
    "reconstruct",
    "share_dense",
]


def pack_dense(
    weight: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    options: KernelOptions | None = None,
) -> DenseWeight:
    """A dense weight [out, in] in the compute type.

    On the CPU float32 products of a few rows are up to twice as fast with [in, out] in memory;
    low-precision ones are not.
    """
    if device.type == "cpu" and dtype == torch.float32:
        matrix = weight.to(dtype).T.clone(memory_format=torch.contiguous_format)
        return DenseWeight(matrix=matrix, is_transposed=True)
    # Off the CPU nothing is mapped, and a head of a gigabyte need not exist twice.
    matrix = weight.to(device=device, dtype=dtype, copy=device.type == "cpu").contiguous()
    own = options if uses_triton(device) else None
    return DenseWeight(matrix=matrix, is_transposed=False, options=own)


def share_dense(matrix: Tensor, options: KernelOptions) -> DenseWeight:
    """A dense weight over a matrix [out, in] that is in place already; nothing is copied."""
    own = options if uses_triton(matrix.device) else None
    return DenseWeight(matrix=matrix, is_transposed=False, options=own)


def pack_quantized(
    weight: QuantizedWeight,
    dtype: torch.dtype,
    device: torch.device,
    options: KernelOptions | None = None,
) -> PackedWeight:
    """A quantized weight in the form that serves this compute type on this device.

    `options` are needed where Triton serves the device.
    """
    if is_served_rounded(weight.scheme):
        return pack_rounded(dequantize(weight), weight.scheme, dtype, device, options)
    activations = weight.scheme.activations
    if options is not None and uses_triton(device) and dtype != torch.float32:
        packed = _pack_for_triton(weight, dtype, device, options)
        if packed is not None:
            return packed
    if activations is not None:
        return _pack_dynamic(weight, dtype, device)
    if device.type == "cpu" and can_pack_int4(weight, dtype):
        return pack_int4(weight)
    return pack_dense(dequantize(weight), dtype, device, options)


def is_served_rounded(scheme: Scheme) -> bool:
    """Whether weights of this scheme are dequantized and met by inputs rounded to their codes:
    those with quantized inputs whose scales differ along `in`, for which we have no kernel."""
    weights = scheme.weights
    if weights is None or scheme.activations is None:
        return False
    return scheme.layout == "pack-quantized" or weights.strategy == "block"


def pack_rounded(
    matrix: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
    options: KernelOptions | None = None,
) -> RoundedInputWeight:
    """A dequantized weight [out, in] of a scheme that `is_served_rounded`."""
    assert scheme.activations is not None
    dense = pack_dense(matrix, dtype, device, options)
    return RoundedInputWeight(dense=dense, activations=scheme.activations)


def _pack_for_triton(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, options: KernelOptions
) -> PackedWeight | None:
    """None where no kernel of ours holds this weight."""
    if can_pack_w8a8(weight, target_of(device)):
        return pack_w8a8(weight, dtype, device, options)
    if can_pack_w4a16(weight):
        return pack_w4a16(weight, dtype, device, options)
    if can_pack_w8a16(weight, dtype):
        return pack_w8a16(weight, dtype, device, options)
    return None


def has_own_product(scheme: Scheme) -> bool:
    """Whether products are made from the codes of this scheme somewhere; otherwise it is served as
    a dense matrix, which saves neither memory nor time."""
    is_odd = scheme.weights is not None and scheme.weights.num_bits == 3
    return not is_odd and not is_served_rounded(scheme)


def expected_activations(weight: PackedWeight) -> ActivationScheme | None:
    """How the op before this linear should quantize its output; None: leave it as it is."""
    return weight.activations if isinstance(weight, W8A8Weight) else None


def _pack_dynamic(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device
) -> DynamicWeight:
    activations = weight.scheme.activations
    assert activations is not None
    is_integer = activations.kind == "int" and device.type == "cpu" and has_exact_int8()
    # Sums of codes leave float16's range: 448 * 448 does by itself.
    held = torch.float32 if dtype == torch.float16 else dtype
    return DynamicWeight(
        codes=weight.codes.clone() if is_integer else pack_dense(weight.codes, held, device),
        scale=weight.scale.flatten().to(device=device, dtype=torch.float32, copy=True),
        activations=activations,
    )


def linear(
    x: Tensor | QuantizedActivations, weight: PackedWeight, bias: Tensor | None = None
) -> Tensor:
    """`x` [T, in] -> [T, out], both in the compute type; `bias` [out].

    Codes instead of a tensor are taken where `expected_activations` names them.
    """
    if isinstance(weight, W8A8Weight):
        codes = quantize(x, weight.activations) if isinstance(x, Tensor) else x
        return w8a8_linear(codes, weight, bias)
    assert isinstance(x, Tensor), "codes are for linears that expect them"
    match weight:
        case DenseWeight():
            return _dense_linear(x, weight, bias)
        case W4A16Weight():
            return w4a16_linear(x, weight, bias)
        case W8A16Weight():
            return w8a16_linear(x, weight, bias)
        case PackedInt4Weight():
            y = int4_linear(x, weight)
        case RoundedInputWeight():
            rounded = fake_quantize_activations(x, weight.activations)
            return _dense_linear(rounded, weight.dense, bias)
        case DynamicWeight():
            y = _dynamic(x, weight)
    return y if bias is None else y + bias


def gated_linear(
    x: Tensor | QuantizedActivations,
    weight: PackedWeight,
    bias: Tensor | None,
    act: Activation,
    activations: ActivationScheme | None = None,
) -> Tensor | QuantizedActivations:
    """act(gate) * up, quantized by `activations`, of a weight gate | up: [T, in] -> [T, out / 2].

    Of many rows by a 4-bit weight, and of few rows of codes, both are made together.
    """
    if isinstance(weight, W8A8Weight) and bias is None and activations is not None:
        codes = quantize(x, weight.activations) if isinstance(x, Tensor) else x
        gated = w8a8_gate_up(codes, weight, act, activations)
        return gate(w8a8_linear(codes, weight), act, activations) if gated is None else gated
    is_plain = bias is None and activations is None
    if isinstance(weight, W4A16Weight) and isinstance(x, Tensor) and is_plain:
        return w4a16_gate_up(x, weight, act)
    return gate(linear(x, weight, bias), act, activations)


def can_add(x: Tensor | QuantizedActivations, weight: PackedWeight, bias: Tensor | None) -> bool:
    """Whether `add_linear_` serves this product, where that spares reading the sum again."""
    if not isinstance(weight, W4A16Weight) or not isinstance(x, Tensor) or bias is not None:
        return False
    return w4a16_can_add(x, weight)


def add_linear_(sum_TN: Tensor, x: Tensor, weight: PackedWeight) -> None:
    """sum_TN [T, out] += the product with `x` [T, in]; `can_add` must have said yes."""
    assert isinstance(weight, W4A16Weight)
    w4a16_add_(sum_TN, x, weight)


def linear_in_float32(x: Tensor, weight: PackedWeight) -> Tensor:
    """`x` [T, in] in the compute type -> [T, out] float32: logits, whose ties decide tokens.

    Where the kernel can hand out its float32 sums they are not rounded in between.
    """
    if isinstance(weight, DenseWeight) and weight.options is not None:
        return dense_linear(x, weight.matrix, None, weight.options, torch.float32)
    return linear(x, weight).float()


def _dense_linear(x: Tensor, weight: DenseWeight, bias: Tensor | None) -> Tensor:
    if weight.options is not None:
        return dense_linear(x, weight.matrix, bias, weight.options)
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
        sums = _dense_linear(codes.to(weight.codes.matrix.dtype), weight.codes, None).float()
    return sums.mul_(scale_T1).mul_(weight.scale).to(x.dtype)


def reconstruct(weight: PackedWeight) -> Tensor:
    """The matrix [out, in] float32 that the kernel really multiplies with."""
    match weight:
        case DenseWeight():
            return (weight.matrix.T if weight.is_transposed else weight.matrix).float()
        case PackedInt4Weight():
            return unpack_int4(weight).float()
        case W4A16Weight():
            return unpack_w4a16(weight).float()
        case W8A16Weight():
            return unpack_w8a16(weight).float()
        case W8A8Weight():
            return unpack_w8a8(weight).float()
        case RoundedInputWeight():
            return reconstruct(weight.dense)
    codes = weight.codes
    values = codes.float() if isinstance(codes, Tensor) else reconstruct(codes)
    return values * weight.scale[:, None]
