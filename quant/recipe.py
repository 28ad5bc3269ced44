"""Recipes: what to make of a model, as a YAML file checked to the last key.

A recipe names a scheme and a method, the modules to leave alone (`skip`), the modules to treat
otherwise (`overrides`) and how to calibrate. It knows nothing of any model: `quant.plan` applies it
to one. Patterns match the *whole* module name: a glob (`*` matches any characters, dots too; case
counts) or, after `re:`, a regular expression. So `model.layers.1.*` is layer 1 and never 10 to 19,
and `down_proj` alone matches nothing: write `*.down_proj`.

The last override that matches a module wins, and `skip` wins over all of them. `lm_head:` alone
speaks for the output head: where it is given, overrides and the default `skip` do not.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from quant.artifact.errors import SchemeError
from quant.artifact.scheme import (
    DENSE,
    ActivationScheme,
    Layout,
    Scheme,
    WeightScheme,
    preset,
    with_group_size,
)
from quant.budget import Budget, check_label
from quant.errors import RecipeError
from quant.located_yaml import KeyPath, LocatedYaml, parse_yaml
from quant.recipe_errors import Finding, explain_validation, place, render_findings

MethodName = Literal["none", "rtn", "gptq", "awq", "auto", "gradient"]
ScaleSearch = Literal["none", "weights", "inputs", "outputs"]
SchemeName = Literal[
    "dense", "w3a16", "w4a16", "w8a16", "w4a8", "w4a8-fp8", "w8a8", "fp8", "fp8-block"
]
HeadSchemeName = Literal["dense", "w8a16"]
KVCacheName = Literal["none", "fp8", "fp8-head", "int8"]
GroupSize = Literal[32, 64, 128, "channel"]
DTypeName = Literal["auto", "float32", "float16", "bfloat16"]
DEFAULT_GROUP_SIZE = 128
HEAD = "lm_head"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WeightsSection(_Section):
    """`weights:`, the long form of a scheme's weight half."""

    num_bits: Literal[3, 4, 8]
    kind: Literal["int", "float"] = "int"


class ActivationsSection(_Section):
    """`activations:`, dynamic per-token quantization of a module's input."""

    num_bits: Literal[8] = 8
    kind: Literal["int", "float"] = "int"


class OverrideRule(_Section):
    """One entry of `overrides:`; keys left out are the recipe's own."""

    match: StrictStr
    layers: tuple[StrictInt, ...] | None = None
    scheme: SchemeName | None = None
    weights: WeightsSection | None = None
    activations: ActivationsSection | None = None
    method: MethodName | None = None
    group_size: GroupSize | None = None
    symmetric: StrictBool | None = None


class GPTQSettings(_Section):
    """`gptq:`; damping is a fraction of the Hessian's mean diagonal, block_size counts columns."""

    damping: Annotated[float, Field(gt=0, le=1)] = 0.1
    act_order: StrictBool = True
    block_size: Annotated[StrictInt, Field(ge=8, le=4096)] = 128
    scale_search: StrictBool = True
    target: Literal["layer", "original", "auto"] = "layer"


class RTNSettings(_Section):
    """`rtn:`; what the scale of a group is searched for (none: taken from its largest value)."""

    scale_search: ScaleSearch = "none"


class GradientSettings(_Section):
    """`gradient:`; steps a layer and tokens a step, the first step's size, what to begin from."""

    steps: Annotated[StrictInt, Field(ge=1, le=100000)] = 200
    tokens: Annotated[StrictInt, Field(ge=1)] = 8192
    rate: Annotated[float, Field(gt=0, le=0.1)] = 1e-3
    start: Literal["rtn", "gptq", "auto"] = "gptq"
    offsets: StrictBool = False


class SmoothSettings(_Section):
    """`smooth:`; tokens that scales are judged on, steps of refinement (0: the alpha grid only)."""

    tokens: Annotated[StrictInt, Field(ge=16, le=65536)] = 512
    refine_steps: Annotated[StrictInt, Field(ge=0, le=10000)] = 25


class MixedSettings(_Section):
    """`mixed:`; windows that sensitivity is measured on, how many tokens of each, gradients drawn
    for each, windows that built plans are judged on, plans that are built; how often the gate is
    asked with --until-accepted."""

    windows: Annotated[StrictInt, Field(ge=1)] = 64
    tokens: Annotated[StrictInt, Field(ge=8)] = 256
    draws: Annotated[StrictInt, Field(ge=1, le=64)] = 4
    heldout: Annotated[StrictInt, Field(ge=1)] = 16
    plans: Annotated[StrictInt, Field(ge=1, le=16)] = 3
    evaluations: Annotated[StrictInt, Field(ge=1, le=64)] = 6


