"""Dynamic per-token quantization as the artifact format defines it."""

from __future__ import annotations

from torch import Tensor

from quant.artifact.layout import quantize_activations
from quant.artifact.scheme import ActivationScheme


def quantize_reference(x_TK: Tensor, scheme: ActivationScheme) -> tuple[Tensor, Tensor]:
    """Codes [T, in] and float32 scales [T]."""
    codes_TK, scale_T1 = quantize_activations(x_TK, scheme)
    return codes_TK, scale_T1.squeeze(-1)
