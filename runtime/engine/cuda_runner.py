"""The runner that never waits for the device: launches steps, reads their tokens one step later.

A step in which every sequence decodes is one small upload, one replay of a captured graph (inputs,
forward pass, drawing, keeping the tokens) and one small download. A step with prompt chunks does
the same without a graph. Token values stay on the device from one step to the next.

Runs on any torch device: without Triton kernels nothing is captured, and on the CPU every copy is
immediate, which is how it is tested.

Shape legend: N slots, D decodes, S rows of a decode step (padding included), R rows of logits, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from runtime.engine.batch import Piece, Rows, plan_rows
from runtime.engine.decode_state import (
    BIASED,
    FILTERED,
    PENALIZED,
    RANDOM,
    REPORTED,
    DecodeState,
    features_of,
)
from runtime.engine.graphs import DecodeGraphs, graph_sizes
from runtime.engine.memory import BYTES_PER_GRAPH
from runtime.engine.model_runner import LOGIT_BYTES, DecoderLike, are_finite
from runtime.engine.runner import StepResult
from runtime.engine.scheduler import Schedule
from runtime.engine.sequence import Sequence
from runtime.engine.step_arrays import (
    StepArrays,
    block_tables,
    split_pieces,
    step_arrays,
    to_inputs,
)
from runtime.engine.step_cost import StepCost, measure
from runtime.engine.step_results import PromptPart, Ticket, collected, tensors_of
from runtime.engine.transfer import Download, Ints, upload, upload_into
from runtime.kernels.decode_inputs import ROW_WIDTH, DecodeInputs, decode_inputs
from runtime.kernels.sampling import RowLogprobs, SamplingFeatures, row_logprobs, sample_rows
from runtime.kernels.store_drawn import store_drawn
from runtime.kernels.workspace import Workspace
from runtime.model.step import StepInputs

FEWEST_TOKENS = 256  # prompts are not cut further than this where memory is short
OUT_OF_MEMORY = (
    "the device ran out of memory while this request was computed; lower max_num_batched_tokens or "
    "gpu_memory_utilization"
)
PADDING = (0, -1, 0, 0, 0)  # a row of a decode step that stands for no sequence

# Ways of drawing that are captured; None captures the logits alone, to be drawn from behind it.
GREEDY = SamplingFeatures()
FILTERED_DRAW = SamplingFeatures(any_random=True, any_filtered=True)
Kind: TypeAlias = SamplingFeatures | None
NO_ROWS: Ints = np.zeros((0, ROW_WIDTH), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The largest step and sequence, in sequences and tokens; KV tokens per block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    @property
    def num_columns(self) -> int:
        return -(-self.max_model_len // self.block_size)


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


class CudaRunner:
    """A `runtime.engine.runner.Runner` of one decoder and one KV cache, one step behind."""

    lag: int = 1

    def __init__(
        self,
        decoder: DecoderLike,
        kv: Any,
        limits: RunnerLimits,
        *,
        deterministic: bool = False,
        use_graphs: bool = True,
    ) -> None:
        """deterministic: a prompt's last token goes through the kernels of prompts, however it was
        cut. use_graphs: where there are kernels to capture."""
        self.decoder, self.block_size = decoder, limits.block_size
        self._kv, self._limits, self._is_deterministic = kv, limits, deterministic
        device, num_rows = decoder.device, limits.max_num_seqs
        self._device, self._has_kernels = device, bool(getattr(decoder, "has_kernels", False))
        self._workspace = Workspace(device)
        self._state = DecodeState(num_rows, limits.num_columns, decoder.spec.vocab, device)
        self._rows_S5 = torch.zeros(num_rows, ROW_WIDTH, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs.empty(num_rows, limits.num_columns, device)
        self._out_S = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._starts_S1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._row_numbers_S = torch.arange(num_rows, device=device)
        self._seq_lens: tuple[int, ...] = ()
        self._logits_SV: Tensor | None = None
        self._most_tokens: int | None = None
        self.step_cost: StepCost | None = None
        self._graphs: DecodeGraphs | None = None
        if use_graphs and self._has_kernels:
            self._graphs = DecodeGraphs(graph_sizes(num_rows), self._decode_step, self._kept)

    @property
    def rows_per_slice(self) -> int:
        """Rows of logits computed at once where a whole prompt's are wanted."""
        return max(1, LOGIT_BYTES // (4 * self.decoder.spec.vocab))

    def can_run_behind(self, schedule: Schedule) -> bool:
        return True

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> Ticket:
        plan = self._plan(schedule)
        try:
            self._state.flush()
            return self._launch_chunks(plan) if plan.chunks else self._launch_decodes(plan)
        except torch.OutOfMemoryError:
            return Ticket.failed(schedule, OUT_OF_MEMORY)

    def collect(self, ticket: Ticket) -> StepResult:
        return collected(ticket)

    def release(self, sequence: Sequence) -> None:
        self._state.release(sequence)

    def abandon(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._state.clear()

    @torch.inference_mode()
    def forward(self, pieces: Seq[Piece]) -> Tensor:
        """Hidden states [R, hidden] of the wanted rows; the pieces' KV is written."""
        return self._forward(NO_ROWS, pieces, upload(block_tables(pieces), self._device))

    @torch.inference_mode()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, vocab]."""
        return self.decoder.logits(hidden_RH)

    @torch.inference_mode()
    def run_worst_step(self) -> int:
        """Run the largest steps on nothing, so that their memory and kernels are there.

        The KV cache may have a single block: its content means nothing afterwards. Returns the
        bytes that graphs of this runner will take, if all are captured.
        """
        num_rows = self._limits.max_num_seqs
        logits_RV = self._run_blank_prompt(self._limits.max_num_batched_tokens, num_rows)
        rare = self._rare_scratch(logits_RV)
        nobody_R = torch.full((len(logits_RV),), -1, dtype=torch.int32, device=self._device)
        self._draw(logits_RV, nobody_R, FILTERED_DRAW, torch.empty_like(nobody_R))
        del logits_RV, rare
        for kind in (GREEDY, FILTERED_DRAW):
            self._run_padding(num_rows, kind)
        return self._graph_bytes()

    @torch.inference_mode()
    def make_ready(self) -> bool:
        """Do one piece of what makes later steps quick; False once there is nothing left to do.

        Takes tens of milliseconds, some tenths of a second for the last one, which measures
        `step_cost`. Steps may be in flight.
        """
        for kind in (GREEDY, FILTERED_DRAW):
            missing = self._graphs.missing(kind) if self._graphs is not None else []
            if missing:
                self._run_padding(missing[0], kind)
                return True
        if self.step_cost is None and self._has_kernels:
            self.step_cost = self._measured_cost()
        return False

    def _measured_cost(self) -> StepCost:
        limits = self._limits
        rows = [size for size in (1, 8, 16, 32, 64, 128, 256, 512) if size < limits.max_num_seqs]
        tokens = [n for n in (256, 1024, 4096) if n < limits.max_num_batched_tokens]
        return StepCost(
            decode=measure([*rows, limits.max_num_seqs], self._decode_s, 0.3),
            prefill=measure(
                [*tokens, limits.max_num_batched_tokens], self._prefill_s, budget_s=0.4
            ),
        )

    def _decode_s(self, num_rows: int) -> float:
        size = num_rows if self._graphs is None else self._graphs.size_for(num_rows)
        return self._seconds(lambda: self._run_padding(size, GREEDY))

    def _prefill_s(self, num_tokens: int) -> float:
        return self._seconds(lambda: self._run_blank_prompt(num_tokens, 1))

    def _seconds(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._device)
        began = perf_counter()
        work()
        torch.cuda.synchronize(self._device)
        return perf_counter() - began

    def _run_blank_prompt(self, num_tokens: int, num_rows: int) -> Tensor:
        """Logits [num_rows, vocab] of a prompt of zeros whose KV is written nowhere."""
        first = num_tokens - min(num_rows, num_tokens)
        num_blocks = -(-num_tokens // self.block_size)
        piece = Piece(
            tokens=[0] * num_tokens, start=0, block_ids=[0] * num_blocks,
            wanted=range(first, num_tokens),
        )  # fmt: skip
        arrays = step_arrays(NO_ROWS, [piece], self.block_size)
        arrays = replace(arrays, kv_slots_T=np.full_like(arrays.kv_slots_T, -1))
        tables_SB = upload(block_tables([piece]), self._device)
        return self.decoder.logits(self._forward_arrays(arrays, tables_SB))

    def _rare_scratch(self, logits_RV: Tensor) -> list[Tensor]:
        """What penalties, biases and log-probs need beside logits: tensors of their sizes.

        A history for every slot, adjusted logits, and the buffer that graphs leave logits in.
        """
        num_rows, vocab = self._limits.max_num_seqs, self.decoder.spec.vocab
        history = logits_RV.new_empty(num_rows, vocab, dtype=torch.int16)
        mask = logits_RV.new_empty(num_rows, -(-vocab // 32), dtype=torch.int32)
        adjusted = logits_RV.new_empty(num_rows, vocab, dtype=torch.float32)
        return [history, mask, adjusted, logits_RV.new_empty(num_rows, vocab)]

    def _run_padding(self, num_rows: int, kind: Kind) -> None:
        """A decode step in which no row stands for a sequence; nothing is written for them."""
        self._run_decodes(np.array([PADDING] * num_rows, np.int32), kind)

    def _graph_bytes(self) -> int:
        """The activations of one decode step of the largest size, and each graph's own."""
        if self._graphs is None or self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._decode_step(self._limits.max_num_seqs, GREEDY)
        activations = torch.cuda.max_memory_allocated(self._device) - before
        return activations + 2 * len(self._graphs.sizes) * BYTES_PER_GRAPH

    def _plan(self, schedule: Schedule) -> Plan:
        """Sort a schedule into decodes and chunks, and bring the slots' host side up to date."""
        state = self._state
        decodes, chunks, drawing = self._sorted(schedule)
        rows: list[int] = []
        traits, num_top = 0, 0
        for sequence in decodes:
            position = sequence.num_computed
            column = position // self.block_size
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

    def _launch_decodes(self, plan: Plan) -> Ticket:
        num_rows = len(plan.rows_D5)
        kind = captured_kind(plan.traits)
        size = self._graphs.size_for(num_rows) if self._graphs is not None else num_rows
        padding = np.array([PADDING] * (size - num_rows), np.int32).reshape(-1, ROW_WIDTH)
        self._run_decodes(np.concatenate([plan.rows_D5, padding]), kind)
        out_R, logprobs = self._out_S[:num_rows], None
        if kind is None:
            assert self._logits_SV is not None
            slots_R = self._inputs.slots_S[:num_rows]
            logprobs = self._draw(self._logits_SV[:num_rows], slots_R, plan.features, out_R)
        return self._ticket(plan, out_R, logprobs, [], [])

    def _run_decodes(self, rows_S5: Ints, kind: Kind) -> None:
        upload_into(self._rows_S5[: len(rows_S5)], rows_S5)
        self._seq_lens = tuple((rows_S5[:, 1] + 1).tolist())
        run = self._decode_step if self._graphs is None else self._graphs.run
        run(len(rows_S5), kind)

    def _decode_step(self, num_rows: int, kind: Kind) -> None:
        """A whole step over the first rows of the fixed buffers: what is captured."""
        inputs = self._inputs.rows(num_rows)
        decode_inputs(
            self._rows_S5[:num_rows],
            self._state.tables_NB,
            self._state.last_tokens_N,
            self._state.sampling.num_generated_N,
            self.block_size,
            inputs,
        )
        hidden_SH = self.decoder.forward(self._decode_inputs(inputs), self._kv)
        logits_SV = self.decoder.logits(hidden_SH)
        if kind is None:
            self._kept_logits(logits_SV)[:num_rows].copy_(logits_SV)
        else:
            self._draw(logits_SV, inputs.slots_S, kind, self._out_S[:num_rows])

    def _decode_inputs(self, inputs: DecodeInputs) -> StepInputs:
        num_rows = len(inputs.slots_S)
        tables_SB = inputs.block_tables_SB
        return StepInputs(
            token_ids_T=inputs.token_ids_S,
            positions_T=inputs.positions_S,
            slots_T=inputs.kv_slots_S,
            block_tables_SB=tables_SB if self._has_kernels else tables_SB.long(),
            query_lens=() if self._has_kernels else (1,) * num_rows,
            seq_lens=() if self._has_kernels else self._seq_lens,
            logit_rows_R=None if self._has_kernels else self._row_numbers_S[:num_rows],
            query_starts_S1=self._starts_S1[: num_rows + 1] if self._has_kernels else None,
            seq_lens_S=inputs.seq_lens_S if self._has_kernels else None,
            num_decodes=num_rows,
            max_query_len=1,
        )

    def _kept_logits(self, logits_SV: Tensor) -> Tensor:
        """The one buffer of logits that graphs write for whoever draws behind them."""
        if self._logits_SV is None:
            self._logits_SV = logits_SV.new_empty(len(self._rows_S5), logits_SV.shape[1])
        return self._logits_SV

    def _kept(self) -> object:
        """Scratch memory that a graph captured now holds; views keep it alive if it is replaced."""
        spaces = [self._workspace, getattr(self.decoder, "workspace", None)]
        return [(w.counters(0), w.partials(0)) for w in spaces if w is not None]

    def _launch_chunks(self, plan: Plan) -> Ticket:
        pieces, rows = plan_rows(plan.chunks)
        num_decodes = len(plan.rows_D5)
        slots_S = plan.rows_D5[:, 0].tolist()
        slots_S += [self._state.slots[sequence].index for sequence, _ in plan.chunks]
        longest = max(len(sequence.block_ids) for sequence, _ in plan.chunks)
        if num_decodes:
            longest = max(longest, int(plan.rows_D5[:, 1].max()) // self.block_size + 1)
        sent_S = upload(np.array(slots_S, np.int32), self._device)
        hidden_RH = self._forward(
            plan.rows_D5, pieces, self._state.tables_NB[:, :longest][sent_S.long()]
        )
        parts, tensors = self._score_prompts(hidden_RH[num_decodes:], rows)
        drawn_from = [*range(num_decodes), *(num_decodes + row for _, row in rows.sampling)]
        out_R, logprobs = self._draw_rows(hidden_RH, drawn_from, plan)
        return self._ticket(plan, out_R, logprobs, parts, tensors)

    def _draw_rows(
        self, hidden_RH: Tensor, rows: Seq[int], plan: Plan
    ) -> tuple[Tensor, RowLogprobs | None]:
        """Draw for `plan.sampling` from these rows of hidden states."""
        out_R = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        if not rows:
            return out_R, None
        slots = [self._state.slots[sequence].index for sequence in plan.sampling]
        counts = [sequence.num_generated for sequence in plan.sampling]
        sent_3R = upload(np.array([rows, slots, counts], np.int32), self._device)
        num_generated_N = self._state.sampling.num_generated_N
        num_generated_N[sent_3R[1].long()] = sent_3R[2]
        if len(rows) < len(hidden_RH):
            hidden_RH = hidden_RH[sent_3R[0].long()]
        logits_RV = self.decoder.logits(hidden_RH)
        return out_R, self._draw(logits_RV, sent_3R[1], plan.features, out_R)

    def _draw(
        self, logits_RV: Tensor, slots_R: Tensor, features: SamplingFeatures, out_R: Tensor
    ) -> RowLogprobs | None:
        drawn = sample_rows(
            logits_RV, self._state.sampling, slots_R, features=features, workspace=self._workspace
        )
        store_drawn(drawn.ids_R, drawn.is_finite_R, slots_R, self._state.last_tokens_N, out_R)
        return drawn.logprobs

    def _score_prompts(
        self, hidden_RH: Tensor, rows: Rows
    ) -> tuple[list[PromptPart], list[Tensor]]:
        """Prompt log-probs, slice by slice: what the rows stand for, and tensors to bring home."""
        parts: list[PromptPart] = []
        tensors: list[Tensor] = []
        for sequence, span, targets in rows.scoring:
            num_top = sequence.request.sampling.prompt_logprobs or 0
            for start in range(0, len(span), self.rows_per_slice):
                part = span[start : start + self.rows_per_slice]
                wanted = targets[start : start + len(part)]
                logits_RV = self.decoder.logits(hidden_RH[part.start : part.stop])
                ids_R = upload(np.array(wanted, np.int32), self._device)
                found = row_logprobs(logits_RV, ids_R, num_top, workspace=self._workspace)
                tensors += [are_finite(logits_RV).all(), *tensors_of(found)]
                parts.append(PromptPart(sequence=sequence, token_ids=wanted, num_top=num_top))
        return parts, tensors

    def _ticket(
        self,
        plan: Plan,
        out_R: Tensor,
        logprobs: RowLogprobs | None,
        parts: Seq[PromptPart],
        tensors: Seq[Tensor],
    ) -> Ticket:
        brought = [out_R] if plan.sampling else []
        brought += tensors_of(logprobs) if logprobs is not None else []
        asked = [s.request.sampling.logprobs for s in plan.sampling] if logprobs else []
        return Ticket(
            download=Download([*brought, *tensors], self._device),
            wanted=plan.wanted,
            sampling=plan.sampling,
            reports=asked,
            prompts=parts,
        )

    def _forward(self, rows_D5: Ints, pieces: Seq[Piece], tables_SB: Tensor) -> Tensor:
        """Hidden states of the wanted rows: in one pass, or in several where memory is short."""
        num_tokens = len(rows_D5) + sum(len(piece.tokens) for piece in pieces)
        while True:
            limit = self._most_tokens
            try:
                if limit is None or num_tokens <= limit:
                    return self._forward_once(rows_D5, pieces, tables_SB)
                return self._forward_in_parts(rows_D5, pieces, tables_SB, limit)
            except torch.OutOfMemoryError:
                smaller = max(min(limit or num_tokens, num_tokens) // 2, FEWEST_TOKENS)
                if smaller == limit or smaller >= num_tokens:
                    raise
                self._most_tokens = smaller
            torch.cuda.empty_cache()

    def _forward_in_parts(
        self, rows_D5: Ints, pieces: Seq[Piece], tables_SB: Tensor, limit: int
    ) -> Tensor:
        num_decodes = len(rows_D5)
        hidden = []
        if num_decodes:
            hidden.append(self._forward_once(rows_D5, [], tables_SB[:num_decodes]))
        for row, piece in enumerate(pieces, start=num_decodes):
            for part in split_pieces([piece], limit):
                hidden.append(self._forward_once(NO_ROWS, [part], tables_SB[row : row + 1]))
        return torch.cat(hidden)

    def _forward_once(self, rows_D5: Ints, pieces: Seq[Piece], tables_SB: Tensor) -> Tensor:
        return self._forward_arrays(step_arrays(rows_D5, pieces, self.block_size), tables_SB)

    def _forward_arrays(self, arrays: StepArrays, tables_SB: Tensor) -> Tensor:
        inputs = to_inputs(
            arrays, tables_SB, self._state.last_tokens_N, has_kernels=self._has_kernels
        )
        return self.decoder.forward(inputs, self._kv)


def captured_kind(traits: int) -> Kind:
    """The captured way of drawing that serves rows with these traits; None if none does."""
    if traits & (PENALIZED | BIASED | REPORTED):
        return None
    return FILTERED_DRAW if traits & (RANDOM | FILTERED) else GREEDY
