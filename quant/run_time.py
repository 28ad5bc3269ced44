"""How long a run takes, from shapes and a machine's speeds: what is computed, moved and waited for.

A layer is computed in part once for each input that statistics are taken of (up to the module that
reads it), then once whole with what was stored. GPTQ is matrix products in float32, work on every
weight and a step for every column. Knows no tensors; experts count as if each saw every token.

Shape legend: I columns and O rows of all modules that read one input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quant.module_names import general_name
from quant.plan import Plan
from quant.plan_rows import PlanRow
from quant.stored_size import DTYPE_BYTES, outside_weights, row_bytes, stored_rows, weights_of

# Products of a weight with a matrix [I, I]: two before and one and a half inside GPTQ's pass and
# the first gradient, 2.5 in each of two rounds of refinement.
_GPTQ_PRODUCTS = 7
# What attention reaches of the speed of plain products.
_ATTENTION_SHARE = 1 / 3
# Smoothing, for each weight: the sampled tokens, forward; four products with 512 tokens; and passes
# over weights and inputs, as arithmetic. Measured: 32 processor seconds for 106 M weights.
_SMOOTHING_FLOPS = 2 * 4096 + 4 * 2 * 512 + 6000
_BY_GPTQ = frozenset({"gptq", "auto", "gradient"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a device reaches in a run, not at its best.

    layer_flops: multiplications and additions a second in a layer's forward pass and X^T X, in the
    dtype that wide models are calibrated in; float32_flops: in float32. weight_s, column_s: GPTQ's
    work on one weight and one column beside products; layer_s: each layer's fixed part.
    moved_bytes_per_s: weights read, checked, written durably, hashed and read back. start_s: once.
    """

    layer_flops: float
    float32_flops: float
    weight_s: float
    column_s: float
    layer_s: float
    moved_bytes_per_s: float
    start_s: float


# One H200 with 16 cores, fitted to three runs (benchmarks/results/quantize*.jsonl): the fixture's
# 30 layers, 32 of an 8B shape and one of a 32B shape. Start is the kernels' compilation.
H200 = Speed(
    layer_flops=430e12, float32_flops=45e12, weight_s=0.0, column_s=6e-6, layer_s=0.17,
    moved_bytes_per_s=1.5e9, start_s=4.0,
)  # fmt: skip


def shared_inputs(rows: Iterable[PlanRow]) -> dict[str, tuple[int, int]]:
    """(columns, rows of all that read it) of each distinct input that a Hessian is taken of:
    modules of one fused group share theirs."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row.statistics == "hessian":
            name = input_name(row.module)
            found[name] = (row.shape[1], found.get(name, (0, 0))[1] + row.shape[0])
    return found


def input_name(module: str) -> str:
    """One name for all modules of a layer that read the same input."""
    parent, _, leaf = module.rpartition(".")
    return parent + (
        "" if leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3") else leaf
    )


def run_seconds(
    plan: Plan, speed: Speed, *, tokens: int, window_tokens: int, is_half: bool
) -> float:
    """Seconds of a run over `tokens` calibration tokens in windows of that many at most.

    is_half: layers are computed in bfloat16.
    """
    layers = [plan.layer_rows(layer) for layer in range(plan.num_layers)]
    rate = speed.layer_flops if is_half else speed.float32_flops
    seconds = speed.start_s + plan.num_layers * speed.layer_s
    for rows in layers:
        seconds += _forward_flops(plan, rows, tokens, window_tokens) / rate
        seconds += _gptq_seconds(rows, speed)
        if plan.is_smoothed:
            seconds += _SMOOTHING_FLOPS * sum(map(weights_of, rows)) / speed.float32_flops
    return seconds + _moved_bytes(plan) / speed.moved_bytes_per_s


def _forward_flops(plan: Plan, rows: Sequence[PlanRow], tokens: int, window_tokens: int) -> float:
    """Of all passes of a layer, X^T X included."""
    weights = sum(map(weights_of, rows))
    width = next((row.shape[1] for row in rows if row.module.endswith("o_proj")), plan.hidden_size)
    attention = 2 * window_tokens * width / _ATTENTION_SHARE
    computed = [weights, *_before_stages(rows)]
    behind_attention = sum(1 for part in computed if part)
    is_aimed = plan.gptq_target == "original"
    passes = sum(computed) * (1 + is_aimed)
    products = sum(columns**2 for columns, _ in shared_inputs(rows).values()) * (1 + is_aimed)
    flops = 2 * tokens * (passes + products + behind_attention * (1 + is_aimed) * attention)
    if any(row.method == "gradient" for row in rows):
        flops += 6 * plan.gradient_steps * min(plan.gradient_tokens, tokens) * weights
    return flops


def _before_stages(rows: Sequence[PlanRow]) -> list[int]:
    """Weights of a layer that are computed with before each input that statistics are taken of."""
    found: dict[str, int] = {}
    before = 0
    for row in rows:
        stage = input_name(general_name(row.module))
        if row.statistics != "none":
            found.setdefault(stage, before)
        before += weights_of(row)
    return list(found.values())


def _gptq_seconds(rows: Sequence[PlanRow], speed: Speed) -> float:
    by_gptq = [row for row in rows if row.method in _BY_GPTQ]
    inputs = [columns for columns, _ in shared_inputs(by_gptq).values()]
    flops = sum(2 * _GPTQ_PRODUCTS * weights_of(row) * row.shape[1] for row in by_gptq)
    flops += sum(columns**3 for columns in inputs)
    seconds = flops / speed.float32_flops + sum(inputs) * speed.column_s
    return seconds + sum(map(weights_of, by_gptq)) * speed.weight_s


def _moved_bytes(plan: Plan) -> int:
    """Sources are read once (the embedding twice), what is stored is written and read back."""
    source = DTYPE_BYTES[plan.source_dtype]
    rows, outside = stored_rows(plan), outside_weights(plan)
    read = source * (sum(map(weights_of, rows)) + 2 * outside)
    stored = sum(row_bytes(row, plan.dtype) for row in rows) + outside * DTYPE_BYTES[plan.dtype]
    return read + 2 * stored
