"""Notes worth reading before anything is spent: what is not used, missing or short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quant.adapter import AdapterSource
from quant.checkpoint import Source
from quant.estimate import Estimate
from quant.foreign import QuantizedSource
from quant.machine import free_memory_bytes
from quant.plan import Plan
from quant.plan_table import size
from quant.recipe import Recipe
from quant.rounded_weights import rounded_weights_warning


def plan_notes(
    plan: Plan, calib: Sequence[Path], cost: Estimate, ranks: int, gpu_bytes: int | None
) -> Iterator[str]:
    """What the plan leaves unused or lacks; gpu_bytes: free memory of the GPU, None without one."""
    if ranks > 1:
        yield f"{ranks} ranks share the calibration windows; memory and time are of each"
    if calib and not plan.needs_calibration:
        yield "this recipe needs no calibration; --calib is not used"
    if plan.needs_calibration and not calib:
        yield "this recipe needs calibration text: give --calib FILE to run it"
    if plan.smoothing != "none":
        yield "smoothing: norms, v_proj and up_proj take over scales that are searched first"
    if plan.dtype == "float32" and any(row.method != "none" for row in plan.rows):
        yield "dense parts and scales stay float32; --dtype bfloat16 halves them"
    yield from _memory_notes(cost, ranks, gpu_bytes)


def window_notes(recipe: Recipe, plan: Plan, config: Mapping[str, Any]) -> Iterator[str]:
    """Windows that reach beyond what the model was made for; `config` is the model's."""
    limit, longest = config.get("max_position_embeddings"), recipe.calibration.max_tokens
    if plan.needs_calibration and limit and longest > limit:
        yield (
            f"calibration windows of up to {longest:,} tokens are longer than the model's "
            f"{limit:,} positions, beyond which it says nothing of use; --max-tokens {limit} cuts "
            "them"
        )


def _memory_notes(cost: Estimate, ranks: int, gpu_bytes: int | None) -> Iterator[str]:
    """What is short; gpu_bytes: what is free of the GPU's memory, None without one."""
    needed = cost.host_bytes * ranks
    wanted = [("memory", needed, free_memory_bytes())]
    if gpu_bytes is not None:
        wanted.append(("GPU memory", cost.gpu_bytes, gpu_bytes))
    for what, needed, free in wanted:
        if free < needed:
            yield (
                f"about {needed / 1e9:.1f} GB of {what} are needed and {free / 1e9:.1f} GB are "
                "free; use fewer --samples or shorter --max-tokens"
            )
    if cost.spilled_bytes:
        yield f"hidden states go to a file of {size(cost.spilled_bytes)} while the run lasts"


def source_notes(source: Source) -> Iterator[str]:
    """What was found in the model's folder, or merged into it."""
    if isinstance(source, AdapterSource):
        yield f"the adapter {source.adapter.path.name} is merged into the model before quantizing"
        yield from source.notes()
    if isinstance(source, QuantizedSource):
        yield from source.notes


def with_source_warning(plan: Plan, source: Source) -> Plan:
    """The plan, with a warning where something is quantized that looks quantized already."""
    if all(row.scheme.is_dense for row in plan.rows):
        return plan
    model = source.base if isinstance(source, AdapterSource) else source  # merging hides the grid
    warning = rounded_weights_warning(model)
    return replace(plan, warnings=(*plan.warnings, warning)) if warning else plan
