"""Smoothing: the scale per channel that makes a linear's inputs and weights cheap to round.

Xiao et al., "SmoothQuant", arXiv 2211.10438, eq. 4: s_j = max|X_j|^a / max|W_j|^(1-a). Here `a` is
searched per mapping and is only the start: the scales are then refined one by one by gradient
descent on the expected error of rounding (each rounding error taken as uniform and independent),

    sum_j s_j^2 |W_j|^2 * E_t[step(x_t / s)^2]  +  sum_r step(W_r * s)^2 * sum_j E[x_j^2] / s_j^2

with step = largest magnitude / highest code, over sqrt(12), but never more than the value itself,
and more for the largest value, which lies half a step beyond the highest code. What is kept is what
has the least *measured* error of the readers' outputs with rounded weights and rounded inputs;
leaving all as it is is always a candidate, so a search cannot lose to none.

The readers are stacked and the gradient is written out, so that a step is a handful of passes over
the inputs and the weights, with no copy to the host between the first step and the last.

Pure: tensors in, a scale out. Knows no models, names or files.

Shape legend: N sampled valid tokens, I input columns, C channels (columns may share one), O rows
(of all readers), G groups of a row, S = I / G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.artifact.errors import SchemeError
from quant.artifact.layout import dequantize, fake_quantize_activations
from quant.artifact.scheme import Scheme
from quant.methods.rtn import rtn

ALPHAS = tuple(round(0.3 + 0.05 * i, 2) for i in range(15))
# Refinement starts from the best of every third alpha: it gets to the same place from any of them.
COARSE = 3
# A channel's scale against the geometric mean of all: beyond this a channel counts as dead.
LARGEST_RATIO = 1e4
# Of Adam on log s; it falls to zero over the steps.
LEARNING_RATE, DECAYS = 0.1, (0.9, 0.95)
# Squared error of a rounded value, in steps: uniform within half a step; and how much more it is
# for the largest one, whose 127.5 (7.5) steps become 127 (7): a whole half.
UNIFORM = 1 / 12
EDGE = 1 / 4 - 1 / 12
# Weights looked at at once: what a processor's cache holds; a GPU wants few launches.
BLOCK, GPU_BLOCK = 1 << 20, 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A linear that reads the smoothed input: weight [O, I] float32 and what becomes of it."""

    weight: Tensor
    scheme: Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """The scale chosen [C], by which candidate (`none`, an alpha, `refined`), and the measured
    relative error of the readers' outputs before and after. dead: channels left at scale 1."""

    scale: Tensor
    chosen: str
    error_before: float
    error_after: float
    dead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Readers of one scheme as one matrix. outputs [N, O]: what they make of the inputs; share [O]:
    one over the energy of its reader's output (per token), over the number of all readers."""

    weight: Tensor
    scheme: Scheme
    outputs: Tensor
    share: Tensor


def stack_readers(inputs: Tensor, readers: Sequence[Reader]) -> list[Stack]:
    """The readers of `inputs` [N, I] by scheme."""
    by_scheme: dict[Scheme, list[Tensor]] = {}
    for reader in readers:
        by_scheme.setdefault(reader.scheme, []).append(reader.weight)
    stacks = []
    for scheme, weights in by_scheme.items():
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        outputs = inputs @ weight.T
        sizes = [len(part) for part in weights]
        energies = [part.square().sum() for part in torch.split(outputs, sizes, 1)]
        energy = torch.stack(energies) / len(inputs) * len(readers)
        share = torch.cat(
            [one.expand(size) for one, size in zip(1 / energy.clamp(min=1e-30), sizes, strict=True)]
        )
        stacks.append(Stack(weight=weight, scheme=scheme, outputs=outputs, share=share))
    return stacks


