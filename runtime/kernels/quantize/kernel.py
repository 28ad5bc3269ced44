"""Triton: one program quantizes one token. The row functions also serve the fused producers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.backend import KernelTarget

PIECE = 2048


@triton.jit
def scale_of(absmax, IS_FLOAT: tl.constexpr):
    """absmax / 448 (e4m3) or / 127.5 (int8), epsilon for zero."""
    limit = 448.0 if IS_FLOAT else 127.5
    scale = tl.div_rn(absmax, limit)
    return tl.where(scale == 0, 1.1920928955078125e-07, scale)


@triton.jit
def row_scale(x, IS_FLOAT: tl.constexpr):
    """The scale of one row: absmax / 448 (e4m3) or / 127.5 (int8), epsilon for a row of zeros.

    The maximum is taken over the bits: they order as the magnitudes do, and a NaN comes out on top.
    """
    absmax = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    return scale_of(absmax, IS_FLOAT)


@triton.jit
def divide_row(x, scale, USE_FMA: tl.constexpr):
    """x / scale rounded as IEEE division rounds it.

    With fused multiply-add: one division a row, then the quotient's remainder times the reciprocal
    corrects it (Markstein, IBM J. Res. Dev. 34(1), 1990). Tiny scales have no finite reciprocal.
    """
    scaled = x
    if USE_FMA:
        if scale < 1e-30:
            scaled = tl.div_rn(x, scale)
        else:
            reciprocal = tl.div_rn(1.0, scale)
            quotient = x * reciprocal
            remainder = tl.fma(-quotient, scale, x)
            scaled = tl.fma(remainder, reciprocal, quotient)
    else:
        scaled = tl.div_rn(x, scale)
    return scaled


@triton.jit
def row_codes(x, scale, IS_FLOAT: tl.constexpr, USE_FMA: tl.constexpr):
    """round_half_even(clamp(x / scale)) as e4m3 or int8 codes; `scale` is the row's `row_scale`.

    The quotients are within the codes' range by an ulp, which rounding takes back, but for the
    upper end of int8. Adding 1.5 * 2^23 rounds a float32 to an integer, ties to even, whose low
    byte is then the code.
    """
    scaled = divide_row(x, scale, USE_FMA)
    if IS_FLOAT:
        codes = scaled.to(tl.float8e4nv)
    else:
        shifted = tl.minimum(scaled, 127.0) + 12582912.0
        codes = shifted.to(tl.int32, bitcast=True).to(tl.int8)
    return codes


@triton.jit
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    width,
    BLOCK: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    USE_FMA: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(x, IS_FLOAT)
    tl.store(codes_ptr + row * width + columns, row_codes(x, scale, IS_FLOAT, USE_FMA), mask=mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def quantize_pieces_kernel(
    x_ptr,
    maxima_ptr,
    codes_ptr,
    scale_ptr,
    width,
    num_maxima,
    BLOCK: tl.constexpr,
    MAXIMA: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    USE_FMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """A piece of a row whose parts' largest magnitudes are known: maxima [T, num_maxima], bits, or
    where there are none the row itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    part = tl.arange(0, MAXIMA)
    is_part = part < num_maxima
    if maxima_ptr is None:
        scale = row_scale(
            tl.load(x_ptr + row * width + part, mask=is_part, other=0.0).to(tl.float32), IS_FLOAT
        )
    else:
        maxima = tl.load(maxima_ptr + row * num_maxima + part, mask=is_part, other=0)
        scale = scale_of(tl.max(maxima, axis=0).to(tl.float32, bitcast=True), IS_FLOAT)
    tl.store(codes_ptr + row * width + columns, row_codes(x, scale, IS_FLOAT, USE_FMA), mask=mask)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + row, scale)


def row_warps(block: int, per_thread: int = 8) -> int:
    """Warps for a program that holds `block` values, `per_thread` of them in a thread if it can."""
    return max(1, min(32, block // (32 * per_thread)))


def launch_quantize(x_TK: Tensor, codes_TK: Tensor, scale_T: Tensor, target: KernelTarget) -> None:
    """Fill `codes` [T, in] and `scale` [T] from contiguous `x` [T, in]."""
    num_rows, width = x_TK.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    quantize_kernel[(num_rows,)](
        x_TK,
        codes_TK,
        scale_T,
        width,
        BLOCK=block,
        IS_FLOAT=codes_TK.dtype != torch.int8,
        USE_FMA=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=row_warps(block, per_thread=16),
        **launch_options(target),
    )


def launch_quantize_pieces(
    x_TK: Tensor, maxima_TP: Tensor | None, codes_TK: Tensor, scale_T: Tensor, target: KernelTarget
) -> None:
    """Fill `codes` and `scale` from `x` [T, in] and the largest magnitudes of its parts [T, P], as
    the bits of float32 in int32. Several programs share a row, and only without `maxima` does each
    look at all of it."""
    num_rows, width = x_TK.shape
    num_maxima = width if maxima_TP is None else maxima_TP.shape[1]
    quantize_pieces_kernel[(num_rows, triton.cdiv(width, PIECE))](
        x_TK,
        maxima_TP,
        codes_TK,
        scale_T,
        width,
        num_maxima,
        BLOCK=PIECE,
        MAXIMA=triton.next_power_of_2(num_maxima),
        IS_FLOAT=codes_TK.dtype != torch.int8,
        USE_FMA=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=4 if maxima_TP is not None else row_warps(triton.next_power_of_2(width)),
        **launch_options(target),
    )


def launch_options(target: KernelTarget) -> dict[str, bool]:
    """What a launch says beside the tile: that the kernel waits for its inputs by itself (PDL)."""
    return {"launch_pdl": True} if target.has_pdl else {}
