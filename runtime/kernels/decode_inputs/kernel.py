"""`decode_inputs` in Triton: one program a row.

The first kernel of a captured step. It reads what the step before wrote last (the drawn tokens),
so it is launched as an ordinary dependent, and lets the kernel behind it start early.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # of a block table, copied at once


@triton.jit
def decode_inputs_kernel(
    rows_ptr,
    tables_ptr,
    last_tokens_ptr,
    num_generated_ptr,
    token_ids_ptr,
    positions_ptr,
    kv_slots_ptr,
    slots_ptr,
    seq_lens_ptr,
    out_tables_ptr,
    num_columns,
    count_stride,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row * ROW_WIDTH).to(tl.int64)
    position = tl.load(rows_ptr + row * ROW_WIDTH + 1)
    block = tl.load(rows_ptr + row * ROW_WIDTH + 2)
    token = tl.load(rows_ptr + row * ROW_WIDTH + 3)
    count = tl.load(rows_ptr + row * ROW_WIDTH + 4)
    is_live = position >= 0
    held = tl.load(last_tokens_ptr + slot, mask=is_live & (token < 0), other=0)
    token = tl.where(token < 0, held, token)
    known = tl.maximum(position, 0)
    kv_slot = block.to(tl.int64) * BLOCK_SIZE + known % BLOCK_SIZE
    tl.store(token_ids_ptr + row, tl.where(is_live, token, 0).to(tl.int64))
    tl.store(positions_ptr + row, known.to(tl.int64))
    tl.store(kv_slots_ptr + row, tl.where(is_live, kv_slot, -1))
    tl.store(slots_ptr + row, tl.where(is_live, slot, -1).to(tl.int32))
    tl.store(seq_lens_ptr + row, position + 1)
    tl.store(num_generated_ptr + slot * count_stride, count, mask=is_live)
    column = known // BLOCK_SIZE
    tl.store(tables_ptr + slot * num_columns + column, block, mask=is_live)
    num_held = tl.where(is_live, column + 1, 0)
    for start in range(0, num_held, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        # The row's own block was stored above by this very program; it is not read back.
        blocks = tl.load(
            tables_ptr + slot * num_columns + columns, mask=columns < num_held - 1, other=0
        )
        blocks = tl.where(columns == num_held - 1, block, blocks)
        out = out_tables_ptr + row.to(tl.int64) * num_columns + columns
        tl.store(out, blocks, mask=columns < num_held)


def decode_inputs_triton(
    rows_S5: torch.Tensor,
    tables_NB: torch.Tensor,
    last_tokens_N: torch.Tensor,
    num_generated_N: torch.Tensor,
    block_size: int,
    out: Any,
) -> None:
    """See `runtime.kernels.decode_inputs.decode_inputs`; tables of both sides are equally wide."""
    num_rows, row_width = rows_S5.shape
    assert out.block_tables_SB.stride(0) == tables_NB.stride(0), "tables of different widths"
    decode_inputs_kernel[(num_rows,)](
        rows_S5,
        tables_NB,
        last_tokens_N,
        num_generated_N,
        out.token_ids_S,
        out.positions_S,
        out.kv_slots_S,
        out.slots_S,
        out.seq_lens_S,
        out.block_tables_SB,
        tables_NB.stride(0),
        num_generated_N.stride(0),
        BLOCK_SIZE=block_size,
        COLUMNS=COLUMNS,
        ROW_WIDTH=row_width,
        num_warps=4,
    )
