"""What the bits mean: quantize, dequantize, pack and unpack, per layout, as pure torch functions.

This file is the specification every kernel is tested against (`x @ dequantize(qw).T`) and is bit
for bit compatible with compressed-tensors 0.20.1: the same codes, the same words, the same
dequantized values. It knows nothing of files, models, methods or devices.

Names: `out`, `in` are a linear's output and input features; G is the number of groups along `in`
(in / group_size, or 1 per channel); b is num_bits. Codes are signed, -2^(b-1) .. 2^(b-1)-1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quant.artifact.errors import IntegrityError, SchemeError
from quant.artifact.scheme import INT_BITS, ActivationScheme, Scheme, WeightScheme

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """One linear's weight [out, in] as codes, scales and, when asymmetric, zero points."""

    scheme: Scheme
    codes: Tensor  # [out, in] int8, or float8_e4m3fn for fp8
    scale: Tensor  # `scale_shape`: [out, G] float32, bfloat16 or float16; finite and > 0
    zero_point: Tensor | None = None  # [out, G] int8, only for asymmetric schemes

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]


def code_range(weights: WeightScheme) -> tuple[float, float]:
    """Lowest and highest code; fp8 codes are e4m3 numbers, so -448 and 448."""
    if weights.kind == "float":
        return -FP8_MAX, FP8_MAX
    half = 1 << (weights.num_bits - 1)
    return float(-half), float(half - 1)


def num_groups(weights: WeightScheme, width: int) -> int:
    """G for a row of `width` columns; SchemeError when the group size does not divide it."""
    if weights.group_size is None:
        return 1
    if width % weights.group_size:
        raise SchemeError(
            f"group_size {weights.group_size} does not divide {width} input features; "
            "choose a group size that does, or one scale per channel"
        )
    return width // weights.group_size


