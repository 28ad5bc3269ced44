"""Bytes that a planned module takes on disk, and what a plan stores besides. Knows no tensors."""

from __future__ import annotations

from quant.plan import Plan
from quant.plan_rows import PlanRow

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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


def weights_of(row: PlanRow) -> int:
    """Weights of a module, without bias."""
    return row.shape[0] * row.shape[1]


def stored_rows(plan: Plan) -> list[PlanRow]:
    """Rows with a weight of their own: a tied lm_head has none."""
    return [row for row in plan.rows if not (plan.is_tied and row.module == "lm_head")]


def outside_weights(plan: Plan) -> int:
    """Embedding and norms (two a layer and one at the end)."""
    return plan.hidden_size * (plan.vocab_size + 2 * plan.num_layers + 1)
