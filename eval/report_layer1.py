"""Layer 1 in the reports: every statistic by domain, the error by position and by input length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from eval.metrics.ladder import Layer1, Part, Statistics
from eval.stats import Interval


def to_json(layer1: Layer1) -> dict[str, Any]:
    """By domain, by position in the window and by input length."""

    def bounds(interval: Interval) -> dict[str, float | None]:
        return {name: _finite(number) for name, number in asdict(interval).items()}

    def place(part: Part) -> dict[str, Any]:
        return {
            "label": part.label,
            "num_tokens": part.num_tokens,
            "Mean KLD": bounds(part.kld),
            "Mean ln(PPL(Q)/PPL(base))": bounds(part.log_ratio),
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


def to_markdown(layer1: Layer1, table: Callable[..., str]) -> str:
    """Every statistic by domain, then the error by position and by input length."""
    domains = layer1.domains
    names = [*domains[0].means, *domains[0].points]
    ladders = table(
        ("statistic", *(s.domain or "all" for s in domains)),
        ((name, *(_statistic(s, name) for s in domains)) for name in names),
    )
    places = table(
        ("scored tokens", "number", "Mean KLD", "Mean ln(PPL(Q)/PPL(base))"),
        (
            (part.label, f"{part.num_tokens:,}", _bounds(part.kld), _bounds(part.log_ratio))
            for part in (*layer1.positions, *layer1.lengths)
        ),
    )
    slope = f"Mean KLD changes by {_bounds(layer1.slope)} nats from a window's first to last token."
    return f"{ladders}\n\n{places}\n\n{slope}"


def _statistic(s: Statistics, name: str) -> str:
    return _bounds(s.means[name]) if name in s.means else f"{s.points[name]:.5f}"


def _bounds(interval: Interval) -> str:
    if not (math.isfinite(interval.lower) and math.isfinite(interval.upper)):
        return f"{interval.estimate:.5f}"
    return f"{interval.estimate:.5f} [{interval.lower:.5f}, {interval.upper:.5f}]"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
