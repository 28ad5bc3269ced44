"""What the device keeps of every running sequence, so that a decode step needs almost nothing.

One slot a sequence: its last drawn token, its block table, its sampling parameters and history. The
host knows which slot is whose, what was uploaded, and what a slot's sampling asks of a step. Writes
are gathered and go up together (`flush`), in stream order: a slot that was released is written
again only behind the steps that still use it.

Shape legend: N slots, B columns of a block table, n slots written by one flush.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.engine.sampler import GREEDY_BELOW
from runtime.engine.sequence import Sequence
from runtime.engine.transfer import upload
from runtime.kernels.sampling import History, SamplingFeatures, SamplingTensors, pack_row
from runtime.request import SamplingParams

# What a slot's sampling asks of the step it is in; bits, so that a step's are an `or`.
RANDOM, FILTERED, PENALIZED, BIASED, REPORTED = 1, 2, 4, 8, 16


@dataclass(slots=True, kw_only=True)
class Slot:
    """The host's side of a slot.

    num_columns: of its block table that the device knows. traits: bits of RANDOM ... REPORTED.
    num_masked_steps: tokens to generate before the masked ids are allowed. num_logprobs: most
    alternatives it asks for.
    """

    index: int
    num_columns: int
    traits: int
    num_masked_steps: int
    num_logprobs: int


class DecodeState:
    """The slots of one runner. At most `num_slots` sequences hold one at a time."""

    def __init__(self, num_slots: int, num_columns: int, vocab: int, device: torch.device) -> None:
        self.num_columns, self._vocab, self._device = num_columns, vocab, device
        self.tables_NB = torch.zeros(num_slots, num_columns, dtype=torch.int32, device=device)
        self.last_tokens_N = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.sampling = SamplingTensors.empty(num_slots, device)
        self.slots: dict[Sequence, Slot] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._biased: set[int] = set()
        self._new_rows: dict[int, bytes] = {}
        self._new_blocks: list[tuple[int, int, list[int]]] = []

    @property
    def num_slots(self) -> int:
        return len(self.last_tokens_N)

    def slot(self, sequence: Sequence) -> Slot:
        """The sequence's slot, its block table complete with the next `flush`."""
        found = self.slots.get(sequence)
        if found is None:
            found = self._admit(sequence)
        if len(sequence.block_ids) > found.num_columns:
            new = sequence.block_ids[found.num_columns :]
            self._new_blocks.append((found.index, found.num_columns, new))
            found.num_columns = len(sequence.block_ids)
        return found

    def decoding_slot(self, sequence: Sequence, column: int) -> Slot:
        """The slot of a sequence whose next token lies in `column` of its block table.

        The step that computes the token notes that column on the device itself.
        """
        found = self.slots.get(sequence)
        if found is None or column > found.num_columns or len(sequence.block_ids) > column + 1:
            return self.slot(sequence)
        found.num_columns = max(found.num_columns, column + 1)
        return found

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; unknown ones are fine."""
        slot = self.slots.pop(sequence, None)
        if slot is not None:
            self._free.append(slot.index)
            self._new_rows.pop(slot.index, None)
            self._new_blocks = [new for new in self._new_blocks if new[0] != slot.index]

    def clear(self) -> None:
        for sequence in list(self.slots):
            self.release(sequence)
        self._new_blocks.clear()

    def flush(self) -> None:
        """Bring what `slot` noted to the device."""
        if self._new_rows:
            index = np.fromiter(self._new_rows, np.int32, len(self._new_rows))
            rows = np.frombuffer(b"".join(self._new_rows.values()), np.int32)
            both = upload(np.concatenate([index, rows]), self._device)
            self.sampling.rows_N16[both[: len(index)].long()] = both[len(index) :].view(-1, 16)
            self._new_rows = {}
        if self._new_blocks:
            places = [
                np.arange(
                    index * self.num_columns + first, index * self.num_columns + first + len(ids)
                )
                for index, first, ids in self._new_blocks
            ]
            blocks = [np.array(ids, np.int32) for _, _, ids in self._new_blocks]
            both = upload(np.concatenate([*places, *blocks]).astype(np.int32), self._device)
            half = len(both) // 2
            self.tables_NB.view(-1)[both[:half].long()] = both[half:]
            self._new_blocks = []

    def _admit(self, sequence: Sequence) -> Slot:
        assert self._free, "more running sequences than max_num_seqs"
        params = sequence.request.sampling
        masked = sequence.stop_ids if params.min_tokens else ()
        slot = Slot(
            index=self._free.pop(),
            num_columns=0,
            traits=traits_of(params),
            num_masked_steps=params.min_tokens if masked else 0,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
        )
        self.slots[sequence] = slot
        self._new_rows[slot.index] = packed(sequence)
        if params.logit_bias or masked or slot.index in self._biased:
            self._write_bias(slot.index, summed(params.logit_bias), masked)
        if slot.traits & PENALIZED:
            self._write_history(slot.index, sequence)
        return slot

    def _write_bias(self, index: int, bias: Mapping[int, float], masked: Iterable[int]) -> None:
        """Both lists of a slot; empty ones wipe out what the slot's last owner had."""
        ids, masks = sorted(bias), sorted(masked)
        self._biased.add(index) if ids or masks else self._biased.discard(index)
        self.sampling = replace(
            self.sampling,
            bias_ids_NB=_widened(self.sampling.bias_ids_NB, len(ids), -1),
            bias_values_NB=_widened(self.sampling.bias_values_NB, len(ids), 0.0),
            masked_ids_NM=_widened(self.sampling.masked_ids_NM, len(masks), -1),
        )
        _write(self.sampling.bias_ids_NB[index], ids, -1)
        _write(self.sampling.bias_values_NB[index], [bias[i] for i in ids], 0.0)
        _write(self.sampling.masked_ids_NM[index], masks, -1)

    def _write_history(self, index: int, sequence: Sequence) -> None:
        if self.sampling.history is None:
            history = History.empty(self.num_slots, self._vocab, self._device)
            self.sampling = replace(self.sampling, history=history)
        assert self.sampling.history is not None
        self.sampling.history.write(index, sequence.request.prompt, sequence.output_counts)


