"""Contradictions within a recipe: faults that no single key shows, whatever the model is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from quant.artifact.errors import SchemeError
from quant.artifact.scheme import Scheme
from quant.budget import Budget, check_label
from quant.located_yaml import KeyPath
from quant.module_names import HEAD, matches
from quant.recipe_errors import Finding
from quant.recipe_keys import OverrideRule, RecipeKeys, SchemeName
from quant.recipe_rules import base_scheme


def contradictions(recipe: RecipeKeys) -> Iterator[Finding]:
    """Faults that no single key shows: (path, message) each."""
    yield from _section_faults(recipe, recipe, ())
    for i, pattern in enumerate(recipe.skip):
        yield from _pattern_faults(pattern, ("skip", i))
    yield from _head_faults(recipe)
    if recipe.kv_skip_layers and recipe.kv_cache == "none":
        yield ("kv_skip_layers",), "given without a quantized `kv_cache:`; take it out"
    is_off = recipe.smoothing == "none" and "smoothing" in recipe.model_fields_set
    if recipe.method == "awq" and is_off:
        yield (
            ("smoothing",),
            "found none, but awq is smoothing and then a weight clip; take it out, or for the clip "
            "alone write `method: rtn` with `rtn: {scale_search: outputs}`",
        )
    yield from _mixed_faults(recipe)
    for i, rule in enumerate(recipe.overrides):
        yield from _pattern_faults(rule.match, ("overrides", i, "match"))
        if not rule.model_fields_set - {"match", "layers"}:
            yield (
                ("overrides", i),
                "changes nothing; give a scheme, method, group_size or symmetric",
            )
        yield from _section_faults(recipe, rule, ("overrides", i))


def _head_faults(recipe: RecipeKeys) -> Iterator[Finding]:
    if recipe.lm_head in (None, "dense") or "skip" not in recipe.model_fields_set:
        return
    pattern = next((p for p in recipe.skip if _is_valid(p) and matches(p, HEAD)), None)
    if pattern is not None:
        yield (
            ("lm_head",),
            f"found {recipe.lm_head}, but `skip:` leaves the head alone ({pattern!r}); "
            "take the pattern out of `skip:`, or write `lm_head: dense`",
        )


def _mixed_faults(recipe: RecipeKeys) -> Iterator[Finding]:
    """What `budget:`, `max_kl:` and the keys that go with them cannot mean."""
    if recipe.budget is not None:
        try:
            Budget.parse(recipe.budget)
        except ValueError as error:
            yield ("budget",), str(error)
    for i, label in enumerate(recipe.candidates or ()):
        if fault := check_label(label):
            yield ("candidates", i), fault
    if recipe.candidates == ():
        yield ("candidates",), "found no scheme, expected two or more, such as [w4a16-g64, w8a16]"
    if recipe.is_mixed:
        key = "budget" if recipe.budget is not None else "max_kl"
        if recipe.scheme == "dense" or recipe.method == "none":
            yield (key,), "given, but nothing is quantized; name a scheme and a method, or drop it"


def _is_valid(pattern: str) -> bool:
    return not any(True for _ in _pattern_faults(pattern, ()))


def _pattern_faults(pattern: str, path: KeyPath) -> Iterator[Finding]:
    if not pattern:
        yield path, "found an empty pattern, expected a module name, a glob or re:EXPRESSION"
    elif pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            yield path, f"found {pattern!r}, which is no regular expression: {error}"


def _section_faults(
    recipe: RecipeKeys, section: RecipeKeys | OverrideRule, path: KeyPath
) -> Iterator[Finding]:
    if section.scheme and section.weights:
        yield (
            (*path, "weights"),
            "scheme and weights both given; a preset or the long form, not both",
        )
        return
    if section.activations and not section.weights:
        yield (*path, "activations"), "given without weights; spell out both or name a scheme"
        return
    if section is recipe and not (section.scheme or section.weights):
        known = ", ".join(get_args(SchemeName))
        yield (), f"scheme: missing; expected one of {known} (or weights:)"
        return
    named = section if section.scheme or section.weights else recipe
    try:
        scheme = base_scheme(named)
    except SchemeError as error:
        yield (*path, "weights"), str(error)
        return
    yield from _granularity_faults(scheme, section, path)
    yield from _method_faults(recipe, scheme, section.method or recipe.method, section, path)


def _granularity_faults(
    scheme: Scheme, section: RecipeKeys | OverrideRule, path: KeyPath
) -> Iterator[Finding]:
    if scheme.layout == "pack-quantized":
        if section.symmetric is False and scheme.activations is not None:
            yield (
                (*path, "symmetric"),
                f"found false, but {scheme.label} is symmetric; leave it out",
            )
        return
    is_block = scheme.weights is not None and scheme.weights.strategy == "block"
    if section.group_size not in (None, "channel") or (is_block and section.group_size):
        unit = "blocks of 128 by 128" if is_block else "whole channels"
        yield (
            (*path, "group_size"),
            f"found {section.group_size}, but {scheme.label} scales {unit}; leave it out",
        )
    if section.symmetric is False:
        yield (*path, "symmetric"), f"found false, but {scheme.label} is symmetric; leave it out"


def _method_faults(
    recipe: RecipeKeys,
    scheme: Scheme,
    method: str,
    section: RecipeKeys | OverrideRule,
    path: KeyPath,
) -> Iterator[Finding]:
    at = (*path, "method")
    if scheme.is_dense and "method" in section.model_fields_set and method != "none":
        yield at, f"found {method}, but a dense scheme has nothing to quantize; expected none"
    if not scheme.is_dense and method == "none":
        yield (
            at,
            f"found none, but {scheme.label} needs a method; expected rtn, gptq, awq, auto or "
            "gradient",
        )
    if scheme.weights is None or scheme.weights.strategy != "block":
        return
    if method not in ("none", "rtn", "gptq"):
        yield at, f"found {method}, which does not know blocks of rows; expected rtn or gptq"
    if method == "rtn" and recipe.rtn.scale_search != "none":
        yield (
            ("rtn", "scale_search"),
            f"found {recipe.rtn.scale_search}, but {scheme.label} has min-max scales; write none",
        )