class CalibrationSettings(_Section):
    """`calibration:`; samples and kv_samples count windows, the others tokens."""

    samples: Annotated[StrictInt, Field(ge=1)] = 256
    max_tokens: Annotated[StrictInt, Field(ge=2)] = 1024
    seed: Annotated[StrictInt, Field(ge=0)] = 0
    batch_tokens: Annotated[StrictInt, Field(ge=1)] = 4096
    kv_samples: Annotated[StrictInt, Field(ge=1)] = 8
    kv_max_tokens: Annotated[StrictInt, Field(ge=2)] = 4096


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


class Recipe(_Section):
    """A checked recipe. `text` is the file verbatim; `cli_overrides` what the caller changed."""

    scheme: SchemeName | None = None
    weights: WeightsSection | None = None
    activations: ActivationsSection | None = None
    method: MethodName
    group_size: GroupSize | None = None
    symmetric: StrictBool | None = None
    dtype: DTypeName = "auto"
    lm_head: HeadSchemeName | None = None
    skip: tuple[StrictStr, ...] = (HEAD,)
    overrides: tuple[OverrideRule, ...] = ()
    kv_cache: KVCacheName = "none"
    kv_skip_layers: tuple[StrictInt, ...] = ()
    smoothing: Literal["none", "auto", "search"] = "none"
    smooth: SmoothSettings = SmoothSettings()
    rtn: RTNSettings = RTNSettings()
    gptq: GPTQSettings = GPTQSettings()
    gradient: GradientSettings = GradientSettings()
    budget: StrictStr | None = None
    max_kl: Annotated[float, Field(gt=0)] | None = None
    candidates: tuple[StrictStr, ...] | None = None
    mixed: MixedSettings = MixedSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    model: StrictStr | None = None
    adapter: StrictStr | None = None

    _located: LocatedYaml = PrivateAttr()
    _text: str = PrivateAttr()
    _cli_overrides: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read and check a recipe file; RecipeError lists every fault with file, line and key."""
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"{path}: not UTF-8 text ({error.reason} at byte {error.start})"
            ) from error
        except OSError as error:
            raise RecipeError(f"{path}: cannot read the recipe: {error.strerror}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "recipe") -> Recipe:
        """A recipe from its text; `name` stands for the file in messages."""
        located = parse_yaml(text, name)
        if not isinstance(located.data, dict):
            raise RecipeError(
                f"{name}:1: found {_kind(located.data)}, expected keys such as `scheme:`, `method:`"
            )
        return cls._checked(located.data, located, text, {})

    @classmethod
    def _checked(
        cls, data: Mapping[str, Any], located: LocatedYaml, text: str, changed: dict[str, Any]
    ) -> Recipe:
        try:
            recipe = cls.model_validate(dict(data))
        except ValidationError as error:
            findings = explain_validation(error, cls, data)
            raise RecipeError(render_findings(findings, located, changed)) from error
        findings = list(_contradictions(recipe))
        if findings:
            raise RecipeError(render_findings(findings, located, changed))
        recipe._located, recipe._text, recipe._cli_overrides = located, text, changed
        return recipe

    @property
    def name(self) -> str:
        """The file name without its suffix: `w4a16`."""
        return Path(self._located.name).stem

    @property
    def text(self) -> str:
        return self._text

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()

    @property
    def cli_overrides(self) -> dict[str, Any]:
        """Dotted key -> value for what `with_overrides` changed, in the order of the keys."""
        return dict(self._cli_overrides)

    @property
    def needs_calibration(self) -> bool:
        """Whether a method or the KV cache scales must see activations."""
        is_smoothed = self.smoothing == "search"  # auto: only where a method sees inputs anyway
        return self.sees_inputs or self.calibrates_kv or is_smoothed or self.is_mixed

    @property
    def is_mixed(self) -> bool:
        """Whether schemes are to be chosen by sensitivity, under `budget:` or `max_kl:`."""
        return self.budget is not None or self.max_kl is not None

    @property
    def data(self) -> dict[str, Any]:
        """The keys as they stand in the file, with what the caller changed."""
        return self._merged({})

    @property
    def calibrates_kv(self) -> bool:
        """Whether the KV cache has stored scales. (int8 makes its own, token by token.)"""
        return self.kv_cache in ("fp8", "fp8-head")

    @property
    def sees_inputs(self) -> bool:
        """Whether any module may get a method that must see its inputs."""
        methods = {self.method, *(rule.method for rule in self.overrides)}
        return any(statistics_of(m, self.rtn.scale_search) != "none" for m in methods if m)

    def with_overrides(self, changes: Mapping[str, Any]) -> Recipe:
        """A new recipe with dotted keys (`calibration.samples`) replaced; None changes nothing."""
        given = {key: value for key, value in sorted(changes.items()) if value is not None}
        changed = {**self._cli_overrides, **given}
        return type(self)._checked(self._merged(given), self._located, self._text, changed)

    def _merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        data = {k: dict(v) if isinstance(v, dict) else v for k, v in self._located.data.items()}
        for key, value in {**self._cli_overrides, **given}.items():
            section, _, leaf = key.rpartition(".")
            target = data.setdefault(section, {}) if section else data
            if leaf == "scheme":
                target.pop("weights", None)
                target.pop("activations", None)
            target[leaf] = value
        return data

    def module_rule(self, module: str, num_layers: int | None = None) -> ModuleRule:
        """The rule for `module`. `num_layers` resolves negative `layers:` (-1 = the last)."""
        if module == HEAD and self.lm_head is not None:
            return _head_rule(self.lm_head)
        for pattern in self.skip:
            if matches(pattern, module):
                return ModuleRule(scheme=None, method="none", reason=f"skip: {pattern}")
        for index in reversed(range(len(self.overrides))):
            if override_applies(self.overrides[index], module, num_layers):
                return _resolve(self, index)
        return _resolve(self, None)

    def where(self, *path: str | int) -> str:
        """`file:line` of a key, or the flag that replaced it, for messages about it."""
        return place(path, self._located, self._cli_overrides)


def statistics_of(
    method: MethodName, scale_search: ScaleSearch
) -> Literal["none", "squares", "hessian"]:
    """What a method must know of a module's inputs: nothing, E[x^2], or X^T X."""
    if method == "rtn":
        return {"outputs": "hessian", "inputs": "squares"}.get(scale_search, "none")  # type: ignore[return-value]
    return "none" if method == "none" else "hessian"


