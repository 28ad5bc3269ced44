"""What is wrong with a plan, or worth a warning: patterns that match nothing, modules that run
fused but differ in scheme, group sizes that do not fit, schemes that cost quality.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quant.artifact.dialect import FUSED_SHARDS, fused_group
from quant.artifact.scheme import Scheme
from quant.errors import PlanError
from quant.module_names import HEAD, SHOWN, few, general_name, is_router, join_layers, matches
from quant.plan_rows import PlanRow
from quant.recipe import Recipe
from quant.recipe_rules import override_applies


def check_patterns(recipe: Recipe, modules: Mapping[str, Any], num_layers: int) -> None:
    """Raise PlanError for each `skip` or override that matches, or decides, no module."""
    faults = [*_skip_faults(recipe, modules), *_override_faults(recipe, modules, num_layers)]
    if faults:
        raise PlanError("\n".join(faults))


def _skip_faults(recipe: Recipe, modules: Mapping[str, Any]) -> Iterator[str]:
    # A tied model may list no lm_head; leaving it alone is then already the case.
    known = {*modules, HEAD}
    for i, pattern in enumerate(recipe.skip):
        if not any(matches(pattern, name) for name in known):
            where = recipe.where("skip", i)
            yield f"{where}: skip: {pattern!r} matches no module{_suggest(pattern, modules)}"


def _override_faults(recipe: Recipe, modules: Mapping[str, Any], num_layers: int) -> Iterator[str]:
    routers = [name for name in modules if is_router(name)]
    modules = {name: shape for name, shape in modules.items() if not is_router(name)}
    decided = {recipe.module_rule(name, num_layers).override for name in modules}
    for i, rule in enumerate(recipe.overrides):
        where = f"{recipe.where('overrides', i, 'match')}: overrides[{i}]"
        hits_none = not any(matches(rule.match, name) for name in modules)
        if hits_none and any(matches(rule.match, name) for name in routers):
            yield f"{where}: {rule.match!r} matches routers alone, which stay dense; take it out"
        elif hits_none:
            yield f"{where}: {rule.match!r} matches no module{_suggest(rule.match, modules)}"
        elif not any(override_applies(rule, name, num_layers) for name in modules):
            yield (
                f"{where}: {rule.match!r} matches no module in layers {list(rule.layers or ())}; "
                f"this model has layers 0 to {num_layers - 1} (negative ones count from the end)"
            )
        elif i not in decided:
            yield (
                f"{where}: {rule.match!r} decides nothing: what it matches is taken by `skip:`, "
                "by `lm_head:` or by a later override (the last match wins); reorder or remove it"
            )


def _suggest(pattern: str, modules: Mapping[str, Any]) -> str:
    """What the writer of a pattern that matches nothing may have meant."""
    if any(name.endswith("." + pattern) for name in modules):
        return f"; patterns match the whole name: did you mean '*.{pattern}'?"
    if any(pattern in name for name in modules):
        return f"; patterns match the whole name: did you mean '*{pattern}*'?"
    general = list(dict.fromkeys(general_name(name) for name in modules))
    close = difflib.get_close_matches(pattern, general, n=3, cutoff=0.3) or general[:SHOWN]
    return f"; nearest names: {', '.join(close)}"


def check_head(recipe: Recipe, modules: Mapping[str, Any], is_tied: bool) -> None:
    """PlanError where `lm_head:` asks for what this model's head cannot be."""
    if recipe.lm_head in (None, "dense") or (HEAD in modules and not is_tied):
        return
    raise PlanError(
        f"{recipe.where('lm_head')}: lm_head: found {recipe.lm_head}, but this model's head shares "
        "its weight with the embedding, which stays dense; write `lm_head: dense`"
    )


def check_fused(rows: Sequence[PlanRow]) -> None:
    """Raise PlanError where q|k|v or gate|up of one layer differ in scheme."""
    by_name = {row.module: row for row in rows}
    split = [group for group in _fused_groups(by_name) if len({row.scheme for row in group}) > 1]
    if not split:
        return
    found = join_layers([_group_text(group) for group in split])
    if ".experts." in split[0][0].module:
        raise PlanError(
            "the experts of a layer run as one and must share a scheme, all their projections; "
            f"found {few(found)}. Use one pattern that takes them all: match: "
            "'*.experts.*'"
        )
    leaves = "|".join(row.module.rpartition(".")[2] for row in split[0])
    raise PlanError(
        f"{leaves} of a layer run as one matrix and must share a scheme; found {few(found)}. Use "
        f"one pattern that takes them all: match: 're:.*\\.({leaves})'"
    )


