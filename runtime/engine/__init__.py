"""The engine: schedule, launch, collect. Knows no text and no HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.engine.engine import Engine


def numerics(engine: Engine) -> dict[str, str]:
    """How this engine computes, in the stamp's words; a verdict holds only for these."""
    schemes = engine.artifact.schemes() if engine.artifact is not None else {}
    head = schemes.get("lm_head")
    return {
        "device_class": engine.resolved.device.split(":")[0],
        "compute_dtype": engine.resolved.dtype,
        "kv_cache_dtype": engine.resolved.kv_cache_dtype,
        "lm_head_scheme": "dense" if head is None else head.label,
    }
