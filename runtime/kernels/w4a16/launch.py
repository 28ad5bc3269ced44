"""Launches of the W4A16 kernels. Runs on a CUDA or ROCm device, or in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.backend import KernelTarget, target_of
from runtime.kernels.w4a16.many import multiply_many
from runtime.kernels.w4a16.pack import ROWS, W4A16Weight
from runtime.kernels.w4a16.tile import Tile, num_whole_tiles
from runtime.kernels.w4a16.wide import launch_wide


def launch(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, tile: Tile, act: str | None = None
) -> Tensor:
    """x_TK [T, in] contiguous in the weight's compute type -> [T, out], by the tile given.

    With `act` the weight is gate | up and the result [T, out / 2] is act(gate) * up: "wide" only,
    where it `gates`.
    """
    assert act is None or tile.kernel == "wide"
    width = weight.shape[0] if act is None else weight.shape[0] // 2
    out_TN = torch.empty(x_TK.shape[0], width, dtype=x_TK.dtype, device=x_TK.device)
    if tile.kernel == "dense":
        multiply_many(x_TK, weight, bias, out_TN)
    elif tile.kernel == "gemv":
        _launch_gemv(x_TK, weight, bias, out_TN, tile)
    elif tile.kernel == "few":
        _launch_few(x_TK, weight, bias, out_TN, tile)
    elif tile.kernel == "warp":
        _launch_warp(x_TK, weight, bias, out_TN, tile)
    elif tile.kernel == "wide":
        launch_wide(x_TK, weight, bias, out_TN, tile, act)
    else:
        _launch_tile(x_TK, weight, bias, out_TN, tile)
    return out_TN


def _launch_gemv(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, out_TN: Tensor, tile: Tile
) -> None:
    from runtime.kernels.w4a16.gemv import gemv_kernel

    (num_rows, width), target = x_TK.shape, target_of(x_TK.device)
    assert num_rows == 1
    assert width % 2 == 0
    gemv_kernel[(weight.codes.shape[0] * (ROWS // tile.block_n),)](
        *(x_TK, weight.codes.view(torch.int32), weight.scale, weight.zero_point, bias, out_TN),
        *(weight.shape[0], width, weight.num_blocks),
        BLOCK_N=tile.block_n,
        BLOCK_K=weight.block_k,
        KBS=tile.k_blocks,
        GROUPS=weight.groups_per_block,
        EVEN_K=width % weight.block_k == 0,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if target.has_pdl else {}),
    )


def _launch_few(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, out_TN: Tensor, tile: Tile
) -> None:
    from runtime.kernels.w4a16.few import few_rows

    (num_rows, width), target = x_TK.shape, target_of(x_TK.device)
    assert num_rows <= tile.block_m
    n_tiles = -(-weight.shape[0] // tile.block_n)
    partials, counters = _scratch(weight, n_tiles, tile)
    blocks = weight.num_blocks
    turn = tile.split_k * (tile.num_warps // tile.row_warps) * tile.k_blocks
    few_rows[n_tiles, tile.split_k](
        *(x_TK, weight.codes, weight.scale, weight.zero_point, bias, out_TN, partials, counters),
        *(num_rows, weight.shape[0], width, blocks),
        BLOCK_M=tile.block_m,
        TILES=tile.block_n // (ROWS * tile.row_warps),
        BLOCK_K=weight.block_k,
        WARPS=tile.num_warps,
        ACROSS=tile.row_warps,
        STEP=tile.k_blocks,
        AHEAD=tile.num_stages == 2,
        STAGES=tile.num_stages if tile.num_stages > 2 else 1,
        GROUPS=weight.groups_per_block,
        CENTERED=tile.scaling == "centered",
        SPLIT_K=tile.split_k,
        EVEN_K=width % weight.block_k == 0,
        WHOLE=blocks % turn == 0,
        ONCE=blocks <= turn,
        PREFETCH=tile.prefetch if target.has_pdl else 0,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_options(target, tile),
    )


def _launch_tile(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, out_TN: Tensor, tile: Tile
) -> None:
    from runtime.kernels.w4a16.kernel import tile_kernel

    (num_rows, width), target = x_TK.shape, target_of(x_TK.device)
    m_tiles, n_tiles = -(-num_rows // tile.block_m), -(-weight.shape[0] // tile.block_n)
    tiles = m_tiles * n_tiles
    whole = num_whole_tiles(tiles, target.num_sms, tile)
    partials, counters = _scratch(weight, tiles - whole, tile)
    tile_kernel[(whole + (tiles - whole) * tile.split_k,)](
        *(x_TK, weight.codes, weight.scale, weight.zero_point, bias, out_TN, partials, counters),
        *(num_rows, weight.shape[0], width, weight.num_blocks, m_tiles, whole),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=weight.block_k,
        GROUPS=weight.groups_per_block,
        SCALING=tile.scaling,
        JOIN=tile.join,
        STAGED=_is_staged(weight, tile),
        SPLIT_K=tile.split_k,
        EVEN_K=width % weight.block_k == 0,
        EVEN_N=weight.codes.shape[0] * ROWS % tile.block_n == 0,
        STAGES=tile.num_stages,
        PREFETCH_KB=tile.prefetch if target.has_pdl else 0,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_options(target, tile),
    )


def _launch_warp(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, out_TN: Tensor, tile: Tile
) -> None:
    from runtime.kernels.w4a16.kernel import warp_kernel

    (num_rows, width), target = x_TK.shape, target_of(x_TK.device)
    assert num_rows <= tile.block_m
    n_tiles, shares = -(-weight.shape[0] // tile.block_n), tile.split_k * tile.num_warps
    partials, counters = _scratch(weight, n_tiles, tile)
    warp_kernel[n_tiles, tile.split_k](
        *(x_TK, weight.codes, weight.scale, weight.zero_point, bias, out_TN, partials, counters),
        *(num_rows, weight.shape[0], width, weight.num_blocks),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=weight.block_k,
        WARPS=tile.num_warps,
        GROUPS=weight.groups_per_block,
        SPLIT_K=tile.split_k,
        EVEN_K=width % weight.block_k == 0 and weight.num_blocks % shares == 0,
        EVEN_N=weight.codes.shape[0] * ROWS % tile.block_n == 0,
        STAGES=tile.num_stages,
        PREFETCH_KB=tile.prefetch if target.has_pdl else 0,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_options(target, tile),
    )


def _is_staged(weight: W4A16Weight, tile: Tile) -> bool:
    """Scales of a tile with fewer threads than rows would cross layouts in every K-block."""
    return tile.block_n >= 32 * tile.num_warps and weight.scale.element_size() == 2


def _options(target: KernelTarget, tile: Tile) -> dict[str, int | bool]:
    """Launch options that only some targets know."""
    options: dict[str, int | bool] = {"launch_pdl": True} if target.has_pdl else {}
    if tile.max_registers and target.has_ptx:
        options["maxnreg"] = tile.max_registers
    return options


def _scratch(weight: W4A16Weight, tiles: int, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
    if tile.split_k == 1:
        return None, None
    workspace = weight.options.workspace
    size = tiles * tile.split_k * tile.block_m * tile.block_n
    return workspace.partials(size), workspace.counters(tiles)
