"""What other tools write about the codes in a checkpoint: read from config.json (and the files that
older tools put beside it), checked, and turned into values.

GPTQ's per-module rules (`dynamic`) follow GPTQModel: regular expressions matched from the start of
a module's name, the first that matches counts, `-:` excludes, `+:` or nothing overrides. Knows no
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from quant.artifact.jsonio import validation_message
from quant.artifact.scheme import BLOCK
from quant.checkpoint import read_object
from quant.errors import SourceError

SECTION_FILES = ("quantize_config.json", "quant_config.json")
METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
_DUPLICATED = ("bits", "group_size", "sym", "desc_act", "checkpoint_format", "version")
_START_OVER = "start from the float checkpoint it was made from"
# Why codes of other kinds are not taken over.
_REFUSED: dict[str, str] = {
    "bitsandbytes": "its codes (nf4, or int8 beside float columns) are no integer grid with one "
    f"scale for a group; {_START_OVER}",
    "mxfp4": f"its 4-bit floats are no integer grid; {_START_OVER}, or let transformers dequantize "
    "it (Mxfp4Config(dequantize=True)) and save that",
    "gguf": "give the .gguf file itself: it is read, dequantized, as a source of its own",
    "auto-round": "its packing is not written down in a form that can be checked; export it as "
    "auto_gptq or llm_compressor, or start from the float checkpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFormat:
    """How one module's codes are written. group_size: columns that share a scale, -1: all."""

    bits: int
    group_size: int
    symmetric: bool
    has_act_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A `dynamic` entry: what differs in the modules whose names match; None where it excludes."""

    pattern: re.Pattern[str]
    changes: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSettings:
    """Settings of a GPTQ or AWQ checkpoint. version: `gptq`, `gptq_v2`, `gemm`; None: not said."""

    method: Literal["gptq", "awq"]
    version: str | None
    default: ModuleFormat
    rules: tuple[Rule, ...] = ()

    def of(self, module: str) -> ModuleFormat | None:
        """The format of a module that has codes; None where a rule says it has none."""
        rule = next((rule for rule in self.rules if rule.pattern.match(module)), None)
        if rule is None:
            return self.default
        return None if rule.changes is None else replace(self.default, **rule.changes)


class _Border(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Rule(_Border):
    bits: int | None = Field(None, validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None

    def changes(self) -> dict[str, Any]:
        named = {
            "bits": self.bits, "group_size": self.group_size, "symmetric": self.sym,
            "has_act_order": self.desc_act,
        }  # fmt: skip
        return {key: value for key, value in named.items() if value is not None}


class _GPTQ(_Border):
    bits: int
    group_size: int
    sym: bool
    desc_act: bool = False
    checkpoint_format: str | None = None
    is_marlin_format: bool = False
    pack_dtype: str = "int32"
    dynamic: dict[str, _Rule] | None = None


class _AWQ(_Border):
    bits: int = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(validation_alias=AliasChoices("group_size", "q_group_size"))
    zero_point: bool
    version: str | None = None


def read_section(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization settings, in one form whichever file they stand in; SourceError unless they
    are of a method that can be converted."""
    section = config.get("quantization_config") or {}
    if not isinstance(section, dict):
        raise SourceError(f"{path}: quantization_config is no JSON object")
    beside = [name for name in SECTION_FILES if (path / name).is_file()]
    if beside:
        section = _merged(path, dict(section), beside[0])
    method = section.get("quant_method")
    if method not in METHODS:
        why = _REFUSED.get(str(method), f"its codes cannot be taken over; {_START_OVER}")
        raise SourceError(
            f"{path}: quant_method is {method!r}: {why}. gptq, awq, fp8 in blocks and "
            "compressed-tensors can be converted"
        )
    return _as_written_now(section) if method == "compressed-tensors" else section


class _Blocks(_Border):
    """fp8 checkpoints as DeepSeek began to publish them."""

    weight_block_size: list[int] | None = None
    activation_scheme: str
    fmt: str = "e4m3"


def check_blocks(section: Mapping[str, Any], path: Path) -> None:
    """SourceError unless an `fp8` section describes the scheme `fp8-block`."""
    try:
        found = _Blocks.model_validate(dict(section))
    except ValidationError as error:
        raise SourceError(f"{path}: quantization_config.{validation_message(error)}") from None
    for key, value, expected in (
        ("weight_block_size", found.weight_block_size, [BLOCK, BLOCK]),
        ("activation_scheme", found.activation_scheme, "dynamic"),
        ("fmt", found.fmt, "e4m3"),
    ):
        if value != expected:
            raise SourceError(
                f"{path}: quantization_config.{key} is {value!r}; of fp8 checkpoints only those "
                f"with {expected!r} can be converted: {_START_OVER}"
            )


