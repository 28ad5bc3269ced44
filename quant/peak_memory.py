"""The most memory a run holds at once, from shapes alone: an account of what lives together.

Per layer the largest of these moments counts: attention, taking statistics (a batch's activations
and one matrix X^T X), factoring that matrix, refining codes beside the factor, and describing the
module for the report. Weights of the layer and hidden states lie there meanwhile, the latter where
`quant.spill` puts them: it takes a third of what is free, of the GPU, else of the host, else none.
Knows no tensors.

Shape legend: I columns and O rows of all modules that read one input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quant.methods.gptq import CPU_VALUES, GPU_VALUES
from quant.modelling import BFLOAT16_FROM
from quant.plan import Plan
from quant.plan_rows import PlanRow
from quant.run_time import shared_inputs
from quant.spill import SHARE
from quant.stored_size import DTYPE_BYTES, weights_of

# Anonymous memory before the first weight is read, where nobody measured it: Python, torch,
# transformers and a tokenizer; and with a GPU's libraries.
PROCESS_BYTES, CUDA_PROCESS_BYTES = 250 * 10**6, 1600 * 10**6
# Tensors as wide as the layer's widest, and as its hidden states, of a batch at work in a layer.
_WIDE, _NARROW = 5, 10
# Scores [heads, T, T] in float32, and what masks them, where attention makes them whole.
_SCORES = 2.25
# Tensors of the rows at work in float32: weight, codes, values, gradient, and trial ones.
_REFINED = 10
# Float64 copies that a solver makes of equations, and values of those solved at once.
_SOLVED, _SOLVED_VALUES = 4, 1 << 26
# Tensors as wide as the widest that a step of gradient descent holds, for each of its tokens.
_KEPT_FOR_BACKWARD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What runs through the layers: calibration tokens of one process, in windows of that many at
    most, and batches; on a GPU or not. free_*_bytes: what a run may take (None: as much as needed).
    process_bytes: the host memory that is taken already, a GGUF's metadata included.
    """

    tokens: int
    window_tokens: int
    batch_tokens: int
    is_gpu: bool = False
    free_gpu_bytes: int | None = None
    free_host_bytes: int | None = None
    process_bytes: int = PROCESS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of the host's anonymous memory, of the GPU (0: none), and of a file of hidden states
    beside the artifact."""

    host_bytes: int
    gpu_bytes: int
    spilled_bytes: int


def is_half(plan: Plan, work: Workload) -> bool:
    """Whether layers are computed in bfloat16."""
    return work.is_gpu and plan.hidden_size >= BFLOAT16_FROM


def peak_memory(plan: Plan, work: Workload) -> Peak:
    """The peaks of a run."""
    layers = [plan.layer_rows(layer) for layer in range(plan.num_layers)]
    table = plan.vocab_size * plan.hidden_size
    embedding = DTYPE_BYTES[plan.dtype] * table
    outer = embedding * (1 if plan.is_tied else 2)
    if plan.dtype != plan.source_dtype:
        outer += DTYPE_BYTES[plan.source_dtype] * table
    in_layer = max(_layer(plan, rows, work) for rows in layers)
    on_gpu, on_host, on_disk = _hidden_states(plan, work)
    if work.is_gpu:
        host = max(work.process_bytes, CUDA_PROCESS_BYTES) + on_host + outer
        gpu = on_gpu + max(in_layer, embedding)
        return Peak(host_bytes=host, gpu_bytes=gpu, spilled_bytes=on_disk)
    # The head computes in float32.
    host = work.process_bytes + on_host + max(in_layer, outer + 4 * table)
    return Peak(host_bytes=host, gpu_bytes=0, spilled_bytes=on_disk)


def _hidden_states(plan: Plan, work: Workload) -> tuple[int, int, int]:
    """Bytes of hidden states on the GPU, the host and the disk."""
    one = (2 if is_half(plan, work) else 4) * work.tokens * plan.hidden_size
    is_beside = plan.gptq_target == "original" or plan.gradient_steps
    found, gpu, host = [0, 0, 0], work.free_gpu_bytes, work.free_host_bytes
    for size in [one] * (2 if is_beside else 1):
        if work.is_gpu and (gpu is None or SHARE * size <= gpu):
            found[0] += size
            gpu = None if gpu is None else gpu - size
        elif host is None or SHARE * size <= host:
            found[1] += size
            host = None if host is None else host - size
        else:
            found[2] += size
    # What the original puts out for each token is held once more while a layer learns.
    found[0 if work.is_gpu else 1] += one if plan.gradient_steps else 0
    return found[0], found[1], found[2]


def _layer(plan: Plan, rows: Sequence[PlanRow], work: Workload) -> int:
    computed = 2 if is_half(plan, work) else 4
    weights, original = sum(map(weights_of, rows)), DTYPE_BYTES[plan.source_dtype]
    held = weights * (computed + (0 if original == computed else original))
    batch = _batch(plan, rows, work, computed)
    described = 12 * max(map(weights_of, rows))
    moments = [batch, described, *_learning(plan, rows, work)]
    is_aimed = plan.gptq_target == "original"
    if is_aimed or plan.gradient_steps:
        held += computed * weights
    for columns, outputs in shared_inputs(rows).values():
        hessian, stacked = 4 * columns**2, (original + 1) * columns * outputs
        seen = hessian * (2 if work.is_gpu else 1) + is_aimed * (hessian + batch)
        moments.append(seen + batch)
        moments.append(stacked + (3 + is_aimed) * hessian)
        refining = _refining(rows, columns, outputs, work.is_gpu)
        moments.append(stacked + (2 + is_aimed) * hessian + refining)
        moments.append(stacked + hessian + described)
    return held + max(moments)


def _batch(plan: Plan, rows: Sequence[PlanRow], work: Workload, computed: int) -> int:
    """Activations of a batch, at the widest of attention and MLP."""
    tokens = min(work.tokens, max(work.batch_tokens, work.window_tokens))
    narrow = computed * tokens * _NARROW * plan.hidden_size
    wide = computed * tokens * _WIDE * max(max(row.shape) for row in rows)
    # No fast kernel of float32 attention shares keys among heads.
    makes_scores = computed == 4 and plan.num_kv_heads != plan.num_heads
    scores = 4 * _SCORES * plan.num_heads * tokens * work.window_tokens if makes_scores else 0
    return narrow + max(wide, int(scores))


def _learning(plan: Plan, rows: Sequence[PlanRow], work: Workload) -> list[int]:
    if not plan.gradient_steps:
        return []
    widest = max(max(row.shape) for row in rows)
    tokens = min(plan.gradient_tokens, work.tokens)
    return [4 * (4 * sum(map(weights_of, rows)) + _KEPT_FOR_BACKWARD * tokens * widest)]


def _refining(rows: Sequence[PlanRow], columns: int, outputs: int, is_gpu: bool) -> int:
    at_once = min(outputs, max(1, (GPU_VALUES if is_gpu else CPU_VALUES) // columns))
    sizes = (row.scheme.weights.group_size for row in rows if row.scheme.weights is not None)
    size = min((each for each in sizes if each), default=columns)
    equations = max(1, columns // size) ** 2 * at_once
    solved = _SOLVED * 8 * min(equations, _SOLVED_VALUES)
    return 4 * _REFINED * columns * at_once + 4 * equations + solved