def _fused_groups(by_name: Mapping[str, PlanRow]) -> Iterator[list[PlanRow]]:
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in by_name):
        for leaves in FUSED_SHARDS.values():
            names = [f"{parent}.{leaf}" for leaf in leaves]
            group = [by_name[name] for name in names if name in by_name]
            if len(group) > 1:
                yield group
    experts: dict[str, list[PlanRow]] = {}
    for name, row in by_name.items():
        if ".experts." in name:
            experts.setdefault(fused_group(name), []).append(row)
    yield from experts.values()


def _group_text(group: Sequence[PlanRow]) -> str:
    if ".experts." in group[0].module:
        counts: dict[str, int] = {}
        for row in group:
            counts[row.scheme.label] = counts.get(row.scheme.label, 0) + 1
        found = ", ".join(f"{count} modules {label}" for label, count in counts.items())
        return f"{fused_group(group[0].module)} ({found})"
    leaves = (f"{row.module.rpartition('.')[2]} {row.scheme.label}" for row in group)
    return f"{group[0].module.rpartition('.')[0]} ({', '.join(leaves)})"


def check_strict(rows: Sequence[PlanRow], recipe: Recipe, num_layers: int) -> None:
    misfits = []
    for row in rows:
        asked = recipe.module_rule(row.module, num_layers).scheme
        if asked is not None and not row.scheme.is_dense and asked != row.scheme:
            assert asked.weights is not None
            group = asked.weights.group_size
            misfits.append(f"{row.module} ({row.shape[1]} columns, group {group})")
    if misfits:
        raise PlanError(
            f"--strict: the group size does not divide the columns of {len(misfits)} modules: "
            f"{few(join_layers(misfits))}. Ask for a smaller group_size (64, 32 or channel), "
            "override or skip these modules, or leave --strict out to let each take the next "
            "that fits"
        )


def plan_warnings(rows: Sequence[PlanRow], recipe: Recipe) -> Iterator[str]:
    coarse = [row.module for row in rows if _is_coarse(row)]
    if coarse:
        yield (
            f"{len(coarse)} modules fall back to 4 bits with one scale per channel, which costs "
            f"quality ({few(join_layers(coarse))}): consider an override with scheme w8a16"
        )
    if any(".experts." in row.module for row in rows):
        yield (
            "a mixture of experts: the artifact is for vLLM and others that read "
            "compressed-tensors; `runtime serve` and `evaluate` do not run it"
        )
    experts = {row.scheme for row in rows if ".experts." in row.module}
    if len(experts) > 1:
        yield (
            f"experts of different layers differ in scheme ({_labels(experts)}): vLLM reads them "
            "layer by layer, but transformers (5.24) decodes all experts by one scheme, silently; "
            "give all experts one scheme if transformers shall load the artifact"
        )
    if any(_is_w4a8(row.scheme) for row in rows):
        smooth = "" if recipe.smoothing != "none" else "set `smoothing: search`, and "
        yield (
            "4-bit weights with 8-bit inputs lose more than either alone: "
            f"{smooth}judge the artifact with `evaluate` before you serve it"
        )
    if recipe.method != "none" and all(row.scheme.is_dense for row in rows):
        yield "nothing is quantized: every module is skipped"


def _is_w4a8(scheme: Scheme) -> bool:
    return scheme.label.startswith("w4a8")


def _labels(schemes: Iterable[Scheme]) -> str:
    return ", ".join(sorted(scheme.label for scheme in schemes))


def _is_coarse(row: PlanRow) -> bool:
    """4 bits with one scale per channel, though groups were asked for."""
    weights = row.scheme.weights
    if weights is None or weights.num_bits > 4 or weights.strategy != "channel":
        return False
    return "divides" in row.note
