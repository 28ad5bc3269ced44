"""The forest plot as inline SVG: every metric's loss as a share of what is allowed.

Colours are CSS classes of the page, so that one picture serves light, dark and print. Knows numbers
and labels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_LABEL, _PLOT, _ROW, _HEAD, _SHARE = 210, 470, 26, 34, 70
# Of what is allowed: how far the axis reaches to either side.
_LEAST, _MOST = -1.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One line of the forest plot, in shares of the allowed loss: 0 is the base, 1 the limit."""

    label: str
    outcome: str
    estimate: float
    lower: float | None
    upper: float | None


def share_of_limit(value: float, unit: str, limit: Mapping[str, Any]) -> float | None:
    """A measured value as a share of the loss that its limit allows; None where there is none."""
    if (drop := limit.get("max_drop")) is not None:
        return value / float(drop)
    if (least := limit.get("min")) is not None:
        return (1 - value) / (1 - float(least)) if least < 1 else None
    most = float(limit["max"])
    none = 1.0 if unit == "ratio" else 0.0
    return (value - none) / (most - none) if most > none else None


def measurement_of(finding: Mapping[str, Any], measured: Mapping[str, Any]) -> Mapping[str, Any]:
    """What report.json's finding judged: a metric as a whole or within one of its domains."""
    whole: Mapping[str, Any] = measured[finding["metric"]]
    stratum = finding.get("stratum")
    part: Mapping[str, Any] = whole["domains"][stratum] if stratum else whole
    return part


def bars(findings: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> list[Bar]:
    """The findings that can be drawn, from report.json's values."""
    found = []
    for finding in findings:
        m = measurement_of(finding, measured)
        if m["estimate"] is None:
            continue
        ends = [_end(m[end], m["unit"], finding["limit"]) for end in ("lower", "upper")]
        estimate = share_of_limit(m["estimate"], m["unit"], finding["limit"])
        if estimate is None:
            continue
        known = [end for end in ends if end is not None]
        low, high = (min(known), max(known)) if len(known) == len(ends) else (None, None)
        found.append(
            Bar(
                label=finding["label"], outcome=finding["outcome"], estimate=estimate,
                lower=low, upper=high,
            )
        )  # fmt: skip
    return found


def _end(value: float | None, unit: str, limit: Mapping[str, Any]) -> float | None:
    return None if value is None else share_of_limit(value, unit, limit)


def forest(lines: Sequence[Bar]) -> str:
    """Every metric's loss with its interval beside the limit."""
    height = _HEAD + _ROW * len(lines) + 8
    parts = [
        _axis(height),
        *(_line(bar, _HEAD + _ROW * i + _ROW / 2) for i, bar in enumerate(lines)),
    ]
    return svg(
        _LABEL + _PLOT + _SHARE, height, "Loss of each metric as a share of what is allowed", parts
    )


def _x(share: float) -> float:
    inside = min(max(share, _LEAST), _MOST)
    return _LABEL + (inside - _LEAST) / (_MOST - _LEAST) * _PLOT


def _axis(height: float) -> str:
    marks = [(0.0, "as the base", "zero"), (1.0, "limit", "limit")]
    lines = [
        f'<line class="{kind}" x1="{_x(at):.1f}" x2="{_x(at):.1f}" y1="{_HEAD - 8}" '
        f'y2="{height - 4}"/><text class="tick" x="{_x(at):.1f}" y="{_HEAD - 14}" '
        f'text-anchor="middle">{text}</text>'
        for at, text, kind in marks
    ]
    beyond = (
        f'<rect class="beyond" x="{_x(1):.1f}" y="{_HEAD - 8}" width="{_x(_MOST) - _x(1):.1f}" '
    )
    share = (
        f'<text class="tick" x="{_LABEL + _PLOT + _SHARE - 4}" y="{_HEAD - 14}" '
        f'text-anchor="end">of limit</text>'
    )
    return beyond + f'height="{height - _HEAD + 4}"/>' + "".join(lines) + share


def _line(bar: Bar, y: float) -> str:
    label = f'<text x="{_LABEL - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(bar.label)}</text>'
    whisker = ""
    if bar.lower is not None and bar.upper is not None:
        whisker = (
            f'<line class="whisker {bar.outcome}" x1="{_x(bar.lower):.1f}" '
            f'x2="{_x(bar.upper):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        whisker += _arrow(bar.lower, bar.upper, y, bar.outcome)
    where = f"{bar.estimate:.0%} of what is allowed"
    dot = (
        f'<circle class="dot {bar.outcome}" cx="{_x(bar.estimate):.1f}" cy="{y:.1f}" r="4.5">'
        f"<title>{escape(bar.label)}: {where}</title></circle>"
    )
    share = (
        f'<text class="tick" x="{_LABEL + _PLOT + _SHARE - 4}" y="{y + 4:.1f}" '
        f'text-anchor="end">{bar.estimate + 0.0:.1f}×</text>'
    )
    return label + whisker + dot + share


def _arrow(lower: float, upper: float, y: float, outcome: str) -> str:
    """A head where the interval leaves the picture."""
    heads = []
    if upper > _MOST:
        x = _x(_MOST)
        heads.append(f"{x + 6:.1f},{y:.1f} {x - 1:.1f},{y - 4:.1f} {x - 1:.1f},{y + 4:.1f}")
    if lower < _LEAST:
        x = _x(_LEAST)
        heads.append(f"{x - 6:.1f},{y:.1f} {x + 1:.1f},{y - 4:.1f} {x + 1:.1f},{y + 4:.1f}")
    return "".join(f'<polygon class="head {outcome}" points="{points}"/>' for points in heads)


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A picture that scales with the page. title: what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
        + "".join(parts)
        + "</svg>"
    )
