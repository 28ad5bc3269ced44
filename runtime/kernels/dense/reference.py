"""A matrix product with scales per row and channel, in float32: what the kernels are held to."""

from __future__ import annotations

from torch import Tensor


def product_reference(
    x_MK: Tensor,
    w_NK: Tensor,
    row_scale_M: Tensor | None = None,
    channel_scale_N: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> Tensor:
    """(x W^T) * row_scale * channel_scale + bias as float32 [M, N]."""
    y_MN = x_MK.float() @ w_NK.float().T
    if row_scale_M is not None and channel_scale_N is not None:
        y_MN = y_MN * row_scale_M[:, None] * channel_scale_N
    return y_MN if bias_N is None else y_MN + bias_N.float()
