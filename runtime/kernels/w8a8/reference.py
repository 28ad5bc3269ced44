"""W8A8 and FP8 as defined: codes times codes, then the token's and the channel's scale."""

from __future__ import annotations

from torch import Tensor


def w8a8_reference(
    codes_TK: Tensor,
    scale_T: Tensor,
    weight_codes_NK: Tensor,
    weight_scale_N: Tensor,
    bias_N: Tensor | None = None,
) -> Tensor:
    """[T, in] and [out, in] codes (int8 or e4m3) -> float32 [T, out]; sums in float64."""
    sums = codes_TK.double() @ weight_codes_NK.double().T
    y = sums.float() * scale_T[:, None] * weight_scale_N
    return y if bias_N is None else y + bias_N.float()
