"""The plan: a recipe applied to one model, a row per linear module, checked before any work.

Decides group sizes (the largest of 128, 64, 32 that divides a module's columns and is not above the
one asked for, else one scale per channel), refuses patterns that match nothing and modules that
run fused but differ in scheme. Works on names and shapes only: no tensors, no files, no devices.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quant.artifact.dialect import FUSED_SHARDS, fused_group
from quant.artifact.scheme import (
    BLOCK,
    DENSE,
    GROUP_SIZES,
    PRESETS,
    Scheme,
    with_group_size,
)
from quant.errors import AlreadyQuantizedError, PlanError, UnsupportedModelError
from quant.recipe import (
    HEAD,
    MethodName,
    ModuleRule,
    Recipe,
    ScaleSearch,
    layer_index,
    matches,
    override_applies,
    statistics_of,
)

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Modules that decide which experts a token goes to. Small, and never quantized: an error there
# sends tokens elsewhere.
ROUTERS = ("gate", "router", "shared_expert_gate")
_SHOWN = 8
# Architectures whose layers do not add the outputs of o_proj and down_proj as they are.
NORMED_SUMS = frozenset({"Gemma3ForCausalLM"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One linear module: weight shape [out, in], what it becomes, by which method and why.

    scale_search: what rtn's scales are searched for.
    """

    module: str
    shape: tuple[int, int]
    scheme: Scheme
    method: MethodName
    note: str = ""
    scale_search: ScaleSearch = "none"

    @property
    def layer(self) -> int | None:
        return layer_index(self.module)

    @property
    def statistics(self) -> Literal["none", "squares", "hessian"]:
        """What the method must know of the module's inputs."""
        return statistics_of(self.method, self.scale_search)


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
    _check_experts(config, module_shapes)
    check_patterns(recipe, module_shapes, num_layers)
    text = _text_config(config)
    if is_tied is None:
        is_tied = bool(config.get("tie_word_embeddings", _ties_by_default(text)))
    _check_head(recipe, module_shapes, is_tied)
    widths = _expert_widths(module_shapes)
    obstacles = _block_obstacles(module_shapes)
    rows = tuple(
        _row(
            name, module_shapes[name], recipe.module_rule(name, num_layers), is_tied,
            widths.get(fused_group(name)), recipe.rtn.scale_search,
            obstacles.get(fused_group(name), ""),
        )
        for name in sorted(module_shapes, key=_layer_order)
    )  # fmt: skip
    check_fused(rows)
    if strict:
        _check_strict(rows, recipe, num_layers)
    smoothing = _smoothing(recipe, rows)
    learned = any(row.method == "gradient" for row in rows)
    source = source_dtype or text.get("dtype") or text.get("torch_dtype") or "float32"
    return Plan(
        rows=rows,
        architecture=_architecture(config),
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
        gptq_target=_gptq_target(recipe, rows, _architecture(config)),
        gradient_steps=recipe.gradient.steps if learned else 0,
        gradient_tokens=recipe.gradient.tokens if learned else 0,
        num_heads=int(text.get("num_attention_heads", 0)),
        num_kv_heads=int(text.get("num_key_value_heads") or text.get("num_attention_heads", 0)),
        overrides=tuple(rule.match for rule in recipe.overrides),
        warnings=tuple(_warnings(rows, recipe)),
    )


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


def _check_head(recipe: Recipe, modules: Mapping[str, Any], is_tied: bool) -> None:
    """PlanError where `lm_head:` asks for what this model's head cannot be."""
    if recipe.lm_head in (None, "dense") or (HEAD in modules and not is_tied):
        return
    raise PlanError(
        f"{recipe.where('lm_head')}: lm_head: found {recipe.lm_head}, but this model's head shares "
        "its weight with the embedding, which stays dense; write `lm_head: dense`"
    )


def check_not_quantized(config: Mapping[str, Any]) -> None:
    """Raise AlreadyQuantizedError if `config` has a quantization section, naming its scheme."""
    section = config.get("quantization_config") or _text_config(config).get("quantization_config")
    if section:
        raise AlreadyQuantizedError(
            f"the model is already quantized ({describe_quantization(section)}); its codes "
            "cannot be quantized again: give the original checkpoint"
        )


