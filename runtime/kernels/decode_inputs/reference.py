"""`decode_inputs` in torch: the definition, and the path of devices without Triton."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Buffers(Protocol):
    """What is filled; see `DecodeInputs`."""

    @property
    def token_ids_S(self) -> Tensor: ...
    @property
    def positions_S(self) -> Tensor: ...
    @property
    def kv_slots_S(self) -> Tensor: ...
    @property
    def slots_S(self) -> Tensor: ...
    @property
    def seq_lens_S(self) -> Tensor: ...
    @property
    def block_tables_SB(self) -> Tensor: ...


def decode_inputs_reference(
    rows_S5: Tensor,
    tables_NB: Tensor,
    last_tokens_N: Tensor,
    num_generated_N: Tensor,
    block_size: int,
    out: Buffers,
) -> None:
    """See `runtime.kernels.decode_inputs.decode_inputs`."""
    slots, positions, blocks, tokens, counts = rows_S5.long().unbind(1)
    is_live = positions >= 0
    live, columns = slots[is_live], positions.clamp(min=0) // block_size
    tables_NB[live, columns[is_live]] = blocks[is_live].to(torch.int32)
    num_generated_N[live] = counts[is_live].to(torch.int32)
    slots = torch.where(is_live, slots, 0)
    held_S = torch.where(tokens < 0, last_tokens_N[slots].long(), tokens)
    out.token_ids_S.copy_(torch.where(is_live, held_S, 0))
    out.positions_S.copy_(positions.clamp(min=0))
    kv_slots_S = blocks * block_size + positions % block_size
    out.kv_slots_S.copy_(torch.where(is_live, kv_slots_S, -1))
    out.slots_S.copy_(torch.where(is_live, slots, -1))
    out.seq_lens_S.copy_(positions + 1)
    is_held_SB = torch.arange(tables_NB.shape[1], device=rows_S5.device) <= columns[:, None]
    is_held_SB &= is_live[:, None]
    out.block_tables_SB.copy_(torch.where(is_held_SB, tables_NB[slots], out.block_tables_SB))
