"""What a plan will cost, from shapes alone: bytes on disk, peak memory, rough time.

Disk is exact but for headers and biases; memory is an upper guess; time is arithmetic over an
assumed speed and meant to tell minutes from hours. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quant.plan import Plan, PlanRow

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Resident before the first weight is read: Python, torch, transformers and a tokenizer.
PROCESS_BYTES = 600 * 10**6
# Every layer runs twice: once to see its inputs, once quantized to feed the next layer.
PASSES = 2
# Smoothing, for each weight: the sampled tokens, forward; four products with 512 tokens; and passes
# over weights and inputs, as arithmetic. Measured: 32 processor seconds for 106 M weights.
SMOOTHING_FLOPS = 2 * 4096 + 4 * 2 * 512 + 6000
# Weights in and out: read, unpacked, checked, written durably, hashed and read back. Measured with
# a 135 M GGUF on a shared 2-core machine: 6 to 11 s for layers of 106 M float32 weights, twice.
_MOVED_BYTES_PER_S = 125e6
# Tensors as wide as the widest that a step of gradient descent holds, for each of its tokens.
_KEPT_FOR_BACKWARD = 8
# GPTQ goes column by column: small steps, whose overhead outweighs arithmetic on small layers.
_SECONDS_PER_COLUMN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes and seconds a plan will take; `seconds` is None where no speed was given.

    quantized_bytes and num_quantized (weights) count the quantized modules alone.
    """

    source_bytes: int
    artifact_bytes: int
    quantized_bytes: int
    num_quantized: int
    num_weights: int
    peak_memory_bytes: int
    seconds: float | None

    @property
    def quantized_bits(self) -> float:
        """Bits per weight of the quantized modules: codes, scales and zero points."""
        return 8 * self.quantized_bytes / self.num_quantized if self.num_quantized else 0.0

    @property
    def total_bits(self) -> float:
        """Bits per weight of the whole model, dense parts included."""
        return 8 * self.artifact_bytes / self.num_weights


def estimate(
    plan: Plan,
    *,
    tokens: int,
    batch_tokens: int,
    flops_per_s: float | None,
    opening_s: float = 0.0,
) -> Estimate:
    """The cost of `plan` with this many calibration tokens (0: none) at this speed.

    opening_s: how long it took to open the source. Its tokenizer takes about as long to load (a
    GGUF's is rebuilt from the same tables), and that comes before the first layer.
    """
    seconds = None
    if flops_per_s is not None:
        seconds = opening_s + _seconds(plan, tokens, flops_per_s)
    quantized = [row for row in plan.rows if not row.scheme.is_dense]
    outside = _outside_weights(plan)
    num_weights = sum(_weights(row) for row in _stored(plan)) + outside
    artifact = sum(row_bytes(row, plan.dtype) for row in _stored(plan))
    return Estimate(
        source_bytes=num_weights * DTYPE_BYTES[plan.source_dtype],
        artifact_bytes=artifact + outside * DTYPE_BYTES[plan.dtype],
        quantized_bytes=sum(row_bytes(row, plan.dtype) for row in quantized),
        num_quantized=sum(_weights(row) for row in quantized),
        num_weights=num_weights,
        peak_memory_bytes=_peak_memory(plan, tokens, batch_tokens),
        seconds=seconds,
    )


