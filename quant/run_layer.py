"""One layer of a run, and what lies outside the layers: captured, smoothed, quantized, learned.

It does not know how codes are chosen (`quant.layer_job`, `quant.methods`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quant.artifact.scheme import DENSE
from quant.expert_job import quantize_experts
from quant.folds import MAPPINGS
from quant.gradient_job import LearnWork, learn_layer, learns, start_of
from quant.kv_layer import layer_scales, planned_kv, stored_tap
from quant.kv_scales import scale_names
from quant.layer_job import LayerWork, quantize_stage, stored_parts
from quant.modelling import HEAD, linear_of
from quant.original import Beside, can_aim, quantize_towards
from quant.outcome import Outcomes
from quant.report import ModuleResult
from quant.run_start import RunState, on_device, stored_tensors
from quant.smooth_layer import NO_FOLD, FoldNote, LayerTensors, smooth_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLayer:
    """A decoder layer under work: its module, and its tensors by checkpoint name, dense ones apart
    from the weights to quantize. run: (hidden, mask) -> what the layer puts out."""

    index: int
    prefix: str
    layer: nn.Module
    dense: dict[str, Tensor]
    weights: dict[str, Tensor]
    run: Callable[[Tensor, Tensor], Tensor]


def quantize_layer(
    state: RunState, index: int
) -> tuple[dict[str, Tensor], dict[str, ModuleResult]]:
    """Capture, choose codes, stage by stage. Returns what to store, and the report's rows."""
    opened = open_layer(state, index)
    notes = {} if state.smooth is None else smooth(state, opened)
    stored, results = dict(opened.dense), dense_results(state, index, opened.dense)
    beside = None if state.original is None else beside_original(state, opened)
    work = layer_work(state, opened)
    outcomes: Outcomes = {}
    for number, stage in enumerate(state.skeleton.stages(index)):
        outcomes |= quantize_next(state, opened, stage, work, beside)
        if number == 0:
            stored.update(kv_scales(state, opened))
    if beside is not None and learns(state.plan.layer_rows(index)):
        learned, norms = learn(state, index, beside, work.weights, outcomes, stored)
        stored.update(norms)
        outcomes |= learned
    for name, outcome in outcomes.items():
        note = notes.get(name, NO_FOLD)
        results[name] = replace(outcome.result, smoothing=note.text, smooth_dead=note.dead)
        stored.update(stored_parts(name, outcome.weight))
    return stored, results


def open_layer(state: RunState, index: int) -> OpenLayer:
    """Layer `index` as the source has it, on the device that computes."""
    names = state.skeleton.layer_names(index)
    rows = state.plan.layer_rows(index)
    quantized = {f"{row.module}.weight" for row in rows if not row.scheme.is_dense}
    kept = [name for name in names if name not in quantized]
    dense = stored_tensors(state.source, state.settings.dtype, kept)
    weights = on_device(state.source.tensors(sorted(quantized)), state.skeleton.device)
    layer = state.skeleton.build_layer(index, {**dense, **weights})
    return OpenLayer(
        index=index, prefix=state.skeleton.layer_prefix(index), layer=layer, dense=dense,
        weights=weights, run=partial(state.skeleton.run_layer, index, layer),
    )  # fmt: skip


def layer_work(state: RunState, opened: OpenLayer) -> LayerWork:
    """The layer's linears to quantize, with the weights as smoothing left them."""
    weights = {name.removesuffix(".weight"): tensor for name, tensor in opened.weights.items()}
    linears = {name: linear_of(opened.layer, name.removeprefix(opened.prefix)) for name in weights}
    return LayerWork(
        linears=linears, weights=weights, stream=state.calibration or state.probe, run=opened.run,
        settings=state.settings,
    )  # fmt: skip


def quantize_next(
    state: RunState,
    opened: OpenLayer,
    stage: Sequence[str],
    work: LayerWork,
    beside: Beside | None,
) -> Outcomes:
    """Quantize one stage (modules that share their input, by name in the layer)."""
    planned = {row.module: row for row in state.plan.layer_rows(opened.index)}
    rows = [start_of(planned[opened.prefix + leaf], state.gradient) for leaf in stage]
    experts = state.skeleton.experts_of(opened.layer)
    if experts is not None and ".experts." in stage[0]:
        return quantize_experts(experts, rows, work)
    if beside is not None and state.plan.gptq_target == "original" and can_aim(rows):
        return quantize_towards(beside, rows, work)
    return quantize_stage(rows, work)


def beside_original(state: RunState, opened: OpenLayer) -> Beside:
    """The layer, about to be quantized, and a copy that stays as it is (smoothed, it computes the
    same), on the streams of both models."""
    assert state.original is not None
    assert state.calibration is not None

    def run(layer: nn.Module, hidden: Tensor, mask: Tensor) -> Tensor:
        return state.skeleton.run_layer(opened.index, layer, hidden, mask)

    return Beside(
        layer=opened.layer, original=copy.deepcopy(opened.layer), stream=state.calibration,
        reference=state.original, run=run, prefix=opened.prefix,
    )  # fmt: skip


