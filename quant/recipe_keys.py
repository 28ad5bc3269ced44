"""The keys of a recipe file, section by section, with their types, bounds and defaults.

What one key alone can be is checked here, by pydantic; what keys mean together is not known.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from quant.module_names import HEAD

MethodName = Literal["none", "rtn", "gptq", "awq", "auto", "gradient"]
ScaleSearch = Literal["none", "weights", "inputs", "outputs"]
SchemeName = Literal[
    "dense", "w3a16", "w4a16", "w8a16", "w4a8", "w4a8-fp8", "w8a8", "fp8", "fp8-block"
]
HeadSchemeName = Literal["dense", "w8a16"]
KVCacheName = Literal["none", "fp8", "fp8-head", "int8"]
GroupSize = Literal[32, 64, 128, "channel"]
DTypeName = Literal["auto", "float32", "float16", "bfloat16"]


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


class RecipeKeys(_Section):
    """All keys of a recipe file."""

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

    @property
    def is_mixed(self) -> bool:
        """Whether schemes are to be chosen by sensitivity, under `budget:` or `max_kl:`."""
        return self.budget is not None or self.max_kl is not None