def search_scale(
    inputs: Tensor,
    readers: Sequence[Reader],
    channels: Tensor,
    scale_dtype: torch.dtype,
    *,
    refine_steps: int,
    is_binary: bool = False,
) -> Smoothing:
    """The scale [C] of least output error. inputs [N, I] float32; channels [I]: a column's channel;
    is_binary: whether scales must be powers of two.

    Deterministic. Channels that are zero in the inputs or in all weights keep scale 1.
    """
    stacks = stack_readers(inputs, readers)
    largest_w = torch.stack([stack.weight.abs().amax(0) for stack in stacks]).amax(0)
    width = int(channels.max()) + 1
    largest_x = _by_channel(inputs.abs().amax(0), channels, width)
    largest_w = _by_channel(largest_w, channels, width)
    alive = (largest_x > 0) & (largest_w > 0)
    alphas = ALPHAS[::COARSE] if refine_steps else ALPHAS
    grid = [_tame(largest_x**alpha / largest_w ** (1 - alpha), alive) for alpha in alphas]
    trials = {f"{alpha:g}": scale for alpha, scale in zip(alphas, grid, strict=True)}
    dead = int((~alive).sum())
    if _has_steps(readers) and dead < width:
        expected = ExpectedError(inputs, stacks)
        values = torch.stack([expected.at(scale.log()[channels])[0] for scale in grid])
        first = int(values.argmin())
        trials = {f"{alphas[first]:g}": grid[first]}
        if refine_steps:
            trials["refined"] = refine(expected, channels, grid[first], alive, refine_steps)
    best, chosen = torch.ones_like(largest_x), "none"
    error = before = measured_error(inputs, stacks, best[channels], scale_dtype)
    for name, exact in trials.items():
        trial = torch.exp2(exact.log2().round()) if is_binary else exact
        found = measured_error(inputs, stacks, trial[channels], scale_dtype)
        if found < error:
            best, error, chosen = trial, found, name
    return Smoothing(
        scale=best, chosen=chosen, error_before=before**0.5, error_after=error**0.5, dead=dead
    )


def _by_channel(values: Tensor, channels: Tensor, width: int) -> Tensor:
    """The largest of the columns' values in each channel."""
    start = torch.zeros(width, device=values.device)
    return start.scatter_reduce(0, channels, values.float(), "amax")


def _tame(scale: Tensor, alive: Tensor) -> Tensor:
    """Scales around 1: finite, of bounded ratio, 1 where the channel is dead."""
    logs = torch.where(alive, scale.clamp(min=1e-30), torch.ones_like(scale)).log()
    middle = logs.sum() / alive.sum().clamp(min=1)
    limit = math.log(LARGEST_RATIO)
    centred = (logs - middle).clamp(-limit, limit)
    return torch.where(alive, centred.exp(), torch.ones_like(scale))


def _has_steps(readers: Sequence[Reader]) -> bool:
    """Whether rounding has a fixed step somewhere: e4m3 numbers have none, scaled or not."""
    return any(
        reader.scheme.weights is not None
        and (
            reader.scheme.weights.kind == "int"
            or (reader.scheme.activations is not None and reader.scheme.activations.kind == "int")
        )
        for reader in readers
    )


def measured_error(
    inputs: Tensor, stacks: Sequence[Stack], spread: Tensor, scale_dtype: torch.dtype
) -> float:
    """Mean over the readers of the relative squared error of their outputs, for column scales [I];
    infinite when a weight scale does not fit its dtype."""
    scaled, total = inputs / spread, inputs.new_zeros(())
    try:
        for stack in stacks:
            act = stack.scheme.activations
            seen = scaled if act is None else fake_quantize_activations(scaled, act)
            weight = dequantize(rtn(stack.weight * spread, stack.scheme, scale_dtype)).float()
            error = torch.addmm(stack.outputs, seen, weight.T, beta=-1).square().sum(0)
            total = total + (error @ stack.share) / len(inputs)
    except SchemeError:
        return float("inf")
    return float(total)


def refine(
    expected: ExpectedError, channels: Tensor, start: Tensor, alive: Tensor, steps: int
) -> Tensor:
    """`start` [C] moved downhill on the expected error, by Adam on log s with a falling rate."""
    logs = best = start.log()
    # Columns of one channel side by side: all channels have equally many.
    order = torch.argsort(channels, stable=True)
    least = logs.new_full((), float("inf"))
    first, second = torch.zeros_like(logs), torch.zeros_like(logs)
    for step in range(steps + 1):
        value, slope = expected.at(logs[channels])
        best = torch.where(value < least, logs, best)
        least = torch.minimum(value, least)
        gradient = slope[order].reshape(len(logs), -1).sum(1)
        first = torch.lerp(gradient, first, DECAYS[0])
        second = torch.lerp(gradient.square(), second, DECAYS[1])
        rate = LEARNING_RATE * (1 - step / steps) / (1 - DECAYS[0] ** (step + 1))
        unbiased = second / (1 - DECAYS[1] ** (step + 1))
        logs = logs - rate * first / (unbiased.sqrt() + 1e-8)
    return _tame(best.exp(), alive)


