"""Launches of W8A8 products. Imports triton: import it where a kernel is about to run."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quant.artifact.layout import FP8
from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.launch import launch as launch_product
from runtime.kernels.dense.product import Product, Tile
from runtime.kernels.quantize.kernel import launch_options
from runtime.kernels.w8a8.kernel import gemv_words


def launch(product: Product, tile: Tile, target: KernelTarget) -> Tensor:
    """The product [M, N]; one row has a kernel of its own, but for e4m3 without inline PTX."""
    is_float = product.w_NK.dtype == FP8
    assert is_float or product.w_NK.dtype == torch.int8
    if tile.kernel == "gemv" and (target.has_ptx or not is_float):
        return launch_gemv_words(product, tile, target)
    return launch_product(product, tile, target)


def launch_gemv_words(product: Product, tile: Tile, target: KernelTarget) -> Tensor:
    """tile.block_k counts codes, four to a word."""
    _, num_channels, width = product.shape
    out = product.new_out()
    gemv_words[(triton.cdiv(num_channels, tile.block_n),)](
        product.x_MK.view(torch.int32),
        product.w_NK.view(torch.int32),
        out,
        product.row_scale_M,
        product.channel_scale_N,
        product.bias_N,
        num_channels,
        width,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k // 4,
        IS_FLOAT=product.w_NK.dtype == FP8,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        **launch_options(target),
    )
    return out
