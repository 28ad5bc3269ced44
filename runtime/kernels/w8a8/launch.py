"""Launches of W8A8 products. Imports triton: import it where a kernel is about to run."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quant.artifact.layout import FP8
from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.launch import PREFETCH_BYTES, exact_every
from runtime.kernels.dense.launch import launch as launch_product
from runtime.kernels.dense.product import Product, Tile
from runtime.kernels.quantize.kernel import launch_options, launch_quantize_pieces
from runtime.kernels.w8a8.kernel import gemm_gate_up, gemv_words


def launch(product: Product, tile: Tile, target: KernelTarget) -> Tensor:
    """The product [M, N]; one row has a kernel of its own, but for e4m3 without inline PTX."""
    is_float = product.w_NK.dtype == FP8
    assert is_float or product.w_NK.dtype == torch.int8
    if tile.kernel == "gemv" and (target.has_ptx or not is_float):
        out = product.new_out()
        launch_gemv_words(product, tile, out, None, target)
        return out
    return launch_product(product, tile, target)


def launch_gemv_words(
    product: Product, tile: Tile, out: Tensor, act: str | None, target: KernelTarget
) -> None:
    """Fill `out`; tile.block_k counts codes. With `act`, act(gate) * up of a weight gate | up."""
    _, num_channels, width = product.shape
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
        ACT=act,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        **launch_options(target),
    )


def launch_gate_up(
    product: Product,
    act: str,
    tile: Tile,
    codes: Tensor,
    scale_M: Tensor,
    target: KernelTarget,
) -> None:
    """act(gate) * up of a weight gate | up, quantized: `codes` [M, N / 2] and `scale` [M]."""
    shape = (product.shape[0], product.shape[1] // 2)
    gated, maxima = product.x_MK.new_empty(shape, dtype=product.dtype), None
    if tile.kernel == "gemv":
        launch_gemv_words(product, tile, gated, act, target)
    else:
        maxima = launch_gemm_gate_up(product, tile, gated, act, target)
    launch_quantize_pieces(gated, maxima, codes, scale_M, target)


def launch_gemm_gate_up(
    product: Product, tile: Tile, out: Tensor, act: str, target: KernelTarget
) -> Tensor:
    """Fill `out` [M, N / 2]; the bits of the largest magnitudes [M, tiles]."""
    num_rows, num_channels, width = product.shape
    num_tiles = num_channels // tile.block_n
    maxima = out.new_empty(num_rows, num_tiles, dtype=torch.int32)
    gemm_gate_up[(num_tiles * triton.cdiv(num_rows, tile.block_m),)](
        product.x_MK,
        product.w_NK,
        out,
        maxima,
        product.row_scale_M,
        product.channel_scale_N,
        num_rows,
        num_channels,
        width,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        EXACT_EVERY=exact_every(product, tile),
        PREFETCH=PREFETCH_BYTES,
        EVEN_K=width % tile.block_k == 0,
        ACT=act,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(target),
    )
    return maxima
