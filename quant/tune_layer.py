"""Gradient rounding of one decoder layer: the loop of steps around `quant.methods.gradient`.

The loss is what the layer puts out against what it should: the squared error of valid tokens, each
over its own mean square, since the norm that reads it next takes the size away. Everything that
the runtime rounds is rounded in the loss (inputs, keys and values), and gradients pass through it
as if it were not there. A few windows are kept out of the steps: they judge, the start is the first
that they judge, and only what does better than all before is kept. So the result is never worse
than the start on windows that no step has seen.

Called by `quant.pipeline` once a layer has codes. One layer's weights, offsets and gradients are in
memory, and one step's tokens. Knows no files.

Shape legend: B sequences of a batch, T tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.artifact.layout import QuantizedWeight
from quant.capture import Batch, Stream
from quant.methods.gradient import Adam, Rounding, begin

# One window in so many is kept out of the steps to judge them; and how often they are judged.
JUDGE_SHARE, JUDGEMENTS = 16, 8

# Twice the way that an offset can go in all; first step of the scales' and norms' logarithms.
TRAVEL, SCALE_RATE, NORM_RATE = 0.5, 1e-3, 1e-3

RunWithGradient = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """steps: of signed gradient descent; tokens: of a step, with padding, one window at least."""

    steps: int = 200
    tokens: int = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What of a layer is learned, by module name: its linears with the weights [out, in] that were
    rounded and the codes to begin from, and its norms. dtype: of norms as they are stored; offset:
    what a norm adds to its weight (Gemma computes x * (1 + w))."""

    linears: Mapping[str, nn.Linear]
    originals: Mapping[str, Tensor]
    starts: Mapping[str, QuantizedWeight]
    norms: Mapping[str, Any]
    dtype: torch.dtype
    offset: float = 0.0

    @property
    def modules(self) -> dict[str, Any]:
        return {**self.linears, **self.norms}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What became of a layer: codes and changed norms by module; the relative error of its outputs
    on the judging windows (norm of the error over norm of the output, root mean square over tokens)
    before and after. All is as it was where nothing was better (best_step 0)."""

    weights: dict[str, QuantizedWeight]
    norms: dict[str, Tensor]
    error_before: float = 0.0
    error_after: float = 0.0
    best_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some windows of a batch: its index and their rows."""

    batch: int
    rows: tuple[int, ...]


