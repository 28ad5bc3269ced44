"""A schedule as the device needs it: rows of the decodes in front, prompt chunks behind.

Knows sequences and slots, and what a step's drawing asks for; holds no tensors.

Shape legend: D decodes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from runtime.engine.decode_state import (
    BIASED,
    FILTERED,
    PENALIZED,
    RANDOM,
    REPORTED,
    DecodeState,
    features_of,
)
from runtime.engine.scheduler import Schedule
from runtime.engine.sequence import Sequence
from runtime.engine.transfer import Ints
from runtime.kernels.decode_inputs import ROW_WIDTH
from runtime.kernels.sampling import SamplingFeatures

# Ways of drawing that are captured; None captures the logits alone, to be drawn from behind it.
GREEDY = SamplingFeatures()
RANDOM_DRAW = SamplingFeatures(any_random=True)
FILTERED_DRAW = SamplingFeatures(any_random=True, any_filtered=True)
Kind: TypeAlias = SamplingFeatures | None

NO_ROWS: Ints = np.zeros((0, ROW_WIDTH), np.int32)
_PADDING = (0, -1, 0, 0, 0)  # a row that stands for no sequence


def padded_columns(num_columns: int) -> int:
    """A width for block tables: kernels are compiled apart for rows that are not 16 apart."""
    return -(-num_columns // 16) * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The largest step and sequence, in sequences and tokens; KV tokens per block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    @property
    def num_columns(self) -> int:
        """Of a block table that holds the longest sequence."""
        return padded_columns(-(-self.max_model_len // self.block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule as the device needs it: rows of the decodes in front, then chunks.

    sampling: whose tokens are drawn, in the order of rows; wanted: the same, in the schedule's.
    traits: bits of decode_state. num_top: most alternatives asked for by a row that draws.
    """

    rows_D5: Ints
    chunks: Seq[tuple[Sequence, int]]
    sampling: Seq[Sequence]
    wanted: Seq[Sequence]
    traits: int
    num_top: int

    @property
    def features(self) -> SamplingFeatures:
        return features_of(self.traits, self.num_top)


class Planner:
    """Makes Plans over the slots of one DecodeState.

    is_deterministic: a prompt's last token goes through the kernels of prompts, however it was cut.
    """

    def __init__(self, state: DecodeState, block_size: int, *, is_deterministic: bool) -> None:
        self._state, self._block_size = state, block_size
        self._is_deterministic = is_deterministic

    def plan(self, schedule: Schedule) -> Plan:
        """Sort a schedule into decodes and chunks, and bring the slots' host side up to date."""
        state = self._state
        decodes, chunks, drawing = self._sorted(schedule)
        rows: list[int] = []
        traits, num_top = 0, 0
        for sequence in decodes:
            position = sequence.num_computed
            column = position // self._block_size
            slot = state.slot(sequence) if chunks else state.decoding_slot(sequence, column)
            num_generated = len(sequence.tokens) - sequence.num_prompt
            traits |= slot.traits | BIASED * (num_generated < slot.num_masked_steps)
            num_top = max(num_top, slot.num_logprobs)
            rows += (slot.index, position, sequence.block_ids[column], sequence.tokens[position],
                     num_generated)  # fmt: skip
        for sequence, _ in chunks:
            slot = state.slot(sequence)
            traits |= slot.traits | BIASED * (sequence.num_generated < slot.num_masked_steps)
            num_top = max(num_top, slot.num_logprobs)
        return Plan(
            rows_D5=np.array(rows, np.int32).reshape(-1, ROW_WIDTH),
            chunks=chunks,
            sampling=[*decodes, *drawing],
            wanted=schedule.sampling,
            traits=traits,
            num_top=num_top,
        )

    def _sorted(
        self, schedule: Schedule
    ) -> tuple[list[Sequence], list[tuple[Sequence, int]], list[Sequence]]:
        """Decodes: those that draw from one token; chunks: all others; the chunks that draw."""
        decodes: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        drawing: list[Sequence] = []
        draws = iter(schedule.sampling)
        next_draw = next(draws, None)
        for sequence, num_tokens in schedule.spans.items():
            is_drawing = sequence is next_draw
            if is_drawing:
                next_draw = next(draws, None)
            is_prompt = self._is_deterministic and sequence.num_computed < sequence.num_prompt
            if num_tokens == 1 and is_drawing and not is_prompt:
                decodes.append(sequence)
                continue
            chunks.append((sequence, num_tokens))
            if is_drawing:
                drawing.append(sequence)
        return decodes, chunks, drawing


def padded(rows_D5: Ints, num_rows: int) -> Ints:
    """The rows, and padding up to `num_rows`."""
    padding = np.array([_PADDING] * (num_rows - len(rows_D5)), np.int32)
    return np.concatenate([rows_D5, padding.reshape(-1, ROW_WIDTH)])


def captured_kind(traits: int) -> Kind:
    """The captured way of drawing that serves rows with these traits; None if none does."""
    if traits & (PENALIZED | BIASED | REPORTED):
        return None
    if traits & FILTERED:
        return FILTERED_DRAW
    return RANDOM_DRAW if traits & RANDOM else GREEDY
