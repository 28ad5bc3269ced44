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

import os
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.engine.batch import Piece, Rows, plan_rows
from runtime.engine.decode_state import DecodeState
from runtime.engine.graphs import DecodeGraphs, graph_sizes
from runtime.engine.model_runner import LOGIT_BYTES, DecoderLike, are_finite
from runtime.engine.readiness import Readiness, thin
from runtime.engine.runner import StepResult
from runtime.engine.scheduler import Schedule
from runtime.engine.sequence import Sequence
from runtime.engine.span_forward import SpanForward
from runtime.engine.step_arrays import block_tables
from runtime.engine.step_cost import StepCost
from runtime.engine.step_plan import (
    GREEDY,
    NO_ROWS,
    Kind,
    Plan,
    Planner,
    RunnerLimits,
    captured_kind,
    padded,
    padded_columns,
)
from runtime.engine.step_results import PromptPart, Ticket, collected, tensors_of
from runtime.engine.transfer import Download, Ints, upload, upload_all, upload_into
from runtime.kernels.compile_ahead import compiling_ahead
from runtime.kernels.decode_inputs import ROW_WIDTH, DecodeInputs, decode_inputs
from runtime.kernels.sampling import RowLogprobs, SamplingFeatures, row_logprobs, sample_rows
from runtime.kernels.store_drawn import store_drawn
from runtime.kernels.workspace import Workspace
from runtime.model.step import StepInputs

