"""Launches of the matrix kernels. Imports triton: import it where a kernel is about to run."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quant.artifact.layout import FP8
from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.kernel import gemm, gemm_tma, gemv
from runtime.kernels.dense.product import Product, Tile
from runtime.kernels.quantize.kernel import launch_options

# Columns of e4m3 products that may be added inside the tensor cores of sm_90 before the sum moves
# to float32.
EXACT_EVERY = 128
PREFETCH_BYTES = 1024
GROUP_M = 8


def launch(product: Product, tile: Tile, target: KernelTarget) -> Tensor:
    """The product [M, N] by the kernel that `tile` names ("torch" is not one of them)."""
    out = product.new_out()
    if out.numel() == 0:
        return out
    {"gemv": launch_gemv, "gemm": launch_gemm, "tma": launch_tma}[tile.kernel](
        product, tile, out, target
    )
    return out


def launch_gemv(product: Product, tile: Tile, out: Tensor, target: KernelTarget) -> None:
    num_rows, num_channels, width = product.shape
    assert num_rows == 1
    gemv[(triton.cdiv(num_channels, tile.block_n),)](
        product.x_MK,
        product.w_NK,
        out,
        product.row_scale_M,
        product.channel_scale_N,
        product.bias_N,
        num_channels,
        width,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        **launch_options(target),
    )


def launch_gemm(product: Product, tile: Tile, out: Tensor, target: KernelTarget) -> None:
    num_rows, num_channels, width = product.shape
    split_k, splits, num_tiles = shares(product, tile)
    partials, counters = scratch(product, splits, num_tiles, tile)
    row_bytes = width * product.w_NK.element_size()
    gemm[(num_tiles * splits,)](
        product.x_MK,
        product.w_NK,
        out,
        partials,
        counters,
        product.row_scale_M,
        product.channel_scale_N,
        product.bias_N,
        num_rows,
        num_channels,
        width,
        split_k,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        SPLITS=splits,
        EXACT_EVERY=exact_every(product, tile),
        PREFETCH=PREFETCH_BYTES if row_bytes % 16 == 0 and num_rows <= 256 else 0,
        EVEN_K=width % tile.block_k == 0,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(target),
    )


def shares(product: Product, tile: Tile) -> tuple[int, int, int]:
    """(columns of K a split takes, splits that have any, tiles of the result)."""
    num_rows, num_channels, width = product.shape
    split_k = triton.cdiv(triton.cdiv(width, tile.block_k), tile.splits) * tile.block_k
    num_tiles = triton.cdiv(num_channels, tile.block_n) * triton.cdiv(num_rows, tile.block_m)
    return split_k, triton.cdiv(width, split_k), num_tiles


def scratch(
    product: Product, splits: int, num_tiles: int, tile: Tile
) -> tuple[Tensor | None, Tensor | None]:
    """Partial sums (in the type they are added in) and counters of a split product."""
    if splits == 1:
        return None, None
    workspace = product.options.workspace
    partials = workspace.partials(splits * num_tiles * tile.block_n * tile.block_m)
    if product.w_NK.dtype == torch.int8:
        partials = partials.view(torch.int32)
    return partials, workspace.counters(num_tiles)


def exact_every(product: Product, tile: Tile) -> int | None:
    return min(EXACT_EVERY, tile.block_k) if product.w_NK.dtype == FP8 else None


def launch_tma(product: Product, tile: Tile, out: Tensor, target: KernelTarget) -> None:
    num_rows, num_channels, width = product.shape
    split_k, splits, num_tiles = shares(product, tile)
    partials, counters = scratch(product, splits, num_tiles, tile)
    num_units = num_tiles * splits
    num_programs = min(num_units, tile.per_sm * target.num_sms)
    gemm_tma[(num_programs,)](
        TensorDescriptor.from_tensor(product.x_MK, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(product.w_NK, [tile.block_n, tile.block_k]),
        product.w_NK,
        out,
        partials,
        counters,
        product.row_scale_M,
        product.channel_scale_N,
        product.bias_N,
        num_rows,
        num_channels,
        width,
        split_k,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=GROUP_M,
        SPLITS=splits,
        EXACT_EVERY=exact_every(product, tile),
        PREFETCH=PREFETCH_BYTES if num_rows <= 256 else 0,
        IS_INT=product.w_NK.dtype == torch.int8,
        IS_SWAPPED=tile.block_m < 64,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(target),
    )
