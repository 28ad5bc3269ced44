"""Inputs of a decode step out of what lies on the device: one small op at the head of every step.

The host says per row which slot decodes at which position; token ids and block tables come from the
slots' state, so no token value makes a round trip. Knows neither models nor requests.

Shape legend: N slots, S rows of the step, B columns of a
block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.backend import uses_triton
from runtime.kernels.decode_inputs.reference import decode_inputs_reference

__all__ = ["ROW_WIDTH", "DecodeInputs", "decode_inputs", "decode_inputs_reference"]

ROW_WIDTH = 5  # slot, position, block, token, num_generated


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """Buffers that `decode_inputs` fills, for up to S rows; graphs keep their addresses.

    token_ids_S, positions_S: int64.
    kv_slots_S: int64, where the token's K/V goes: block * block_size + offset; -1 for padding.
    slots_S: int32, the slot of each row; -1 for padding.
    seq_lens_S: int32, 0 for padding rows.
    block_tables_SB: int32; only the columns of a row's sequence are written, the others hold what
        they held: some valid block.
    """

    token_ids_S: Tensor
    positions_S: Tensor
    kv_slots_S: Tensor
    slots_S: Tensor
    seq_lens_S: Tensor
    block_tables_SB: Tensor

    @staticmethod
    def empty(num_rows: int, num_columns: int, device: torch.device) -> DecodeInputs:
        """Buffers for up to `num_rows` rows of block tables of `num_columns`, all zero."""
        long_3S = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        short_2S = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        return DecodeInputs(
            token_ids_S=long_3S[0],
            positions_S=long_3S[1],
            kv_slots_S=long_3S[2],
            slots_S=short_2S[0],
            seq_lens_S=short_2S[1],
            block_tables_SB=torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device),
        )

    def rows(self, num_rows: int) -> DecodeInputs:
        """The first `num_rows` rows of the same buffers."""
        return DecodeInputs(
            token_ids_S=self.token_ids_S[:num_rows],
            positions_S=self.positions_S[:num_rows],
            kv_slots_S=self.kv_slots_S[:num_rows],
            slots_S=self.slots_S[:num_rows],
            seq_lens_S=self.seq_lens_S[:num_rows],
            block_tables_SB=self.block_tables_SB[:num_rows],
        )


def decode_inputs(
    rows_S5: Tensor,
    tables_NB: Tensor,
    last_tokens_N: Tensor,
    num_generated_N: Tensor,
    block_size: int,
    out: DecodeInputs,
) -> None:
    """Fill `out`; note each row's block and count in its slot's state.

    `rows_S5` int32 [S, 5]: slot; position of the token, -1 for padding; the block that position
    lies in; the token, or -1 for the last one that was drawn for the slot; tokens generated before.
    `tables_NB` int32 [N, B], `last_tokens_N` int32 [N] and `num_generated_N` int32 [N] (of any
    stride) are the slots' state; a padding row's slot is not looked at.
    """
    state = (tables_NB, last_tokens_N, num_generated_N)
    if not uses_triton(rows_S5.device):
        decode_inputs_reference(rows_S5, *state, block_size, out)
        return
    from runtime.kernels.decode_inputs.kernel import decode_inputs_triton

    decode_inputs_triton(rows_S5, *state, block_size, out)