class ExpectedError:
    """The sum of this module's docstring over the readers of some inputs, and its slope.

    What decides which value is the largest, and which are below their step, has no slope (almost
    everywhere), so that it is written out with vectors only.
    """

    def __init__(self, inputs: Tensor, stacks: Sequence[Stack]) -> None:
        self._inputs = inputs.abs()
        self._power = inputs.square().mean(0)
        self._costs: dict[float, Tensor] = {}
        self._weights: list[tuple[Tensor, Tensor]] = []
        for stack in stacks:
            weights, act = stack.scheme.weights, stack.scheme.activations
            assert weights is not None
            if act is not None and act.kind == "int":
                cost = stack.share @ stack.weight.square()
                codes = _highest_code(act.num_bits)
                self._costs[codes] = self._costs.get(codes, 0.0) + cost
            if weights.kind == "int":
                groups = 1 if weights.group_size is None else inputs.shape[1] // weights.group_size
                share = stack.share / _highest_code(weights.num_bits) ** 2
                self._weights += _blocks(stack.weight.abs(), share, groups)

    def at(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Value (a scalar tensor) and slope by `logs` [I], for column scales exp(logs)."""
        scale = logs.exp()
        total, slope = logs.new_zeros(()), torch.zeros_like(logs)
        for codes, cost in self._costs.items():
            total += _input_noise(self._inputs, scale, scale.square() * cost, codes, slope)
        power = self._power / scale.square()
        for weight, share in self._weights:
            total += _weight_noise(weight, share, scale, power, slope)
        return total, slope


def _highest_code(num_bits: int) -> float:
    return ((1 << num_bits) - 1) / 2


def _blocks(weight: Tensor, share: Tensor, groups: int) -> list[tuple[Tensor, Tensor]]:
    """Magnitudes [o, G, S] with their rows' shares [o, 1], cut along the rows."""
    rows = max(1, (GPU_BLOCK if weight.is_cuda else BLOCK) // weight.shape[1])
    cut = torch.split(weight.reshape(len(weight), groups, -1), rows)
    return list(zip(cut, torch.split(share[:, None], rows), strict=True))


def _input_noise(
    inputs: Tensor, scale: Tensor, cost: Tensor, codes: float, slope: Tensor
) -> Tensor:
    """Mean over tokens of each channel's squared rounding error times its `cost` [I], which grows
    with the square of `scale`. inputs: magnitudes. Its slope is added to `slope`."""
    scaled = inputs / scale
    reach, largest = scaled.max(-1)
    is_coarse = (scaled >= (reach * (UNIFORM**0.5 / codes))[:, None]).to(scaled.dtype)
    step = reach.square() * (1 / codes**2 / len(inputs))
    edge = EDGE * step * cost[largest]
    noise = UNIFORM * step * (is_coarse @ cost) + edge
    small = (scaled.square_() * (1 - is_coarse)).mean(0)
    slope += 2 * UNIFORM * cost * (step @ is_coarse)
    slope += 2 * sum_at((edge - noise)[:, None], largest[:, None], len(scale))
    total: Tensor = noise.sum() + small @ cost
    return total


def _weight_noise(
    weight: Tensor, share: Tensor, scale: Tensor, power: Tensor, slope: Tensor
) -> Tensor:
    """Squared rounding error of weights (magnitudes [o, G, S]) times the `power` [I] of their
    inputs, which falls with the square of `scale`, times the rows' shares [o, 1]. Its slope is
    added to `slope`."""
    groups, width = weight.shape[1:]
    reach, largest = (weight * scale.reshape(groups, width)).max(-1)
    step = reach.square() * share
    edge = EDGE * step * power[largest + width * torch.arange(groups, device=weight.device)]
    noise = UNIFORM * step * power.reshape(groups, width).sum(-1) + edge
    slope -= 2 * UNIFORM * power * step.sum(0).repeat_interleave(width)
    slope += 2 * sum_at(noise - edge, largest, width)
    return noise.sum()


def sum_at(values: Tensor, places: Tensor, width: int) -> Tensor:
    """[G * width]: each of `values` [n, G] added at its place [n, G] (0 to width - 1) in its group.

    Always in one order: a GPU's index_add_ has none, and the artifact would not be repeatable.
    """
    if values.is_cuda:
        return sum_where(values, places, torch.arange(width, device=values.device))
    columns = places + width * torch.arange(values.shape[1])
    whole = values.new_zeros(values.shape[1] * width)
    return whole.index_add_(0, columns.flatten(), values.flatten())


def sum_where(values: Tensor, places: Tensor, every: Tensor) -> Tensor:
    """`sum_at` for a GPU: `every` is the places of a group, [width]."""
    return (values[..., None] * (places[..., None] == every)).sum(0).flatten()
