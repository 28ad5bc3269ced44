"""Smoothing: the scale per channel that makes a linear's inputs and weights cheap to round.

Xiao et al., "SmoothQuant", arXiv 2211.10438, eq. 4: s_j = max|X_j|^a / max|W_j|^(1-a). Here `a` is
searched per mapping and is only the start: the scales are then refined one by one by gradient
descent on the expected error of rounding (each rounding error taken as uniform and independent),

    sum_j s_j^2 |W_j|^2 * E_t[step(x_t / s)^2]  +  sum_r step(W_r * s)^2 * sum_j E[x_j^2] / s_j^2

with step = largest magnitude / highest code, over sqrt(12), but never more than the value itself,
and more for the largest value, which lies half a step beyond the highest code. What is kept is what
has the least *measured* error of the readers' outputs with rounded weights and rounded inputs;
leaving all as it is is always a candidate, so a search cannot lose to none.

Pure: tensors in, a scale out. Knows no models, names or files.

Shape legend: N sampled valid tokens, I input columns, C channels (columns may share one), O rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.artifact.errors import SchemeError
from quant.artifact.layout import dequantize, fake_quantize_activations
from quant.artifact.scheme import Scheme
from quant.methods.rtn import rtn

ALPHAS = tuple(round(0.3 + 0.05 * i, 2) for i in range(15))
# A channel's scale against the geometric mean of all: beyond this a channel counts as dead.
LARGEST_RATIO = 1e4
LEARNING_RATE = 0.05
# Squared error of a rounded value, in steps: uniform within half a step; and how much more it is
# for the largest one, whose 127.5 (7.5) steps become 127 (7): a whole half.
UNIFORM = 1 / 12
EDGE = 1 / 4 - 1 / 12


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


def search_scale(
    inputs: Tensor,
    readers: Sequence[Reader],
    channels: Tensor,
    scale_dtype: torch.dtype,
    *,
    refine_steps: int,
) -> Smoothing:
    """The scale [C] of least output error. inputs [N, I] float32; channels [I]: a column's channel.

    Deterministic. Channels that are zero in the inputs or in all weights keep scale 1.
    """
    tally = Judge(inputs, readers, scale_dtype)
    width = int(channels.max()) + 1
    largest_x = _by_channel(inputs.abs().amax(0), channels, width)
    largest_w = _by_channel(
        torch.stack([r.weight.abs().amax(0) for r in readers]).amax(0), channels, width
    )
    alive = (largest_x > 0) & (largest_w > 0)
    ones = torch.ones_like(largest_x)
    before = tally.error(ones[channels])
    best, error, chosen = ones, before, "none"
    for alpha in ALPHAS:
        trial = _tame(largest_x**alpha / largest_w ** (1 - alpha), alive)
        found = tally.error(trial[channels])
        if found < error:
            best, error, chosen = trial, found, f"{alpha:g}"
    if refine_steps and int(alive.sum()) > 1 and _has_steps(readers):
        trial = refine(inputs, readers, channels, best, alive, refine_steps)
        found = tally.error(trial[channels])
        if found < error:
            best, error, chosen = trial, found, "refined"
    return Smoothing(
        scale=best, chosen=chosen, error_before=before**0.5, error_after=error**0.5,
        dead=int((~alive).sum()),
    )  # fmt: skip


def _by_channel(values: Tensor, channels: Tensor, width: int) -> Tensor:
    """The largest of the columns' values in each channel."""
    start = torch.zeros(width, device=values.device)
    return start.scatter_reduce(0, channels, values.float(), "amax")


def _tame(scale: Tensor, alive: Tensor) -> Tensor:
    """Scales around 1: finite, of bounded ratio, 1 where the channel is dead."""
    logs = torch.where(alive, scale.clamp(min=1e-30), torch.ones_like(scale)).log()
    middle = logs[alive].mean() if bool(alive.any()) else logs.new_zeros(())
    limit = torch.tensor(LARGEST_RATIO).log()
    centred = (logs - middle).clamp(-float(limit), float(limit))
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


class Judge:
    """Measures a scale: mean over the readers of the relative squared error of their outputs."""

    def __init__(self, inputs: Tensor, readers: Sequence[Reader], scale_dtype: torch.dtype) -> None:
        self._inputs, self._readers, self._dtype = inputs, readers, scale_dtype
        self._outputs = [inputs @ reader.weight.T for reader in readers]

    def error(self, spread: Tensor) -> float:
        """Of column scales [I]; infinite when a weight scale does not fit its dtype."""
        scaled, total = self._inputs / spread, 0.0
        try:
            for reader, wanted in zip(self._readers, self._outputs, strict=True):
                act = reader.scheme.activations
                seen = scaled if act is None else fake_quantize_activations(scaled, act)
                weight = dequantize(rtn(reader.weight * spread, reader.scheme, self._dtype)).float()
                energy = wanted.square().mean().clamp(min=1e-30)
                total += float((seen @ weight.T - wanted).square().mean() / energy)
        except SchemeError:
            return float("inf")
        return total / len(self._readers)


