"""Measurement: what a metric found, before anyone decides whether that is good enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from eval.stats import PairedCounts, clopper_pearson_lower, shrunk

Unit = Literal["ratio", "nats", "share", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One metric over one suite, base against candidate.

    Attributes:
        name: the metric's key in a gates file.
        unit: "ratio" (candidate / base), "nats", "share" (of 1) or "drop" (base minus candidate,
            a share of 1; positive is worse).
        base, candidate: each model's own value where it has one.
        estimate, lower, upper: the judged value and its one-sided bounds, in `unit`.
        counted: what `num_scored` counts, "tokens" or "items".
        num_clusters: independent documents or items behind the bounds.
        paired: the four-way counts, for pass-or-fail metrics.
        design_effect: by how much items of one document repeat each other (1: not at all).
        p_value: one-sided, of "the candidate is worse", where `paired` alone does not give it.
        golden_lost: ids of items that must never be lost and were.
        num_nonfinite: scored positions or items where the candidate gave NaN, Inf or an error.
        about: what was held to what, where the name does not say it.
        domains: the same measurement within each domain, ("source:code", ...) to measurement.
    """

    name: str
    unit: Unit
    base: float | None
    candidate: float | None
    estimate: float
    lower: float
    upper: float
    counted: Literal["tokens", "items"]
    num_scored: int
    num_clusters: int
    paired: PairedCounts | None = None
    design_effect: float = 1.0
    p_value: float | None = None
    golden_lost: tuple[str, ...] = ()
    num_nonfinite: int = 0
    about: str = ""
    domains: tuple[tuple[str, Measurement], ...] = ()

    @property
    def clusters(self) -> str:
        """What `num_clusters` counts."""
        is_whole = self.counted == "items" and self.num_clusters >= self.num_scored
        return "items" if is_whole else "documents"

    @property
    def evidence(self) -> PairedCounts | None:
        """`paired` as counts of independent items."""
        return None if self.paired is None else shrunk(self.paired, self.design_effect)

    @property
    def distance(self) -> float:
        """How far the candidate is from the base, in `unit` and without a sign.

        Of pass-or-fail items, half of those that changed: by chance alone as many are lost.
        """
        if self.paired is not None:
            return (self.paired.lost + self.paired.gained) / (2 * self.paired.num_items)
        return abs(self.estimate - 1) if self.unit in ("ratio", "share") else abs(self.estimate)

    @property
    def noise_floor(self) -> float:
        """Of a base against itself: the part of `distance` that is certain (95 %)."""
        if self.paired is None:
            return self.distance
        flips = self.paired.lost + self.paired.gained
        return clopper_pearson_lower(flips, self.paired.num_items) / 2

    @property
    def has_interval(self) -> bool:
        """False when there were too few clusters to say how sure the estimate is."""
        return math.isfinite(self.lower) and math.isfinite(self.upper)


def format_value(value: float, unit: Unit) -> str:
    """A value as a person compares it: 1.0340, 0.0215 nats, 92.1 %, +3.3 pp."""
    value += 0.0  # no minus sign on zero
    if unit == "ratio":
        return f"{value:.4f}"
    if unit == "nats":
        return f"{value:.4f} nats"
    if unit == "share":
        return f"{value:.1%}"
    return f"{value * 100:+.1f} pp"


def format_distance(value: float, unit: Unit) -> str:
    """How far apart, without a sign: 0.0300, 0.0215 nats, 8.0 pp."""
    if unit in ("share", "drop"):
        return f"{value * 100:.1f} pp"
    return format_value(value, unit)


def format_interval(estimate: float, lower: float, upper: float, unit: Unit) -> str:
    """An estimate with its bounds, the unit said once: 0.0215 nats [0.0180, 0.0261]."""
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return f"{format_value(estimate, unit)} [no interval]"
    low, high = (format_value(bound, unit).removesuffix(" nats") for bound in (lower, upper))
    low, high = (text.removesuffix(" pp").removesuffix("%") for text in (low, high))
    return f"{format_value(estimate, unit)} [{low}, {high}]"
