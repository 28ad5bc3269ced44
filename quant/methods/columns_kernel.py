"""Triton: one launch rounds a block of columns, where `columns.sweep_reference` makes ten a column.

Rows are independent, so each program takes a tile of them, holds the block's columns in registers
and goes through them in order. Every operation rounds as its torch twin does.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.artifact.layout import code_range
from quant.methods.columns import KERNEL_COLUMNS, Grid

ROWS = 16
# As in `runtime.kernels`, which is not known here: Triton 3.10 would no longer fuse.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@triton.jit
def round_even(x):
    """The nearest integer of |x| < 2^22, ties to even: 1.5 * 2^23 leaves no bit for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_e4m3(x):
    """The nearest e4m3 number of |x| <= 448, ties to even, on every card and as float32.

    Its three bits of mantissa are worth 2^(exponent - 3), and no less than 2^-9.
    """
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    step_bits = (tl.maximum(exponent, 121) - 3) << 23
    step = step_bits.to(tl.float32, bitcast=True)
    return round_even(tl.div_rn(x, step)) * step


@triton.jit
def sweep_kernel(
    block_ptr,
    local_ptr,
    groups_ptr,
    scale_ptr,
    zero_ptr,
    is_zero_ptr,
    present_ptr,
    codes_ptr,
    pushed_ptr,
    num_rows,
    num_columns,
    local_stride,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    columns = tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    remaining = tl.load(
        block_ptr + columns[:, None] * num_rows + rows[None, :],
        mask=is_column[:, None] & is_row[None, :],
        other=0.0,
    )
    for i in range(num_columns):
        factor = tl.load(local_ptr + i * local_stride + columns, mask=is_column, other=0.0)
        diagonal = tl.load(local_ptr + i * local_stride + i)
        at = tl.load(groups_ptr + i) * num_rows + rows
        scale = tl.load(scale_ptr + at, mask=is_row, other=1.0)
        is_zero = tl.load(is_zero_ptr + at, mask=is_row, other=0) != 0
        zero = tl.zeros([ROWS], tl.float32)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + at, mask=is_row, other=0).to(tl.float32)
        own = i * num_rows + rows
        taken = tl.sum(tl.where(columns[:, None] == i, remaining, 0.0), axis=0)
        target = taken
        if present_ptr is not None:
            present = tl.load(present_ptr + own, mask=is_row, other=0.0)
            target = present + tl.div_rn(taken, diagonal)
        shifted = tl.div_rn(target, scale.to(tl.float32)) + zero
        codes = tl.minimum(tl.maximum(shifted, LOW), HIGH)
        codes = round_e4m3(codes) if IS_FLOAT else round_even(codes)
        codes = tl.where(is_zero, zero, codes)
        # Exact in float32, as both factors have few bits: one rounding, to the scale's dtype.
        value = ((codes - zero) * scale.to(tl.float32)).to(scale.dtype).to(tl.float32)
        if present_ptr is not None:  # noqa: SIM108 - only one branch is compiled
            pushed = value - present
        else:
            pushed = tl.div_rn(target - value, diagonal)
        tl.store(codes_ptr + own, codes, mask=is_row)
        tl.store(pushed_ptr + own, pushed, mask=is_row)
        remaining -= factor[:, None] * pushed[None, :]


def launch_sweep(
    block: Tensor, local: Tensor, groups: Tensor, grid: Grid, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`columns.sweep_reference` of at most KERNEL_COLUMNS columns; `block` is left as it was."""
    num_columns, num_rows = block.shape
    assert num_columns <= KERNEL_COLUMNS
    tensors = [block, grid.scale, grid.is_zero, groups, *(() if present is None else (present,))]
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert local.stride(1) == 1
    codes, pushed = torch.empty_like(block), torch.empty_like(block)
    low, high = code_range(grid.scheme)
    sweep_kernel[triton.cdiv(num_rows, ROWS),](
        block, local, groups, grid.scale, grid.zero_point, grid.is_zero, present, codes, pushed,
        num_rows, num_columns, local.stride(0), LOW=low, HIGH=high,
        IS_FLOAT=grid.scheme.kind == "float", COLUMNS=KERNEL_COLUMNS, ROWS=ROWS, num_warps=1,
    )  # fmt: skip
    return codes, pushed
