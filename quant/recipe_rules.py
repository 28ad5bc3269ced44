"""What a recipe's keys ask for: the scheme and method of one module, by its name alone.

Shapes are not known here: group sizes are those asked for, and `quant.plan_rows` fits them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quant.artifact.scheme import (
    DENSE,
    ActivationScheme,
    Layout,
    Scheme,
    WeightScheme,
    preset,
    with_group_size,
)
from quant.module_names import layer_index, matches
from quant.recipe_keys import (
    HeadSchemeName,
    MethodName,
    OverrideRule,
    RecipeKeys,
    ScaleSearch,
    WeightsSection,
)

DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """What a recipe wants for one module, before its shape is known.

    `scheme` is None for a module that stays as it is; `reason` says which line decided, and
    `override` is the index of the override that did (None: skip, or the recipe itself).
    """

    scheme: Scheme | None
    method: MethodName
    reason: str
    override: int | None = None


def statistics_of(
    method: MethodName, scale_search: ScaleSearch
) -> Literal["none", "squares", "hessian"]:
    """What a method must know of a module's inputs: nothing, E[x^2], or X^T X."""
    if method == "rtn":
        return {"outputs": "hessian", "inputs": "squares"}.get(scale_search, "none")  # type: ignore[return-value]
    return "none" if method == "none" else "hessian"


def override_applies(rule: OverrideRule, module: str, num_layers: int | None) -> bool:
    """Whether the rule's pattern and its `layers` both take `module`."""
    if not matches(rule.match, module):
        return False
    if rule.layers is None:
        return True
    wanted = {i + num_layers if i < 0 and num_layers else i for i in rule.layers}
    return layer_index(module) in wanted


def head_rule(name: HeadSchemeName) -> ModuleRule:
    """One scale per channel and plain rounding: at 8 bits nothing better pays for the head."""
    scheme = None if name == "dense" else with_group_size(preset(name), None)
    method: MethodName = "none" if scheme is None else "rtn"
    return ModuleRule(scheme=scheme, method=method, reason=f"lm_head: {name}")


def resolve_rule(recipe: RecipeKeys, index: int | None) -> ModuleRule:
    rule = None if index is None else recipe.overrides[index]
    named = rule if rule and (rule.scheme or rule.weights) else recipe
    scheme = base_scheme(named)
    reason = "recipe" if index is None else f"override {index + 1}"
    if scheme.is_dense:
        return ModuleRule(scheme=None, method="none", reason=reason, override=index)
    if scheme.layout == "pack-quantized":
        group_size = _first(rule and rule.group_size, recipe.group_size, DEFAULT_GROUP_SIZE)
        asked = _first(rule and rule.symmetric, recipe.symmetric, True)
        symmetric = asked or scheme.activations is not None
        scheme = _packed(scheme, group_size, symmetric)
    method = _first(rule and rule.method, recipe.method)
    return ModuleRule(scheme=scheme, method=method, reason=reason, override=index)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _packed(scheme: Scheme, group_size: int | str, symmetric: bool) -> Scheme:
    assert scheme.weights is not None
    sized = with_group_size(scheme, None if group_size == "channel" else int(group_size))
    assert sized.weights is not None
    strategy, size = sized.weights.strategy, sized.weights.group_size
    weights = WeightScheme(
        num_bits=scheme.weights.num_bits,
        kind="int",
        symmetric=symmetric,
        strategy=strategy,
        group_size=size,
    )
    return Scheme(layout=scheme.layout, weights=weights, activations=scheme.activations)


def base_scheme(named: RecipeKeys | OverrideRule) -> Scheme:
    """The scheme a section names, with its default granularity; SchemeError if there is none."""
    if named.scheme is not None:
        return preset(named.scheme)
    if named.weights is None:
        return DENSE
    weights, inputs = named.weights, named.activations
    activations = ActivationScheme(num_bits=inputs.num_bits, kind=inputs.kind) if inputs else None
    layout = _layout(weights, activations)
    grouped = layout == "pack-quantized"
    return Scheme(
        layout=layout,
        weights=WeightScheme(
            num_bits=weights.num_bits,
            kind=weights.kind,
            symmetric=True,
            strategy="group" if grouped else "channel",
            group_size=DEFAULT_GROUP_SIZE if grouped else None,
        ),
        activations=activations,
    )


def _layout(weights: WeightsSection, activations: ActivationScheme | None) -> Layout:
    if weights.kind == "float":
        return "float-quantized"
    return (
        "int-quantized" if activations is not None and weights.num_bits == 8 else "pack-quantized"
    )