def _merged(path: Path, section: dict[str, Any], beside: str) -> dict[str, Any]:
    other = read_object(path / beside)
    clash = [
        key for key in other.keys() & section.keys()
        if key in _DUPLICATED and str(other[key]).lower() != str(section[key]).lower()
    ]  # fmt: skip
    if clash:
        raise SourceError(f"{path}: {beside} and config.json differ in {', '.join(sorted(clash))}")
    merged = {**other, **section}
    if "quant_method" not in merged and beside == "quantize_config.json":
        merged["quant_method"] = "gptq"
    return merged


def _as_written_now(section: dict[str, Any]) -> dict[str, Any]:
    """Older versions write the format once for all groups, and that nothing is sparse at length."""
    groups, fmt = section.get("config_groups"), section.get("format")
    if isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values()):
        filled = {n: {**g, "format": g.get("format") or fmt} for n, g in groups.items()}
        section = {**section, "config_groups": filled}
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        section = {**section, "sparsity_config": {}}
    return section


def narrowed(section: Mapping[str, Any], widest: int) -> tuple[dict[str, Any], set[int]]:
    """The section with groups of a multiple of `widest` columns as groups of `widest`, and how many
    of them have the same scale."""
    groups, times = section.get("config_groups"), {1}
    if not isinstance(groups, dict):
        return dict(section), times
    changed = {}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            size = weights.get("group_size")
            if isinstance(size, int) and size > widest and size % widest == 0:
                times.add(size // widest)
                group = {**group, "weights": {**weights, "group_size": widest}}
        changed[name] = group
    return {**section, "config_groups": changed}, times


def packed_settings(section: Mapping[str, Any], path: Path) -> PackedSettings:
    """The settings of a GPTQ or AWQ section; SourceError names what is wrong or not supported."""
    try:
        if section["quant_method"] == "gptq":
            return _gptq(_GPTQ.model_validate(dict(section)), path)
        return _awq(_AWQ.model_validate(dict(section)), path)
    except ValidationError as error:
        raise SourceError(
            f"{path}: the quantization settings: {validation_message(error)}"
        ) from None


def _gptq(found: _GPTQ, path: Path) -> PackedSettings:
    version = "marlin" if found.is_marlin_format else found.checkpoint_format
    if version not in ("gptq", "gptq_v2", None):
        raise SourceError(
            f"{path}: checkpoint_format is {version!r}; only gptq (zero points stored less one) "
            "and gptq_v2 (stored as they are) are read. Let the tool that made it save it as gptq, "
            f"or {_START_OVER}"
        )
    if found.pack_dtype != "int32":
        raise SourceError(f"{path}: pack_dtype {found.pack_dtype!r}; only int32 is supported")
    default = ModuleFormat(
        bits=found.bits, group_size=found.group_size, symmetric=found.sym,
        has_act_order=found.desc_act,
    )  # fmt: skip
    rules = tuple(_rule(key, rule, path) for key, rule in (found.dynamic or {}).items())
    return PackedSettings(method="gptq", version=version, default=default, rules=rules)


def _rule(key: str, rule: _Rule, path: Path) -> Rule:
    is_excluding = key.startswith("-:")
    try:
        pattern = re.compile(key.removeprefix("-:") if is_excluding else key.removeprefix("+:"))
    except re.error as error:
        raise SourceError(f"{path}: dynamic: {key!r} is no regular expression: {error}") from None
    return Rule(pattern=pattern, changes=None if is_excluding else rule.changes())


def _awq(found: _AWQ, path: Path) -> PackedSettings:
    if str(found.version).lower() != "gemm":
        raise SourceError(
            f"{path}: AWQ version is {found.version!r}; only gemm is read (gemv, gemv_fast, marlin "
            f"and others pack the codes in other orders). Save it as gemm, or {_START_OVER}"
        )
    if not found.zero_point:
        raise SourceError(f"{path}: zero_point is False; AWQ's gemm layout always has zero points")
    if found.bits != 4:
        raise SourceError(f"{path}: {found.bits} bits; AWQ's gemm layout has 4")
    default = ModuleFormat(bits=4, group_size=found.group_size, symmetric=False)
    return PackedSettings(method="awq", version="gemm", default=default)
