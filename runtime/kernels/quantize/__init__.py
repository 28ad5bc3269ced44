"""Inputs quantized per token on the fly: what W8A8 and FP8 linears multiply.

The codes are those of `quant.artifact.layout.quantize_activations`, bit for bit: the same float32
division and rounding. A token with a NaN or an infinity gets a scale that is none, so that what is
computed from it is NaN and seen, and no silent zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.artifact.layout import FP8
from quant.artifact.scheme import ActivationScheme
from runtime.kernels.backend import target_of, uses_triton
from runtime.kernels.quantize.reference import quantize_reference

__all__ = ["QuantizedActivations", "code_dtype", "quantize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedActivations:
    """A linear's input as codes and one scale per token.

    Attributes:
        codes_TK: [T, in] int8 or float8_e4m3fn.
        scale_T: [T] float32.
        dtype: the compute type, in which outputs come.
    """

    codes_TK: Tensor
    scale_T: Tensor
    dtype: torch.dtype


def code_dtype(scheme: ActivationScheme) -> torch.dtype:
    """The dtype of the codes."""
    return FP8 if scheme.kind == "float" else torch.int8


def quantize(x_TK: Tensor, scheme: ActivationScheme) -> QuantizedActivations:
    """`x` [T, in] as 8-bit codes with one scale per token."""
    is_native = scheme.kind == "int" or target_of(x_TK.device).has_fp8
    if is_native and uses_triton(x_TK.device):
        return _triton_quantize(x_TK, scheme)
    codes_TK, scale_T = quantize_reference(x_TK, scheme)
    return QuantizedActivations(codes_TK=codes_TK, scale_T=scale_T, dtype=x_TK.dtype)


def _triton_quantize(x_TK: Tensor, scheme: ActivationScheme) -> QuantizedActivations:
    from runtime.kernels.quantize.kernel import launch_quantize

    codes_TK = torch.empty(x_TK.shape, dtype=code_dtype(scheme), device=x_TK.device)
    scale_T = torch.empty(x_TK.shape[0], dtype=torch.float32, device=x_TK.device)
    launch_quantize(x_TK.contiguous(), codes_TK, scale_T, target_of(x_TK.device))
    return QuantizedActivations(codes_TK=codes_TK, scale_T=scale_T, dtype=x_TK.dtype)
