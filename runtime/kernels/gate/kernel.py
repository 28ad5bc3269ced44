"""Triton: act(gate) * up, a token per program where it quantizes, a piece of one where not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.backend import KernelTarget
from runtime.kernels.quantize.kernel import launch_options, row_codes, row_scale, row_warps

PIECE = 1024


@triton.jit
def sigmoid(x, USE_PTX: tl.constexpr):
    """1 / (1 + e^-x); with PTX by the approximate reciprocal, which is within an ulp."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [1.0 + tl.exp(-x)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.sigmoid(x)


@triton.jit
def activate(x, ACT: tl.constexpr, USE_PTX: tl.constexpr = False):
    """silu, gelu_tanh or gelu of float32 values."""
    if ACT == "silu":
        return x * sigmoid(x, USE_PTX)
    if ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * sigmoid(2.0 * inner, USE_PTX)


@triton.jit
def gate_kernel(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    width,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """What is quantized is the product rounded to the input's type, as if it had been stored."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate_at = gate_up_ptr + row * 2 * width + columns
    first = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(gate_at + width, mask=mask, other=0.0).to(tl.float32)
    product = (activate(first, ACT, USE_PTX) * second).to(gate_up_ptr.dtype.element_ty)
    if IS_QUANTIZED:
        product = product.to(tl.float32)
        scale = row_scale(product, IS_FLOAT)
        codes = row_codes(product, scale, IS_FLOAT, USE_PTX)
        tl.store(out_ptr + row * width + columns, codes, mask=mask)
        tl.store(scale_ptr + row, scale)
    else:
        tl.store(out_ptr + row * width + columns, product, mask=mask)


def launch_gate(
    gate_up: Tensor, act: str, out: Tensor, scale_T: Tensor | None, target: KernelTarget
) -> None:
    """Fill `out` [T, n] (codes where there are scales) from contiguous `gate_up` [T, 2 n]."""
    num_rows, width = out.shape
    if num_rows == 0:
        return
    is_quantized = scale_T is not None
    block = triton.next_power_of_2(width)
    block = block if is_quantized else min(block, PIECE)
    gate_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up,
        out,
        scale_T,
        width,
        ACT=act,
        BLOCK=block,
        IS_QUANTIZED=is_quantized,
        IS_FLOAT=out.dtype != torch.int8,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=row_warps(block) if is_quantized else max(1, block // 256),
        **launch_options(target),
    )
