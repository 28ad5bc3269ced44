"""What makes later steps quick and sure: memory and kernels of the worst step, graphs, step costs.

Runs steps that stand for no sequence; they write no KV and draw for nobody, so that they may be put
between others.

Shape legend: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.engine.graphs import DecodeGraphs, graph_sizes
from runtime.engine.memory import BYTES_PER_GRAPH, LIBRARY_BYTES
from runtime.engine.model_runner import DecoderLike
from runtime.engine.step_cost import StepCost, measure
from runtime.engine.step_plan import GREEDY, RANDOM_DRAW, Kind, RunnerLimits

# Kernels of filters take seconds to compile: they wait for a request that filters.
FIRST = (GREEDY, RANDOM_DRAW)
# Lengths that are not multiples of 16 as well as such: kernels are compiled apart for the two.
FIRST_PROMPTS = (1, 8, 16, 23, 64, 100, 256, 300, 512, 1024, 1500)


class BlankSteps(Protocol):
    """Steps without sequences, as a runner offers them."""

    def run_padding(self, num_rows: int, kind: Kind) -> None:
        """A decode step of padding rows; through a graph where there is one."""
        ...

    def compile_steps(self, decodes: Seq[tuple[int, Kind]], prompts: Seq[int]) -> None:
        """Compile the kernels of such decode steps, and of prompts of so many tokens."""
        ...

    def blank_prompt(self, num_tokens: int, num_rows: int, *, draw: bool) -> Tensor:
        """Logits [num_rows, vocab] of a prompt written nowhere, drawn from if `draw`."""
        ...


class Readiness:
    """The dry runs of one runner, whose logits have `vocab` columns.

    step_cost: None until `proceed` has come to measure it.
    """

    def __init__(
        self,
        steps: BlankSteps,
        limits: RunnerLimits,
        vocab: int,
        device: torch.device,
        graphs: DecodeGraphs | None,
    ) -> None:
        self._steps, self._limits, self._graphs = steps, limits, graphs
        self._vocab, self._device = vocab, device
        self.step_cost: StepCost | None = None

    def compile_ahead(self) -> None:
        """Compile what first answers need: prompts of some lengths, one decode, and many."""
        limits = self._limits
        lengths = {n for n in FIRST_PROMPTS if n < limits.max_num_batched_tokens}
        rows = (1, limits.max_num_seqs)
        self._steps.compile_steps(
            [(size, kind) for size in rows for kind in FIRST],
            # The largest have the kernels that take longest to compile.
            sorted({*lengths, limits.max_num_batched_tokens}, reverse=True),
        )

    def run_worst_step(self) -> None:
        """Run the largest steps, so that their memory and kernels are there."""
        limits = self._limits
        rare = self._rare_memory()
        logits_RV = self._steps.blank_prompt(
            limits.max_num_batched_tokens, limits.max_num_seqs, draw=True
        )
        adjusted = torch.empty_like(logits_RV, dtype=torch.float32)
        del logits_RV, rare, adjusted
        for kind in FIRST:
            self._steps.run_padding(limits.max_num_seqs, kind)

    def proceed(self) -> bool:
        """Do one piece of what is left; False once nothing is.

        Takes tens of milliseconds, some tenths of a second for the last piece, which measures; and
        seconds for a kernel that this machine has never compiled.
        """
        if self._graphs is not None and self._captured_one(self._graphs):
            return True
        if self.step_cost is None and self._device.type == "cuda":
            self.step_cost = self._measured_cost()
        return False

    def _captured_one(self, graphs: DecodeGraphs) -> bool:
        """Capture a missing size: of greedy drawing, then of whatever else requests have used."""
        for kind in dict.fromkeys([GREEDY, *graphs.kinds]):
            for size in graphs.missing(kind):
                self._steps.compile_steps([(size, kind)], [])
                self._steps.run_padding(size, kind)
                return True
        return False

    def _rare_memory(self) -> list[Tensor]:
        """What comes to stay once a request has penalties: the history of every slot."""
        num_rows, vocab = self._limits.max_num_seqs, self._vocab
        num_bytes = 2 * num_rows * vocab + num_rows * vocab // 8
        return [torch.empty(num_bytes, dtype=torch.uint8, device=self._device)]

    def graph_bytes(self) -> int:
        """What graphs will take: the activations of the largest decode step, and each one's own."""
        num_rows = self._limits.max_num_seqs
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._steps.run_padding(num_rows, GREEDY)
        activations = torch.cuda.max_memory_allocated(self._device) - before
        num_graphs = 2 * len(graph_sizes(num_rows))  # greedy, and one other way of drawing
        return activations + LIBRARY_BYTES + num_graphs * BYTES_PER_GRAPH

    def _measured_cost(self) -> StepCost:
        limits = self._limits
        rows = [size for size in (1, 8, 16, 32, 64, 128, 256, 512) if size < limits.max_num_seqs]
        tokens = [n for n in (256, 1024, 4096) if n < limits.max_num_batched_tokens]
        return StepCost(
            decode=measure([*rows, limits.max_num_seqs], self._decode_s, budget_s=0.3),
            prefill=measure(
                [*tokens, limits.max_num_batched_tokens], self._prefill_s, budget_s=0.4
            ),
        )

    def _decode_s(self, num_rows: int) -> float:
        size = num_rows if self._graphs is None else self._graphs.size_for(num_rows)
        return self._seconds(lambda: self._steps.run_padding(size, GREEDY))

    def _prefill_s(self, num_tokens: int) -> float:
        return self._seconds(lambda: self._steps.blank_prompt(num_tokens, 1, draw=True))

    def _seconds(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._device)
        began = perf_counter()
        work()
        torch.cuda.synchronize(self._device)
        return perf_counter() - began


def thin(decoder: DecoderLike, kv: Any) -> tuple[DecoderLike, Any]:
    """The same decoder with every kind of layer once, and the first one again behind them, and the
    cache of those layers.

    Going through it launches all the kernels of the whole. Its results mean nothing.
    """
    layers = getattr(decoder, "layers", ())
    if not layers:
        return decoder, kv
    kinds: dict[object, int] = {}
    for i, layer in enumerate(layers):
        parts = (layer.qkv, layer.o, layer.gate_up, layer.down)
        labels = (part.label for part in parts)
        kinds.setdefault((layer.spec, kv.pools[i].dtype, *labels), i)
    chosen = (*kinds.values(), 0)
    thinned = copy.copy(decoder)
    thinned.layers = tuple(layers[i] for i in chosen)  # type: ignore[attr-defined]
    return thinned, kv.of_layers(chosen)
