"""Layer 1 in the reports: every statistic by domain, the error by position and by input length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from eval import figures
from eval.metrics.ladder import Layer1, Part
from eval.stats import Interval

KLD, LOG_RATIO = "Mean KLD", "Mean ln(PPL(Q)/PPL(base))"
# What is known of each place in a text.
PLACED = (KLD, LOG_RATIO)


def to_json(layer1: Layer1) -> dict[str, Any]:
    """By domain, by position in the window and by input length."""

    def bounds(interval: Interval) -> dict[str, float | None]:
        return {name: _finite(number) for name, number in asdict(interval).items()}

    def place(part: Part) -> dict[str, Any]:
        return {
            "label": part.label,
            "num_tokens": part.num_tokens,
            KLD: bounds(part.kld),
            LOG_RATIO: bounds(part.log_ratio),
        }

    return {
        "domains": {
            s.domain or "all": {
                "num_tokens": s.num_tokens,
                "num_documents": s.num_documents,
                **{name: bounds(interval) for name, interval in s.means.items()},
                **{name: _finite(number) for name, number in s.points.items()},
            }
            for s in layer1.domains
        },
        "positions": [place(part) for part in layer1.positions],
        "lengths": [place(part) for part in layer1.lengths],
        "kld_slope": bounds(layer1.slope),
    }


def is_point(found: object) -> bool:
    """Whether a domain's statistic has no interval: a percentile or an extreme."""
    return not isinstance(found, Mapping)


def names(domains: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The statistics, those with intervals first."""
    first = next(iter(domains.values()))
    return [name for name in first if not name.startswith("num_")]


def said(found: Any) -> str:
    """One statistic in words."""
    if not is_point(found):
        return figures.bounds(found)
    return "not a number" if found is None else f"{found:.5f}"


def to_markdown(layer1: Mapping[str, Any], table: Callable[..., str]) -> str:
    """Every statistic by domain, then the error by position and by input length."""
    domains = layer1["domains"]
    ladders = table(
        ("statistic", *domains),
        ((name, *(said(part[name]) for part in domains.values())) for name in names(domains)),
    )
    places = table(
        ("scored tokens", "number", *PLACED),
        (
            (part["label"], f"{part['num_tokens']:,}", *(figures.bounds(part[k]) for k in PLACED))
            for part in (*layer1["positions"], *layer1["lengths"])
        ),
    )
    return f"{ladders}\n\n{places}\n\n{slope(layer1)}"


def slope(layer1: Mapping[str, Any]) -> str:
    """The drift from a window's beginning to its end, as a sentence."""
    drift = figures.bounds(layer1["kld_slope"])
    return f"Mean KLD changes by {drift} nats from a window's first to last token."


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
