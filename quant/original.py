"""GPTQ towards the original model: a linear is asked for what the original's puts out, not for what
its own weight makes of the quantized model's inputs.

Everything before a linear was rounded, so that it reads other inputs than the original's does. The
usual target hands those errors on; this one takes them back as far as a linear map of the inputs
can, and where a linear adds to the residual stream (o_proj, down_proj), also the error that the
stream has taken on by then. With x, r of the original and x~, r~ of the quantized model, in rows:

    W' = argmin |X W^T + R - R~ - X~ W'^T|^2 = W + (W D^T + E^T) (H + l I)^-1,
    H = X~^T X~,  D = X~^T (X - X~),  E = X~^T (R - R~);

GPTQ then rounds W' under H, since what is left does not depend on the codes. The original's outputs
as targets are those of Li et al., "GPTAQ", arXiv 2504.02692; the stream's error and the ridge are
ours.

It knows the names by which decoder layers add to the stream, but no files and no families.

Shape legend: N valid tokens, I inputs, O outputs, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quant.capture import InputStatistics, Stream, check_finite, first_input, share_statistics
from quant.layer_job import LayerWork, quantize_modules
from quant.outcome import ModuleOutcome, Outcomes
from quant.plan_rows import PlanRow

# l, as a fraction of the mean of H's diagonal. With a tenth of it the fixture's loss on other text
# than the calibration's was a fifth higher, and on text like it a sixth (docs/LOG.md).
RIDGE = 1.0
# What reads the residual stream behind attention, hence what down_proj's output is added to.
STREAM_READER = "post_attention_layernorm"
NOTE = "towards the original model's outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A layer under work and the same layer as it was, with the hidden states that enter each.

    run: (layer, hidden, mask) -> the layer's output; prefix: of the layer's names.
    """

    layer: nn.Module
    original: nn.Module
    stream: Stream
    reference: Stream
    run: Callable[[nn.Module, Tensor, Tensor], Tensor]
    prefix: str


def can_aim(rows: Sequence[PlanRow]) -> bool:
    """Whether the modules of a stage can have this target: gptq makes them, and all of them read
    the same tokens in both models (an expert does not: the router may send it others)."""
    active = [row for row in rows if not row.scheme.is_dense]
    is_gptq = all(row.method == "gptq" and ".experts." not in row.module for row in active)
    return bool(active) and is_gptq


def quantize_towards(beside: Beside, rows: Sequence[PlanRow], work: LayerWork) -> Outcomes:
    """`quant.layer_job.quantize_stage` with this module's target; rows as `can_aim` wants them."""
    active = [row for row in rows if not row.scheme.is_dense]
    leaf = active[0].module.removeprefix(beside.prefix)
    sums = collect(beside, leaf)
    aimed = {row.module: sums.target(work.weights[row.module]) for row in active}
    outcomes = quantize_modules(active, replace(work, weights=aimed), sums.inputs)
    return {name: _noted(outcome) for name, outcome in outcomes.items()}


def _noted(outcome: ModuleOutcome) -> ModuleOutcome:
    note = "; ".join(filter(None, (outcome.result.note, NOTE)))
    return replace(outcome, result=replace(outcome.result, note=note))


@dataclass(slots=True, kw_only=True)
class Sums:
    """H (in `inputs`), D [I, I] and E [I, H] (None where nothing is added to the stream)."""

    inputs: InputStatistics
    drift: Tensor
    error: Tensor | None

    def target(self, weight: Tensor) -> Tensor:
        """W' of `weight` [O, I], float32; `weight` itself where H has no inverse."""
        hessian = self.inputs.hessian.clone()
        hessian.diagonal().add_(RIDGE * hessian.diagonal().mean())
        original = weight.to(hessian.device).float()
        wanted = self.drift @ original.to(hessian.dtype).T
        if self.error is not None:
            wanted += self.error
        factor, failed = torch.linalg.cholesky_ex(hessian)
        step = torch.cholesky_solve(wanted, factor).T.float()
        usable = (failed == 0) & torch.isfinite(step.sum())
        return torch.where(usable, original + step, original)


def collect(beside: Beside, leaf: str) -> Sums:
    """The sums of what the linear `leaf` of the layer reads, over all tokens of the stream."""
    linear = beside.layer.get_submodule(leaf)
    weight = linear.weight
    assert isinstance(weight, Tensor)
    inputs = InputStatistics(num_inputs=weight.shape[1], device=weight.device, needs_hessian=True)
    adds = leaf.endswith(("o_proj", "down_proj"))
    drift = torch.zeros_like(inputs.hessian)
    error = drift.new_zeros(weight.shape[1], weight.shape[0]) if adds else None
    for (batch, hidden), past in zip(beside.stream, beside.reference.hidden, strict=True):
        read, stream = _read(beside, beside.layer, leaf, hidden, batch.mask)
        wanted, reference = _read(beside, beside.original, leaf, past, batch.mask)
        check_finite(read, batch, f"the input of {beside.prefix}{leaf}")
        rows = _valid(read, batch.mask)
        inputs.add(rows)
        _add_product(drift, rows, _valid(wanted - read, batch.mask))
        if error is not None:
            _add_product(error, rows, _valid(reference - stream, batch.mask))
    share_statistics([inputs], beside.stream.ranks)
    beside.stream.ranks.add(drift, *(() if error is None else (error,)))
    return Sums(inputs=inputs, drift=drift, error=error)


def _read(
    beside: Beside, layer: nn.Module, leaf: str, hidden: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """What the linear reads and, where its output is added to the stream, the stream there."""
    seen = [hidden]
    reader = layer.get_submodule(STREAM_READER)
    hook = reader.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        inputs = first_input(layer.get_submodule(leaf), partial(beside.run, layer, hidden, mask))
    finally:
        hook.remove()
    return inputs, seen[-1].to(inputs.device)


def _valid(values: Tensor, mask: Tensor) -> Tensor:
    """Rows of valid tokens; without asking the device where there is no padding."""
    return values.flatten(0, 1) if bool(mask.all()) else values[mask.to(values.device)]


def _add_product(total: Tensor, rows: Tensor, difference: Tensor) -> None:
    """total += rows^T difference; on a GPU's tensor cores where the model computes in bfloat16."""
    if rows.is_cuda and rows.dtype == torch.bfloat16 and total.dtype == torch.float32:
        total += torch.mm(rows.T, difference, out_dtype=torch.float32)
    else:
        total.addmm_(rows.T.to(total.dtype), difference.to(total.dtype))
