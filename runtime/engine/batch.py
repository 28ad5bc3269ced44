"""From a schedule to tensors: StepInputs for the decoder, and which rows of logits are for what.

Knows sequences and blocks; does not know what the decoder does with them. Each step is built anew
from plain lists, so a row carries no state of its own.

Shape legend: T tokens in the step, S spans, R rows of logits, B blocks of the longest sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from runtime.engine.sequence import Sequence
from runtime.model.step import StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A span in plain numbers: `tokens` are at positions start, start + 1, ... of a sequence whose
    KV lies in `block_ids`. `wanted` are the offsets into `tokens` whose logits are needed."""

    tokens: Seq[int]
    start: int
    block_ids: Seq[int]
    wanted: Seq[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the rows of logits of one step are for; indices into R, sequences in the same order.

    sampling: sequences that draw a token, and their rows.
    scoring: sequences that are owed prompt log-probs, their rows and the tokens those predict.
    """

    sampling: list[tuple[Sequence, int]]
    scoring: list[tuple[Sequence, range, Seq[int]]]


def build_inputs(pieces: Seq[Piece], block_size: int, device: torch.device) -> StepInputs:
    """StepInputs of these spans; every integer tensor is int64 on `device`."""
    tokens, positions, slots, rows = (array("q") for _ in range(4))
    for piece in pieces:
        base = len(tokens)
        end = piece.start + len(piece.tokens)
        tokens.extend(piece.tokens)
        positions.extend(range(piece.start, end))
        blocks = piece.block_ids
        slots.extend(
            blocks[position // block_size] * block_size + position % block_size
            for position in range(piece.start, end)
        )
        rows.extend(base + offset for offset in piece.wanted)
    return StepInputs(
        token_ids_T=_tensor(tokens, device),
        positions_T=_tensor(positions, device),
        slots_T=_tensor(slots, device),
        block_tables_SB=_block_tables([piece.block_ids for piece in pieces], device),
        query_lens=tuple(len(piece.tokens) for piece in pieces),
        seq_lens=tuple(piece.start + len(piece.tokens) for piece in pieces),
        logit_rows_R=_tensor(rows, device),
    )


def plan_rows(spans: Iterable[tuple[Sequence, int]]) -> tuple[list[Piece], Rows]:
    """The pieces of a schedule's spans and the use of each row of logits they ask for.

    The last position of a sequence predicts the token to draw; earlier prompt positions predict the
    next prompt token. A recomputed sequence is asked only for the prompt log-probs still missing.
    The token of a decode may be PENDING; who runs behind fills it in on the device.
    """
    pieces: list[Piece] = []
    rows = Rows(sampling=[], scoring=[])
    num_rows = 0
    for sequence, num_tokens in spans:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        owed = _owed_positions(sequence, start, end)
        if owed:
            targets = sequence.tokens[owed.start + 1 : owed.stop + 1]
            rows.scoring.append((sequence, range(num_rows, num_rows + len(owed)), targets))
        wanted = [position - start for position in owed]
        num_rows += len(owed)
        if sequence.draws_at(end):
            rows.sampling.append((sequence, num_rows))
            wanted.append(num_tokens - 1)
            num_rows += 1
        pieces.append(
            Piece(
                tokens=sequence.tokens[start:end],
                start=start,
                block_ids=sequence.block_ids,
                wanted=wanted,
            )
        )
    return pieces, rows


def _owed_positions(sequence: Sequence, start: int, end: int) -> range:
    """Positions in [start, end) whose logits give prompt log-probs not computed before.

    Entry i + 1 of prompt_logprobs comes from position i; entry 0 is None and always there. Chunks
    in flight are not asked for again: `start` is behind them.
    """
    if sequence.request.sampling.prompt_logprobs is None:
        return range(0)
    first_missing = len(sequence.prompt_logprobs) - 1
    return range(max(start, first_missing), min(end, sequence.num_prompt - 1))


def _block_tables(tables: Seq[Seq[int]], device: torch.device) -> torch.Tensor:
    width = max(len(table) for table in tables)
    flat = array("q")
    for table in tables:
        flat.extend(table)
        flat.extend([0] * (width - len(table)))
    return _tensor(flat, device).view(len(tables), width)


def _tensor(values: array[int], device: torch.device) -> torch.Tensor:
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(values, dtype=torch.int64).to(device)