OUT_OF_MEMORY = (
    "the device ran out of memory while this request was computed; lower max_num_batched_tokens or "
    "gpu_memory_utilization"
)


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
        self._kv, self._limits = kv, limits
        device, num_rows = decoder.device, limits.max_num_seqs
        self._device, self.has_kernels = device, bool(getattr(decoder, "has_kernels", False))
        self._workspace = Workspace(device)
        self._state = DecodeState(num_rows, limits.num_columns, decoder.spec.vocab, device)
        self._planner = Planner(self._state, limits.block_size, is_deterministic=deterministic)
        self._spans = SpanForward(
            decoder, kv, self._state.last_tokens_N, limits.block_size,
            has_kernels=self.has_kernels,
        )  # fmt: skip
        self._rows_S5 = torch.zeros(num_rows, ROW_WIDTH, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs.empty(num_rows, limits.num_columns, device)
        self._out_S = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._starts_S1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._row_numbers_S = torch.arange(num_rows, device=device)
        self._seq_lens: tuple[int, ...] = ()
        self._graphs: DecodeGraphs | None = None
        if use_graphs and self.has_kernels:
            self._graphs = DecodeGraphs(graph_sizes(num_rows), self._decode_step, self._kept)
        self._dry: CudaRunner | None = None
        self._readiness = Readiness(self, limits, decoder.spec.vocab, device, self._graphs)

    @property
    def rows_per_slice(self) -> int:
        """Rows of logits computed at once where a whole prompt's are wanted."""
        return max(1, LOGIT_BYTES // (4 * self.decoder.spec.vocab))

    def can_run_behind(self, schedule: Schedule) -> bool:
        return True

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> Ticket:
        plan = self._planner.plan(schedule)
        try:
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
        return self._spans.pieces(pieces)

    @torch.inference_mode()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, vocab]."""
        return self.decoder.logits(hidden_RH)

    @torch.inference_mode()
    def run_worst_step(self) -> None:
        """See `Readiness.run_worst_step`; needs no more than one block of KV."""
        self._readiness.run_worst_step()

    @torch.inference_mode()
    def graph_bytes(self) -> int:
        """See `Readiness.graph_bytes`; 0 where nothing can be captured."""
        return self._readiness.graph_bytes() if self.has_kernels else 0

    @torch.inference_mode()
    def make_ready(self) -> bool:
        """Do one piece of what makes later steps quick; False once there is nothing left to do.

        For idle moments; steps may be in flight.
        """
        is_more = self._readiness.proceed()
        if not is_more:
            self.forget_dry_runs()
        return is_more

    @property
    def step_cost(self) -> StepCost | None:
        """What steps cost here; None until `make_ready` has measured it."""
        return self._readiness.step_cost

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """See `Readiness.compile_ahead`."""
        if self.has_kernels:
            self._readiness.compile_ahead()
            self.forget_dry_runs()

    def run_padding(self, num_rows: int, kind: Kind) -> None:
        self._run_decodes(padded(NO_ROWS, num_rows), kind)

    @torch.inference_mode()
    def compile_steps(self, decodes: Seq[tuple[int, Kind]], prompts: Seq[int]) -> None:
        if not self.has_kernels:
            return
        if self._dry is None:
            self._dry = CudaRunner(*thin(self.decoder, self._kv), self._limits, use_graphs=False)
        with compiling_ahead(os.cpu_count() or 1):
            for num_tokens in prompts:
                num_rows = min(num_tokens, self._limits.max_num_seqs)
                self._dry.blank_prompt(num_tokens, num_rows, draw=True)
            for num_rows, kind in decodes:
                self._dry.run_padding(num_rows, kind)

    def forget_dry_runs(self) -> None:
        """Free what `compile_steps` works with."""
        self._dry = None

    def blank_prompt(self, num_tokens: int, num_rows: int, *, draw: bool) -> Tensor:
        logits_RV = self.decoder.logits(
            self._spans.blank(num_tokens, num_rows, self._limits.max_model_len)
        )
        if draw:
            nobody_R = torch.full((len(logits_RV),), -1, dtype=torch.int32, device=self._device)
            self._draw(logits_RV, nobody_R, GREEDY, torch.empty_like(nobody_R))
        return logits_RV

    def _launch_decodes(self, plan: Plan) -> Ticket:
        self._state.flush()
        num_rows = len(plan.rows_D5)
        kind = captured_kind(plan.traits)
        size = self._graphs.size_for(num_rows) if self._graphs is not None else num_rows
        logits_SV = self._run_decodes(padded(plan.rows_D5, size), kind)
        out_R, logprobs = self._out_S[:num_rows], None
        if logits_SV is not None:
            slots_R = self._inputs.slots_S[:num_rows]
            logprobs = self._draw(logits_SV[:num_rows], slots_R, plan.features, out_R)
        return self._ticket(plan, out_R, logprobs, [], [])

    def _run_decodes(self, rows_S5: Ints, kind: Kind) -> Tensor | None:
        upload_into(self._rows_S5[: len(rows_S5)], rows_S5)
        if not self.has_kernels:
            self._seq_lens = tuple((rows_S5[:, 1] + 1).tolist())
        run = self._decode_step if self._graphs is None else self._graphs.run
        return run(len(rows_S5), kind)

    def _decode_step(self, num_rows: int, kind: Kind) -> Tensor | None:
        """A whole step over the first rows of the fixed buffers: what is captured.

        Returns the logits [S, V] for the kind that draws nothing itself.
        """
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
            return logits_SV
        self._draw(logits_SV, inputs.slots_S, kind, self._out_S[:num_rows])
        return None

    def _decode_inputs(self, inputs: DecodeInputs) -> StepInputs:
        num_rows = len(inputs.slots_S)
        tables_SB = inputs.block_tables_SB
        return StepInputs(
            token_ids_T=inputs.token_ids_S,
            positions_T=inputs.positions_S,
            slots_T=inputs.kv_slots_S,
            block_tables_SB=tables_SB if self.has_kernels else tables_SB.long(),
            query_lens=() if self.has_kernels else (1,) * num_rows,
            seq_lens=() if self.has_kernels else self._seq_lens,
            logit_rows_R=None if self.has_kernels else self._row_numbers_S[:num_rows],
            query_starts_S1=self._starts_S1[: num_rows + 1] if self.has_kernels else None,
            seq_lens_S=inputs.seq_lens_S if self.has_kernels else None,
            num_decodes=num_rows,
            max_query_len=1,
        )

    def _kept(self) -> object:
        """Scratch memory that a graph captured now holds; views keep it alive if it is replaced."""
        options = getattr(self.decoder, "options", None)
        spaces = [self._workspace, *([options.workspace] if options is not None else [])]
        return [(space.counters(0), space.partials(0)) for space in spaces]

    def _launch_chunks(self, plan: Plan) -> Ticket:
        """Chunks alone need nothing of the slots but at the end: the device starts before that."""
        pieces, rows = plan_rows(plan.chunks)
        num_decodes = len(plan.rows_D5)
        tables_SB = self._tables_of(plan) if num_decodes else block_tables(pieces)
        hidden_RH = self._spans.run(plan.rows_D5, pieces, tables_SB)
        self._state.flush()
        parts, tensors = self._score_prompts(hidden_RH[num_decodes:], rows)
        drawn_from = [*range(num_decodes), *(num_decodes + row for _, row in rows.sampling)]
        out_R, logprobs = self._draw_rows(hidden_RH, drawn_from, plan)
        return self._ticket(plan, out_R, logprobs, parts, tensors)

    def _tables_of(self, plan: Plan) -> Tensor:
        """[S, B] of the decodes and chunks of a step, out of the slots' state."""
        self._state.flush()
        slots = plan.rows_D5[:, 0].tolist()
        slots += [self._state.slots[sequence].index for sequence, _ in plan.chunks]
        longest = max(len(sequence.block_ids) for sequence, _ in plan.chunks)
        longest = max(longest, int(plan.rows_D5[:, 1].max()) // self.block_size + 1)
        sent_S = upload(np.array(slots, np.int32), self._device)
        return self._state.tables_NB[:, : padded_columns(longest)][sent_S.long()]

    def _draw_rows(
        self, hidden_RH: Tensor, rows: Seq[int], plan: Plan
    ) -> tuple[Tensor, RowLogprobs | None]:
        """Draw for `plan.sampling` from these rows of hidden states."""
        out_R = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        if not rows:
            return out_R, None
        slots = [self._state.slots[sequence].index for sequence in plan.sampling]
        counts = [sequence.num_generated for sequence in plan.sampling]
        columns = [np.array(column, np.int32) for column in (rows, slots, counts)]
        rows_R, slots_R, counts_R = upload_all(columns, self._device)
        num_generated_N = self._state.sampling.num_generated_N
        num_generated_N[slots_R.long()] = counts_R
        if len(rows) < len(hidden_RH):
            hidden_RH = hidden_RH[rows_R.long()]
        logits_RV = self.decoder.logits(hidden_RH)
        return out_R, self._draw(logits_RV, slots_R, plan.features, out_R)

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
