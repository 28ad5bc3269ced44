"""Smoothing of one decoder layer: which folds of its family apply, their scales, and the check that
the layer still computes the same.

Called by `quant.pipeline` before the layer is quantized. The layer's tensors come in as they were
read and go out as they shall be quantized (linears, float32) or stored (norms, biases).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quant.artifact.scheme import Scheme
from quant.capture import Batch, Stream, check_finite
from quant.folds import Fold, FoldMapping, column_channels, fold
from quant.layer_job import Run
from quant.methods.smoothing import Reader, Smoothing, search_scale

# The largest difference of a layer's outputs that a fold may make, over their largest value, and
# the tokens that it is looked for in.
TOLERANCE, CHECKED_TOKENS = 1e-3, 64
# Windows that samples are taken from, evenly spaced over the calibration windows; how much of a
# window is computed for each token that is taken of it; and tokens run through a layer at once.
SAMPLED_WINDOWS, STRIDE, BATCH_TOKENS = 16, 8, 4096


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
    dead: int


NO_FOLD = FoldNote(text="", dead=0)


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

    Returns what was done, by name of the readers in the layer, for the report.
    """
    notes: dict[str, FoldNote] = {}
    usable = [mapping for mapping in mappings if _applies(mapping, work)]
    inputs = sample_inputs(work.layer, [m.readers[0] for m in usable], stream, run, settings.tokens)
    check = partial(_first_tokens, stream, run)
    wanted = check()
    for mapping, rows in zip(usable, inputs, strict=True):
        # The inputs were taken before any fold: readers of a later mapping are not changed by it.
        found = _search(mapping, work, rows, head_dim, settings)
        text = _apply(mapping, work, found, head_dim, check, wanted)
        note = FoldNote(text=text, dead=found.dead)
        notes.update(dict.fromkeys(mapping.readers, note))
    return notes


def _applies(mapping: FoldMapping, work: LayerTensors) -> bool:
    """Whether the layer has these tensors and all linears among them are quantized."""
    linears = mapping.readers if mapping.is_norm else (mapping.producer, *mapping.readers)
    if f"{mapping.producer}.weight" not in work.tensors:
        return False
    return all(name in work.schemes and not work.schemes[name].is_dense for name in linears)


def sample_inputs(
    layer: nn.Module, names: Sequence[str], stream: Stream, run: Run, tokens: int
) -> list[Tensor]:
    """About `tokens` valid tokens of what each named linear reads, [N, I] float32; evenly spaced
    over the beginnings of some windows (what comes after a token does not change it)."""
    found: list[list[Tensor]] = [[] for _ in names]
    for batch, hidden, share in sampled_windows(stream, tokens):
        seen: list[Tensor] = []
        hooks = [
            layer.get_submodule(name).register_forward_pre_hook(
                lambda _, args, into=seen: into.append(args[0])
            )
            for name in names
        ]
        try:
            run(hidden, batch.mask)
        finally:
            for hook in hooks:
                hook.remove()
        picked = torch.nonzero(_spread(batch.mask, share).flatten())[:, 0]
        for name, values, into in zip(names, seen, found, strict=True):
            check_finite(values, batch, f"the input of {name}")
            into.append(values.flatten(0, 1)[picked.to(values.device)].float())
    return [torch.cat(parts) for parts in found]


def sampled_windows(stream: Stream, tokens: int) -> Iterator[tuple[Batch, Tensor, int]]:
    """Batches of the beginnings of `SAMPLED_WINDOWS` windows, their hidden states, and how many
    tokens to take of each window for `tokens` in all."""
    rows = [(b, r) for b, batch in enumerate(stream.batches) for r in range(len(batch.mask))]
    count = min(SAMPLED_WINDOWS, len(rows))
    picked = [rows[i * len(rows) // count] for i in range(count)]
    share = -(-tokens // count)
    width = share * STRIDE
    at_once = max(1, BATCH_TOKENS // width)
    for part in (picked[i : i + at_once] for i in range(0, count, at_once)):
        cut = [(stream.batches[b], stream.hidden[b], r) for b, r in part]
        length = min(width, max(int(batch.mask[r].sum()) for batch, _, r in cut))
        mask = torch.stack([_padded(batch.mask[r], length) for batch, _, r in cut])
        ids = torch.stack([_padded(batch.token_ids[r], length) for batch, _, r in cut])
        hidden = torch.stack([_padded(states[r], length) for _, states, r in cut])
        samples = tuple(batch.samples[r] for batch, _, r in cut)
        yield Batch(samples=samples, token_ids=ids, mask=mask), hidden, share


def _padded(row: Tensor, length: int) -> Tensor:
    """The first `length` entries of a window's row, zeros after its end."""
    cut = row[:length]
    return torch.cat([cut, cut.new_zeros(length - len(cut), *cut.shape[1:])])


def _spread(mask: Tensor, share: int) -> Tensor:
    """Of the valid tokens of each row of mask [B, T], `share` evenly spaced ones."""
    number = mask.sum(1, keepdim=True)
    place = mask.cumsum(1) - 1
    taken = number.clamp(max=share)
    # The k-th token is taken where k * taken / number steps over a whole number.
    return mask & ((place * taken) % number.clamp(min=1) < taken)


def _search(
    mapping: FoldMapping,
    work: LayerTensors,
    inputs: Tensor,
    head_dim: int,
    settings: SmoothSettings,
) -> Smoothing:
    readers = [
        Reader(weight=_weight(work, name, inputs.device), scheme=work.schemes[name])
        for name in mapping.readers
    ]
    channels = _channels(mapping, work, inputs.shape[1], head_dim).to(inputs.device)
    return search_scale(inputs, readers, channels, work.dtype, refine_steps=settings.refine_steps)


def _weight(work: LayerTensors, name: str, device: torch.device) -> Tensor:
    return work.tensors[f"{name}.weight"].to(device, torch.float32)


def _channels(mapping: FoldMapping, work: LayerTensors, columns: int, head_dim: int) -> Tensor:
    produced = work.tensors[f"{mapping.producer}.weight"].shape[0]
    return column_channels(mapping, produced, columns, head_dim)


def _apply(
    mapping: FoldMapping,
    work: LayerTensors,
    found: Smoothing,
    head_dim: int,
    check: Callable[[], Tensor],
    wanted: Tensor,
) -> str:
    """Fold, check, and take it back if the layer's output moved. Returns the report's words."""
    if found.chosen == "none":
        return "none: no scale lowers the error"
    columns = work.tensors[f"{mapping.readers[0]}.weight"].shape[1]
    names = [f"{name}.weight" for name in (mapping.producer, *mapping.readers)]
    names += [f"{mapping.producer}.bias"] * (f"{mapping.producer}.bias" in work.tensors)
    old = {name: work.tensors[name] for name in names}
    device = next(work.layer.parameters()).device
    on_device = {name: tensor.to(device) for name, tensor in old.items()}
    channels = _channels(mapping, work, columns, head_dim)
    folded: Fold = fold(mapping, on_device, found.scale, channels, work.dtype)
    _install(work, folded.tensors)
    moved = float((check() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    if not moved <= TOLERANCE:
        _install(work, old)
        return f"none: folding into {mapping.producer} would change the output by {moved:.2g}"
    dead = f", {found.dead} dead channels left alone" if found.dead else ""
    return (
        f"{found.chosen} into {mapping.producer}, output error {found.error_before:.3g} -> "
        f"{found.error_after:.3g}{dead}"
    )


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
