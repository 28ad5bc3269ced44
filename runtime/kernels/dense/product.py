"""What the matrix kernels are asked for, and by which of them: values, no launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from runtime.kernels.workspace import KernelOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """out = (x W^T) * row_scale * channel_scale + bias, operands of one dtype and K-contiguous.

    Attributes:
        x_MK, w_NK: operands: bfloat16, float16, float32, int8 or float8_e4m3fn.
        dtype: the result's.
        row_scale_M, channel_scale_N: float32, both or neither.
        bias_N: of any floating dtype.
    """

    x_MK: Tensor
    w_NK: Tensor
    dtype: torch.dtype
    options: KernelOptions
    row_scale_M: Tensor | None = None
    channel_scale_N: Tensor | None = None
    bias_N: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.x_MK.shape[0], self.w_NK.shape[0], self.w_NK.shape[1]

    def new_out(self) -> Tensor:
        return self.x_MK.new_empty(self.x_MK.shape[0], self.w_NK.shape[0], dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Which kernel computes a product, in blocks of what size.

    gemv: one row; blocks of block_n channels by block_k columns. gemm: blocks of block_n by
    block_m, K in `splits` parts. tma: the same through the copy engine, `per_sm` programs on each
    multiprocessor. torch: the library's own matmul, to which sizes mean nothing.
    """

    kernel: Literal["gemv", "gemm", "tma", "torch"]
    block_n: int = 0
    block_m: int = 0
    block_k: int = 0
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
    per_sm: int = 1