def scale_shape(weights: WeightScheme, shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a weight of `shape` (out, in): [out, G], or a row for each block."""
    return -(-shape[0] // weights.scale_rows), num_groups(weights, shape[1])


def scale_by_row(scale: Tensor, weights: WeightScheme, rows: int) -> Tensor:
    """The scale of every output row, [out, G]."""
    if weights.scale_rows == 1:
        return scale
    return scale.repeat_interleave(weights.scale_rows, 0)[:rows]


def _over_blocks(absmax: Tensor, weights: WeightScheme) -> Tensor:
    """The largest of the rows that share a scale: [out, G] -> [ceil(out / rows), G]."""
    rows = weights.scale_rows
    if rows == 1:
        return absmax
    padded = torch.nn.functional.pad(absmax, (0, 0, 0, -len(absmax) % rows))
    return padded.view(-1, rows, absmax.shape[1]).amax(1)


def round_scale(scale_f32: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Scales as they will be stored, in `scale_dtype`; codes are computed from the result.

    Unless `scale_dtype` is float16, values are rounded to bfloat16 numbers even when stored as
    float32, so that a kernel holding bf16 scales reproduces them exactly. A zero scale (a group
    of zeros) becomes the dtype's epsilon, so that no code is ever divided by zero.

    Raises SchemeError for a NaN, infinite or negative scale, and for one that overflows or
    vanishes in `scale_dtype`. The message is meant to be prefixed with the module's name.
    """
    if scale_dtype not in SCALE_DTYPES:
        raise SchemeError(f"scales are float32, bfloat16 or float16, not {scale_dtype}")
    if not bool(torch.isfinite(scale_f32).all()) or bool((scale_f32 < 0).any()):
        raise SchemeError("a scale is NaN, infinite or negative: the weight or its statistics are")
    via = torch.float16 if scale_dtype == torch.float16 else torch.bfloat16
    stored = scale_f32.to(via).to(scale_dtype)
    _check_scale_fits(scale_f32, stored)
    eps = torch.tensor(torch.finfo(scale_dtype).eps, dtype=scale_dtype, device=stored.device)
    return torch.where(stored == 0, eps, stored)


def _check_scale_fits(scale_f32: Tensor, stored: Tensor) -> None:
    name = str(stored.dtype).removeprefix("torch.")
    if bool(torch.isinf(stored).any()):
        raise SchemeError(
            f"scale {float(scale_f32.max()):.4g} overflows {name}; use dtype bfloat16 or float32"
        )
    lost = (stored == 0) & (scale_f32 > 0)
    if bool(lost.any()):
        raise SchemeError(
            f"scale {float(scale_f32[lost].max()):.4g} vanishes in {name}: a group of tiny weights "
            "would become zeros; use dtype bfloat16 or float32, or skip the module"
        )


def _check_values_fit(absmax: Tensor, scale: Tensor) -> None:
    """A code lies up to half a step beyond the weight it stands for, which float16 may not hold."""
    highest = float((absmax + scale.float() / 2).max())
    if highest > torch.finfo(scale.dtype).max:
        name = str(scale.dtype).removeprefix("torch.")
        raise SchemeError(
            f"dequantized weights up to {highest:.4g} overflow {name}; "
            "use dtype bfloat16 or float32, or skip the module"
        )


def min_max_qparams(
    weight_f32: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scale [out, G] in `scale_dtype` and zero point [out, G] int8 (None when symmetric).

    compressed-tensors' rule over the full code range: symmetric absmax / 3.5 (int3), / 7.5
    (int4), / 127.5 (int8), / 448 (fp8); asymmetric (max - min) / (2^b - 1) with zero inside
    [min, max]. The zero point is computed from the scale as stored. A group of zeros gets epsilon
    and zero point 0.

    Raises SchemeError when the weight holds NaN or Inf, the group size does not divide, or a
    scale does not fit `scale_dtype`.
    """
    groups = num_groups(scheme, weight_f32.shape[1])
    grouped = _grouped(weight_f32.float(), groups)
    low = grouped.amin(-1).clamp(max=0)
    high = grouped.amax(-1).clamp(min=0)
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise SchemeError("the weight holds NaN or Inf")
    q_min, q_max = code_range(scheme)
    absmax = _over_blocks(torch.maximum(-low, high), scheme)
    if scheme.symmetric:
        scale = round_scale(absmax / ((q_max - q_min) / 2), scale_dtype)
        _check_values_fit(absmax, scale)
        return scale, None
    scale = round_scale((high - low) / (q_max - q_min), scale_dtype)
    _check_values_fit(absmax, scale)
    zero_point = (q_min - low / scale.float()).clamp(q_min, q_max).round()
    return scale, torch.where(high == low, 0.0, zero_point).to(torch.int8)


def quantize(
    weight_f32: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme
) -> QuantizedWeight:
    """Codes of `weight_f32` [out, in] for the given `scale` [out, G] and `zero_point` [out, G].

    round_half_even(clamp(w / scale + zero_point)), computed in float32. fp8: clamp, then cast.
    """
    weights = _weights(scheme)
    check_qparams(weights, (weight_f32.shape[0], weight_f32.shape[1]), scale, zero_point)
    by_row = scale_by_row(scale, weights, len(weight_f32))
    scaled = _grouped(weight_f32.float(), scale.shape[1]) / by_row.float().unsqueeze(-1)
    if zero_point is not None:
        scaled = scaled + zero_point.float().unsqueeze(-1)
    codes = _round_to_codes(scaled, weights).flatten(1)
    return QuantizedWeight(scheme=scheme, codes=codes, scale=scale, zero_point=zero_point)


def _round_to_codes(scaled: Tensor, weights: WeightScheme | ActivationScheme) -> Tensor:
    if weights.kind == "float":
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    half = 1 << (weights.num_bits - 1)
    return scaled.clamp(-half, half - 1).round().to(torch.int8)


def dequantize(qw: QuantizedWeight) -> Tensor:
    """The weight [out, in] the codes stand for: (codes - zero_point) * scale, in scale's dtype."""
    values = _grouped(qw.codes.to(qw.scale.dtype), qw.scale.shape[1])
    if qw.zero_point is not None:
        values = values - qw.zero_point.to(qw.scale.dtype).unsqueeze(-1)
    by_row = scale_by_row(qw.scale, _weights(qw.scheme), len(qw.codes))
    return torch.flatten(values * by_row.unsqueeze(-1), 1)


def _grouped(matrix: Tensor, groups: int) -> Tensor:
    """[out, in] as [out, G, in / G]."""
    return matrix.reshape(matrix.shape[0], groups, -1)


def quantize_activations(x: Tensor, act: ActivationScheme) -> tuple[Tensor, Tensor]:
    """Codes [..., in] (int8 or e4m3) and float32 scales of `x`: [..., 1], one per token, or for
    groups of channels [..., in / group_size].

    Computed in float32 whatever x's dtype: scale = absmax / 127.5 (int8) or / 448 (fp8), epsilon
    for a row of zeros; codes = round_half_even(clamp(x / scale)).
    """
    if act.group_size is not None:
        one = replace(act, group_size=None)
        codes, scale = quantize_activations(x.reshape(*x.shape[:-1], -1, act.group_size), one)
        return codes.flatten(-2), scale.squeeze(-1)
    x_f32 = x.float()
    absmax = x_f32.abs().amax(-1, keepdim=True)
    scale = absmax / (FP8_MAX if act.kind == "float" else ((1 << act.num_bits) - 1) / 2)
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return _round_to_codes(x_f32 / scale, act), scale


def fake_quantize_activations(x: Tensor, act: ActivationScheme) -> Tensor:
    """`x` [..., in] after dynamic per-token quantization, in x's dtype: what a kernel must see."""
    codes, scale = quantize_activations(x, act)
    if act.group_size is not None:
        scale = scale.repeat_interleave(act.group_size, -1)
    return (codes.float() * scale).to(x.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes in memory order, uint8 [n].

    `contiguous` leaves odd strides on dimensions of size one, which `view` then refuses.
    """
    contiguous = tensor.contiguous()
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def packed_width(width: int, num_bits: int) -> int:
    """int32 words that hold `width` codes: ceil(width * num_bits / 32)."""
    return -(-width * num_bits // 32)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """int8 codes [rows, width] -> int32 words [rows, ceil(width * b / 32)], first code lowest.

    Each code is stored as code + 2^(b-1) at bits [i * b, (i + 1) * b) of its row's bit stream, so
    3-bit codes straddle words; unused bits of the last word are zero.
    """
    assert num_bits in INT_BITS
    assert codes.dtype == torch.int8
    assert sys.byteorder == "little"
    unsigned = (codes + (1 << (num_bits - 1))).view(torch.uint8)  # int8 wraps, as 8 bits need
    pad = torch.nn.functional.pad
    if num_bits == 3:
        stream = _bits(unsigned, 3)
        words = packed_width(codes.shape[1], 3)
        unsigned = _from_bits(pad(stream, (0, 32 * words - stream.shape[1])), 8)
    else:
        unsigned = pad(unsigned, (0, -codes.shape[1] % (32 // num_bits)))
    if num_bits == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return as_bytes(unsigned).view(torch.int32).reshape(codes.shape[0], -1)


def unpack(packed: Tensor, num_bits: int, width: int) -> Tensor:
    """The inverse of `pack`: int32 words [rows, words] -> int8 codes [rows, width]."""
    assert num_bits in INT_BITS
    assert packed.dtype == torch.int32
    assert sys.byteorder == "little"
    unsigned = as_bytes(packed).reshape(packed.shape[0], -1)
    if num_bits == 4:
        unsigned = torch.stack((unsigned & 0xF, unsigned >> 4), dim=-1).flatten(1)
    elif num_bits == 3:
        unsigned = _from_bits(_bits(unsigned, 8)[:, : 3 * width], 3)
    codes = unsigned.view(torch.int8)[:, :width] - (1 << (num_bits - 1))
    return codes.contiguous()


def _bits(values: Tensor, num_bits: int) -> Tensor:
    """The low bits of uint8 `values` [rows, n], lowest first: uint8 0 or 1 [rows, n * num_bits]."""
    shifts = torch.arange(num_bits, dtype=torch.uint8, device=values.device)
    return ((values.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _from_bits(stream: Tensor, num_bits: int) -> Tensor:
    """The inverse of `_bits`."""
    shifts = torch.arange(num_bits, dtype=torch.uint8, device=stream.device)
    fields = stream.reshape(stream.shape[0], -1, num_bits) << shifts
    return fields.sum(-1, dtype=torch.uint8)


def tensor_names(scheme: Scheme) -> tuple[str, ...]:
    """Names, without the module's prefix, of the tensors a module of this scheme has."""
    if scheme.weights is None:
        return ("weight",)
    if scheme.layout != "pack-quantized":
        return ("weight", "weight_scale")
    names = ("weight_packed", "weight_scale", "weight_shape")
    return names if scheme.weights.symmetric else (*names, "weight_zero_point")


def tensor_shapes(scheme: Scheme, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shape of each of `tensor_names(scheme)` for a module of shape (out, in)."""
    rows, width = shape
    if scheme.weights is None:
        return {"weight": (rows, width)}
    bits, groups = scheme.weights.num_bits, num_groups(scheme.weights, width)
    every = {
        "weight": (rows, width),
        "weight_packed": (rows, packed_width(width, bits)),
        "weight_scale": scale_shape(scheme.weights, shape),
        "weight_shape": (2,),
        "weight_zero_point": (packed_width(rows, bits), groups),
    }
    return {name: every[name] for name in tensor_names(scheme)}


def allowed_dtypes(scheme: Scheme, name: str) -> tuple[torch.dtype, ...]:
    """The dtypes tensor `name` of a module of this scheme may have."""
    if name == "weight_scale" or scheme.weights is None:
        return SCALE_DTYPES
    fixed = {
        "weight": FP8 if scheme.weights.kind == "float" else torch.int8,
        "weight_packed": torch.int32,
        "weight_shape": torch.int64,
        "weight_zero_point": torch.int32,
    }
    return (fixed[name],)


def to_tensors(qw: QuantizedWeight) -> dict[str, Tensor]:
    """`qw` as stored, keyed by `tensor_names` (no module prefix)."""
    weights = _weights(qw.scheme)
    check_qparams(weights, qw.shape, qw.scale, qw.zero_point)
    if qw.scheme.layout != "pack-quantized":
        return {"weight": qw.codes.contiguous(), "weight_scale": qw.scale.contiguous()}
    tensors = {
        "weight_packed": pack(qw.codes, weights.num_bits),
        "weight_scale": qw.scale.contiguous(),
        "weight_shape": torch.tensor(qw.shape, dtype=torch.int64),
    }
    if qw.zero_point is not None:
        packed = pack(qw.zero_point.T.contiguous(), weights.num_bits)
        tensors["weight_zero_point"] = packed.T.contiguous()
    return tensors


def from_tensors(tensors: dict[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """The inverse of `to_tensors`; IntegrityError names a tensor that is absent or misshapen."""
    weights = _weights(scheme)
    missing = [name for name in tensor_names(scheme) if name not in tensors]
    if missing:
        raise IntegrityError(f"tensor {missing[0]} of a {scheme.label} module is missing")
    shape = _stored_shape(tensors)
    for name, expected in tensor_shapes(scheme, shape).items():
        _check_tensor(name, tensors[name], expected, allowed_dtypes(scheme, name))
    if scheme.layout == "pack-quantized":
        codes = unpack(tensors["weight_packed"], weights.num_bits, shape[1])
    else:
        codes = tensors["weight"]
    zero_point = None
    if not weights.symmetric:
        words = tensors["weight_zero_point"].T
        zero_point = unpack(words, weights.num_bits, shape[0]).T.contiguous()
    return QuantizedWeight(
        scheme=scheme, codes=codes, scale=tensors["weight_scale"], zero_point=zero_point
    )


def _stored_shape(tensors: dict[str, Tensor]) -> tuple[int, int]:
    if "weight_shape" not in tensors:
        return tensors["weight"].shape[0], tensors["weight"].shape[-1]
    _check_tensor("weight_shape", tensors["weight_shape"], (2,), (torch.int64,))
    rows, width = tensors["weight_shape"].tolist()
    return int(rows), int(width)


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise IntegrityError(
            f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, "
            f"expected {dtypes[0]} {list(shape)}"
        )


def check_qparams(
    weights: WeightScheme, shape: tuple[int, int], scale: Tensor, zero_point: Tensor | None
) -> None:
    """SchemeError unless scale and zero point have the scheme's shape and dtypes."""
    expected = scale_shape(weights, shape)
    if tuple(scale.shape) != expected or scale.dtype not in SCALE_DTYPES:
        raise SchemeError(f"scale is {scale.dtype} {list(scale.shape)}, expected {list(expected)}")
    if weights.symmetric != (zero_point is None):
        raise SchemeError("asymmetric schemes have zero points, symmetric ones do not")
    if zero_point is not None and (
        tuple(zero_point.shape) != expected or zero_point.dtype != torch.int8
    ):
        raise SchemeError(
            f"zero point is {zero_point.dtype} {list(zero_point.shape)}, "
            f"expected torch.int8 {list(expected)}"
        )


def _weights(scheme: Scheme) -> WeightScheme:
    assert scheme.weights is not None, "a dense module has no codes"
    return scheme.weights
