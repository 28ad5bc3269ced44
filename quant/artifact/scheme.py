"""Schemes: how one module's weight (and its input) is represented. Frozen values, no tensors.

A scheme is written down per module in artifact.json and never inferred from tensor names. The
vocabulary is compressed-tensors' (see docs/artifact-format.md); `quant.artifact.dialect` turns
schemes into config.json's `quantization_config` and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quant.artifact.errors import SchemeError

Layout = Literal["dense", "pack-quantized", "int-quantized", "float-quantized"]
GROUP_SIZES = (128, 64, 32)
INT_BITS = (3, 4, 8)
BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """Codes of a weight [out, in]: `num_bits` ints or fp8 (e4m3), one scale per strategy unit.

    group: along `in`, `group_size` columns share a scale; channel: a whole output row does; block:
    `group_size` (128) rows by as many columns do, the last rows may be fewer.
    Integer codes are signed, -2^(b-1) .. 2^(b-1)-1; so are the zero points of asymmetric ones.
    """

    num_bits: int
    kind: Literal["int", "float"]
    symmetric: bool
    strategy: Literal["group", "channel", "block"]
    group_size: int | None = None

    @property
    def scale_rows(self) -> int:
        """Output rows that share a scale."""
        return BLOCK if self.strategy == "block" else 1

    def __post_init__(self) -> None:
        if self.kind == "float" and (self.num_bits != 8 or not self.symmetric):
            raise SchemeError("float weights are fp8 e4m3: num_bits 8 and symmetric")
        if self.kind == "int" and self.num_bits not in INT_BITS:
            raise SchemeError(f"integer weights have 3, 4 or 8 bits, not {self.num_bits}")
        if (self.strategy == "channel") != (self.group_size is None):
            raise SchemeError("strategy 'group' goes with a group_size, 'channel' without one")
        if self.strategy == "block" and (self.kind != "float" or self.group_size != BLOCK):
            raise SchemeError(f"blocks are of fp8 weights, {BLOCK} rows by {BLOCK} columns")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise SchemeError(f"group_size is one of {GROUP_SIZES}, not {self.group_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationScheme:
    """Inputs of a module, quantized on the fly: symmetric scales made at run time, one per token,
    or one for each `group_size` (128) channels of a token."""

    num_bits: int = 8
    kind: Literal["int", "float"] = "int"
    group_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScheme:
    """A quantized KV cache. In fp8 e4m3 one stored scale per layer for keys and one for values
    ("tensor"), or one for each KV head ("attn_head"); in int8 a scale for each token and KV head,
    made at run time ("token_head")."""

    num_bits: int = 8
    kind: Literal["float", "int"] = "float"
    strategy: Literal["tensor", "attn_head", "token_head"] = "tensor"

    def __post_init__(self) -> None:
        if (self.kind == "int") != (self.strategy == "token_head"):
            raise SchemeError(
                "an int8 KV cache has a scale per token and head ('token_head'), an fp8 one per "
                f"'tensor' or 'attn_head'; not {self.kind} and {self.strategy!r}"
            )

    @property
    def label(self) -> str:
        """What a recipe calls it: `fp8`, `fp8-head` or `int8`."""
        if self.kind == "int":
            return "int8"
        return "fp8" if self.strategy == "tensor" else "fp8-head"

    @property
    def has_stored_scales(self) -> bool:
        return self.kind == "float"


KV_SCHEMES: dict[str, KVScheme] = {
    scheme.label: scheme
    for scheme in (
        KVScheme(), KVScheme(strategy="attn_head"), KVScheme(kind="int", strategy="token_head")
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a module is on disk: layout, weight codes, activation rule. `DENSE` has neither."""

    layout: Layout
    weights: WeightScheme | None = None
    activations: ActivationScheme | None = None

    def __post_init__(self) -> None:
        if (self.layout == "dense") != (self.weights is None):
            raise SchemeError("a dense module has no weight scheme, a quantized one needs it")
        if self.weights is not None:
            check_layout(self.layout, self.weights, self.activations)

    @property
    def is_dense(self) -> bool:
        return self.weights is None

    @property
    def label(self) -> str:
        """Short name for tables: `w4a16-g64`, `w4a16-g64-asym`, `w4a8-fp8-g64`, `dense`."""
        if self.weights is None:
            return "dense"
        w, a = self.weights, self.activations
        head = "fp8" if w.kind == "float" else f"w{w.num_bits}a{a.num_bits if a else 16}"
        if w.kind == "int" and a is not None and a.kind == "float":
            head += "-fp8"
        unit = f"g{w.group_size}" if w.strategy == "group" else w.strategy
        return f"{head}-{unit}" + ("" if w.symmetric else "-asym")


