"""`store_drawn` in Triton: one program for all rows, the last kernel of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.store_drawn.reference import FAULTY as FAULTY_ID

BLOCK = 256


@triton.jit
def store_drawn_kernel(
    ids_ptr,
    is_finite_ptr,
    slots_ptr,
    last_tokens_ptr,
    out_ptr,
    num_rows,
    FAULTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    ids = tl.load(ids_ptr + rows, mask=is_row, other=0)
    is_finite = tl.load(is_finite_ptr + rows, mask=is_row, other=0)
    slots = tl.load(slots_ptr + rows, mask=is_row, other=-1)
    tl.store(last_tokens_ptr + slots, ids, mask=is_row & (slots >= 0))
    tl.store(out_ptr + rows, tl.where(is_finite != 0, ids, FAULTY), mask=is_row)


def store_drawn_triton(
    ids_R: torch.Tensor,
    is_finite_R: torch.Tensor,
    slots_R: torch.Tensor,
    last_tokens_N: torch.Tensor,
    out_R: torch.Tensor,
) -> None:
    """See `runtime.kernels.store_drawn.store_drawn`."""
    num_rows = len(ids_R)
    store_drawn_kernel[(triton.cdiv(num_rows, BLOCK),)](
        ids_R,
        is_finite_R.view(torch.uint8),
        slots_R,
        last_tokens_N,
        out_R,
        num_rows,
        FAULTY=FAULTY_ID,
        BLOCK=BLOCK,
        num_warps=4,
    )
