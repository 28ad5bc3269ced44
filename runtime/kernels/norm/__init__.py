"""RMSNorm, alone and with the residual added first. Weights are float32, offsets folded in.

Where the next linear multiplies 8-bit codes, the same kernel quantizes: `activations` says how, and
the result is `QuantizedActivations`.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from quant.artifact.scheme import ActivationScheme
from runtime.kernels.backend import target_of, uses_triton
from runtime.kernels.quantize import QuantizedActivations, code_dtype, quantize


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, activations: None = None) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, activations: ActivationScheme | None
) -> Tensor | QuantizedActivations: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, activations: ActivationScheme | None = None
) -> Tensor | QuantizedActivations:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; computed in float32.

    `x` [..., n] of any floating type, which is also the result's; `weight` [n] float32. With
    `activations` the result, rounded to x's type, comes quantized, and `x` is [T, n].
    """
    if uses_triton(x.device):
        return _triton_norm(x, None, weight, eps, activations)[1]
    normed = _torch_norm(x, weight, eps)
    return normed if activations is None else quantize(normed, activations)


@overload
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, activations: None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, activations: ActivationScheme | None
) -> tuple[Tensor, Tensor | QuantizedActivations]: ...
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    activations: ActivationScheme | None = None,
) -> tuple[Tensor, Tensor | QuantizedActivations]:
    """(residual + x in the compute type, the RMSNorm of that). Neither input is changed."""
    if uses_triton(x.device):
        return _triton_norm(x, residual, weight, eps, activations)
    residual = residual + x
    return residual, rms_norm(residual, weight, eps, activations)


def _torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A dot product of each row with itself: a third of the time of squaring and averaging."""
    x_f32 = x.float()
    mean = torch.linalg.vecdot(x_f32, x_f32).div_(x.shape[-1])
    normed: Tensor = (x_f32 * mean.add_(eps).rsqrt_().unsqueeze(-1)).mul_(weight)
    return normed.to(x.dtype)


def _triton_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    activations: ActivationScheme | None,
) -> tuple[Tensor, Tensor | QuantizedActivations]:
    """(new residual, normed); without a residual the first is `x` itself."""
    from runtime.kernels.norm.kernel import launch_rms_norm

    x_TE = x.reshape(-1, x.shape[-1])
    x_TE = x_TE if x_TE.stride(1) == 1 else x_TE.contiguous()
    dtype = x.dtype if activations is None else code_dtype(activations)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    residual_out = (
        None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    )
    scale_T = None if activations is None else out.new_empty(x_TE.shape[0], dtype=torch.float32)
    launch_rms_norm(
        x_TE,
        None if residual is None else residual.contiguous(),
        weight,
        eps,
        out,
        residual_out,
        scale_T,
        target_of(x.device),
    )
    first = x if residual_out is None else residual_out
    if scale_T is None:
        return first, out
    return first, QuantizedActivations(codes_TK=out, scale_T=scale_T, dtype=x.dtype)
