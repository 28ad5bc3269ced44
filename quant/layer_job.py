"""One decoder layer, quantized: stage by stage, each stage's statistics taken with the earlier
stages already quantized (GPTQ's "true sequential" order), and one decoder layer, rebuilt from what
was stored.

Called by `quant.run_layer` for each layer and, with one stage, for lm_head. It knows methods and
layouts, but no files: tensors come in and go out by checkpoint name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quant.artifact.errors import SchemeError
from quant.artifact.layout import (
    QuantizedWeight,
    dequantize,
    fake_quantize_activations,
    from_tensors,
    tensor_names,
    to_tensors,
)
from quant.artifact.scheme import ActivationScheme, Scheme
from quant.capture import InputStatistics, Stream, collect_inputs
from quant.held_out import hold_out, sample_inputs
from quant.methods.auto import output_error
from quant.methods.clip import clip
from quant.methods.gptq import GPTQInfo, GPTQSettings, gptq, relative_output_error
from quant.methods.rtn import rtn
from quant.methods.scales import revive_squares
from quant.outcome import ModuleOutcome, Outcomes, can_cut, cut, dealt, stored_bytes
from quant.outliers import input_outliers, weight_outliers
from quant.plan_rows import PlanRow
from quant.report import ModuleResult
from quant.straight_through import straight_through

Run = Callable[[Tensor, Tensor], object]
# What `method: auto` tries: by its name in the report, the changes to a plan's row.
CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "rtn (inputs)": {"method": "rtn", "scale_search": "inputs"},
    "rtn (outputs)": {"method": "rtn", "scale_search": "outputs"},
    "gptq": {"method": "gptq"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSettings:
    """What the recipe says to every module: dtype of scales and dense tensors, GPTQ's knobs."""

    dtype: torch.dtype
    gptq: GPTQSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The linears of a layer, or lm_head, while they are quantized, by module name.

    weights: the source's [out, in]; `linears` are changed to what is stored, so that later stages
    see it. Statistics are of `run(hidden, mask)` over the whole stream, whose ranks share the work.
    """

    linears: Mapping[str, nn.Linear]
    weights: Mapping[str, Tensor]
    stream: Stream
    run: Run
    settings: MethodSettings


def quantize_stage(rows: Sequence[PlanRow], work: LayerWork) -> Outcomes:
    """Quantize the modules of one stage (they share their input) and install the result. Rows that
    are dense are left alone."""
    active = [row for row in rows if not row.scheme.is_dense]
    judged = [row for row in active if row.method == "auto"]
    if judged:
        outcomes = quantize_judged(judged, work)
        rest = [row for row in active if row.method != "auto"]
        return {**quantize_stage(rest, work), **outcomes}
    statistics = None
    wanted = {row.statistics for row in active}
    if wanted - {"none"}:
        first = active[0].module
        statistics = collect_inputs(
            work.linears[first], work.stream, work.run, first, needs_hessian="hessian" in wanted
        )
    return quantize_modules(active, work, statistics)


def quantize_judged(rows: Sequence[PlanRow], work: LayerWork) -> Outcomes:
    """`quantize_stage` by the method whose outputs are best on windows that none has seen."""
    first = rows[0].module
    kept, held = hold_out(work.stream)
    linear = work.linears[first]
    statistics = collect_inputs(linear, kept, work.run, first, needs_hessian=True)
    inputs = sample_inputs(linear, held, work.run, first)
    tried = {}
    for name, how in CANDIDATES.items():
        asked = [replace(row, **how) for row in rows]
        tried[name] = choose_codes(asked, work, statistics)
    outcomes = {row.module: _best(row, tried, work.weights[row.module], inputs) for row in rows}
    install_all(work.linears, outcomes)
    return outcomes


def _best(
    row: PlanRow,
    tried: Mapping[str, Mapping[str, ModuleOutcome]],
    weight: Tensor,
    inputs: Tensor,
) -> ModuleOutcome:
    """The candidate of least error on `inputs`; of equals the first. All errors are recorded."""
    original = weight.to(inputs.device)
    errors = {
        name: output_error(original, outcomes[row.module].weight, inputs)
        for name, outcomes in tried.items()
    }
    best = min(errors, key=errors.__getitem__)
    outcome = tried[best][row.module]
    found = ", ".join(f"{name} {error:.2%}" for name, error in errors.items())
    chosen = f"auto chose {best} (error on unseen windows: {found})"
    note = "; ".join(filter(None, (row.note, chosen)))
    result = replace(outcome.result, candidates=tuple(errors.items()), note=note)
    return replace(outcome, result=result)


def quantize_modules(
    rows: Sequence[PlanRow], work: LayerWork, statistics: InputStatistics | None
) -> Outcomes:
    """Quantize modules that share an input with these statistics of it, and install the result.
    The ranks share the work."""

    def quantize(part: Sequence[PlanRow], pieces: Mapping[str, Tensor]) -> Outcomes:
        return _quantize_group(part, replace(work, weights=pieces), statistics)

    ranks, weights = work.stream.ranks, work.weights
    outcomes: Outcomes = {}
    for group in _alike(rows):
        if ranks.size > 1 and can_cut(group):
            outcomes.update(cut(ranks, group, weights, quantize, partial(_energy, statistics)))
        else:
            outcomes.update(dealt(ranks, [group], lambda rows: quantize(rows, weights)))
    install_all(work.linears, outcomes)
    return outcomes


def install_all(linears: Mapping[str, nn.Linear], outcomes: Mapping[str, ModuleOutcome]) -> None:
    """Make the linears compute as the runtime will."""
    for name, outcome in outcomes.items():
        install(linears[name], outcome.weight)


def choose_codes(
    rows: Sequence[PlanRow], work: LayerWork, statistics: InputStatistics | None
) -> Outcomes:
    """`quantize_modules` on one rank, nothing installed."""
    outcomes: Outcomes = {}
    for group in _alike(rows):
        outcomes.update(_quantize_group(group, work, statistics))
    return outcomes


def _energy(statistics: InputStatistics | None, weight: Tensor) -> float:
    """Squared norm of these rows' outputs over the calibration tokens, or of the rows: what their
    relative error is relative to."""
    if statistics is None or not statistics.needs_hessian:
        return float(weight.float().square().sum())
    rows = weight.to(statistics.hessian.device).float()
    return float(((rows @ statistics.hessian.float()) * rows).sum())


def _alike(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Rows of one scheme and method together: they are quantized in one call. A module whose last
    block of rows is not full stays alone: no block may reach into the next module."""
    groups: dict[tuple[Any, ...], list[PlanRow]] = {}
    for row in rows:
        assert row.scheme.weights is not None
        is_even = row.shape[0] % row.scheme.weights.scale_rows == 0
        key = (row.scheme, row.method, row.scale_search, None if is_even else row.module)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _quantize_group(
    group: Sequence[PlanRow], work: LayerWork, statistics: InputStatistics | None
) -> Outcomes:
    """Modules of one input, scheme and method, stacked along their outputs."""
    names = [row.module for row in group]
    device = work.linears[names[0]].weight.device
    stacked = torch.cat([work.weights[name].to(device) for name in names])
    try:
        whole, info = _choose_codes(group[0], stacked, statistics, work.settings)
    except SchemeError as error:
        raise SchemeError(f"{', '.join(names)}: {error}") from error
    sizes = [row.shape[0] for row in group]
    infos = [None] * len(group) if info is None else info.split(sizes)
    parts = zip(group, _split(whole, sizes), torch.split(stacked, sizes), infos, strict=True)
    return {
        row.module: ModuleOutcome(
            weight=part, result=_result(row, part, original.float(), own, statistics)
        )
        for row, part, original, own in parts
    }