def traits_of(params: SamplingParams) -> int:
    """Bits of what these parameters always ask for; masks before min_tokens come on top."""
    is_random = params.temperature >= GREEDY_BELOW and params.top_k != 1
    is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    is_penalized = (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
    return (
        RANDOM * is_random
        | FILTERED * (is_random and is_filtered)
        | PENALIZED * is_penalized
        | BIASED * bool(params.logit_bias)
        | REPORTED * (params.logprobs is not None)
    )


def features_of(traits: int, num_logprobs: int) -> SamplingFeatures:
    """What a step with these bits has to launch."""
    return SamplingFeatures(
        any_random=bool(traits & RANDOM),
        any_filtered=bool(traits & FILTERED),
        any_penalty=bool(traits & PENALIZED),
        any_biased=bool(traits & BIASED),
        num_logprobs=num_logprobs if traits & REPORTED else None,
    )


def packed(sequence: Sequence) -> bytes:
    """A sequence's sampling parameters as the device keeps them."""
    params = sequence.request.sampling
    return pack_row(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=sequence.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        num_logprobs=params.logprobs,
        num_generated=sequence.num_generated,
    )


def summed(bias: Iterable[tuple[int, float]]) -> dict[int, float]:
    """One bias an id: those named several times add up."""
    total: dict[int, float] = {}
    for token_id, value in bias:
        total[token_id] = total.get(token_id, 0.0) + value
    return total


def _widened(table_NB: Tensor, num_columns: int, blank: Any) -> Tensor:
    """The table with room for `num_columns`, in powers of two; itself if it has it."""
    num_rows, width = table_NB.shape
    if num_columns <= width:
        return table_NB
    wider = table_NB.new_full((num_rows, 1 << (num_columns - 1).bit_length()), blank)
    wider[:, :width] = table_NB
    return wider


def _write(row: Tensor, values: list[Any], blank: Any) -> None:
    padded = values + [blank] * (len(row) - len(values))
    row.copy_(torch.tensor(padded, dtype=row.dtype), non_blocking=True)
