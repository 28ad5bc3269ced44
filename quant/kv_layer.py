"""The KV cache of one layer: what the plan wants of it, chosen, and computed with as stored.

Between the pipeline, which knows plans and streams, and `quant.kv_scales`, which knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from quant.artifact.scheme import KV_SCHEMES, KVScheme
from quant.capture import Stream
from quant.kv_scales import choose_scales, fake_quantize_kv, fake_quantize_kv_to_int8, scale_names
from quant.modelling import KVTap
from quant.plan import Plan
from quant.report import KVLayerResult


def layer_scales(
    plan: Plan,
    index: int,
    prefix: str,
    layer: nn.Module,
    streams: Sequence[Stream],
    run: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], KVLayerResult | None]:
    """The scales to store for layer `index`, by name, and their row of the report.

    Of a layer that the plan leaves out nothing is stored, but the row says what it would have
    cost. ({}, None) where the plan's cache has no stored scales at all.
    """
    scheme = KV_SCHEMES.get(plan.kv_cache)
    if scheme is None or not scheme.has_stored_scales:
        return {}, None
    chosen = choose_scales(layer, streams, run, dtype, by_head=scheme.strategy == "attn_head")
    is_kept = index not in plan.kv_layers
    result = KVLayerResult(
        layer=index,
        cache=plan.dtype if is_kept else scheme.label,
        key_scales=tuple(chosen.key.flatten().tolist()),
        value_scales=tuple(chosen.value.flatten().tolist()),
        error=chosen.error,
        error_of_one=chosen.error_of_one,
        longest_text=chosen.longest_text,
    )
    if is_kept:
        return {}, result
    return dict(zip(scale_names(prefix), (chosen.key, chosen.value), strict=True)), result


def planned_kv(plan: Plan, index: int) -> KVScheme | None:
    """What the plan makes of a layer's cache; None where it keeps the model's dtype."""
    return KV_SCHEMES[plan.kv_cache] if index in plan.kv_layers else None


def stored_tap(scheme: KVScheme | None, scales: Sequence[Tensor]) -> KVTap | None:
    """What the runtime's cache will make of keys and values; None where it holds them as they are.

    `scales`: of keys and of values as stored, none for a cache that makes its own.
    """
    if scheme is None:
        return None
    if scheme.has_stored_scales:
        return fake_quantize_kv(*scales)
    return fake_quantize_kv_to_int8()
