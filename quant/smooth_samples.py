"""What the readers of a layer's folds read: a few hundred valid tokens of each, before any fold.

The tokens lie evenly over the beginnings of a few windows, since what comes after a token does not
change it. An expert is shown the tokens that its router sends it. Knows no schemes and no scales.

Shape legend: B windows of a batch, T tokens, N sampled tokens, I inputs of a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from quant.capture import Batch, Stream, check_finite
from quant.experts import Expert
from quant.folds import FoldMapping
from quant.layer_job import Run

# Windows that samples are taken from, evenly spaced over the calibration windows; how much of a
# window is computed for each token that is taken of it; and tokens run through a layer at once.
SAMPLED_WINDOWS, STRIDE, BATCH_TOKENS = 16, 8, 4096
# An expert that was sent fewer of the tokens is shown all that were taken.
FEWEST_TOKENS = 16


def sample_inputs(
    layer: nn.Module, mappings: Sequence[FoldMapping], stream: Stream, run: Run, tokens: int
) -> list[Tensor]:
    """About `tokens` valid tokens of what the readers of each mapping read, [N, I] float32."""
    found: list[list[Tensor]] = [[] for _ in mappings]
    watched = {_watched(mapping) for mapping in mappings}
    for batch, hidden, share in sampled_windows(stream, tokens):
        seen = _arguments(layer, watched, partial(run, hidden, batch.mask))
        taken = _spread(batch.mask, share)
        for mapping, into in zip(mappings, found, strict=True):
            name = _watched(mapping)
            values = seen[name][0].reshape(*batch.mask.shape, -1)
            check_finite(values, batch, f"the input of {name}")
            if _expert(layer, mapping) is None:
                into.append(values[taken.to(values.device)].float())
            else:
                into.append(_inner(layer, mapping, batch, taken, *seen[name][:2]))
    return [_thinned(torch.cat(parts), tokens) for parts in found]


def _watched(mapping: FoldMapping) -> str:
    """The module whose arguments tell what the mapping's readers read."""
    if mapping.followers:
        return mapping.followers[0]
    reader = mapping.readers[0]
    return reader[: reader.index(".experts.")] + ".experts" if ".experts." in reader else reader


def _expert(layer: nn.Module, mapping: FoldMapping) -> Expert | None:
    """The expert whose down projection the mapping is about."""
    if mapping.followers or ".experts." not in mapping.producer:
        return None
    expert = layer.get_submodule(mapping.producer.rpartition(".")[0])
    assert isinstance(expert, Expert)
    return expert


def _inner(
    layer: nn.Module,
    mapping: FoldMapping,
    batch: Batch,
    taken: Tensor,
    hidden: Tensor,
    chosen: Tensor,
) -> Tensor:
    """What an expert's down projection reads of the tokens sent to it: of hidden [B * T, H] those
    whose `chosen` experts [B * T, K] name it."""
    expert = _expert(layer, mapping)
    assert expert is not None
    number = int(mapping.producer.split(".")[-2])
    sent = (chosen == number).any(-1) & batch.mask.flatten().to(hidden.device)
    if int(sent.sum()) < FEWEST_TOKENS:
        sent = taken.flatten().to(hidden.device)
    with torch.no_grad():
        return expert.inner(hidden.reshape(len(sent), -1)[sent]).float()


def _thinned(rows: Tensor, most: int) -> Tensor:
    """At most about `most` of the rows, evenly spaced."""
    return rows[:: max(1, len(rows) // most)]


def _arguments(
    layer: nn.Module, names: Collection[str], run: Callable[[], object]
) -> dict[str, tuple[Tensor, ...]]:
    """What the named modules of the layer are called with during `run()`."""
    seen: dict[str, tuple[Tensor, ...]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: seen.update({name: args})

    hooks = [layer.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


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
