"""Triton: what lies between two products of a weight that is dequantized slice by slice."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.kernels.gate.kernel import activate
from runtime.kernels.w4a16.kernel_parts import (
    ROWS,
    excess,
    load_group,
    offset_of,
    scaled,
    unpack_plane,
)


@triton.jit(do_not_specialize=["num_tokens", "gate_programs", "first", "num_rows", "turn", "jump"])
def slice_kernel(
    pairs_ptr,
    gated_ptr,
    num_tokens,
    width,
    gated_stride,
    gate_programs,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    matrix_ptr,
    first,
    num_rows,
    turn,
    jump,
    K,
    num_kb,
    ACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Two parts that share nothing, side by side in one launch: the first `gate_programs` write
    act(gate) * up of pairs [num_tokens, 2 width] to gated (rows gated_stride apart), the others the
    weight rows of a slice to matrix [num_rows, K] in its dtype.

    Row r of the slice is row first + r of the weight, from `turn` on jump rows further.
    """
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if pairs_ptr is not None:  # noqa: SIM102 - the outer condition is decided when compiling
        if program < gate_programs:
            gate_tile(
                pairs_ptr, gated_ptr, num_tokens, width, gated_stride, program,
                ACT, BLOCK_T, BLOCK_W, USE_PTX, PDL,
            )  # fmt: skip
    if matrix_ptr is not None:  # noqa: SIM102
        if program >= gate_programs:
            dequantize_tile(
                codes_ptr, scale_ptr, zero_ptr, matrix_ptr, first, num_rows, turn, jump, K, num_kb,
                program - gate_programs, BLOCK_N, BLOCK_K, GROUPS, USE_PTX, PDL,
            )  # fmt: skip


@triton.jit
def gate_tile(
    pairs_ptr,
    gated_ptr,
    num_tokens,
    width,
    gated_stride,
    tile,
    ACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """act(gate) * up of BLOCK_T tokens and BLOCK_W columns."""
    across = tl.cdiv(width, BLOCK_W)
    tokens = tile // across * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tile % across * BLOCK_W + tl.arange(0, BLOCK_W)
    ok = (tokens < num_tokens)[:, None] & (columns < width)[None, :]
    at = pairs_ptr + tokens.to(tl.int64)[:, None] * (2 * width) + columns[None, :]
    if PDL:
        gdc_wait()
    gate = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=ok, other=0.0).to(tl.float32)
    product = (activate(gate, ACT, USE_PTX) * up).to(gated_ptr.dtype.element_ty)
    out = gated_ptr + tokens.to(tl.int64)[:, None] * gated_stride + columns[None, :]
    tl.store(out, product, mask=ok)


@triton.jit
def dequantize_tile(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    matrix_ptr,
    first,
    num_rows,
    turn,
    jump,
    K,
    num_kb,
    tile,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N rows of one K-block. What is read is constant; only writing waits for others."""
    dtype: tl.constexpr = matrix_ptr.dtype.element_ty
    EXCESS: tl.constexpr = excess(dtype == tl.bfloat16, USE_PTX)
    WIDTH: tl.constexpr = BLOCK_K // 4
    kb = tile % num_kb
    to = tile // num_kb * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = first + to + tl.where(to < turn, 0, jump)
    k = tl.arange(0, WIDTH)
    row_ok = to < num_rows
    block = (rows // ROWS).to(tl.int64)
    at = (block * num_kb + kb) * (ROWS * WIDTH) + rows % ROWS * WIDTH
    words = tl.load(codes_ptr + at[:, None] + k[None, :], mask=row_ok[:, None], other=0)
    num_groups = num_kb * GROUPS if GROUPS > 0 else 1
    group = block * num_groups * ROWS + rows % ROWS
    SYMMETRIC: tl.constexpr = zero_ptr is None
    out = matrix_ptr + to.to(tl.int64)[:, None] * K + kb * BLOCK_K + k[None, :]
    if PDL:
        gdc_wait()
    for p in tl.static_range(4):
        s = load_group(scale_ptr + group, kb, p * GROUPS // 4, GROUPS, row_ok)
        z = s
        if not SYMMETRIC:
            z = load_group(zero_ptr + group, kb, p * GROUPS // 4, GROUPS, row_ok)
        offset = offset_of(z, SYMMETRIC, EXCESS)[:, None]
        w = scaled(unpack_plane(words, p, dtype, USE_PTX) - offset.to(dtype), s[:, None])
        k_ok = kb * BLOCK_K + p * WIDTH + k < K
        tl.store(out + p * WIDTH, w, mask=row_ok[:, None] & k_ok[None, :])
