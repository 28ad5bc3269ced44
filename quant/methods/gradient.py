"""Gradient rounding: scales and the way each weight is rounded, learned from what a layer puts out.

After Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of
LLMs", arXiv 2309.05516 (SignRound): each weight gets an offset V in [-1/2, 1/2] added before it is
rounded, which moves by a fixed step against the sign of the loss's gradient, as if rounding were
not there; the step falls to zero. Each group's scale has a factor, which moves by Adam.

Three things differ from the paper, as it is to start from good codes (GPTQ's), which rounding by
the sign of noisy gradients alone makes worse. V = 0 gives the starting code, whatever the weight:
what V is added to is the weight moved to at most `REACH` from that code, so that an offset must
be wanted for many steps before a code changes. The scale's factor leaves codes as they are, so
that its gradient is exact. And it moves both ways.

Pure: weights, codes and gradients in, codes out. Knows no layers and no losses (`quant.tune_layer`
does).

Shape legend: O output rows, I input columns, G groups per row, S = I / G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.artifact.layout import QuantizedWeight, code_range, round_scale
from quant.artifact.scheme import WeightScheme
from quant.methods.scales import decode, encode, grouped, store_codes, within

# How far from its code a weight may lie when it begins, in codes.
REACH = 0.25
# How far a scale may move: the logarithm of its factor.
LARGEST_STRETCH = 0.5
BETAS = (0.9, 0.99)


@dataclass(slots=True, kw_only=True)
class Adam:
    """Steps of Adam (Kingma and Ba, arXiv 1412.6980) on one tensor."""

    value: Tensor
    first: Tensor
    second: Tensor
    count: int = 0

    @classmethod
    def zeros(cls, like: Tensor) -> Adam:
        """At a value of zeros in the shape of `like`, float32."""
        start = torch.zeros_like(like, dtype=torch.float32)
        return cls(value=start, first=start.clone(), second=start.clone())

    def step(self, gradient: Tensor, rate: float) -> None:
        self.count += 1
        low, high = BETAS
        self.first.lerp_(gradient, 1 - low)
        self.second.lerp_(gradient.square(), 1 - high)
        size = (self.second / (1 - high**self.count)).sqrt().clamp(min=1e-30)
        self.value.sub_(rate / (1 - low**self.count) * self.first / size)


@dataclass(slots=True, kw_only=True)
class Rounding:
    """A module while it is learned: what it began with and what has been learned so far.

    base [O, G, S] float32: the weight in codes, near its starting code; shift [O, G, S]: V;
    stretch [O, G, 1]: logarithm of the factor of `start.scale`; frozen [O, G, 1]: groups of
    nothing but zeros, which stay zero.
    """

    start: QuantizedWeight
    base: Tensor
    shift: Tensor
    stretch: Adam
    frozen: Tensor

    def values(self) -> Tensor:
        """The weight [O, I] that is learned so far, as it will be reconstructed, float32."""
        zero = None if self.start.zero_point is None else self._zero
        return decode(self._codes(), self._scale(), zero).flatten(1)

    def step(self, gradient: Tensor, *, shift_rate: float, scale_rate: float) -> None:
        """Move against the loss's gradient by the weight's values [O, I]."""
        slope = gradient.reshape(self.base.shape).float()
        shifted = (self._codes() - self._zero) * self._scale().float()
        self.stretch.step((slope * shifted).sum(-1, keepdim=True), scale_rate)
        self.stretch.value.clamp_(-LARGEST_STRETCH, LARGEST_STRETCH)
        if shift_rate:
            self.shift.sub_(slope.sign(), alpha=shift_rate).clamp_(-0.5, 0.5)

    def result(self) -> QuantizedWeight:
        """What is learned so far, as it is stored."""
        return QuantizedWeight(
            scheme=self.start.scheme,
            codes=store_codes(self._codes().flatten(1), self._scheme),
            scale=self._scale()[..., 0],
            zero_point=self.start.zero_point,
        )

    def _codes(self) -> Tensor:
        scheme = self._scheme
        moved = self.shift * _spacing(self.base) if scheme.kind == "float" else self.shift
        low, high = code_range(scheme)
        unit = torch.ones((), device=self.base.device)
        codes = encode((self.base + moved).clamp(low, high), unit, None, scheme)
        return torch.where(self.frozen, self._zero, codes)

    def _scale(self) -> Tensor:
        scale = self.start.scale[..., None]
        wanted = within(scale.float() * self.stretch.value.exp(), scale.dtype)
        return round_scale(wanted, scale.dtype)

    @property
    def _scheme(self) -> WeightScheme:
        assert self.start.scheme.weights is not None
        return self.start.scheme.weights

    @property
    def _zero(self) -> Tensor:
        zero = self.start.zero_point
        return self.base.new_zeros(()) if zero is None else zero.float()[..., None]


def begin(weight: Tensor, start: QuantizedWeight) -> Rounding:
    """`weight` [O, I] at the codes of `start`, nothing learned yet. Neither is changed."""
    scheme = start.scheme.weights
    assert scheme is not None
    values = grouped(weight.float(), scheme)
    codes = grouped(start.codes.float(), scheme)
    scale = start.scale.float()[..., None]
    zero = 0.0 if start.zero_point is None else start.zero_point.float()[..., None]
    reach = REACH * (_spacing(codes) / 2 if scheme.kind == "float" else 1.0)
    return Rounding(
        start=start,
        base=torch.clamp(values / scale + zero, codes - reach, codes + reach),
        shift=torch.zeros_like(values),
        stretch=Adam.zeros(scale),
        frozen=~values.any(-1, keepdim=True),
    )


def _spacing(values: Tensor) -> Tensor:
    """Distance of neighbouring e4m3 numbers at each value: 2^(exponent - 3), at least 2^-9."""
    exponent = torch.frexp(values.abs().clamp(min=2.0**-6, max=448.0))[1]
    return torch.exp2((exponent - 1 - 3).float())