def tune_layer(
    layer: LayerParts,
    stream: Stream,
    targets: Sequence[Tensor],
    run: RunWithGradient,
    settings: TuneSettings,
) -> Tuned:
    """Learn the rounding of a layer's linears, and its norms, so that it puts out `targets`.

    targets: one [B, T, H] for each batch of the stream. `run(hidden, mask)` is the layer,
    differentiable by its weights. The modules are left in an undefined state: install the result.
    Deterministic for a seed.
    """
    train, judge = split_chunks(stream.batches, settings.tokens)
    work = _Work(layer=layer, stream=stream, targets=targets, run=run)
    learned = _Learned.begin(layer)
    best = Tuned(weights=dict(layer.starts), norms={})
    best = replace(best, error_before=work.error(judge))
    best = replace(best, error_after=best.error_before)
    for number, chunk in enumerate(_shuffled(train, settings.steps, settings.seed), start=1):
        left = 1 - (number - 1) / settings.steps
        learned.step(work.gradients(chunk), left, settings.steps)
        work.install(learned.values())
        if number % max(1, settings.steps // JUDGEMENTS) == 0 or number == settings.steps:
            error = work.error(judge)
            if error < best.error_after:
                best = learned.result(best.error_before, error, number)
    return best


@dataclass(slots=True, kw_only=True)
class _Learned:
    """Everything of a layer that is learned, by module name."""

    roundings: dict[str, Rounding]
    norms: dict[str, tuple[Tensor, Adam]]
    layer: LayerParts

    @classmethod
    def begin(cls, layer: LayerParts) -> _Learned:
        return cls(
            roundings={
                name: begin(layer.originals[name].to(m.weight.device), _on(layer.starts[name], m))
                for name, m in layer.linears.items()
            },
            norms={
                name: (m.weight.detach().float() + layer.offset, Adam.zeros(m.weight.detach()))
                for name, m in layer.norms.items()
            },
            layer=layer,
        )

    def step(self, gradients: Mapping[str, Tensor], left: float, steps: int) -> None:
        """Move against the gradients; left: the part of the way that is still to go, 1 to 0."""
        for name, rounding in self.roundings.items():
            rounding.step(
                gradients[name], shift_rate=TRAVEL * left / steps, scale_rate=SCALE_RATE * left
            )
        for name, (start, factor) in self.norms.items():
            present = start * factor.value.exp()
            factor.step(gradients[name].float() * present, NORM_RATE * left)

    def values(self) -> dict[str, Tensor]:
        """The weights as they will be stored and read."""
        found = {name: rounding.values() for name, rounding in self.roundings.items()}
        return found | self._norms()

    def _norms(self) -> dict[str, Tensor]:
        return {
            name: (start * factor.value.exp() - self.layer.offset).to(self.layer.dtype)
            for name, (start, factor) in self.norms.items()
        }

    def result(self, before: float, after: float, step: int) -> Tuned:
        weights = {name: rounding.result() for name, rounding in self.roundings.items()}
        return Tuned(
            weights=weights, norms=self._norms(), error_before=before, error_after=after,
            best_step=step,
        )  # fmt: skip


def split_chunks(batches: Sequence[Batch], tokens: int) -> tuple[list[Chunk], list[Chunk]]:
    """Windows to learn from, as many at once as `tokens` allow, and windows to judge on, spread
    evenly. With fewer than four windows, they are the same."""
    count = sum(len(batch.samples) for batch in batches)
    share = min(JUDGE_SHARE, max(2, count // 2))
    numbers = range(share // 2, count, share) if count >= 4 else range(count)
    train: list[Chunk] = []
    judge: list[Chunk] = []
    seen = 0
    for index, batch in enumerate(batches):
        rows = range(len(batch.samples))
        kept = tuple(row for row in rows if seen + row in numbers)
        free = tuple(row for row in rows if row not in kept) if count >= 4 else tuple(rows)
        seen += len(batch.samples)
        size = max(1, tokens // batch.mask.shape[1])
        train += [Chunk(batch=index, rows=free[i : i + size]) for i in range(0, len(free), size)]
        judge += [Chunk(batch=index, rows=kept[i : i + size]) for i in range(0, len(kept), size)]
    return train, judge


def _shuffled(chunks: Sequence[Chunk], count: int, seed: int) -> list[Chunk]:
    """`count` chunks: all of them in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Chunk] = []
    while len(found) < count:
        order = torch.randperm(len(chunks), generator=generator).tolist()
        found += [chunks[i] for i in order]
    return found[:count]


def _on(weight: QuantizedWeight, module: nn.Module) -> QuantizedWeight:
    device, zero = next(module.parameters()).device, weight.zero_point
    return QuantizedWeight(
        scheme=weight.scheme,
        codes=weight.codes.to(device),
        scale=weight.scale.to(device),
        zero_point=None if zero is None else zero.to(device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The layer with its windows and what it should put out for them."""

    layer: LayerParts
    stream: Stream
    targets: Sequence[Tensor]
    run: RunWithGradient

    def install(self, values: Mapping[str, Tensor]) -> None:
        for name, module in self.layer.modules.items():
            value = values[name].to(module.weight.dtype)
            module.weight = nn.Parameter(value, requires_grad=False)

    def gradients(self, chunk: Chunk) -> dict[str, Tensor]:
        """Of the loss on these windows by each module's weight."""
        weights = {name: m.weight.requires_grad_() for name, m in self.layer.modules.items()}
        total, _ = self._loss(chunk)
        found = torch.autograd.grad(total, list(weights.values()))
        return dict(zip(weights, found, strict=True))

    @torch.no_grad()
    def error(self, chunks: Sequence[Chunk]) -> float:
        """Root of the mean loss over all valid tokens of `chunks`."""
        parts = [self._loss(chunk) for chunk in chunks]
        total = sum(float(loss.double()) for loss, _ in parts)
        return math.sqrt(total / max(1, sum(count for _, count in parts)))

    def _loss(self, chunk: Chunk) -> tuple[Tensor, int]:
        """Sum over valid tokens of |output - target|^2 / |target|^2, and how many they are."""
        batch, rows = self.stream.batches[chunk.batch], list(chunk.rows)
        mask = batch.mask[rows]
        output = self.run(self.stream.hidden[chunk.batch][rows], mask)
        valid = mask.to(output.device)
        wanted = self.targets[chunk.batch][rows].to(output.device)[valid].float()
        missed = (output[valid].float() - wanted).square().mean(-1)
        size = wanted.square().mean(-1).clamp(min=1e-12)
        return (missed / size).sum(), int(mask.sum())