def row_bytes(row: PlanRow, dtype: str) -> int:
    """Bytes of a module's tensors on disk (without bias): codes, scales, zero points, or floats."""
    rows, columns = row.shape
    weights = row.scheme.weights
    if weights is None:
        return rows * columns * DTYPE_BYTES[dtype]
    groups = columns // weights.group_size if weights.group_size else 1
    scales = -(-rows // weights.scale_rows) * groups * DTYPE_BYTES[dtype]
    if row.scheme.layout != "pack-quantized":
        return rows * columns + scales
    zero_points = 0 if weights.symmetric else _words(rows, weights.num_bits) * groups
    return 4 * (rows * _words(columns, weights.num_bits) + zero_points) + scales + 16


def _words(values: int, num_bits: int) -> int:
    return -(-values * num_bits // 32)


def _weights(row: PlanRow) -> int:
    return row.shape[0] * row.shape[1]


def _stored(plan: Plan) -> list[PlanRow]:
    """Rows with a weight of their own: a tied lm_head has none."""
    return [row for row in plan.rows if not (plan.is_tied and row.module == "lm_head")]


def _outside_weights(plan: Plan) -> int:
    """Embedding and norms (two a layer and one at the end)."""
    return plan.hidden_size * (plan.vocab_size + 2 * plan.num_layers + 1)


def _inputs(rows: Iterable[PlanRow]) -> list[int]:
    """Columns of each distinct input of a layer: modules of one fused group share theirs."""
    groups = {_input_name(row.module): row.shape[1] for row in rows if row.statistics == "hessian"}
    return list(groups.values())


def _input_name(module: str) -> str:
    parent, _, leaf = module.rpartition(".")
    return parent + (
        "" if leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3") else leaf
    )


def _peak_memory(plan: Plan, tokens: int, batch_tokens: int) -> int:
    layers = [plan.layer_rows(layer) for layer in range(plan.num_layers)]
    weights = max(sum(_weights(row) for row in rows) for rows in layers)
    widest = max(max(row.shape) for rows in layers for row in rows)
    hessians = max(sum(columns**2 for columns in _inputs(rows)) for rows in layers)
    largest = max((columns**2 for rows in layers for columns in _inputs(rows)), default=0)
    is_aimed = plan.gptq_target == "original"  # a second stream, a copy of the layer, D beside H
    hidden_states = (3 if is_aimed else 2) * tokens * plan.hidden_size
    batch = 4 * min(batch_tokens, tokens) * widest
    in_layer = 3 * weights + hessians + 3 * largest + batch + is_aimed * (weights + 2 * largest)
    if plan.gradient_steps:  # the original's states and outputs; values, gradients, a step's inside
        hidden_states *= 2
        in_layer += 4 * weights + _KEPT_FOR_BACKWARD * min(plan.gradient_tokens, tokens) * widest
    embedding = 4 * plan.vocab_size * plan.hidden_size
    return PROCESS_BYTES + 4 * (hidden_states + max(in_layer, embedding))


def _seconds(plan: Plan, tokens: int, flops_per_s: float) -> float:
    layers = [plan.layer_rows(layer) for layer in range(plan.num_layers)]
    in_layers = sum(_weights(row) for rows in layers for row in rows)
    passes = PASSES + 2 * (plan.gptq_target == "original")  # the same two of the original model
    flops = 2 * passes * in_layers * tokens
    if plan.is_smoothed:
        flops += SMOOTHING_FLOPS * in_layers
    for rows in layers:
        flops += sum(2 * tokens * columns**2 + 2 * columns**3 for columns in _inputs(rows))
        if plan.gptq_target == "original":
            flops += sum(2 * tokens * columns**2 for columns in _inputs(rows))
        by_gptq = [row for row in rows if row.method in ("gptq", "auto", "gradient")]
        flops += sum(2 * _weights(row) * row.shape[1] for row in by_gptq)
        if any(row.method == "gradient" for row in rows):
            learned = plan.gradient_steps * min(plan.gradient_tokens, tokens)
            flops += 6 * learned * sum(_weights(row) for row in rows)
    arithmetic = flops / flops_per_s
    steps = _SECONDS_PER_COLUMN * sum(columns for rows in layers for columns in _inputs(rows))
    # The embedding is read for the first layer and again for the head and the artifact.
    outer = _outside_weights(plan) + sum(_weights(r) for r in _stored(plan) if r.layer is None)
    moved_bytes = 2 * (in_layers + outer + _outside_weights(plan)) * DTYPE_BYTES[plan.source_dtype]
    return arithmetic + steps + moved_bytes / _MOVED_BYTES_PER_S
