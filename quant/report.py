"""What a run did: RunReport, and the files made of it beside the artifact.

`report.json` (versioned, for programs), `report.html` and `report.md` (for people) and `README.md`
(the model card).
They hold timings and memory, so they stay outside the artifact's digest. Knows no tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from quant.coverage import Coverage
from quant.errors import PipelineError

REPORT_VERSION = "1.1"
# A layer whose KV cache loses so many times what the median layer's does is named.
KV_STANDS_OUT = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResult:
    """One linear module as it was written.

    shape: [out, in]. scheme: `Scheme.label`. method: the one that made the codes (rtn where gptq
    fell back). rel_error: Frobenius norm of the error over that of the original, of the module's
    outputs on calibration tokens, or of its weight when there were none (`error_of`); None for
    dense modules. damping: fraction of the Hessian's mean diagonal that gptq ended with.
    fallback: why the planned method could not be used. dead_columns: inputs that were always 0.
    tokens_seen: of an expert, calibration tokens that the router sent it; is_starved: too few for
    statistics of its own, so that the layer's were mixed in.
    weight_outliers: median, 99th percentile, maximum of max|w| / rms(w) over the groups that share
    a scale. input_outliers: (channel, absmax / rms of the input) of the worst channels.
    smoothing: what scale was folded into the module's input and what it did to the output error;
    smooth_dead: channels it left at scale 1, their inputs or weights being all 0.
    candidates: what `method: auto` tried, and the relative output error of each on windows that
    none of them had seen. layer_error: of a layer that `method: gradient` learned, the relative
    error of its outputs on such windows before and after.
    """

    module: str
    shape: tuple[int, int]
    scheme: str
    method: str
    bytes: int
    rel_error: float | None = None
    error_of: Literal["outputs", "weights"] = "outputs"
    damping: float | None = None
    fallback: str | None = None
    dead_columns: int = 0
    smoothing: str = ""
    smooth_dead: int = 0
    note: str = ""
    tokens_seen: int | None = None
    is_starved: bool = False
    weight_outliers: tuple[float, float, float] | None = None
    input_outliers: tuple[tuple[int, float], ...] = ()
    candidates: tuple[tuple[str, float], ...] = ()
    layer_error: tuple[float, float] | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModuleResult:
        """What `asdict` and JSON made of one."""
        return cls(**{key: _tuples(value) for key, value in data.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayerResult:
    """The fp8 KV cache of one layer: its scales (one, or one for each KV head), or those it would
    have had where `cache` says that it keeps the model's dtype.

    error: rms error of the attention output over its rms that rounding keys and values causes, on
    texts of up to `longest_text` tokens; error_of_one: the same with scales of 1.
    """

    layer: int
    cache: str
    key_scales: tuple[float, ...]
    value_scales: tuple[float, ...]
    error: float
    error_of_one: float
    longest_text: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KVLayerResult:
        """What `asdict` and JSON made of one."""
        return cls(**{key: _tuples(value) for key, value in data.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRow:
    """What one group of modules would lose in one scheme: `loss` (nats of KL, or its estimate).

    `chosen` marks the scheme the group was given.
    """

    group: str
    scheme: str
    loss: float
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTrial:
    """A mixed-precision plan that was built and judged.

    bits_per_weight: of the quantized linears, as stored. predicted_kl: what sensitivities of plain
    rounding add up to. kl: measured mean KL in nats per token on windows held out of the
    calibration; kl_error: its standard error over windows, None of a single one.
    verdict: the gate's (accepted, rejected, inconclusive), where it was asked.
    """

    bits_per_weight: float
    artifact_bytes: int
    predicted_kl: float
    kl: float
    kl_error: float | None
    chosen: bool = False
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The whole run. Bytes are of all weights (source, artifact); seconds per stage, in order.

    unpacked_bytes: what a GGUF source's weights take as floats, else None.
    peak_memory_bytes: largest resident size of the process. resumed_layers: taken over from an
    earlier, interrupted run. ranks: processes that shared the calibration windows; threads of each,
    time and memory of the first. adapter: name of the LoRA adapter that was merged first.
    tools: library name -> version. recipe_text: the recipe, verbatim;
    overrides: its keys that were replaced. source_digest, calibration_digest: what it was made of.
    sensitivity, plans: measured and tried by mixed precision, else empty. runtime_serves: whether
    our runtime knows the architecture (it refuses mixtures of experts). kv_layers: of a
    calibrated KV cache.
    """

    model: str
    architecture: str
    recipe: str
    artifact: str
    artifact_digest: str
    dtype: str
    source_bytes: int
    artifact_bytes: int
    modules: tuple[ModuleResult, ...]
    seconds: Mapping[str, float]
    peak_memory_bytes: int
    device: str = "cpu"
    threads: int = 1
    ranks: int = 1
    unpacked_bytes: int | None = None
    resumed_layers: int = 0
    adapter: str | None = None
    coverage: Coverage | None = None
    warnings: tuple[str, ...] = ()
    tools: Mapping[str, str] = field(default_factory=dict)
    recipe_text: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    source_digest: str = ""
    calibration_digest: str = ""
    sensitivity: tuple[SensitivityRow, ...] = ()
    plans: tuple[PlanTrial, ...] = ()
    runtime_serves: bool = True
    kv_layers: tuple[KVLayerResult, ...] = ()

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def quantized(self) -> tuple[ModuleResult, ...]:
        return tuple(m for m in self.modules if m.scheme != "dense")

    def next_steps(
        self, name: str, *, model: str = "MODEL", adapter: str | None = None
    ) -> tuple[str, ...]:
        """`next_steps` of this run; `model` and `adapter` as they are found again from here."""
        return next_steps(
            name, runtime_serves=self.runtime_serves, is_dense=not self.quantized,
            is_converted=self.is_converted, adapter=adapter or self.adapter, model=model,
        )  # fmt: skip

    @property
    def is_converted(self) -> bool:
        """Whether the codes are another tool's: no method of ours made them."""
        return bool(self.quantized) and all(m.method == "none" for m in self.quantized)

    @property
    def fallbacks(self) -> tuple[ModuleResult, ...]:
        return tuple(m for m in self.modules if m.fallback)

    def worst(self, count: int = 5) -> tuple[ModuleResult, ...]:
        """The modules with the largest relative error, worst first."""
        measured = [m for m in self.modules if m.rel_error is not None]
        return tuple(sorted(measured, key=lambda m: -(m.rel_error or 0.0))[:count])

    def bits_per_weight(self) -> float:
        """Bits on disk (codes, scales, zero points) per weight of the quantized modules."""
        weights = sum(m.shape[0] * m.shape[1] for m in self.quantized)
        return 8 * sum(m.bytes for m in self.quantized) / weights if weights else 0.0

    def all_warnings(self) -> Iterator[str]:
        yield from self.warnings
        if self.coverage is not None:
            yield from self.coverage.warnings()
            widest = max((m.shape[1] for m in self.modules if m.method == "gptq"), default=0)
            if self.coverage.tokens < widest:
                yield (
                    f"{self.coverage.tokens:,} calibration tokens are fewer than the {widest:,} "
                    "inputs of the widest module, so the errors shown are too good to be true; "
                    "use more --samples or longer --max-tokens"
                )
        starved = [m for m in self.modules if m.is_starved]
        if starved:
            experts = sorted({m.module.rpartition(".")[0] for m in starved})
            shown = ", ".join(experts[:8]) + (" and more" if len(experts) > 8 else "")
            yield (
                f"{len(experts)} experts saw too few calibration tokens and were quantized with "
                f"statistics of all their layer's tokens mixed in ({shown}); use more --samples or "
                "texts that reach them"
            )
        yield from self._kv_advice()
        dead = [m for m in self.modules if m.dead_columns]
        if dead:
            yield (
                f"{sum(m.dead_columns for m in dead)} input columns of {len(dead)} modules were "
                "always 0 in calibration; they were rounded to nearest"
            )
        left = [m for m in self.modules if m.smooth_dead]
        if left:
            yield (
                f"{sum(m.smooth_dead for m in left)} input channels of {len(left)} modules were "
                "always 0, in calibration or in the weights; smoothing left them at scale 1"
            )

    def _kv_advice(self) -> Iterator[str]:
        """The layers whose quantized cache loses far more than the others' does, by name."""
        quantized = [row for row in self.kv_layers if row.cache.startswith("fp8")]
        if len(quantized) < 4:  # too few to say what is usual
            return
        usual = median(row.error for row in quantized)
        worst = sorted(row.layer for row in quantized if row.error > KV_STANDS_OUT * usual)
        if worst:
            yield (
                f"the fp8 KV cache of layers {', '.join(map(str, worst))} distorts attention more "
                f"than {KV_STANDS_OUT:g} times as much as that of the median layer ({usual:.1%}); "
                f"`kv_skip_layers: {worst}` keeps theirs in {self.dtype}"
            )

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["coverage"] = None if self.coverage is None else self.coverage.to_json()
        data["warnings"] = list(self.all_warnings())
        return {"report_version": REPORT_VERSION, **data}


