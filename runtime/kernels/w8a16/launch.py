"""Launches of W8A16 products. Imports triton: import it where a kernel is about to run."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from runtime.kernels.backend import KernelTarget
from runtime.kernels.dense.launch import PREFETCH_BYTES
from runtime.kernels.dense.product import Tile
from runtime.kernels.quantize.kernel import launch_options
from runtime.kernels.w8a16.kernel import dequantize_w8a16, gemm_w8a16, gemv_w8a16
from runtime.kernels.w8a16.pack import W8A16Weight


def launch(
    x_TK: Tensor, weight: W8A16Weight, bias_N: Tensor | None, tile: Tile, target: KernelTarget
) -> Tensor:
    """The product [T, out] by the kernel that `tile` names ("torch" is not one of them)."""
    out = x_TK.new_empty(x_TK.shape[0], weight.shape[0])
    if out.numel() == 0:
        return out
    run = launch_gemv if tile.kernel == "gemv" else launch_gemm
    run(x_TK, weight, bias_N, tile, out, target)
    return out


def launch_gemv(
    x_TK: Tensor,
    weight: W8A16Weight,
    bias_N: Tensor | None,
    tile: Tile,
    out: Tensor,
    target: KernelTarget,
) -> None:
    assert x_TK.shape[0] == 1
    num_channels, width = weight.shape
    gemv_w8a16[(triton.cdiv(num_channels, tile.block_n),)](
        x_TK,
        weight.words,
        out,
        weight.scale,
        weight.zero_point,
        bias_N,
        num_channels,
        width,
        BLOCK_N=tile.block_n,
        BLOCK_K=max(tile.block_k, weight.block),
        BLOCK=weight.block,
        GROUP=weight.group,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        **launch_options(target),
    )


def launch_gemm(
    x_TK: Tensor,
    weight: W8A16Weight,
    bias_N: Tensor | None,
    tile: Tile,
    out: Tensor,
    target: KernelTarget,
) -> None:
    num_rows = x_TK.shape[0]
    num_channels, width = weight.shape
    split_k = triton.cdiv(width // weight.block, tile.splits) * weight.block
    splits = triton.cdiv(width, split_k)
    num_tiles = triton.cdiv(num_channels, tile.block_n) * triton.cdiv(num_rows, tile.block_m)
    workspace = weight.options.workspace
    size = splits * num_tiles * tile.block_n * tile.block_m
    gemm_w8a16[(num_tiles * splits,)](
        x_TK,
        weight.words,
        out,
        workspace.partials(size) if splits > 1 else None,
        workspace.counters(num_tiles) if splits > 1 else None,
        weight.scale,
        weight.zero_point,
        bias_N,
        num_rows,
        num_channels,
        width,
        split_k,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        BLOCK=weight.block,
        SPLITS=splits,
        GROUP=weight.group,
        PREFETCH=PREFETCH_BYTES if num_rows <= 256 else 0,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(target),
    )


def dequantize(weight: W8A16Weight) -> Tensor:
    """The weight [out, in] in the compute type."""
    num_channels, width = weight.shape
    out = torch.empty((num_channels, width), dtype=weight.dtype, device=weight.words.device)
    words = 512
    dequantize_w8a16[(num_channels, triton.cdiv(width // 2, words))](
        weight.words,
        weight.scale,
        weight.zero_point,
        out,
        width,
        WORDS=words,
        BLOCK=weight.block,
        GROUP=weight.group,
        num_warps=4,
    )
    return out
