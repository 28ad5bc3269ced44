"""What `method: gradient` does to one decoder layer: its start, the learning, the report's words.

The layer is first quantized by the method that the recipe names as the start. Then everything
continuous in it is learned at once (`quant.tune_layer`), its target being what the *unquantized*
model puts out there, whose hidden states flow beside those of the quantized one: so a layer also
takes back what the layers before it have done.

Knows plan rows and outcomes, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quant.artifact.layout import QuantizedWeight
from quant.capture import Stream, tapped
from quant.folds import MAPPINGS
from quant.layer_job import weight_error
from quant.modelling import KVTap
from quant.original import Beside
from quant.outcome import ModuleOutcome
from quant.plan_rows import PlanRow
from quant.recipe import Recipe
from quant.tune_layer import LayerParts, RunWithGradient, Tuned, TuneSettings, tune_layer

# Rows of the plan that begin as another method's.
STARTS: Mapping[str, Mapping[str, str]] = {
    "gptq": {"method": "gptq"},
    "rtn": {"method": "rtn", "scale_search": "outputs"},
    "auto": {"method": "auto"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What a recipe says of it: the method to begin from, and how to learn."""

    start: str
    tune: TuneSettings

    @classmethod
    def of(cls, recipe: Recipe) -> Gradient:
        settings = recipe.gradient.model_dump(exclude={"start"})
        tune = TuneSettings(**settings, seed=recipe.calibration.seed)
        return cls(start=recipe.gradient.start, tune=tune)


def learns(rows: Sequence[PlanRow]) -> bool:
    """Whether any of the rows is learned."""
    return any(row.method == "gradient" for row in rows)


def start_of(row: PlanRow, gradient: Gradient | None) -> PlanRow:
    """The row to begin with: another method's where it is to be learned."""
    if row.method != "gradient":
        return row
    assert gradient is not None
    changes = STARTS[gradient.start]
    if row.layer is None:
        changes = {**changes, "note": _joined(row.note, "gradient learns layers only")}
    return replace(row, **changes)  # type: ignore[arg-type]


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnWork:
    """A layer that has codes, beside the original one: the linears' weights before rounding and
    outcomes by module name, how it runs (`Skeleton.run_layer` but for its first two arguments) and
    how its KV cache rounds. dtype: of norms as they are stored."""

    beside: Beside
    architecture: str
    originals: Mapping[str, Tensor]
    outcomes: Mapping[str, ModuleOutcome]
    run: Callable[..., Tensor]
    kv_tap: KVTap | None
    dtype: torch.dtype

    def targets(self) -> Stream:
        """What the original layer puts out for the original model's hidden states."""
        beside, stream = self.beside, self.beside.reference
        outputs = [
            beside.run(beside.original, hidden, batch.mask).to(stream.home)
            for batch, hidden in stream
        ]
        return replace(stream, hidden=outputs)


def learn_layer(
    rows: Sequence[PlanRow], work: LearnWork, settings: TuneSettings
) -> tuple[dict[str, ModuleOutcome], dict[str, Tensor]]:
    """New outcomes of the learned modules, and the layer's norms by checkpoint name, as stored.

    Experts keep the codes they began with, and of a layer that has them so do the norms: a router
    reads what they put out.
    """
    asked = [row for row in rows if row.method == "gradient"]
    kept = {row.module for row in asked if ".experts." in row.module}
    found = {name: _unlearned(work.outcomes[name], "experts are not learned") for name in kept}
    learned = [row.module for row in asked if row.module not in kept]
    if not learned:
        return found, {}
    parts = LayerParts(
        linears={name: _submodule(work, name) for name in learned},
        originals={name: work.originals[name] for name in learned},
        starts={name: work.outcomes[name].weight for name in learned},
        norms={} if kept else _norms(work),
        dtype=work.dtype,
        offset=max((m.offset for m in MAPPINGS.get(work.architecture, ())), default=0.0),
    )
    targets = work.targets()
    with _rounded_kv(work):
        tuned = tune_layer(parts, work.beside.stream, targets, _differentiable(work), settings)
    for name in learned:
        found[name] = _learned(
            work.outcomes[name], tuned.weights[name], work.originals[name], tuned
        )
    return found, {f"{name}.weight": weight.cpu() for name, weight in tuned.norms.items()}


def _differentiable(work: LearnWork) -> RunWithGradient:
    """The layer, recording what a gradient needs only where one is wanted."""
    return lambda hidden, mask: work.run(hidden, mask, needs_grad=torch.is_grad_enabled())


def _rounded_kv(work: LearnWork) -> AbstractContextManager[object]:
    """Within it attention reads what the cache will hold."""
    if work.kv_tap is None:
        return nullcontext()
    return tapped(work.beside.layer.get_submodule("self_attn"), work.kv_tap)


def _submodule(work: LearnWork, name: str) -> nn.Linear:
    module = work.beside.layer.get_submodule(name.removeprefix(work.beside.prefix))
    assert isinstance(module, nn.Linear)
    return module


def _norms(work: LearnWork) -> dict[str, nn.Module]:
    """The layer's norms by checkpoint name: modules of one vector."""
    return {
        work.beside.prefix + name: module
        for name, module in work.beside.layer.named_modules()
        if [p.ndim for p in module.parameters(recurse=False)] == [1] and name.endswith("norm")
    }


def _unlearned(outcome: ModuleOutcome, why: str) -> ModuleOutcome:
    return replace(outcome, result=replace(outcome.result, note=_joined(outcome.result.note, why)))


def _learned(
    outcome: ModuleOutcome, weight: QuantizedWeight, original: Tensor, tuned: Tuned
) -> ModuleOutcome:
    """The outcome with what was learned; as it was where no step did better."""
    errors = (tuned.error_before, tuned.error_after)
    if tuned.best_step == 0:
        kept = _unlearned(outcome, "gradient: no step was better than the start")
        return replace(kept, result=replace(kept.result, layer_error=errors))
    result = replace(
        outcome.result,
        method="gradient",
        rel_error=weight_error(weight, original.to(weight.scale.device).float()),
        error_of="weights",
        layer_error=errors,
    )
    return replace(outcome, weight=weight, result=result)