def _choose_codes(
    row: PlanRow, weight: Tensor, statistics: InputStatistics | None, settings: MethodSettings
) -> tuple[QuantizedWeight, GPTQInfo | None]:
    """The row's method on `weight` [out, in]: any module's of that method, or several stacked.

    Of auto, where there was nothing to judge by (experts): gptq, which falls back by itself.
    """
    if row.method in ("gptq", "auto"):
        assert statistics is not None
        return gptq(weight, statistics.hessian, row.scheme, settings.dtype, settings.gptq)
    weight = weight.float()
    if row.statistics == "none":
        is_searched = row.scale_search == "weights"
        return rtn(weight, row.scheme, settings.dtype, scale_search=is_searched), None
    assert statistics is not None
    if row.statistics == "squares":
        importance = revive_squares(statistics.mean_square)
        return rtn(weight, row.scheme, settings.dtype, importance=importance), None
    return clip(weight, statistics.hessian.float(), row.scheme, settings.dtype), None


def _split(whole: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    """The modules of a stack again."""
    zeros = (
        [None] * len(sizes) if whole.zero_point is None else torch.split(whole.zero_point, sizes)
    )
    assert whole.scheme.weights is not None
    scale_sizes = [-(-size // whole.scheme.weights.scale_rows) for size in sizes]
    return [
        QuantizedWeight(scheme=whole.scheme, codes=codes, scale=scale, zero_point=zero)
        for codes, scale, zero in zip(
            torch.split(whole.codes, sizes),
            torch.split(whole.scale, scale_sizes),
            zeros,
            strict=True,
        )
    ]


def _result(
    row: PlanRow,
    weight: QuantizedWeight,
    original: Tensor,
    info: GPTQInfo | None,
    statistics: InputStatistics | None,
) -> ModuleResult:
    fell_back = info is not None and info.fallback
    hessian = statistics.hessian if statistics is not None and statistics.needs_hessian else None
    if info is not None:
        error = info.loss**0.5
    elif hessian is not None:
        error = relative_output_error(original, weight, hessian.float()) ** 0.5
    else:
        error = weight_error(weight, original)
    return ModuleResult(
        module=row.module,
        shape=row.shape,
        scheme=row.scheme.label,
        method="rtn" if fell_back else "gptq" if row.method == "auto" else row.method,
        bytes=stored_bytes(weight),
        rel_error=error,
        error_of="weights" if hessian is None else "outputs",
        damping=info.damping if info else None,
        fallback="Hessian not positive definite at any damping" if fell_back else None,
        dead_columns=info.dead_columns if info else 0,
        note=row.note,
        **_seen(row, original, statistics),
    )


def _seen(row: PlanRow, original: Tensor, statistics: InputStatistics | None) -> dict[str, Any]:
    """Fields of the report that tell how hard the module is, whatever the method."""
    assert row.scheme.weights is not None
    found: dict[str, Any] = {"weight_outliers": weight_outliers(original, row.scheme.weights)}
    if statistics is not None:
        found["input_outliers"] = input_outliers(statistics.absmax, statistics.mean_square)
    return found


def weight_error(weight: QuantizedWeight, original: Tensor) -> float:
    """Frobenius norm of the error over that of the weight, whatever squares would overflow."""
    low, high = original.aminmax()
    peak = torch.maximum(-low, high)
    if not peak:
        return 0.0
    error = float((dequantize(weight).float() - original).div_(peak).norm())
    return error / float((original / peak).norm())


def stored_parts(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """A module's tensors under their checkpoint names, in host memory; packed where they are."""
    return {f"{name}.{leaf}": tensor.cpu() for leaf, tensor in to_tensors(weight).items()}


def install(linear: nn.Linear, weight: QuantizedWeight) -> None:
    """Make `linear` compute as the runtime will: dequantized weight, fake-quantized input."""
    linear.weight = nn.Parameter(
        dequantize(weight).to(linear.weight.device, linear.weight.dtype), requires_grad=False
    )
    if weight.scheme.activations is not None:
        quantize_input(linear, weight.scheme.activations)


def quantize_input(linear: nn.Linear, activations: ActivationScheme) -> RemovableHandle:
    """Round the input of `linear` to its codes on every call, until the handle is removed.

    Gradients pass as if it were not rounded.
    """
    return linear.register_forward_pre_hook(
        lambda _, args: (
            straight_through(args[0], lambda x: fake_quantize_activations(x, activations)),
            *args[1:],
        )
    )


def dense_state(tensors: Mapping[str, Tensor], schemes: Mapping[str, Scheme]) -> dict[str, Tensor]:
    """Stored tensors as the parameters they stand for: quantized modules dequantized.

    `tensors` may hold more (KV scales, modules of no scheme given): those with no parameter of that
    name are for the caller to leave out.
    """
    state = dict(tensors)
    for name, scheme in schemes.items():
        if not scheme.is_dense:
            parts = {leaf: state.pop(f"{name}.{leaf}") for leaf in tensor_names(scheme)}
            state[f"{name}.weight"] = dequantize(from_tensors(parts, scheme))
    return state
