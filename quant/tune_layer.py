"""Gradient rounding of one decoder layer: the loop of steps around `quant.methods.gradient`.

The loss is what the layer puts out against what it should: the squared error of valid tokens, each
over its own mean square, since the norm that reads it next takes the size away. Everything that
the runtime rounds is rounded in the loss (inputs, keys and values), and gradients pass through it
as if it were not there. A few windows are kept out of the steps: they judge, the start is the first
that they judge, and only what does better than all before is kept. So the result is never worse
than the start on windows that no step has seen.

Called once a layer has codes (`quant.gradient_job`). One layer's weights, offsets and gradients
are in memory, and one step's tokens. Knows no files.

Shape legend: B sequences of a batch, T tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quant.artifact.layout import QuantizedWeight
from quant.capture import Stream
from quant.held_out import hold_out
from quant.methods.gradient import Adam, Rounding, begin

# How often what has been learned is judged.
JUDGEMENTS = 8

# Twice the way that an offset can go in all.
TRAVEL = 0.5

RunWithGradient = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """steps: of gradient descent; tokens: of a step, with padding, one window at least; rate: the
    first step of the factors' logarithms, the last is 0; offsets: whether rounding is learned as
    well as scales and norms."""

    steps: int = 200
    tokens: int = 8192
    rate: float = 1e-3
    offsets: bool = False
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


def tune_layer(
    layer: LayerParts,
    stream: Stream,
    targets: Stream,
    run: RunWithGradient,
    settings: TuneSettings,
) -> Tuned:
    """Learn the rounding of a layer's linears, and its norms, so that it puts out `targets`.

    stream, targets: the same windows, what the layer reads and what it shall put out. `run(hidden,
    mask)` is the layer, differentiable by its weights. The modules are left in an undefined state:
    install the result. Deterministic for a seed.
    """
    work, judge = (
        _Work(layer=layer, stream=ours, targets=theirs, run=run, tokens=settings.tokens)
        for ours, theirs in zip(hold_out(stream), hold_out(targets), strict=True)
    )
    learned = _Learned.begin(layer, settings)
    best = Tuned(weights=dict(layer.starts), norms={})
    best = replace(best, error_before=judge.error())
    best = replace(best, error_after=best.error_before)
    for number, chunk in enumerate(_shuffled(work.chunks(), settings), start=1):
        left = 1 - (number - 1) / settings.steps
        learned.step(work.gradients(chunk), left, settings)
        work.install(learned.values())
        if number % max(1, settings.steps // JUDGEMENTS) == 0 or number == settings.steps:
            error = judge.error()
            if error < best.error_after:
                best = learned.result(best.error_before, error, number)
    return best


@dataclass(slots=True, kw_only=True)
class _Learned:
    """Everything of a layer that is learned, by module name.

    logs: logarithms of the factors of all scales, module by module, then of the norms' weights,
    which `norms` holds as they began, what the norm adds included.
    """

    roundings: dict[str, Rounding]
    norms: dict[str, Tensor]
    logs: Adam
    layer: LayerParts

    @classmethod
    def begin(cls, layer: LayerParts, settings: TuneSettings) -> _Learned:
        roundings = {
            name: begin(
                layer.originals[name].to(linear.weight.device), _on(layer.starts[name], linear),
                learns_offsets=settings.offsets,
            )
            for name, linear in layer.linears.items()
        }  # fmt: skip
        norms = {n: m.weight.detach().float() + layer.offset for n, m in layer.norms.items()}
        size = sum(r.num_scales for r in roundings.values()) + sum(map(len, norms.values()))
        device = next(iter(layer.linears.values())).weight.device
        return cls(roundings=roundings, norms=norms, logs=Adam.zeros(size, device), layer=layer)

    def _factors(self) -> dict[str, Tensor]:
        sizes = [r.num_scales for r in self.roundings.values()] + [
            len(w) for w in self.norms.values()
        ]
        parts = torch.split(self.logs.value.exp(), sizes)
        return dict(zip([*self.roundings, *self.norms], parts, strict=True))

    def step(self, gradients: Mapping[str, Tensor], left: float, settings: TuneSettings) -> None:
        """Move against the gradients; left: the part of the way that is still to go, 1 to 0."""
        factors = self._factors()
        slopes = [r.slopes(gradients[n], factors[n]) for n, r in self.roundings.items()]
        slopes += [gradients[n].float() * w * factors[n] for n, w in self.norms.items()]
        self.logs.step(torch.cat(slopes), settings.rate * left)
        for name, rounding in self.roundings.items():
            rounding.move(gradients[name], TRAVEL * left / settings.steps)

    def values(self) -> dict[str, Tensor]:
        """The weights as they will be stored and read."""
        factors = self._factors()
        found = {name: r.values(factors[name]) for name, r in self.roundings.items()}
        return found | self._norms(factors)

    def _norms(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: (start * factors[name] - self.layer.offset).to(self.layer.dtype)
            for name, start in self.norms.items()
        }

    def result(self, before: float, after: float, step: int) -> Tuned:
        factors = self._factors()
        weights = {name: r.result(factors[name]) for name, r in self.roundings.items()}
        return Tuned(
            weights=weights, norms=self._norms(factors), error_before=before, error_after=after,
            best_step=step,
        )  # fmt: skip


# Windows of a batch: its index and their rows.
Chunk = tuple[int, slice]


def _shuffled(chunks: Sequence[Chunk], settings: TuneSettings) -> list[Chunk]:
    """A chunk for each step: all of them in random order, again and again."""
    generator = torch.Generator().manual_seed(settings.seed)
    found: list[Chunk] = []
    while len(found) < settings.steps:
        order = torch.randperm(len(chunks), generator=generator).tolist()
        found += [chunks[i] for i in order]
    return found[: settings.steps]


def _on(weight: QuantizedWeight, module: nn.Module) -> QuantizedWeight:
    device, zero = next(module.parameters()).device, weight.zero_point
    return QuantizedWeight(
        scheme=weight.scheme,
        codes=weight.codes.to(device),
        scale=weight.scale.to(device),
        zero_point=None if zero is None else zero.to(device),
    )


@contextmanager
def _coarse_products() -> Iterator[None]:
    """Float32 products of a GPU in TF32: gradients are noisier than that by themselves. Errors are
    judged outside of it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The layer with its windows and what it should put out for them."""

    layer: LayerParts
    stream: Stream
    targets: Stream
    run: RunWithGradient
    tokens: int

    def chunks(self) -> list[Chunk]:
        """All windows, as many at once as `tokens` allow."""
        found = []
        for index, batch in enumerate(self.stream.batches):
            rows, width = batch.mask.shape
            size = max(1, self.tokens // width)
            found += [(index, slice(i, i + size)) for i in range(0, rows, size)]
        return found

    def install(self, values: Mapping[str, Tensor]) -> None:
        for name, module in self.layer.modules.items():
            value = values[name].to(module.weight.dtype)
            module.weight = nn.Parameter(value, requires_grad=False)

    def gradients(self, chunk: Chunk) -> dict[str, Tensor]:
        """Of the loss on these windows by each module's weight."""
        weights = {name: m.weight.requires_grad_() for name, m in self.layer.modules.items()}
        with _coarse_products():
            total, _ = self._loss(chunk)
            found = torch.autograd.grad(total, list(weights.values()))
        return dict(zip(weights, found, strict=True))

    @torch.no_grad()
    def error(self) -> float:
        """Root of the mean loss over all valid tokens."""
        parts = [self._loss(chunk) for chunk in self.chunks()]
        total = sum(float(loss.double()) for loss, _ in parts)
        return math.sqrt(total / max(1, sum(count for _, count in parts)))

    def _loss(self, chunk: Chunk) -> tuple[Tensor, int]:
        """Sum over valid tokens of |output - target|^2 / |target|^2, and how many they are."""
        index, rows = chunk
        mask = self.stream.batches[index].mask[rows]
        output = self.run(self.stream.hidden[index][rows], mask)
        wanted = self.targets.hidden[index][rows].to(output.device).float()
        missed = (output.float() - wanted).square().mean(-1)
        size = wanted.square().mean(-1).clamp(min=1e-12)
        # What padding puts out may be anything, so that zero times it is no answer.
        valid = torch.where(mask.to(output.device), missed / size, 0.0)
        return valid.sum(), int(mask.sum())
