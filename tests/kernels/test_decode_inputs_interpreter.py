"""Inputs of decode steps: the kernel against the definition, and the definition against a list."""

from __future__ import annotations

import pytest
import torch

from runtime.kernels.decode_inputs import DecodeInputs, decode_inputs, decode_inputs_reference

NUM_SLOTS, NUM_COLUMNS = 5, 1300  # more columns than one program copies at once
POISON = 77


FIELDS = ("token_ids_S", "positions_S", "kv_slots_S", "slots_S", "seq_lens_S", "block_tables_SB")


def state() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block tables, last tokens, and counts that lie 16 apart."""
    generator = torch.Generator().manual_seed(3)
    shape = (NUM_SLOTS, NUM_COLUMNS)
    tables = torch.randint(0, 1000, shape, generator=generator, dtype=torch.int32)
    last_tokens = torch.arange(10, 10 + NUM_SLOTS, dtype=torch.int32)
    return tables, last_tokens, torch.full((NUM_SLOTS, 16), 55, dtype=torch.int32)[:, 3]


def buffers(num_rows: int) -> DecodeInputs:
    made = DecodeInputs.empty(num_rows, NUM_COLUMNS, torch.device("cpu"))
    for name in FIELDS:
        getattr(made, name).fill_(POISON)
    return made


# slot, position, block, token, generated: a first block, a border, a long table, padding.
ROWS = [[2, 0, 7, 42, 0], [0, 16, 9, -1, 3], [3, 16 * 1200 + 5, 11, -1, 9], [4, -1, 0, 0, 0]]


def test_rows_become_inputs() -> None:
    tables, last, counts = state()
    before, out = tables.clone(), buffers(4)
    decode_inputs(torch.tensor(ROWS, dtype=torch.int32), tables, last, counts, 16, out)
    assert counts.tolist() == [3, 55, 0, 9, 55]
    assert out.token_ids_S.tolist() == [42, 10, 13, 0]
    assert out.positions_S.tolist() == [0, 16, 16 * 1200 + 5, 0]
    assert out.kv_slots_S.tolist() == [7 * 16, 9 * 16, 11 * 16 + 5, -1]
    assert out.slots_S.tolist() == [2, 0, 3, -1]
    assert out.seq_lens_S.tolist() == [1, 17, 16 * 1200 + 6, 0]
    for row, (slot, num_held, block) in enumerate([(2, 1, 7), (0, 2, 9), (3, 1201, 11)]):
        before[slot, num_held - 1] = block
        assert torch.equal(out.block_tables_SB[row, :num_held], before[slot, :num_held])
        assert bool((out.block_tables_SB[row, num_held:] == POISON).all())
    assert torch.equal(tables, before), "the slots' tables know the new blocks"
    assert bool((out.block_tables_SB[3] == POISON).all())


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_the_kernel_does_what_the_reference_says(block_size: int) -> None:
    from runtime.kernels.decode_inputs.kernel import decode_inputs_triton

    rows = torch.tensor(ROWS, dtype=torch.int32)
    rows[:, 1] = rows[:, 1].clamp(max=NUM_COLUMNS * 8 - 1)
    expected, found = (state(), buffers(4)), (state(), buffers(4))
    decode_inputs_reference(rows, *expected[0], block_size, expected[1])
    decode_inputs_triton(rows, *found[0], block_size, found[1])
    for name in FIELDS:
        assert torch.equal(getattr(expected[1], name), getattr(found[1], name)), name
    for before, after in zip(expected[0], found[0], strict=True):
        assert torch.equal(before, after)
