"""Gradient rounding: scales, and where asked the rounding itself, learned from a layer's outputs.

Scales: each group's has a factor, which moves by Adam and leaves the codes as they are, so that its
gradient is exact. Offsets, after Cheng et al., "Optimize Weight Rounding via Signed Gradient
Descent for the Quantization of LLMs", arXiv 2309.05516 (SignRound): each weight gets an offset V in
[-1/2, 1/2] added before it is rounded, which moves by a fixed step against the sign of the loss's
gradient, as if rounding were not there; the step falls to zero.

It is to start from good codes (GPTQ's), which signs of noisy gradients alone make worse. So V = 0
gives the starting code, whatever the weight, and what V is added to is the weight moved to at most
`REACH` from that code: an offset must be wanted for many steps before a code changes.

Pure: weights, codes and gradients in, codes out. Knows no layers and no losses (`quant.tune_layer`
does).

Shape legend: O output rows, I input columns, G groups per row, S = I / G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.artifact.layout import QuantizedWeight, code_range
from quant.artifact.scheme import WeightScheme
from quant.methods.scales import decode, encode, grouped, store_codes, within

# How far from its code a weight may lie when it begins, in codes.
REACH = 0.25
# How far a factor may go: its logarithm.
LARGEST_LOG = 0.5
BETAS = (0.9, 0.99)


@dataclass(slots=True, kw_only=True)
class Adam:
    """Steps of Adam (Kingma and Ba, arXiv 1412.6980) on one vector."""

    value: Tensor
    first: Tensor
    second: Tensor
    count: int = 0

    @classmethod
    def zeros(cls, size: int, device: torch.device) -> Adam:
        """At zeros, float32."""
        value, first, second = torch.zeros(3, size, device=device)
        return cls(value=value, first=first, second=second)

    def step(self, gradient: Tensor, rate: float) -> None:
        self.count += 1
        low, high = BETAS
        self.first.lerp_(gradient, 1 - low)
        self.second.lerp_(gradient.square(), 1 - high)
        size = (self.second / (1 - high**self.count)).sqrt_().clamp_(min=1e-30)
        self.value.addcdiv_(self.first, size, value=-rate / (1 - low**self.count))
        self.value.clamp_(-LARGEST_LOG, LARGEST_LOG)


@dataclass(slots=True, kw_only=True)
class Rounding:
    """A module while it is learned.

    codes [O, G, S] float32: what is learned so far, the start's at first; base [O, G, S]: the
    weight in codes, near its starting code; shift [O, G, S]: V. The last two are None where
    rounding stays as it is. frozen [O, G, 1]: groups of nothing but zeros, which stay zero.
    """

    start: QuantizedWeight
    codes: Tensor
    frozen: Tensor
    base: Tensor | None = None
    shift: Tensor | None = None

    @property
    def num_scales(self) -> int:
        return self.start.scale.numel()

    def values(self, factors: Tensor) -> Tensor:
        """The weight [O, I] that the codes stand for, float32; factors [O * G] of the scale."""
        zero = None if self.start.zero_point is None else self._zero
        return decode(self.codes, self._scale(factors), zero).flatten(1)

    def slopes(self, gradient: Tensor, factors: Tensor) -> Tensor:
        """The loss's gradient by the logarithms of the factors [O * G], from that by the values."""
        share = gradient.reshape(self.codes.shape).float() * (self.codes - self._zero)
        return (share.sum(-1, keepdim=True) * self._scale(factors).float()).flatten()

    def move(self, gradient: Tensor, rate: float) -> None:
        """Offsets against the signs of the gradient by the values, and the codes with them."""
        if self.shift is None or self.base is None:
            return
        slope = gradient.reshape(self.codes.shape)
        self.shift.sub_(slope.sign(), alpha=rate).clamp_(-0.5, 0.5)
        scheme = self._scheme
        moved = self.shift * _spacing(self.base) if scheme.kind == "float" else self.shift
        low, high = code_range(scheme)
        unit = torch.ones((), device=self.base.device)
        codes = encode((self.base + moved).clamp(low, high), unit, None, scheme)
        self.codes = torch.where(self.frozen, self._zero, codes)

    def result(self, factors: Tensor) -> QuantizedWeight:
        """What is learned so far, as it is stored."""
        return QuantizedWeight(
            scheme=self.start.scheme,
            codes=store_codes(self.codes.flatten(1), self._scheme),
            scale=self._scale(factors)[..., 0],
            zero_point=self.start.zero_point,
        )

    def _scale(self, factors: Tensor) -> Tensor:
        """[O, G, 1], as stored: `layout.round_scale`'s arithmetic without its checks, which wait
        for the device; a positive scale times a bounded factor passes them all."""
        start = self.start.scale[..., None]
        wanted = within(start.float() * factors.reshape(start.shape), start.dtype)
        via = torch.float16 if start.dtype == torch.float16 else torch.bfloat16
        return wanted.to(via).to(start.dtype)

    @property
    def _scheme(self) -> WeightScheme:
        assert self.start.scheme.weights is not None
        return self.start.scheme.weights

    @property
    def _zero(self) -> Tensor:
        zero = self.start.zero_point
        return self.codes.new_zeros(()) if zero is None else zero.float()[..., None]


def begin(weight: Tensor, start: QuantizedWeight, *, learns_offsets: bool) -> Rounding:
    """`weight` [O, I] at the codes of `start`, nothing learned yet. Neither is changed."""
    scheme = start.scheme.weights
    assert scheme is not None
    values = grouped(weight.float(), scheme)
    codes = grouped(start.codes.float(), scheme)
    frozen = ~values.any(-1, keepdim=True)
    if not learns_offsets:
        return Rounding(start=start, codes=codes, frozen=frozen)
    zero = 0.0 if start.zero_point is None else start.zero_point.float()[..., None]
    reach = REACH * (_spacing(codes) / 2 if scheme.kind == "float" else 1.0)
    exact = values / start.scale.float()[..., None] + zero
    return Rounding(
        start=start, codes=codes, frozen=frozen, shift=torch.zeros_like(codes),
        base=torch.clamp(exact, codes - reach, codes + reach),
    )  # fmt: skip


def _spacing(values: Tensor) -> Tensor:
    """Distance of neighbouring e4m3 numbers at each value: 2^(exponent - 3), at least 2^-9."""
    exponent = torch.frexp(values.abs().clamp(min=2.0**-6, max=448.0))[1]
    return torch.exp2((exponent - 1 - 3).float())
