"""Forward passes over spans of any length: prompt chunks, with decodes in front of them.

Where memory is short the same rows are computed in several passes, and what was learned is kept.
Knows pieces and rows, not sequences.

Shape legend: D decodes, S spans, R rows of logits, B columns of a block table.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.engine.batch import Piece
from runtime.engine.model_runner import DecoderLike
from runtime.engine.step_arrays import (
    StepArrays,
    Tables,
    block_tables,
    split_pieces,
    step_arrays,
    to_inputs,
)
from runtime.engine.step_plan import NO_ROWS
from runtime.engine.transfer import Ints

FEWEST_TOKENS = 256  # prompts are not cut further than this where memory is short


class SpanForward:
    """Forward passes of one decoder; tokens of decodes are read from `last_tokens_N` by slot."""

    def __init__(
        self, decoder: DecoderLike, kv: Any, last_tokens_N: Tensor, block_size: int, *,
        has_kernels: bool,
    ) -> None:  # fmt: skip
        self._decoder, self._kv, self._block_size = decoder, kv, block_size
        self._last_tokens_N, self._has_kernels = last_tokens_N, has_kernels
        self._most_tokens: int | None = None

    def pieces(self, pieces: Seq[Piece]) -> Tensor:
        """Hidden states [R, hidden] of the wanted rows of pieces alone."""
        return self.run(NO_ROWS, pieces, block_tables(pieces))

    def blank(self, num_tokens: int, num_rows: int, longest: int) -> Tensor:
        """Hidden states [num_rows, hidden] of `num_tokens` zeros whose KV is written nowhere.

        They are prompts of at most `longest` tokens; the last rows are wanted.
        """
        pieces: list[Piece] = []
        for first in range(0, num_tokens, longest):
            length = min(longest, num_tokens - first)
            wanted = range(max(num_tokens - num_rows - first, 0), length)
            blocks = [0] * -(-length // self._block_size)
            pieces.append(Piece(tokens=[0] * length, start=0, block_ids=blocks, wanted=wanted))
        arrays = step_arrays(NO_ROWS, pieces, self._block_size)
        arrays = replace(arrays, kv_slots_T=np.full_like(arrays.kv_slots_T, -1))
        return self._pass(arrays, block_tables(pieces))

    def run(self, rows_D5: Ints, pieces: Seq[Piece], tables_SB: Tables) -> Tensor:
        """Hidden states [R, hidden]: of each decode, then of the rows the pieces want."""
        num_tokens = len(rows_D5) + sum(len(piece.tokens) for piece in pieces)
        while True:
            limit = self._most_tokens
            try:
                if limit is None or num_tokens <= limit:
                    return self._once(rows_D5, pieces, tables_SB)
                return self._in_parts(rows_D5, pieces, tables_SB, limit)
            except torch.OutOfMemoryError:
                smaller = max(min(limit or num_tokens, num_tokens) // 2, FEWEST_TOKENS)
                if smaller == limit or smaller >= num_tokens:
                    raise
                self._most_tokens = smaller
            torch.cuda.empty_cache()

    def _in_parts(self, rows_D5: Ints, pieces: Seq[Piece], tables_SB: Tables, limit: int) -> Tensor:
        num_decodes = len(rows_D5)
        hidden = []
        if num_decodes:
            hidden.append(self._once(rows_D5, [], tables_SB[:num_decodes]))
        for row, piece in enumerate(pieces, start=num_decodes):
            for part in split_pieces([piece], limit):
                hidden.append(self._once(NO_ROWS, [part], tables_SB[row : row + 1]))
        return torch.cat(hidden)

    def _once(self, rows_D5: Ints, pieces: Seq[Piece], tables_SB: Tables) -> Tensor:
        return self._pass(step_arrays(rows_D5, pieces, self._block_size), tables_SB)

    def _pass(self, arrays: StepArrays, tables_SB: Tables) -> Tensor:
        inputs = to_inputs(arrays, tables_SB, self._last_tokens_N, has_kernels=self._has_kernels)
        return self._decoder.forward(inputs, self._kv)
