"""Triton: RMSNorm of one token per program, with the residual and the quantization fused in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.backend import KernelTarget
from runtime.kernels.quantize.kernel import launch_options, row_codes, row_scale, row_warps


@triton.jit
def prefetch_row(row_ptr, width, BLOCK: tl.constexpr):
    """Ask L2 for a row of 16-bit numbers, a line of 128 bytes at a time. A hint: whoever still
    writes the row writes it there."""
    line = tl.minimum(tl.arange(0, triton.cdiv(BLOCK, 64)) * 64, width - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [(row_ptr + line).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    scale_ptr,
    x_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    USE_FMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """What is quantized is the normed row rounded to x's type, as if it had been stored."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if PDL:
        if HAS_RESIDUAL:
            # Stored before the layer's weights or keys went through the L2: out in memory by now.
            prefetch_row(residual_ptr + row * width, width, BLOCK)
        tl.extra.cuda.gdc_wait()
    stored = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * width + columns, mask=mask, other=0.0)
        stored = (residual.to(tl.float32) + stored.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + row * width + columns, stored, mask=mask)
    x = stored.to(tl.float32)
    mean = tl.sum(x * x, axis=0) / width
    normed = (x * tl.rsqrt(mean + eps) * weight).to(x_ptr.dtype.element_ty)
    if IS_QUANTIZED:
        normed = normed.to(tl.float32)
        scale = row_scale(normed, IS_FLOAT)
        codes = row_codes(normed, scale, IS_FLOAT, USE_FMA)
        tl.store(out_ptr + row * width + columns, codes, mask=mask)
        tl.store(scale_ptr + row, scale)
    else:
        tl.store(out_ptr + row * width + columns, normed, mask=mask)


def launch_rms_norm(
    x_TE: Tensor,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    eps: float,
    out_TE: Tensor,
    residual_out_TE: Tensor | None,
    scale_T: Tensor | None,
    target: KernelTarget,
) -> None:
    """Fill `out` (codes where there are scales) and the new residual from `x` [T, n].

    Rows of `x` may lie apart (a stride); everything else is contiguous.
    """
    num_rows, width = x_TE.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(num_rows,)](
        x_TE,
        residual_TE,
        weight_E,
        out_TE,
        residual_out_TE,
        scale_T,
        x_TE.stride(0),
        width,
        eps,
        BLOCK=block,
        HAS_RESIDUAL=residual_TE is not None,
        IS_QUANTIZED=scale_T is not None,
        IS_FLOAT=out_TE.dtype != torch.int8,
        USE_FMA=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=row_warps(block),
        **launch_options(target),
    )
