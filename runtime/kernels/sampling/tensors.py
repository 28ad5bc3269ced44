"""What drawing works from and gives: parameters and history by slot, results by row.

A slot holds a request for as long as it runs; a row is one line of logits of one step. Rows name
their slot, so that a step needs no gathering of parameters and a captured graph no copies.
Knows nothing of requests and of the order of steps.

Shape legend: N slots, R rows, V vocabulary, B biased ids, M masked ids, W words of a bit mask,
K alternatives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_COUNT = 2**15 - 1
_ROW = struct.Struct("<qddddffiiii")
_DOUBLES = ("seed", "top_p", "min_p", "presence_penalty", "frequency_penalty")  # 8 bytes each
_FLOATS = ("temperature", "repetition_penalty")  # 4 bytes each, from word 10 on
_INTS = ("top_k", "min_tokens", "num_logprobs", "num_generated")
NUM_WORDS = _ROW.size // 4


def pack_row(
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_tokens: int = 0,
    num_logprobs: int | None = None,
    num_generated: int = 0,
) -> bytes:
    """One slot's 64 bytes of `SamplingTensors.rows_N16`.

    seed: its low 64 bits count. num_logprobs: None where no log-probs are wanted. min_tokens: the
    slot's masked ids are masked until this many tokens were generated.
    """
    signed_seed = (seed + 2**63) % 2**64 - 2**63
    return _ROW.pack(
        signed_seed,
        top_p,
        min_p,
        presence_penalty,
        frequency_penalty,
        min(temperature, 3e38),
        min(repetition_penalty, 3e38),
        min(top_k, 2**31 - 1),
        min(min_tokens, 2**31 - 1),
        -1 if num_logprobs is None else num_logprobs,
        num_generated,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What penalties look back on, for the slots whose requests have any.

    counts_NV: int16, how often each id was generated; stays at 32767 from there on.
    prompt_mask_NW: int32, bit `i % 32` of word `i // 32` says that id i stands in the prompt.
    """

    counts_NV: Tensor
    prompt_mask_NW: Tensor

    @classmethod
    def empty(cls, num_slots: int, vocab: int, device: torch.device | str) -> History:
        return cls(
            counts_NV=torch.zeros(num_slots, vocab, dtype=torch.int16, device=device),
            prompt_mask_NW=torch.zeros(
                num_slots, -(-vocab // 32), dtype=torch.int32, device=device
            ),
        )

    def write(self, slot: int, prompt_ids: Iterable[int], output_counts: Mapping[int, int]) -> None:
        """Set a slot to a request's history, whatever it held before. Not for captured graphs."""
        counts_V = torch.zeros(self.counts_NV.shape[1], dtype=torch.int16)
        if output_counts:
            ids = torch.tensor(list(output_counts))
            counts = torch.tensor(list(output_counts.values())).clamp_(max=MAX_COUNT)
            counts_V[ids] = counts.to(torch.int16)
        bits = torch.zeros(self.prompt_mask_NW.shape[1] * 32, dtype=torch.int64)
        bits[torch.tensor(list(prompt_ids), dtype=torch.int64)] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
        self.counts_NV[slot].copy_(counts_V)
        self.prompt_mask_NW[slot].copy_(words.to(torch.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Every slot's sampling parameters, on one device at addresses that stay.

    rows_N16: int32, one row of `pack_row` a slot.
    bias_ids_NB, bias_values_NB: int32 and float32: added to logits; ids of a slot are distinct,
        -1 pads.
    masked_ids_NM: int32, -1 pads: not drawn while num_generated < min_tokens.
    history: needed once a slot has a penalty.
    """

    rows_N16: Tensor
    bias_ids_NB: Tensor
    bias_values_NB: Tensor
    masked_ids_NM: Tensor
    history: History | None = None

    @classmethod
    def empty(
        cls, num_slots: int, device: torch.device | str, *, max_bias: int = 0, max_masked: int = 0
    ) -> SamplingTensors:
        """Greedy slots with room for so many biased and masked ids."""
        row = torch.frombuffer(bytearray(pack_row()), dtype=torch.int32)
        bias = torch.full((num_slots, max_bias), -1, dtype=torch.int32, device=device)
        return cls(
            rows_N16=row.repeat(num_slots, 1).to(device),
            bias_ids_NB=bias,
            bias_values_NB=torch.zeros(num_slots, max_bias, dtype=torch.float32, device=device),
            masked_ids_NM=torch.full((num_slots, max_masked), -1, dtype=torch.int32, device=device),
        )

    def field(self, name: str) -> Tensor:
        """[N] view of one parameter of `pack_row`: float64 (seed: int64), float32 or int32."""
        if name in _DOUBLES:
            dtype = torch.int64 if name == "seed" else torch.float64
            return self.rows_N16.view(dtype)[:, _DOUBLES.index(name)]
        if name in _FLOATS:
            at = 2 * len(_DOUBLES) + _FLOATS.index(name)
            return self.rows_N16.view(torch.float32)[:, at]
        return self.rows_N16[:, 2 * len(_DOUBLES) + len(_FLOATS) + _INTS.index(name)]

    @property
    def num_generated_N(self) -> Tensor:
        """[N] int32 view, stride 16: the counter of each slot's random stream."""
        return self.field("num_generated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFeatures:
    """What the rows of a step use, as the host knows it: decides which kernels are launched.

    May promise more than the rows use, since each row's own parameters decide, but never less.

    any_random: a row is not greedy. any_filtered: one has top_k, top_p or min_p. any_penalty: one
    has a penalty. any_biased: one has a bias or masked ids. num_logprobs: the most alternatives a
    row asks for; None if no row wants log-probs.
    """

    any_random: bool = False
    any_filtered: bool = False
    any_penalty: bool = False
    any_biased: bool = False
    num_logprobs: int | None = None

    @property
    def any_adjusted(self) -> bool:
        return self.any_penalty or self.any_biased


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log-probabilities (natural log) of raw logits, floored at -9999; ties rank by the lower id.

    chosen_R: float32, of the id asked about. rank_R: int32, its rank from 1.
    top_ids_RK, top_values_RK: int32 and float32, the most likely ids in falling order.
    """

    chosen_R: Tensor
    rank_R: Tensor
    top_ids_RK: Tensor
    top_values_RK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What was drawn: ids_R int32, all in [0, V); is_finite_R bool, false where the row of logits
    holds NaN or an infinity, and then the id means nothing.

    logprobs: where asked for; rows that did not ask hold nothing of use.
    """

    ids_R: Tensor
    is_finite_R: Tensor
    logprobs: RowLogprobs | None = None