def matches(pattern: str, module: str) -> bool:
    """Whether `pattern` (a glob, or `re:` and a regular expression) matches the whole name."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def layer_index(module: str) -> int | None:
    """The decoder layer a module belongs to, None outside the layers."""
    found = _LAYER.search(module)
    return int(found[1]) if found else None


def override_applies(rule: OverrideRule, module: str, num_layers: int | None) -> bool:
    """Whether the rule's pattern and its `layers` both take `module`."""
    if not matches(rule.match, module):
        return False
    if rule.layers is None:
        return True
    wanted = {i + num_layers if i < 0 and num_layers else i for i in rule.layers}
    return layer_index(module) in wanted


def _head_rule(name: HeadSchemeName) -> ModuleRule:
    """One scale per channel and plain rounding: at 8 bits nothing better pays for the head."""
    scheme = None if name == "dense" else with_group_size(preset(name), None)
    method: MethodName = "none" if scheme is None else "rtn"
    return ModuleRule(scheme=scheme, method=method, reason=f"lm_head: {name}")


def _resolve(recipe: Recipe, index: int | None) -> ModuleRule:
    rule = None if index is None else recipe.overrides[index]
    named = rule if rule and (rule.scheme or rule.weights) else recipe
    scheme = _base_scheme(named)
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


def _base_scheme(named: Recipe | OverrideRule) -> Scheme:
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


def _contradictions(recipe: Recipe) -> Iterator[Finding]:
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


def _head_faults(recipe: Recipe) -> Iterator[Finding]:
    if recipe.lm_head in (None, "dense") or "skip" not in recipe.model_fields_set:
        return
    pattern = next((p for p in recipe.skip if _is_valid(p) and matches(p, HEAD)), None)
    if pattern is not None:
        yield (
            ("lm_head",),
            f"found {recipe.lm_head}, but `skip:` leaves the head alone ({pattern!r}); "
            "take the pattern out of `skip:`, or write `lm_head: dense`",
        )


def _mixed_faults(recipe: Recipe) -> Iterator[Finding]:
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
    recipe: Recipe, section: Recipe | OverrideRule, path: KeyPath
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
        scheme = _base_scheme(named)
    except SchemeError as error:
        yield (*path, "weights"), str(error)
        return
    yield from _granularity_faults(scheme, section, path)
    yield from _method_faults(recipe, scheme, section.method or recipe.method, section, path)


def _granularity_faults(
    scheme: Scheme, section: Recipe | OverrideRule, path: KeyPath
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
    recipe: Recipe, scheme: Scheme, method: str, section: Recipe | OverrideRule, path: KeyPath
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


def _kind(value: Any) -> str:
    return "an empty file" if value is None else f"a {type(value).__name__}"
