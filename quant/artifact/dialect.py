"""config.json's `quantization_config`, in compressed-tensors' dialect: schemes to JSON and back.

Written so that transformers and vLLM, which resolve a module's targets by different rules, always
agree: targets are the class `Linear` when one scheme covers everything quantized (and the head is
not quantized), and otherwise exact checkpoint names (a pattern for all experts of a layer); modules
that engines fuse (q|k|v, gate|up, the experts of a layer) share a scheme; every unquantized linear
is ignored by name. What is written is resolved again by both rules before it is returned. This
module knows nothing of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from quant.artifact.errors import SchemeError
from quant.artifact.jsonio import validation_message
from quant.artifact.scheme import (
    BLOCK,
    DENSE,
    ActivationScheme,
    KVScheme,
    Layout,
    Scheme,
    WeightScheme,
)

DIALECT_VERSION = "0.20.1"
FUSED_SHARDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)
_CLASS_TARGET = "Linear"
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..+")


def quantization_config(
    modules: Mapping[str, Scheme], ignored: Iterable[str] = (), kv: KVScheme | None = None
) -> dict[str, Any]:
    """The `quantization_config` object; {} when nothing is quantized.

    `modules` maps checkpoint names of linears to schemes; dense ones join `ignored`. `kv` is
    written where the dialect has a word for it (`dialect_kv`).
    SchemeError when a fused group mixes schemes.
    """
    kv = dialect_kv(kv)
    quantized = {name: scheme for name, scheme in modules.items() if not scheme.is_dense}
    dense = sorted({*ignored, *(name for name in modules if name not in quantized)})
    if not quantized and kv is None:
        return {}
    check_fused_groups({**quantized, **dict.fromkeys(dense, DENSE)})
    groups = _groups(quantized)
    config: dict[str, Any] = {
        "config_groups": groups,
        "format": _global_format(scheme.layout for scheme in quantized.values()),
        "global_compression_ratio": None,
        "ignore": sorted({_target(name) for name in dense}),
        "kv_cache_scheme": None if kv is None else _kv_json(kv),
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": DIALECT_VERSION,
    }
    _self_check(config, quantized, dense)
    return config


def _groups(quantized: Mapping[str, Scheme]) -> dict[str, dict[str, Any]]:
    members: dict[Scheme, list[str]] = {}
    for name in sorted(quantized):
        targets = members.setdefault(quantized[name], [])
        targets.extend({_target(name)} - set(targets[-1:]))
    if len(members) == 1 and not any(_is_head(name) for name in quantized):
        members = {scheme: [_CLASS_TARGET] for scheme in members}
    by_label = sorted(members.items(), key=lambda item: item[0].label)
    return {f"group_{i:02}": _group_json(*item) for i, item in enumerate(by_label)}


def _target(name: str) -> str:
    """The exact name; for an expert a pattern of all its layer's. vLLM asks for experts by names of
    its own: `experts.0.gate_proj`, also where the checkpoint says `experts.0.w1`."""
    expert = _EXPERT.fullmatch(name)
    return name if expert is None else f"re:{re.escape(expert.group(1))}\\..*"


def _group_json(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    w, a = scheme.weights, scheme.activations
    assert w is not None
    return {
        "format": scheme.layout,
        "input_activations": None if a is None else _inputs_json(a),
        "output_activations": None,
        "targets": targets,
        "weights": _weights_json(w),
    }


def _weights_json(w: WeightScheme) -> dict[str, Any]:
    if w.strategy == "block":
        blocks = {"block_structure": [BLOCK, BLOCK]}
        return {**blocks, **_args_json(w.num_bits, w.kind, "block", w.symmetric)}
    return _args_json(w.num_bits, w.kind, w.strategy, w.symmetric, w.group_size)


def _inputs_json(a: ActivationScheme) -> dict[str, Any]:
    strategy = "token" if a.group_size is None else "group"
    return {**_args_json(a.num_bits, a.kind, strategy, True, a.group_size), "dynamic": True}


def _args_json(
    num_bits: int, kind: str, strategy: str, symmetric: bool, group_size: int | None = None
) -> dict[str, Any]:
    return {
        "dynamic": strategy == "token",
        "group_size": group_size,
        "num_bits": num_bits,
        "strategy": strategy,
        "symmetric": symmetric,
        "type": kind,
    }


def dialect_kv(kv: KVScheme | None) -> KVScheme | None:
    """`kv` where `kv_cache_scheme` can say it: a cache whose scales are made at run time it cannot
    (vLLM refuses integer ones there), so that those stand in artifact.json alone."""
    return kv if kv is not None and kv.has_stored_scales else None


def _kv_json(kv: KVScheme) -> dict[str, Any]:
    return _args_json(kv.num_bits, kv.kind, kv.strategy, True)


def _global_format(layouts: Iterable[Layout]) -> str:
    distinct = sorted(set(layouts))
    if not distinct:
        return "dense"
    return distinct[0] if len(distinct) == 1 else "mixed-precision"


def check_fused_groups(modules: Mapping[str, Scheme]) -> None:
    """SchemeError when modules that serving engines load as one have different schemes."""
    first: dict[str, str] = {}
    for name in sorted(modules):
        other = first.setdefault(fused_group(name), name)
        if modules[other] != modules[name]:
            raise SchemeError(
                f"{other} is {modules[other].label} but {name} is {modules[name].label}: "
                "engines load them as one module, so they need the same scheme"
            )


def fused_group(name: str) -> str:
    """Key shared by all modules that engines load as one: q|k|v, gate|up, a layer's experts."""
    expert = _EXPERT.fullmatch(name)
    return expert.group(1) if expert else _fused_path(name)[0]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Args(_Strict):
    """QuantizationArgs, as far as this build can execute them."""

    num_bits: int
    type: Literal["int", "float"]
    symmetric: bool = True
    strategy: Literal["group", "channel", "block", "token", "tensor", "attn_head"]
    group_size: int | None = None
    dynamic: bool = False
    # Harmless: what the quantizer did, not what the bits mean.
    actorder: Literal["static", "weight"] | None = None
    observer: str | None = None
    observer_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    block_structure: list[int] | None = None
    scale_dtype: None = None
    zp_dtype: str | None = None


