"""The plan: a recipe applied to one model, a row per linear module, checked before any work.

Works on names and shapes only: no tensors, no files, no devices. `quant.plan_rows` makes the rows;
`quant.plan_checks` holds what is refused, and what is warned of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quant.artifact.dialect import fused_group
from quant.artifact.scheme import Scheme
from quant.errors import PlanError
from quant.model_config import (
    architecture_of,
    check_experts,
    check_not_quantized,
    text_config,
    ties_by_default,
)
from quant.module_names import layer_order
from quant.plan_checks import check_fused, check_head, check_patterns, check_strict, plan_warnings
from quant.plan_rows import PlanRow, block_obstacles, expert_widths, make_row
from quant.recipe import Recipe

# Architectures whose layers do not add the outputs of o_proj and down_proj as they are.
NORMED_SUMS = frozenset({"Gemma3ForCausalLM"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All rows (layer by layer, then lm_head) and what else fixes the artifact's size and cost.

    `dtype` is that of dense tensors and scales: float32, float16 or bfloat16. `overrides` are the
    recipe's patterns in order: a row's note says `override 1` for the first. `kv_layers` are those
    whose KV cache is quantized.
    """

    rows: tuple[PlanRow, ...]
    architecture: str
    num_layers: int
    dtype: str
    source_dtype: str
    hidden_size: int
    vocab_size: int
    is_tied: bool
    needs_calibration: bool
    kv_cache: str
    kv_layers: tuple[int, ...] = ()
    smoothing: str = "none"
    gptq_target: str = "layer"
    gradient_steps: int = 0
    gradient_tokens: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    overrides: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_smoothed(self) -> bool:
        """Whether scales are folded anywhere: smoothing, or awq's half of it."""
        return self.smoothing != "none" or any(row.method == "awq" for row in self.rows)

    def schemes(self) -> dict[str, Scheme]:
        return {row.module: row.scheme for row in self.rows}

    def layer_rows(self, layer: int | None) -> tuple[PlanRow, ...]:
        """Rows of one decoder layer; None for those outside the layers (lm_head)."""
        return tuple(row for row in self.rows if row.layer == layer)


def make_plan(
    recipe: Recipe,
    module_shapes: Mapping[str, tuple[int, int]],
    num_layers: int,
    config: Mapping[str, Any],
    *,
    strict: bool = False,
    source_dtype: str | None = None,
    is_tied: bool | None = None,
) -> Plan:
    """Apply `recipe` to linear modules (name -> [out, in]) of a model with this HF `config`.

    `strict` refuses every group size other than the one asked for. `source_dtype` and `is_tied`
    (lm_head shares the embedding) are read from `config` where not given. Raises PlanError
    (modules and the way out named), AlreadyQuantizedError, UnsupportedModelError.
    """
    check_not_quantized(config)
    check_experts(config, module_shapes)
    check_patterns(recipe, module_shapes, num_layers)
    text = text_config(config)
    if is_tied is None:
        is_tied = bool(config.get("tie_word_embeddings", ties_by_default(text)))
    check_head(recipe, module_shapes, is_tied)
    rows = _rows(recipe, module_shapes, num_layers, is_tied)
    check_fused(rows)
    if strict:
        check_strict(rows, recipe, num_layers)
    smoothing = _smoothing(recipe, rows)
    learned = any(row.method == "gradient" for row in rows)
    source = source_dtype or text.get("dtype") or text.get("torch_dtype") or "float32"
    return Plan(
        rows=rows,
        architecture=architecture_of(config),
        num_layers=num_layers,
        dtype=source if recipe.dtype == "auto" else recipe.dtype,
        source_dtype=source,
        hidden_size=int(text.get("hidden_size", 0)),
        vocab_size=int(text.get("vocab_size", 0)),
        is_tied=is_tied,
        needs_calibration=recipe.calibrates_kv
        or smoothing != "none"
        or any(r.statistics != "none" for r in rows),
        kv_cache=recipe.kv_cache,
        kv_layers=_kv_layers(recipe, num_layers),
        smoothing=smoothing,
        gptq_target=_gptq_target(recipe, rows, architecture_of(config)),
        gradient_steps=recipe.gradient.steps if learned else 0,
        gradient_tokens=recipe.gradient.tokens if learned else 0,
        num_heads=int(text.get("num_attention_heads", 0)),
        num_kv_heads=int(text.get("num_key_value_heads") or text.get("num_attention_heads", 0)),
        overrides=tuple(rule.match for rule in recipe.overrides),
        warnings=tuple(plan_warnings(rows, recipe)),
    )


def _rows(
    recipe: Recipe, module_shapes: Mapping[str, tuple[int, int]], num_layers: int, is_tied: bool
) -> tuple[PlanRow, ...]:
    widths = expert_widths(module_shapes)
    obstacles = block_obstacles(module_shapes)
    return tuple(
        make_row(
            name, module_shapes[name], recipe.module_rule(name, num_layers), is_tied,
            widths.get(fused_group(name)), recipe.rtn.scale_search,
            obstacles.get(fused_group(name), ""),
        )
        for name in sorted(module_shapes, key=layer_order)
    )  # fmt: skip


def _smoothing(recipe: Recipe, rows: Sequence[PlanRow]) -> str:
    """none or search. `auto` is search where it has been seen to pay and costs no other text: where
    gptq makes integer codes."""
    if recipe.smoothing != "auto":
        return recipe.smoothing
    weights = [row.scheme.weights for row in rows if row.method == "gptq"]
    pays = any(scheme is not None and scheme.kind == "int" for scheme in weights)
    return "search" if pays else "none"


def _gptq_target(recipe: Recipe, rows: Sequence[PlanRow], architecture: str) -> str:
    """What gptq aims at, layer or original (`auto`: original where it can be had); PlanError where
    the original's outputs are asked for and out of its reach."""
    learned = any(row.method == "gradient" for row in rows) and recipe.gradient.start == "gptq"
    if not learned and not any(row.method == "gptq" for row in rows):
        return "layer"
    if learned and "target" not in recipe.gptq.model_fields_set:
        # What is learned has that target as well, and a start that has it is much the better one.
        return "layer" if architecture in NORMED_SUMS else "original"
    if recipe.gptq.target == "layer":
        return "layer"
    if architecture in NORMED_SUMS:
        if recipe.gptq.target == "auto":
            return "layer"
        raise PlanError(
            f"{recipe.where('gptq', 'target')}: gptq.target: original cannot be had for "
            f"{architecture}, which norms what attention and MLP put out before it adds it; use "
            "`target: layer`"
        )
    return "original"


def _kv_layers(recipe: Recipe, num_layers: int) -> tuple[int, ...]:
    """Layers with a quantized KV cache; PlanError where `kv_skip_layers` leaves none, or names one
    that the model does not have."""
    if recipe.kv_cache == "none":
        return ()
    where = f"{recipe.where('kv_skip_layers')}: kv_skip_layers:"
    beyond = [i for i in recipe.kv_skip_layers if not -num_layers <= i < num_layers]
    if beyond:
        raise PlanError(
            f"{where} found {beyond[0]}, but the model has layers 0 to {num_layers - 1} "
            "(-1 is the last)"
        )
    skipped = {i % num_layers for i in recipe.kv_skip_layers}
    if len(skipped) == num_layers:
        raise PlanError(f"{where} names every layer; write `kv_cache: none` instead")
    return tuple(i for i in range(num_layers) if i not in skipped)