def check_layout(layout: Layout, w: WeightScheme, a: ActivationScheme | None) -> None:
    """Raise SchemeError unless this layout can hold these codes and a serving engine accepts it."""
    if layout == "pack-quantized" and w.kind != "int":
        raise SchemeError("pack-quantized holds integer weights")
    if layout == "pack-quantized" and a is not None and (w.num_bits != 4 or not w.symmetric):
        raise SchemeError(
            "pack-quantized with 8-bit inputs is W4A8: symmetric 4-bit weights, dynamic int8 or "
            f"e4m3 inputs; not {w.num_bits}-bit {'symmetric' if w.symmetric else 'asymmetric'} ones"
        )
    if layout == "int-quantized" and (
        w.kind != "int"
        or w.num_bits != 8
        or not w.symmetric
        or w.strategy != "channel"
        or a is None
        or a.kind != "int"
    ):
        raise SchemeError("int-quantized is W8A8: symmetric per-channel int8, dynamic int8 inputs")
    if layout == "float-quantized" and (
        w.kind != "float" or w.strategy == "group" or a is None or a.kind != "float"
    ):
        raise SchemeError("float-quantized is fp8: e4m3 per channel or block, dynamic e4m3 inputs")
    if a is not None and a.group_size != (BLOCK if w.strategy == "block" else None):
        raise SchemeError(
            f"inputs have scales for each {BLOCK} channels where weights come in blocks, only there"
        )


DENSE = Scheme(layout="dense")

_INT4 = WeightScheme(num_bits=4, kind="int", symmetric=True, strategy="group", group_size=128)
_INT8 = WeightScheme(num_bits=8, kind="int", symmetric=True, strategy="channel")
_FP8 = WeightScheme(num_bits=8, kind="float", symmetric=True, strategy="channel")
_FP8_BLOCK = WeightScheme(
    num_bits=8, kind="float", symmetric=True, strategy="block", group_size=BLOCK
)

PRESETS: dict[str, Scheme] = {
    "dense": DENSE,
    "w4a16": Scheme(layout="pack-quantized", weights=_INT4),
    "w8a16": Scheme(layout="pack-quantized", weights=replace(_INT4, num_bits=8)),
    "w3a16": Scheme(layout="pack-quantized", weights=replace(_INT4, num_bits=3)),
    "w4a8": Scheme(layout="pack-quantized", weights=_INT4, activations=ActivationScheme()),
    "w4a8-fp8": Scheme(
        layout="pack-quantized", weights=_INT4, activations=ActivationScheme(kind="float")
    ),
    "w8a8": Scheme(layout="int-quantized", weights=_INT8, activations=ActivationScheme()),
    "fp8": Scheme(
        layout="float-quantized", weights=_FP8, activations=ActivationScheme(kind="float")
    ),
    "fp8-block": Scheme(
        layout="float-quantized",
        weights=_FP8_BLOCK,
        activations=ActivationScheme(kind="float", group_size=BLOCK),
    ),
}


def preset(name: str) -> Scheme:
    """The scheme called `name`; SchemeError lists the known names."""
    if name not in PRESETS:
        raise SchemeError(f"unknown scheme {name!r}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def with_group_size(scheme: Scheme, group_size: int | None) -> Scheme:
    """The same scheme with groups of `group_size` columns (None: one scale per channel)."""
    assert scheme.weights is not None
    strategy: Literal["group", "channel"] = "channel" if group_size is None else "group"
    weights = replace(scheme.weights, strategy=strategy, group_size=group_size)
    return replace(scheme, weights=weights)
