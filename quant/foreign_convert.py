"""`quantize convert` of a checkpoint that is quantized already: its codes, scales and zero points
become an artifact as they are.

The same staging, resume, probe and sealing as `quant.pipeline`, without a method: a layer is read,
written, and the probe prompts pass through what was written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from quant.foreign import QuantizedSource
from quant.layer_job import stored_parts
from quant.layer_store import LayerStore
from quant.parallel import Single
from quant.pipeline import open_writer
from quant.plan import Plan
from quant.plan_checks import check_fused
from quant.provenance import Describe, RunFindings, RunInputs, finish, no_texts, stage_files
from quant.recipe import Recipe
from quant.report import ModuleResult, RunReport
from quant.run_onward import advance, run_probe
from quant.run_progress import Clock, Progress, Silent
from quant.run_start import RunState, start_run
from quant.spill import UNLIMITED, Shelves


def foreign_plan(dense: Plan, source: QuantizedSource) -> Plan:
    """The plan of a conversion: what `dense` says of the model, with the schemes that are there.

    PlanError where modules that run as one differ in scheme.
    """
    rows = tuple(
        row
        if source.schemes[row.module].is_dense
        else replace(
            row, scheme=source.schemes[row.module], note=f"codes of {source.method}, as read"
        )
        for row in dense.rows
    )
    check_fused(rows)
    kv_cache = "none" if source.kv is None else source.kv.label
    kv_layers = () if source.kv is None else tuple(range(dense.num_layers))
    return replace(dense, rows=rows, warnings=(), kv_cache=kv_cache, kv_layers=kv_layers)


def convert(
    source: QuantizedSource,
    plan: Plan,
    recipe: Recipe,
    out: Path,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    resume: bool = True,
    describe: Describe = no_texts,
) -> RunReport:
    """Seal the artifact of `source` at `out`. Raises what `quant.pipeline.run` raises."""
    clock, shown, alone = Clock(), progress or Silent(), Single()
    inputs = RunInputs(source=source, plan=plan, recipe=recipe, calibration=None)
    with open_writer(inputs, out, alone, overwrite=overwrite, resume=resume) as writer:
        assert writer is not None, "the only rank writes"
        store = LayerStore(writer, alone)
        resumed = len(store.committed)
        stage_files(source, recipe, writer)
        state = start_run(inputs, store, alone, Shelves(out, "cpu", alone, UNLIMITED))
        shown.start(plan.num_layers)
        for index in range(plan.num_layers):
            shown.layer(index, f"layer {index + 1} of {plan.num_layers}")
            names = state.skeleton.layer_names(index)
            advance(state, index, _written(state, source, index, index + 1, names))
        shown.done()
        outer = (*state.skeleton.outer_names(), *source.extra_names())
        probe = run_probe(state, _written(state, source, None, 0, outer))
        clock.lap("convert")
        findings = RunFindings(results=state.results, seconds=clock.seconds, resumed_layers=resumed)
        return finish(inputs, writer, probe, findings, describe)


def _written(
    state: RunState, source: QuantizedSource, layer: int | None, shard: int, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The tensors of a shard as they are on disk, written now or by an earlier run."""
    if shard not in state.store.committed:
        state.store.commit(shard, *_read(state, source, layer, names))
    state.results.update(state.store.results(shard))
    return state.store.read(shard)


def _read(
    state: RunState, source: QuantizedSource, layer: int | None, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, ModuleResult]]:
    tensors: dict[str, Tensor] = {}
    results = {}
    for row in state.plan.layer_rows(layer):
        parts = {}
        if not row.scheme.is_dense:
            parts = stored_parts(row.module, source.weight(row.module))
        elif f"{row.module}.weight" in names:
            parts = {f"{row.module}.weight": source.tensor(f"{row.module}.weight")}
        tensors.update(parts)
        results[row.module] = ModuleResult(
            module=row.module, shape=row.shape, scheme=row.scheme.label, method="none",
            bytes=sum(part.nbytes for part in parts.values()), note=row.note,
        )  # fmt: skip
    if layer is not None:
        tensors.update(source.kv_scales(layer))
    done = {f"{row.module}.weight" for row in state.plan.layer_rows(layer)}
    tensors.update({name: source.tensor(name) for name in names if name not in done})
    return tensors, results