def check_patterns(recipe: Recipe, modules: Mapping[str, Any], num_layers: int) -> None:
    """Raise PlanError for each `skip` or override that matches, or decides, no module."""
    faults = [*_skip_faults(recipe, modules), *_override_faults(recipe, modules, num_layers)]
    if faults:
        raise PlanError("\n".join(faults))


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
            f"found {_few(found)}. Use one pattern that takes them all: match: "
            "'*.experts.*'"
        )
    leaves = "|".join(row.module.rpartition(".")[2] for row in split[0])
    raise PlanError(
        f"{leaves} of a layer run as one matrix and must share a scheme; found {_few(found)}. Use "
        f"one pattern that takes them all: match: 're:.*\\.({leaves})'"
    )


def _group_text(group: Sequence[PlanRow]) -> str:
    if ".experts." in group[0].module:
        counts: dict[str, int] = {}
        for row in group:
            counts[row.scheme.label] = counts.get(row.scheme.label, 0) + 1
        found = ", ".join(f"{count} modules {label}" for label, count in counts.items())
        return f"{fused_group(group[0].module)} ({found})"
    leaves = (f"{row.module.rpartition('.')[2]} {row.scheme.label}" for row in group)
    return f"{group[0].module.rpartition('.')[0]} ({', '.join(leaves)})"


def is_router(module: str) -> bool:
    """Whether the module decides which experts a token goes to."""
    return module.rpartition(".")[2] in ROUTERS


def _expert_widths(modules: Mapping[str, tuple[int, int]]) -> dict[str, frozenset[int]]:
    """Columns of all experts of a layer, by fused group: they share one scheme, group size too."""
    found: dict[str, set[int]] = {}
    for name, shape in modules.items():
        if ".experts." in name:
            found.setdefault(fused_group(name), set()).add(shape[1])
    return {group: frozenset(columns) for group, columns in found.items()}


def _row(
    name: str,
    shape: tuple[int, int],
    rule: ModuleRule,
    is_tied: bool,
    widths: frozenset[int] | None = None,
    scale_search: ScaleSearch = "none",
    blocks: str = "",
) -> PlanRow:
    """The row of a module; `widths` are the columns of what it must share its group size with, and
    `blocks` says what keeps it from blocks of 128 by 128."""
    if is_router(name):
        note = rule.reason if rule.reason.startswith("skip: ") else "routers stay dense"
        return PlanRow(module=name, shape=shape, scheme=DENSE, method="none", note=note)
    if name == HEAD and is_tied:
        if rule.scheme is not None:
            raise PlanError(
                "lm_head shares its weight with the embedding, which stays dense; put lm_head "
                "under `skip:`"
            )
        note = "tied to the embedding"
        return PlanRow(module=name, shape=shape, scheme=DENSE, method="none", note=note)
    if rule.scheme is None:
        note = "" if rule.reason == "recipe" else rule.reason
        return PlanRow(module=name, shape=shape, scheme=DENSE, method="none", note=note)
    if rule.scheme.weights is not None and rule.scheme.weights.strategy == "block":
        scheme, note = fit_blocks(rule.scheme, blocks)
    else:
        fits = [fit_group_size(rule.scheme, columns) for columns in sorted(widths or {shape[1]})]
        scheme, note = min(fits, key=_group_columns)
    reasons = [] if rule.reason == "recipe" else [rule.reason]
    note = "; ".join([*reasons, note] if note else reasons)
    return PlanRow(
        module=name, shape=shape, scheme=scheme, method=rule.method, note=note,
        scale_search=scale_search if rule.method == "rtn" else "none",
    )  # fmt: skip


def fit_group_size(scheme: Scheme, columns: int) -> tuple[Scheme, str]:
    """The scheme with a group size that divides `columns`, and a note if it had to change."""
    assert scheme.weights is not None
    asked = scheme.weights.group_size
    if asked is None or columns % asked == 0:
        return scheme, ""
    tried = [size for size in GROUP_SIZES if size <= asked]
    fitting = next((size for size in tried if columns % size == 0), None)
    note = f"{asked} does not divide {columns}"
    if fitting is None:
        note = f"no group of {'/'.join(map(str, tried))} divides {columns}"
    return with_group_size(scheme, fitting), note


def fit_blocks(scheme: Scheme, obstacle: str) -> tuple[Scheme, str]:
    """The scheme in blocks, or where something forbids them with a scale per channel and token."""
    if not obstacle:
        return scheme, ""
    return PRESETS["fp8"], f"{obstacle}, so one scale per channel"