def refine(
    inputs: Tensor,
    readers: Sequence[Reader],
    channels: Tensor,
    start: Tensor,
    alive: Tensor,
    steps: int,
) -> Tensor:
    """`start` [C] moved downhill on the expected error, by Adam on log s with a falling rate."""
    terms = _noise_terms(inputs, readers)
    logs = start.log().clone().requires_grad_(True)
    optimizer = torch.optim.Adam([logs], lr=LEARNING_RATE, betas=(0.9, 0.95))
    best, least = start, float("inf")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / steps)
        with torch.enable_grad():
            loss = expected_error(inputs, terms, logs[channels])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        if value < least:
            best, least = _tame(logs.detach().exp(), alive), value
        optimizer.step()
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseTerms:
    """What the expected error needs of a reader. column_energy [I]: |W_j|^2 over the outputs'
    energy; weight: |W| as [O, G, S] by group; the highest codes, None where nothing is rounded."""

    column_energy: Tensor
    weight: Tensor
    weight_codes: float | None
    input_codes: float | None
    energy: Tensor


def _noise_terms(inputs: Tensor, readers: Sequence[Reader]) -> list[NoiseTerms]:
    terms = []
    for reader in readers:
        weights, act = reader.scheme.weights, reader.scheme.activations
        assert weights is not None
        energy = (inputs @ reader.weight.T).square().sum(-1).mean().clamp(min=1e-30)
        groups = 1 if weights.group_size is None else inputs.shape[1] // weights.group_size
        terms.append(
            NoiseTerms(
                column_energy=reader.weight.square().sum(0) / energy,
                weight=reader.weight.abs().reshape(len(reader.weight), groups, -1),
                weight_codes=_highest_code(weights.num_bits) if weights.kind == "int" else None,
                input_codes=_highest_code(act.num_bits) if act and act.kind == "int" else None,
                energy=energy,
            )
        )
    return terms


def _highest_code(num_bits: int) -> float:
    return ((1 << num_bits) - 1) / 2


def expected_error(inputs: Tensor, terms: Sequence[NoiseTerms], logs: Tensor) -> Tensor:
    """The sum of this module's docstring over the readers, for column scales exp(logs) [I].

    What decides which value is the largest, and which are below their step, is found without a
    gradient (it has none almost everywhere), so that the backward pass touches vectors only.
    """
    scale = logs.exp()
    costs: dict[float, Tensor] = {}
    for term in terms:
        if term.input_codes is not None:
            costs[term.input_codes] = costs.get(term.input_codes, 0.0) + term.column_energy
    total = logs.new_zeros(())
    for codes, energy in costs.items():
        total = total + _input_noise(inputs, scale, scale.square() * energy, codes)
    power = inputs.square().mean(0) / scale.square()
    for term in terms:
        if term.weight_codes is not None:
            noise = _weight_noise(term.weight, scale, power) / term.weight_codes**2
            total = total + noise / term.energy
    return total


def _input_noise(inputs: Tensor, scale: Tensor, cost: Tensor, codes: float) -> Tensor:
    """Mean over tokens of each channel's squared rounding error times its `cost` [I]."""
    with torch.no_grad():
        scaled = inputs.abs() / scale
        reach, largest = scaled.max(-1)
        is_small = scaled.square() < (reach.square() / codes**2 * UNIFORM)[:, None]
        small = (inputs.square() * is_small).mean(0)
        at_most = inputs.abs().gather(1, largest[:, None])[:, 0]
        others = (~is_small).float()
    step = (at_most / scale[largest]).square() / codes**2
    noise = (step @ others) * UNIFORM / len(inputs) + small / scale.square()
    return (noise * cost).sum() + (step * EDGE * cost[largest]).mean()


def _weight_noise(weight: Tensor, scale: Tensor, power: Tensor) -> Tensor:
    """Squared rounding error of all weights times the `power` [I] of their inputs, in steps of one
    over the highest code."""
    groups, width = weight.shape[1:]
    with torch.no_grad():
        largest = (weight * scale.reshape(groups, width)).argmax(-1)
        at_most = weight.gather(2, largest[..., None])[..., 0]
        column = largest + width * torch.arange(groups, device=weight.device)
    reach = at_most * scale[column]
    spread = UNIFORM * power.reshape(groups, width).sum(-1) + EDGE * power[column]
    return (reach.square() * spread).sum()