def write_reports(files: Mapping[str, str], directory: Path) -> None:
    """Write report files into an artifact's directory, each whole or not; PipelineError if not."""
    for name, text in files.items():
        temporary = directory / f"{name}.partial"
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, directory / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise PipelineError(
                f"{directory}: the artifact is complete, but {name} could not be written "
                f"({error.strerror}); make room and run with --overwrite if you need the report"
            ) from error


def report_json(report: RunReport) -> str:
    return json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n"


def next_steps(
    name: str,
    *,
    runtime_serves: bool,
    is_dense: bool = False,
    is_converted: bool = False,
    adapter: str | None = None,
    model: str = "MODEL",
) -> tuple[str, ...]:
    """The commands that make sense once the artifact `name` is there: only what will work.

    An artifact is judged against the float model that its codes stand for: with an adapter that is
    the merged one (a dense artifact is one), and for another tool's codes it lies elsewhere.
    """
    serve = f"runtime serve {name}"
    if not runtime_serves:
        return (f"vllm serve {name}",)
    if adapter is None:
        return f"evaluate {name}{' --base FLOAT_MODEL' if is_converted else ''}", serve
    if is_dense:
        return (serve,)
    merge = f"quantize convert {model} --adapter {adapter} --out MERGED"
    return merge, f"evaluate {name} --base MERGED", serve


def chosen_candidate(candidates: Sequence[Sequence[Any]]) -> str:
    """The (name, error) of least error, the first of equals: what `method: auto` took."""
    return str(min(candidates, key=lambda found: found[1])[0])


def by_kind(modules: Sequence[ModuleResult]) -> dict[tuple[str, str], list[ModuleResult]]:
    """Modules grouped by their last name part and scheme, in order of appearance."""
    groups: dict[tuple[str, str], list[ModuleResult]] = {}
    for module in modules:
        key = (module.module.rpartition(".")[2], module.scheme)
        groups.setdefault(key, []).append(module)
    return groups
