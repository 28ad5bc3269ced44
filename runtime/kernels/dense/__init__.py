"""Our own matrix product over dense weights [out, in], where it serves better than the library's.

For one row (a GEMV that streams the weights: a wide lm_head is mostly this), and in deterministic
mode for every number of rows: one tile, so that a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runtime.kernels.backend import KernelTarget, target_of, uses_triton
from runtime.kernels.dense.choose import fixed_tile, gemv_tile, measured_tile
from runtime.kernels.dense.product import Product, Tile
from runtime.kernels.workspace import KernelOptions

__all__ = ["dense_linear"]

LIBRARY = Tile(kernel="torch")


def dense_linear(
    x_TK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    options: KernelOptions,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x` [T, in] times `w` [out, in], both in the compute type, + bias [out] -> [T, out].

    `out_dtype`: the result's, float32 sums unrounded; None is x's.
    """
    dtype = out_dtype or x_TK.dtype
    tile = choose_tile(x_TK, w_NK, options)
    if tile.kernel == "torch":
        return _library(x_TK, w_NK, bias_N, dtype)
    from runtime.kernels.dense.launch import launch

    product = Product(
        x_MK=x_TK.contiguous(), w_NK=w_NK, dtype=dtype, options=options, bias_N=bias_N
    )
    return launch(product, tile, target_of(x_TK.device))


def _library(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype == x_TK.dtype:
        return functional.linear(x_TK, w_NK, bias_N)
    if not x_TK.is_cuda:
        return functional.linear(x_TK, w_NK, bias_N).to(dtype)
    sums = torch.mm(x_TK, w_NK.T, out_dtype=dtype)
    return sums if bias_N is None else sums + bias_N


def choose_tile(x_TK: Tensor, w_NK: Tensor, options: KernelOptions) -> Tile:
    if not uses_triton(x_TK.device) or x_TK.dtype == torch.float32:
        return LIBRARY
    target: KernelTarget = target_of(x_TK.device)
    if options.deterministic:
        return fixed_tile(w_NK.element_size(), target)
    shape = (x_TK.shape[0], w_NK.shape[0], w_NK.shape[1])
    found = measured_tile("dense", shape, target)
    if found is not None:
        return found
    return gemv_tile(w_NK.shape[1], w_NK.element_size()) if shape[0] == 1 else LIBRARY
