"""RMSNorm as defined (arXiv 1910.07467, equation 4), in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype."""
    x_f32 = x.float()
    variance = x_f32.pow(2).mean(-1, keepdim=True)
    return (x_f32 * torch.rsqrt(variance + eps) * weight.float()).to(x.dtype)
