"""Runs schedules on the decoder: builds inputs, computes only the logits that are needed, draws.

Owns the Decoder and its KVCache; knows neither queues nor limits. Faults of single rows
(non-finite logits) are reported per row; the others of the step are not touched.

Shape legend: T tokens in the step, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch

from runtime.engine.batch import Piece, Rows, build_inputs, plan_rows
from runtime.engine.logprobs import token_logprobs
from runtime.engine.runner import StepResult
from runtime.engine.sampler import SamplingRow, sample
from runtime.engine.scheduler import Schedule
from runtime.engine.sequence import PENDING, Sequence
from runtime.engine.step_cost import StepCost
from runtime.model.step import StepInputs
from runtime.request import TokenLogprobs

LOGIT_BYTES = 64 * 2**20  # of one slice of prompt logits, float32


class VocabSpec(Protocol):
    """The part of ModelSpec that the runner reads."""

    @property
    def vocab(self) -> int: ...


class DecoderLike(Protocol):
    """What the runner needs of `runtime.model.decoder.Decoder`; tests script their own.

    The KV cache is the decoder's affair: the engine only passes it on.
    """

    @property
    def spec(self) -> VocabSpec: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, step: StepInputs, kv: Any) -> torch.Tensor: ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    """The runner that waits: a ticket is the result. See `runtime.engine.runner.Runner`."""

    lag: int = 0

    def __init__(self, decoder: DecoderLike, kv: Any, block_size: int) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self._kv = kv

    @property
    def rows_per_slice(self) -> int:
        """Rows of logits computed at once where a whole prompt's are wanted."""
        return max(1, LOGIT_BYTES // (4 * self.decoder.spec.vocab))

    @torch.inference_mode()
    def forward(self, pieces: Seq[Piece]) -> torch.Tensor:
        """Hidden states [R, hidden] of the wanted rows; the pieces' KV is written."""
        return self.decoder.forward(
            build_inputs(pieces, self.block_size, self.decoder.device), self._kv
        )

    @torch.inference_mode()
    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """[R, vocab] float32."""
        return self.decoder.logits(hidden_RH)

    def can_run_behind(self, schedule: Schedule) -> bool:
        return True

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> StepResult:
        pieces, rows = plan_rows(schedule.spans.items())
        hidden_RH = self.forward(pieces)
        result = StepResult(token_ids=[PENDING] * len(rows.sampling))
        self._score_prompts(hidden_RH, rows, result)
        self._draw(hidden_RH, rows, result)
        return result

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def release(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""

    def abandon(self) -> None:
        """Nothing is in flight."""

    def make_ready(self) -> bool:
        """Nothing is captured, and a CPU shared with others is not worth measuring once."""
        return False

    @property
    def step_cost(self) -> StepCost | None:
        return None

    def _score_prompts(self, hidden_RH: torch.Tensor, rows: Rows, result: StepResult) -> None:
        for sequence, span, targets in rows.scoring:
            entries: list[TokenLogprobs] = []
            num_top = sequence.request.sampling.prompt_logprobs or 0
            for start in range(0, len(span), self.rows_per_slice):
                part = span[start : start + self.rows_per_slice]
                logits_RV = self.decoder.logits(hidden_RH[part.start : part.stop])
                if not bool(are_finite(logits_RV).all()):
                    result.errors[sequence] = NOT_FINITE
                    break
                wanted = targets[start : start + len(part)]
                entries += token_logprobs(logits_RV, wanted, [num_top] * len(part))
            result.prompt_logprobs[sequence] = entries

    def _draw(self, hidden_RH: torch.Tensor, rows: Rows, result: StepResult) -> None:
        if not rows.sampling:
            return
        index = torch.tensor([row for _, row in rows.sampling], device=hidden_RH.device)
        logits_RV = self.decoder.logits(hidden_RH[index])
        sequences = [sequence for sequence, _ in rows.sampling]
        good = self._sort_out_faults(logits_RV, sequences, result)
        if len(good) < len(sequences):
            logits_RV, sequences = logits_RV[good], [sequences[row] for row in good]
        if not sequences:
            return
        ids = sample(logits_RV, [sampling_row(sequence) for sequence in sequences]).tolist()
        for row, token_id in zip(good, ids, strict=True):
            result.token_ids[row] = token_id
        self._report(logits_RV, sequences, ids, result)

    def _sort_out_faults(
        self, logits_RV: torch.Tensor, sequences: Seq[Sequence], result: StepResult
    ) -> list[int]:
        finite = are_finite(logits_RV).tolist()
        for sequence, ok in zip(sequences, finite, strict=True):
            if not ok:
                result.errors[sequence] = NOT_FINITE
        return [row for row, s in enumerate(sequences) if s not in result.errors]

    def _report(
        self, logits_RV: torch.Tensor, sequences: Seq[Sequence], ids: Seq[int], result: StepResult
    ) -> None:
        asked = [r for r, s in enumerate(sequences) if s.request.sampling.logprobs is not None]
        if not asked:
            return
        num_top = [sequences[row].request.sampling.logprobs or 0 for row in asked]
        entries = token_logprobs(logits_RV[asked], [ids[row] for row in asked], num_top)
        result.logprobs.update(zip((sequences[row] for row in asked), entries, strict=True))


NOT_FINITE = (
    "the model produced NaN or infinite logits for this request; its weights, scales or compute "
    "type are at fault, not the sampling settings"
)


def are_finite(logits_RV: torch.Tensor) -> torch.Tensor:
    """[R] bool: every logit of the row is finite (both extremes propagate NaN)."""
    low_R, high_R = torch.aminmax(logits_RV, dim=-1)
    return low_R.isfinite() & high_R.isfinite()


def sampling_row(sequence: Sequence) -> SamplingRow:
    """What the sampler has to know of a sequence in this step."""
    params = sequence.request.sampling
    is_early = sequence.num_generated < params.min_tokens
    uses_prompt = params.repetition_penalty != 1.0
    uses_output = uses_prompt or params.presence_penalty != 0 or params.frequency_penalty != 0
    return SamplingRow(
        params=params,
        seed=sequence.seed,
        num_generated=sequence.num_generated,
        prompt_ids=sequence.request.prompt if uses_prompt else (),
        output_counts=sequence.output_counts if uses_output else {},
        masked_ids=tuple(sequence.stop_ids) if is_early else (),
    )