class _Group(_Strict):
    targets: list[str] = Field(min_length=1)
    weights: _Args
    input_activations: _Args | None = None
    output_activations: None = None
    format: Literal["pack-quantized", "int-quantized", "float-quantized"]


class _Config(_Strict):
    quant_method: Literal["compressed-tensors"]
    config_groups: dict[str, _Group]
    ignore: list[str] = Field(default_factory=list)
    format: str
    quantization_status: Literal["compressed"] = "compressed"
    kv_cache_scheme: _Args | None = None
    version: str = ""
    global_compression_ratio: float | None = None
    sparsity_config: dict[str, JsonValue] = Field(default_factory=dict, max_length=0)
    transform_config: dict[str, JsonValue] = Field(default_factory=dict, max_length=0)
    moe_sparsity_config: None = None


def parse_quantization_config(
    config: Mapping[str, Any], module_names: Iterable[str]
) -> dict[str, Scheme]:
    """The scheme of each of `module_names` (all linears, checkpoint names) under `config`.

    SchemeError with the path of the field for anything unknown or unsupported, for a target that
    matches no module, and for a module the two resolvers would read differently.
    """
    parsed = _validate(config)
    names = sorted(module_names)
    schemes = {group: _scheme(group, value) for group, value in parsed.config_groups.items()}
    targets = _target_table(parsed.config_groups)
    patterns, ignore = _Patterns(targets), _Patterns(dict.fromkeys(parsed.ignore, ""))
    _check_all_match(targets, names)
    resolved = {}
    for name in names:
        group = _resolve_both(name, patterns, ignore)
        resolved[name] = DENSE if group is None else schemes[group]
    return resolved


def _target_table(groups: Mapping[str, _Group]) -> dict[str, str]:
    """Target to config group, in config order."""
    table: dict[str, str] = {}
    for group, value in groups.items():
        for target in value.targets:
            if table.setdefault(target, group) != group:
                raise SchemeError(
                    f"quantization_config.config_groups: target {target!r} stands in both "
                    f"{table[target]} and {group}"
                )
    return table


def _check_all_match(targets: Mapping[str, str], names: Sequence[str]) -> None:
    known = set(names)
    for target, group in targets.items():
        is_hit = target in known or target == _CLASS_TARGET
        if not is_hit and not any(_Patterns({target: group}).first(name) for name in names):
            raise SchemeError(
                f"quantization_config.config_groups.{group}: target {target!r} matches no module"
            )


def parse_kv_scheme(config: Mapping[str, Any]) -> KVScheme | None:
    """The KV cache scheme of a `quantization_config`; SchemeError unless static fp8."""
    kv = _validate(config).kv_cache_scheme
    if kv is None:
        return None
    found = (kv.num_bits, kv.type, kv.symmetric, kv.dynamic)
    if found != (8, "float", True, False) or kv.strategy not in ("tensor", "attn_head"):
        raise SchemeError(
            "quantization_config.kv_cache_scheme: only fp8 (8-bit float, symmetric, static, one "
            "scale per tensor or per attn_head) is supported"
        )
    return KVScheme(strategy="tensor" if kv.strategy == "tensor" else "attn_head")


def _validate(config: Mapping[str, Any]) -> _Config:
    try:
        return _Config.model_validate(dict(config))
    except ValidationError as error:
        raise SchemeError(f"quantization_config.{validation_message(error)}") from None