def _block_obstacles(shapes: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """What keeps modules that run as one from blocks, by `fused_group`; those that nothing does
    have none. Inputs are cut every 128 channels, and so are rows where modules meet."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for name, shape in shapes.items():
        groups.setdefault(fused_group(name), []).append(shape)
    found = {}
    for group, members in groups.items():
        odd = [width for _, width in members if width % BLOCK]
        ragged = [rows for rows, _ in members if rows % BLOCK] if len(members) > 1 else []
        if odd:
            found[group] = f"{BLOCK} does not divide {odd[0]} columns"
        elif ragged:
            found[group] = f"{BLOCK} does not divide {ragged[0]} rows of what runs as one"
    return found


def _group_columns(fit: tuple[Scheme, str]) -> float:
    """Columns of a group; infinite for whole channels that nothing forced: they fit everything."""
    weights = fit[0].weights
    assert weights is not None
    if weights.group_size is None:
        return 0.0 if fit[1] else math.inf
    return weights.group_size


def _check_strict(rows: Sequence[PlanRow], recipe: Recipe, num_layers: int) -> None:
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
            f"{_few(join_layers(misfits))}. Ask for a smaller group_size (64, 32 or channel), "
            "override or skip these modules, or leave --strict out to let each take the next "
            "that fits"
        )


def _warnings(rows: Sequence[PlanRow], recipe: Recipe) -> Iterator[str]:
    coarse = [row.module for row in rows if _is_coarse(row)]
    if coarse:
        yield (
            f"{len(coarse)} modules fall back to 4 bits with one scale per channel, which costs "
            f"quality ({_few(join_layers(coarse))}): consider an override with scheme w8a16"
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
    close = difflib.get_close_matches(pattern, general, n=3, cutoff=0.3) or general[:_SHOWN]
    return f"; nearest names: {', '.join(close)}"


def layer_ranges(layers: Iterable[int]) -> str:
    """`0-3, 7`: numbers ascending with runs joined."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def join_layers(names: Iterable[str]) -> list[str]:
    """Names that differ in layer or expert alone as one: `model.layers.0-29.mlp.down_proj`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        layer = layer_index(name)
        layers.setdefault(general_name(name), []).extend([] if layer is None else [layer])
    return [
        name.replace("layers.*.", f"layers.{layer_ranges(found)}.", 1)
        for name, found in layers.items()
    ]


def general_name(module: str) -> str:
    """The module's name with `*` for its layer's and expert's numbers: what all of them share."""
    in_layer = re.sub(r"(^|\.)layers\.\d+\.", r"\1layers.*.", module)
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", in_layer)


def _layer_order(name: str) -> tuple[bool, int]:
    layer = layer_index(name)
    return (layer is None, layer or 0)


def _check_experts(config: Mapping[str, Any], modules: Mapping[str, Any]) -> None:
    """UnsupportedModelError for a mixture whose experts are not linears of their own here."""
    text = _text_config(config)
    key = next((key for key in _EXPERT_KEYS if text.get(key)), None)
    if key and not any(".experts." in name for name in modules):
        raise UnsupportedModelError(
            f"{_architecture(config)} is a mixture of experts ({key} = {text[key]}), but no module "
            "is named `experts.N`; supported are Qwen3MoeForCausalLM and MixtralForCausalLM"
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [config.get("model_type", "unknown architecture")]
    return str(names[0])


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _ties_by_default(text: Mapping[str, Any]) -> bool:
    """Gemma's config.json leaves the key out and means true; elsewhere absent means false."""
    return bool(text.get("tie_word_embeddings", str(text.get("model_type")).startswith("gemma")))


def describe_quantization(section: Any) -> str:
    """What a quantization section of config.json says, in a few words."""
    if not isinstance(section, Mapping):
        return str(section)
    keys = ("quant_method", "format", "bits", "num_bits", "group_size")
    said = [f"{key} {section[key]}" for key in keys if section.get(key) is not None]
    return ", ".join(said) or "by what, its quantization section does not say"


def _few(items: Sequence[str]) -> str:
    shown = ", ".join(items[:_SHOWN])
    rest = len(items) - _SHOWN
    return shown if rest <= 0 else f"{shown} and {rest} more"
