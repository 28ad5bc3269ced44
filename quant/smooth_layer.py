"""Smoothing of one decoder layer: which folds of its family apply, their scales, and the check that
the layer still computes the same.

Called by `quant.run_layer` before the layer is quantized. The layer's tensors come in as they were
read and go out as they shall be quantized (linears, float32) or stored (norms, biases).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quant.artifact.scheme import Scheme
from quant.capture import Stream
from quant.folds import (
    Fold,
    FoldMapping,
    column_channels,
    fold,
    mappings_in,
    needs_powers_of_two,
    num_channels,
)
from quant.layer_job import Run
from quant.methods.smoothing import Reader, Smoothing, search_scale
from quant.smooth_samples import sample_inputs

# The largest difference of a layer's outputs that a fold may make, over their largest value, and
# the tokens that it is looked for in.
TOLERANCE, CHECKED_TOKENS = 1e-3, 64
# Weights of a mapping's readers that scales are judged on; of more, every so many-th row.
JUDGED_WEIGHTS = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothSettings:
    """tokens: valid tokens that scales are judged on; refine_steps: steps of gradient descent."""

    tokens: int = 512
    refine_steps: int = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldNote:
    """For the report: what was folded into a module's input, and channels that were left at scale 1
    because their inputs or weights were all 0."""

    text: str
    dead: int = 0


NO_FOLD = FoldNote(text="")


@dataclass(slots=True, kw_only=True)
class LayerTensors:
    """A layer under work: its module, its tensors by name in the layer, schemes of its linears by
    name in the layer, and the dtype of what stays dense."""

    layer: nn.Module
    tensors: dict[str, Tensor]
    schemes: Mapping[str, Scheme]
    dtype: torch.dtype


def smooth_layer(
    work: LayerTensors,
    mappings: Sequence[FoldMapping],
    stream: Stream,
    run: Run,
    head_dim: int,
    settings: SmoothSettings,
) -> dict[str, FoldNote]:
    """Fold what lowers the error into `work` (tensors and module are changed).

    Returns what was done, by name of the readers in the layer, for the report. Where several ranks
    work together, the first one judges for all, on its own windows.
    """
    notes: dict[str, FoldNote] = {}
    usable: list[FoldMapping] = []
    for mapping in mappings_in(mappings, work.tensors):
        quantized, reason = _hindrance(mapping, work)
        if reason:
            notes.update(dict.fromkeys(quantized, FoldNote(text=f"none: {reason}")))
        else:
            usable.append(mapping)
    ranks = stream.ranks
    inputs = (
        sample_inputs(work.layer, usable, stream, run, settings.tokens) if ranks.rank == 0 else []
    )
    check = partial(_first_tokens, stream, run)
    wanted = check() if ranks.rank == 0 else None
    for i, mapping in enumerate(usable):
        # The inputs were taken before any fold: readers of a later mapping are not changed by it.
        search = partial(_search, mapping, work, inputs[i : i + 1], head_dim, settings)
        found = ranks.first(search)
        judge = partial(ranks.first, lambda: _moved(check(), wanted))
        text = _apply(mapping, work, found, head_dim, judge)
        note = FoldNote(text=text, dead=found.dead)
        notes.update(dict.fromkeys(mapping.readers, note))
    return notes


def _hindrance(mapping: FoldMapping, work: LayerTensors) -> tuple[list[str], str]:
    """Readers that are quantized, and why the scale cannot be folded ("" where it can): a linear
    that would have to change is not quantized, so that its values are not free."""
    linears = mapping.readers if mapping.is_norm else (mapping.producer, *mapping.readers)
    is_dense = {n: n not in work.schemes or work.schemes[n].is_dense for n in linears}
    quantized = [name for name in mapping.readers if not is_dense[name]]
    dense = [name for name in linears if is_dense[name]]
    if not dense:
        return quantized, ""
    return quantized, f"{dense[0]}, which the same scale would change, stays dense"


def _search(
    mapping: FoldMapping,
    work: LayerTensors,
    sampled: Sequence[Tensor],
    head_dim: int,
    settings: SmoothSettings,
) -> Smoothing:
    (inputs,) = sampled
    size = sum(work.tensors[f"{name}.weight"].numel() for name in mapping.readers)
    every = -(-size // JUDGED_WEIGHTS)
    readers = [
        Reader(weight=_weight(work, name, inputs.device, every), scheme=work.schemes[name])
        for name in mapping.readers
    ]
    channels = _channels(mapping, work, inputs.shape[1], head_dim).to(inputs.device)
    found = search_scale(
        inputs, readers, channels, work.dtype, refine_steps=settings.refine_steps,
        is_binary=needs_powers_of_two(mapping, work.tensors),
    )  # fmt: skip
    return replace(found, scale=found.scale.cpu())


def _weight(work: LayerTensors, name: str, device: torch.device, every: int) -> Tensor:
    return work.tensors[f"{name}.weight"][::every].to(device).float()


def _channels(mapping: FoldMapping, work: LayerTensors, columns: int, head_dim: int) -> Tensor:
    rows = work.tensors[f"{mapping.producer}.weight"].shape[0]
    return column_channels(mapping, num_channels(mapping, rows, columns), columns, head_dim)


def _apply(
    mapping: FoldMapping,
    work: LayerTensors,
    found: Smoothing,
    head_dim: int,
    judge: Callable[[], float],
) -> str:
    """Fold, check, and take it back if the layer's output moved. Returns the report's words."""
    if found.chosen == "none":
        return "none: no scale lowers the error"
    columns = work.tensors[f"{mapping.readers[0]}.weight"].shape[1]
    linears = (mapping.producer, *mapping.readers, *mapping.followers)
    names = [f"{name}.weight" for name in linears]
    names += [f"{mapping.producer}.bias"] * (f"{mapping.producer}.bias" in work.tensors)
    old = {name: work.tensors[name] for name in names}
    device = next(work.layer.parameters()).device
    on_device = {name: tensor.to(device) for name, tensor in old.items()}
    channels = _channels(mapping, work, columns, head_dim)
    folded: Fold = fold(mapping, on_device, found.scale.to(device), channels, work.dtype)
    _install(work, folded.tensors)
    moved = judge()
    if not moved <= TOLERANCE:
        _install(work, old)
        return f"none: folding into {mapping.producer} would change the output by {moved:.2g}"
    dead = f", {found.dead} dead channels left alone" if found.dead else ""
    return (
        f"{found.chosen} into {mapping.producer}, output error {found.error_before:.3g} -> "
        f"{found.error_after:.3g}{dead}"
    )


def _moved(output: Tensor, wanted: Tensor | None) -> float:
    """The largest difference of the layer's outputs over their largest value."""
    assert wanted is not None
    return float((output - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def _first_tokens(stream: Stream, run: Run) -> Tensor:
    """The layer's output on the first window's first valid tokens."""
    mask = stream.batches[0].mask[:1, :CHECKED_TOKENS]
    output = run(stream.hidden[0][:1, :CHECKED_TOKENS], mask)
    assert isinstance(output, Tensor)
    return output[mask.to(output.device)]


def _install(work: LayerTensors, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors into the work and into the module, there as float32."""
    for name, tensor in tensors.items():
        work.tensors[name] = tensor.cpu()
        module, _, leaf = name.rpartition(".")
        device = next(work.layer.parameters()).device
        value = nn.Parameter(tensor.to(device, torch.float32), requires_grad=False)
        setattr(work.layer.get_submodule(module), leaf, value)