def _scheme(name: str, group: _Group) -> Scheme:
    w, a = group.weights, group.input_activations
    where = f"quantization_config.config_groups.{name}"
    if w.dynamic or w.strategy not in ("group", "channel", "block"):
        raise SchemeError(f"{where}.weights: strategy {w.strategy!r} is not supported for weights")
    if w.strategy == "block" and (w.block_structure != [BLOCK, BLOCK] or w.group_size is not None):
        raise SchemeError(
            f"{where}.weights: only blocks of {BLOCK} by {BLOCK}, not {w.block_structure}"
        )
    if a is not None and (not a.dynamic or a.strategy not in ("token", "group") or not a.symmetric):
        raise SchemeError(f"{where}.input_activations: only dynamic, symmetric, per token or group")
    if a is not None and a.num_bits != 8:
        raise SchemeError(f"{where}.input_activations: only 8 bits, not {a.num_bits}")
    try:
        weights = WeightScheme(
            num_bits=w.num_bits,
            kind=w.type,
            symmetric=w.symmetric,
            strategy=w.strategy,
            group_size=BLOCK if w.strategy == "block" else w.group_size,
        )
        activations = (
            None
            if a is None
            else ActivationScheme(num_bits=a.num_bits, kind=a.type, group_size=a.group_size)
        )
        return Scheme(layout=group.format, weights=weights, activations=activations)
    except SchemeError as error:
        raise SchemeError(f"{where}: {error}") from None


def _self_check(config: dict[str, Any], quantized: Mapping[str, Scheme], dense: list[str]) -> None:
    """What we write reads back as what was asked for, under both resolvers."""
    resolved = parse_quantization_config(config, [*quantized, *dense])
    assert resolved == {**quantized, **dict.fromkeys(dense, DENSE)}


class _Patterns:
    """Targets (each of a config group) or ignore entries, in config order.

    An entry is an exact module name, a `re:` regex, or the class `Linear`.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        self.groups = groups
        self._rank = {entry: i for i, entry in enumerate(groups)}
        self._regexes = [(e, _regex(e)) for e in groups if e.startswith("re:")]

    def matching(self, name: str) -> list[str]:
        """The entries that match `name` by name, in order."""
        hits = [entry for entry, regex in self._regexes if regex.match(name)]
        return sorted({*hits, *([name] if name in self._rank else [])}, key=self._rank.__getitem__)

    def first(self, name: str) -> str | None:
        return next(iter(self.matching(name)), None)

    def of_class(self) -> str | None:
        return _CLASS_TARGET if _CLASS_TARGET in self._rank else None


def _regex(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry.removeprefix("re:"))
    except re.error as error:
        raise SchemeError(f"quantization_config: {entry!r} is not a regex: {error}") from None


def _resolve_both(name: str, targets: _Patterns, ignore: _Patterns) -> str | None:
    """The config group of `name`, or None; SchemeError when the resolvers disagree."""
    hf = resolve_hf(name, targets, ignore)
    for class_first in (False, True):
        vllm = resolve_vllm(name, targets, ignore, class_first=class_first)
        if vllm != hf:
            raise SchemeError(
                f"quantization_config: module {name} resolves to {hf} in transformers but to "
                f"{vllm} in vLLM: its targets overlap, or it and what it is fused with are not "
                "all named in one group"
            )
    return hf


def resolve_hf(name: str, targets: _Patterns, ignore: _Patterns) -> str | None:
    """compressed-tensors' rule (utils/match.py): exact, then regex, then class; each sorted."""
    if ignore.first(name) or ignore.of_class():
        return None
    named = sorted(targets.matching(name), key=lambda target: ("re:" in target, target))
    hit = named[0] if named else targets.of_class()
    return None if hit is None else targets.groups[hit]


def resolve_vllm(
    name: str, targets: _Patterns, ignore: _Patterns, *, class_first: bool
) -> str | None:
    """vLLM's rule (compressed_tensors/utils.py) for `name`, or the fused module it is a shard of.

    First the module's own name, in config order; then the class; then the names of all shards
    (released versions differ in whether the class comes before or after the shards). A head is
    of a class of its own, which `Linear` does not cover.
    """
    fused, shards = _fused_path(name)
    if all(ignore.first(shard) for shard in shards):
        return None
    found = [targets.first(shard) for shard in shards]
    by_shards = found[0] if None not in found else None
    later = (None if _is_head(name) else targets.of_class(), by_shards)
    hit = targets.first(fused) or next(filter(None, later if class_first else later[::-1]), None)
    return None if hit is None else targets.groups[hit]


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def _fused_path(name: str) -> tuple[str, list[str]]:
    """The name of the module vLLM loads `name` into, and the checkpoint names of its shards."""
    prefix, dot, leaf = name.rpartition(".")
    for fused, shards in FUSED_SHARDS.items():
        if leaf in shards:
            return f"{prefix}{dot}{fused}", [f"{prefix}{dot}{shard}" for shard in shards]
    return name, [name]
