"""One layer of a run, and what lies outside the layers: captured, smoothed, quantized, learned.

It does not know how codes are chosen (`quant.layer_job`, `quant.methods`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quant.artifact.scheme import DENSE
from quant.expert_job import quantize_experts
from quant.folds import MAPPINGS
from quant.gradient_job import LearnWork, learn_layer, learns, start_of
from quant.kv_layer import layer_scales, planned_kv, stored_tap
from quant.kv_scales import scale_names
from quant.layer_job import quantize_stage, stored_parts
from quant.modelling import HEAD, linear_of
from quant.original import Beside, can_aim, quantize_towards
from quant.outcome import Outcomes
from quant.report import ModuleResult
from quant.run_start import RunState, on_device, stored_tensors
from quant.smooth_layer import NO_FOLD, FoldNote, LayerTensors, smooth_layer


def quantize_layer(
    state: RunState, index: int
) -> tuple[dict[str, Tensor], dict[str, ModuleResult]]:
    """Capture, choose codes, stage by stage. Returns what to store, and the report's rows."""
    planned = state.plan.layer_rows(index)
    rows = {row.module: start_of(row, state.gradient) for row in planned}
    prefix, names = state.skeleton.layer_prefix(index), state.skeleton.layer_names(index)
    quantized = {f"{name}.weight" for name, row in rows.items() if not row.scheme.is_dense}
    dense = stored_tensors(
        state.source, state.settings.dtype, [n for n in names if n not in quantized]
    )
    weights = on_device(state.source.tensors(sorted(quantized)), state.skeleton.device)
    layer = state.skeleton.build_layer(index, {**dense, **weights})
    linears = {
        name: linear_of(layer, name.removeprefix(prefix))
        for name, row in rows.items()
        if not row.scheme.is_dense
    }
    experts = state.skeleton.experts_of(layer)

    def run_layer(hidden: Tensor, mask: Tensor) -> Tensor:
        return state.skeleton.run_layer(index, layer, hidden, mask)

    windows = state.calibration or state.probe
    notes = {} if state.smooth is None else smooth(state, index, layer, dense, weights, run_layer)
    by_module = {name.removesuffix(".weight"): tensor for name, tensor in weights.items()}
    stored, results = dict(dense), dense_results(state, index, dense)
    stages = state.skeleton.stages(index)
    beside = None if state.original is None else beside_original(state, index, layer)
    every: Outcomes = {}
    for stage in stages:
        work = (
            [rows[prefix + leaf] for leaf in stage], linears, by_module, windows, run_layer,
            state.settings,
        )  # fmt: skip
        if experts is not None and ".experts." in stage[0]:
            outcomes = quantize_experts(experts, *work)
        elif beside is not None and state.plan.gptq_target == "original" and can_aim(work[0]):
            outcomes = quantize_towards(beside, work[0], linears, by_module, state.settings)
        else:
            outcomes = quantize_stage(*work)
        every |= outcomes
        if stage is stages[0]:
            stored.update(kv_scales(state, index, layer, run_layer))
    if beside is not None and learns(planned):
        outcomes, norms = learn(state, index, beside, by_module, every, stored)
        stored.update(norms)
        every |= outcomes
    for name, outcome in every.items():
        note = notes.get(name, NO_FOLD)
        results[name] = replace(outcome.result, smoothing=note.text, smooth_dead=note.dead)
        stored.update(stored_parts(name, outcome.weight))
    return stored, results


def beside_original(state: RunState, index: int, layer: nn.Module) -> Beside:
    """`layer`, about to be quantized, and a copy that stays as it is (smoothed, it computes the
    same), on the streams of both models."""
    assert state.original is not None
    assert state.calibration is not None

    def run(layer: nn.Module, hidden: Tensor, mask: Tensor) -> Tensor:
        return state.skeleton.run_layer(index, layer, hidden, mask)

    return Beside(
        layer=layer, original=copy.deepcopy(layer), stream=state.calibration,
        reference=state.original, run=run, prefix=state.skeleton.layer_prefix(index),
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


def kv_scales(
    state: RunState, index: int, layer: nn.Module, run: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """The scales of the layer's KV cache to store; what they cost is kept for the report."""
    streams = [state.calibration or state.probe, *([state.long_texts] if state.long_texts else [])]
    prefix, dtype = state.skeleton.layer_prefix(index), state.settings.dtype
    scales, result = layer_scales(state.plan, index, prefix, layer, streams, run, dtype)
    if result is not None:
        state.store.keep_kv(result)
    return scales


def smooth(
    state: RunState,
    index: int,
    layer: nn.Module,
    dense: dict[str, Tensor],
    weights: dict[str, Tensor],
    run_layer: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, FoldNote]:
    """Fold scales into a layer's tensors (changed, here and in the module); what was done, by
    module."""
    assert state.smooth is not None
    prefix = state.skeleton.layer_prefix(index)
    leaves = {name.removeprefix(prefix): tensor for name, tensor in {**dense, **weights}.items()}
    # Where awq alone folds, what another method takes stays as it is: dense, as smoothing sees it.
    schemes = {
        row.module.removeprefix(prefix): row.scheme
        if state.plan.smoothing != "none" or row.method == "awq"
        else DENSE
        for row in state.plan.layer_rows(index)
    }
    work = LayerTensors(layer=layer, tensors=leaves, schemes=schemes, dtype=state.settings.dtype)
    notes = smooth_layer(
        work, MAPPINGS.get(state.plan.architecture, ()), state.calibration or state.probe, run_layer,
        state.skeleton.head_dim, state.smooth,
    )  # fmt: skip
    for group in (dense, weights):
        group.update({name: work.tensors[name.removeprefix(prefix)] for name in group})
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

        outcomes = quantize_stage(
            rows, {HEAD: linear_of(head, HEAD)},
            {name.removesuffix(".weight"): tensor for name, tensor in weights.items()},
            state.calibration or state.probe, run_head, state.settings,
        ) if rows else {}  # fmt: skip
    for name, outcome in outcomes.items():
        results[name] = outcome.result
        stored.update(stored_parts(name, outcome.weight))
    stored.update({name: state.source.raw_tensor(name) for name in state.source.extra_names()})
    return stored, results