def learn(
    state: RunState,
    index: int,
    beside: Beside,
    originals: Mapping[str, Tensor],
    outcomes: Outcomes,
    stored: Mapping[str, Tensor],
) -> tuple[Outcomes, dict[str, Tensor]]:
    """Gradient rounding of a layer that has codes: outcomes and norms that take their place."""
    assert state.gradient is not None
    scales = [stored[name] for name in scale_names(beside.prefix) if name in stored]
    work = LearnWork(
        beside=beside, architecture=state.plan.architecture, originals=originals, outcomes=outcomes,
        dtype=state.settings.dtype, kv_tap=stored_tap(planned_kv(state.plan, index), scales),
        run=partial(state.skeleton.run_layer, index, beside.layer),
    )  # fmt: skip
    return learn_layer(state.plan.layer_rows(index), work, state.gradient.tune)


def kv_scales(state: RunState, opened: OpenLayer) -> dict[str, Tensor]:
    """The scales of the layer's KV cache to store; what they cost is kept for the report."""
    streams = [state.calibration or state.probe, *([state.long_texts] if state.long_texts else [])]
    scales, result = layer_scales(
        state.plan, opened.index, opened.prefix, opened.layer, streams, opened.run,
        state.settings.dtype,
    )  # fmt: skip
    if result is not None:
        state.store.keep_kv(result)
    return scales


def smooth(state: RunState, opened: OpenLayer) -> dict[str, FoldNote]:
    """Fold scales into a layer's tensors (changed, in both tables and in the module); what was
    done, by module."""
    assert state.smooth is not None
    prefix, tables = opened.prefix, (opened.dense, opened.weights)
    leaves = {n.removeprefix(prefix): tensor for table in tables for n, tensor in table.items()}
    # Where awq alone folds, what another method takes stays as it is: dense, as smoothing sees it.
    schemes = {
        row.module.removeprefix(prefix): row.scheme
        if state.plan.smoothing != "none" or row.method == "awq"
        else DENSE
        for row in state.plan.layer_rows(opened.index)
    }
    work = LayerTensors(
        layer=opened.layer, tensors=leaves, schemes=schemes, dtype=state.settings.dtype
    )
    notes = smooth_layer(
        work, MAPPINGS.get(state.plan.architecture, ()), state.calibration or state.probe,
        opened.run, state.skeleton.head_dim, state.smooth,
    )  # fmt: skip
    for table in tables:
        table.update({name: work.tensors[name.removeprefix(prefix)] for name in table})
    return {prefix + name: note for name, note in notes.items()}


def dense_results(
    state: RunState, layer: int | None, dense: Mapping[str, Tensor]
) -> dict[str, ModuleResult]:
    """Report rows of the linears that stay as they are."""
    return {
        row.module: ModuleResult(
            module=row.module, shape=row.shape, scheme=row.scheme.label, method="none",
            bytes=dense[f"{row.module}.weight"].nbytes if f"{row.module}.weight" in dense else 0,
            note=row.note,
        )
        for row in state.plan.layer_rows(layer)
        if row.scheme.is_dense
    }  # fmt: skip


def quantize_outer(
    state: RunState, outer: list[str]
) -> tuple[dict[str, Tensor], dict[str, ModuleResult]]:
    """lm_head if the plan wants it, and everything else outside the layers as it is."""
    rows = [
        start_of(row, state.gradient)
        for row in state.plan.layer_rows(None)
        if not row.scheme.is_dense
    ]
    quantized = {f"{row.module}.weight" for row in rows}
    dense = stored_tensors(
        state.source, state.settings.dtype, [n for n in outer if n not in quantized]
    )
    weights = state.source.tensors(sorted(quantized))
    stored, results = dict(dense), dense_results(state, None, dense)
    with state.skeleton.head({**dense, **weights}) as head:

        def run_head(hidden: Tensor, mask: Tensor) -> object:
            with torch.no_grad():
                return head(inputs_embeds=hidden.to(state.skeleton.device, torch.float32))

        work = LayerWork(
            linears={HEAD: linear_of(head, HEAD)},
            weights={name.removesuffix(".weight"): tensor for name, tensor in weights.items()},
            stream=state.calibration or state.probe, run=run_head, settings=state.settings,
        )  # fmt: skip
        outcomes = quantize_stage(rows, work)
    for name, outcome in outcomes.items():
        results[name] = outcome.result
        stored.update(stored_parts(name, outcome.weight))
    stored.update({name: state.source.raw_tensor(name) for name in state.source.extra_names()})
    return stored, results
