"""The arrays of a step that holds prompt chunks, built on the host and sent up in one piece.

Decodes come as rows (`ROW_WIDTH` ints each, see `runtime.kernels.decode_inputs`), whose tokens lie
on the device; chunks come as pieces, whose tokens the host knows. Knows blocks and positions; does
not know what a slot's state is beyond its number.

Shape legend: D decodes, T tokens, S spans (decodes first), R rows of logits, B columns.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engine.batch import Piece
from runtime.engine.step_plan import padded_columns
from runtime.engine.transfer import Ints, upload_all
from runtime.model.step import StepInputs

Longs: TypeAlias = NDArray[np.int64]
Tables: TypeAlias = Ints | Tensor  # [S, B] block ids, on the host or on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The integers of StepInputs on the host. A negative token id is a slot's last token: -1 of
    slot 0, -2 of slot 1, ..."""

    token_ids_T: Longs
    positions_T: Longs
    kv_slots_T: Longs
    logit_rows_R: Longs
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens)


def step_arrays(rows_D5: Ints, pieces: Seq[Piece], block_size: int) -> StepArrays:
    """Decodes first, each with one row of logits; then the pieces with the rows they want."""
    slots, positions, blocks, tokens, _ = rows_D5.T
    token_ids = [np.where(tokens < 0, -1 - slots, tokens)]
    kv_slots = [blocks * block_size + positions % block_size]
    all_positions, wanted = [positions], [np.arange(len(rows_D5))]
    first = len(rows_D5)
    for piece in pieces:
        span = np.arange(piece.start, piece.start + len(piece.tokens))
        token_ids.append(np.fromiter(piece.tokens, np.int64, len(piece.tokens)))
        all_positions.append(span)
        kv_slots.append(_slots(piece, block_size))
        wanted.append(first + np.array(piece.wanted, np.int64))
        first += len(span)
    return StepArrays(
        token_ids_T=_joined(token_ids),
        positions_T=_joined(all_positions),
        kv_slots_T=_joined(kv_slots),
        logit_rows_R=_joined(wanted),
        query_lens=(1,) * len(rows_D5) + tuple(len(piece.tokens) for piece in pieces),
        seq_lens=(
            *(positions + 1).tolist(),
            *(piece.start + len(piece.tokens) for piece in pieces),
        ),
        num_decodes=len(rows_D5),
    )


def _slots(piece: Piece, block_size: int) -> Longs:
    """Where the KV of each of its tokens goes."""
    end = piece.start + len(piece.tokens)
    begun = piece.start // block_size
    blocks = np.array(piece.block_ids[begun : -(-end // block_size)], np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
    return slots[piece.start - begun * block_size : end - begun * block_size]


def block_tables(pieces: Seq[Piece]) -> Ints:
    """[S, B] block ids of pieces, padded with 0."""
    longest = max(len(piece.block_ids) for piece in pieces)
    tables = np.zeros((len(pieces), padded_columns(longest)), np.int32)
    for row, piece in zip(tables, pieces, strict=True):
        row[: len(piece.block_ids)] = piece.block_ids
    return tables


def to_inputs(
    arrays: StepArrays, tables_SB: Tables, last_tokens_N: Tensor, *, has_kernels: bool
) -> StepInputs:
    """StepInputs on the device of `last_tokens_N`. The tables may be wider than needed; those of
    the host go up with the rest."""
    device = last_tokens_N.device
    starts = np.cumsum((0, *arrays.query_lens), dtype=np.int32)
    parts: list[NDArray[Any]] = [arrays.token_ids_T, arrays.positions_T, arrays.kv_slots_T]
    parts += [arrays.logit_rows_R, starts, np.array(arrays.seq_lens, np.int32)]
    parts += [] if isinstance(tables_SB, Tensor) else [tables_SB]
    token_ids, positions, kv_slots, rows, starts_S1, lens_S, *tables = upload_all(parts, device)
    if arrays.num_decodes:
        held = last_tokens_N[(-1 - token_ids).clamp_(min=0)].long()
        token_ids = torch.where(token_ids < 0, held, token_ids)
    table_SB = tables_SB if isinstance(tables_SB, Tensor) else tables[0]
    return StepInputs(
        token_ids_T=token_ids,
        positions_T=positions,
        slots_T=kv_slots,
        block_tables_SB=table_SB if has_kernels else table_SB.long(),
        query_lens=arrays.query_lens,
        seq_lens=arrays.seq_lens,
        logit_rows_R=rows,
        query_starts_S1=starts_S1 if has_kernels else None,
        seq_lens_S=lens_S if has_kernels else None,
        num_decodes=arrays.num_decodes,
        max_query_len=arrays.max_query_len,
        wants_last_rows=np.array_equal(arrays.logit_rows_R, starts[1:] - 1),
    )


def split_pieces(pieces: Seq[Piece], num_tokens: int) -> list[Piece]:
    """The same work in pieces of at most `num_tokens`; wanted rows stay in their order."""
    parts: list[Piece] = []
    for piece in pieces:
        for low in range(0, len(piece.tokens), num_tokens):
            high = min(low + num_tokens, len(piece.tokens))
            parts.append(
                Piece(
                    tokens=piece.tokens[low:high],
                    start=piece.start + low,
                    block_ids=piece.block_ids,
                    wanted=[at - low for at in piece.wanted if low <= at < high],
                )
            )
    return parts


def _joined(parts: Seq[NDArray[Any]]) -> Longs:
    return np.concatenate(parts).astype(np.int64)
