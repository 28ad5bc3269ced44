"""Ladders by domain, curves over places in a text, and survival curves, as inline SVG.

Colours are CSS classes of the page (`series-0`, `series-1`, ...), so that one picture serves light,
dark and print. Knows numbers and labels only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from eval.charts import svg

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 34, 26, 44
_WIDTH, _HEIGHT = 460, 230
_TICKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """One row of `ladders`: name to nats, the commonest first."""

    label: str
    steps: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place of a curve; lower and upper are None where there is no interval."""

    value: float
    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line over the places of a chart; None where nothing was measured."""

    label: str
    points: Sequence[Point | None]


def ladders(rows: Sequence[Ladder]) -> str:
    """Each row's named values on one logarithmic axis, the mean as a diamond."""
    label, plot, row = 190, 520, 30
    nats = [v for each in rows for v in each.steps.values() if v > 0]
    low, high = math.floor(math.log10(min(nats))), math.ceil(math.log10(max(nats)))
    low, high = max(low, -8), max(high, low + 1)

    def x(value: float) -> float:
        at = math.log10(value) if value > 0 else low
        return label + (min(max(at, low), high) - low) / (high - low) * plot

    height = _TOP + row * len(rows) + 34
    parts = [_decade(x(10.0**n), n, height - 28) for n in range(low, high + 1)]
    for i, each in enumerate(rows):
        parts.append(_rung(each, label, _TOP + row * i + row / 2, x))
    axis = f'<text class="tick" x="{label + plot / 2}" y="{height - 8}" text-anchor="middle">'
    parts.append(f"{axis}KL divergence per token, nats</text>")
    return svg(label + plot + 20, height, "KL divergence per token by domain, logarithmic", parts)


def _decade(x: float, power: int, bottom: float) -> str:
    text = f"{10.0**power:g}"
    return (
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom:.1f}"/>'
        f'<text class="tick" x="{x:.1f}" y="{_TOP - 12}" text-anchor="middle">{text}</text>'
    )


def _rung(each: Ladder, left: float, y: float, x: Callable[[float], float]) -> str:
    shown = {name: value for name, value in each.steps.items() if value > 0}
    parts = [f'<text x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(each.label)}</text>']
    if shown:
        ends = [x(value) for value in shown.values()]
        parts.append(
            f'<line class="rail" x1="{min(ends):.1f}" x2="{max(ends):.1f}" y1="{y}" y2="{y}"/>'
        )
    for name, value in shown.items():
        said = f"<title>{escape(each.label)}, {escape(name)}: {value:.5f}</title>"
        at = x(value)
        if name.startswith("Mean"):
            points = f"{at - 6:.1f},{y} {at:.1f},{y - 6} {at + 6:.1f},{y} {at:.1f},{y + 6}"
            parts.append(f'<polygon class="mean" points="{points}">{said}</polygon>')
        else:
            parts.append(f'<circle class="rung" cx="{at:.1f}" cy="{y}" r="4">{said}</circle>')
    return "".join(parts)


def curves(title: str, places: Sequence[str], lines: Sequence[Curve], *, axis: str) -> str:
    """Lines over named places with their intervals as bands. axis: what the places are."""
    x = _across(len(places))
    ends = [e for line in lines for p in line.points if p for e in (p.value, p.lower, p.upper)]
    y, marks = _scale([0.0, *(end for end in ends if end is not None)])
    parts = [_frame(marks, y)]
    every = max(1, math.ceil(len(places) / 6))
    parts += [
        f'<text class="tick" x="{x(i):.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">'
        f"{escape(place)}</text>"
        for i, place in enumerate(places)
        if i % every == 0
    ]
    # One line alone has the candidate's colour.
    first = 1 if len(lines) == 1 else 0
    for number, line in enumerate(lines, start=first):
        parts.append(_curve(line, number, places, x, y))
    return _chart(title, axis, lines, parts)


def _across(count: int) -> Callable[[float], float]:
    step = _WIDTH / max(count - 1, 1)
    return lambda i: _LEFT + (i * step if count > 1 else _WIDTH / 2)


def _scale(values: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """Where a value lies from the top, and round numbers for the axis."""
    low, high = min(values), max(values)
    step = _round_up((high - low or 1.0) / _TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    span = (last - first) * step
    marks = [n * step for n in range(first, last + 1)]
    return lambda value: _TOP + _HEIGHT * (1 - (value - first * step) / span), marks


def _round_up(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= step * (1 - 1e-9))


def _frame(marks: Sequence[float], y: Callable[[float], float]) -> str:
    return "".join(
        f'<line class="{"zero" if mark == 0 else "grid"}" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" '
        f'y1="{y(mark):.1f}" y2="{y(mark):.1f}"/><text class="tick" x="{_LEFT - 8}" '
        f'y="{y(mark) + 4:.1f}" text-anchor="end">{mark + 0.0:.4g}</text>'
        for mark in marks
    )


def _curve(
    line: Curve,
    number: int,
    places: Sequence[str],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    found = [(i, point) for i, point in enumerate(line.points) if point is not None]
    path = " ".join(f"{x(i):.1f},{y(point.value):.1f}" for i, point in found)
    parts = [f'<polyline class="line series-{number}" points="{path}"/>']
    for i, point in found:
        if point.lower is not None and point.upper is not None:
            parts.append(
                f'<line class="whisker series-{number}" x1="{x(i):.1f}" x2="{x(i):.1f}" '
                f'y1="{y(point.lower):.1f}" y2="{y(point.upper):.1f}"/>'
            )
        said = f"{escape(line.label)}, {escape(places[i])}: {point.value:.4g}"
        parts.append(
            f'<circle class="spot series-{number}" cx="{x(i):.1f}" cy="{y(point.value):.1f}" '
            f'r="3.5"><title>{said}</title></circle>'
        )
    return "".join(parts)


def survival(title: str, times: Sequence[tuple[int, bool]], *, axis: str) -> str:
    """The share that has not ended by each time, after Kaplan and Meier (1958).

    times: (when, whether it ended then); those that did not were watched only so long.
    """
    steps = kaplan_meier(times)
    last = max(when for when, _ in times)
    x = _across(last + 1) if last else _across(2)
    y, marks = _scale([0.0, 1.0])
    path, before = [f"{x(0):.1f},{y(1.0):.1f}"], 1.0
    for when, share in steps:
        path += [f"{x(when):.1f},{y(before):.1f}", f"{x(when):.1f},{y(share):.1f}"]
        before = share
    path.append(f"{x(last):.1f},{y(before):.1f}")
    ticks = sorted({round(last * n / _TICKS) for n in range(_TICKS + 1)})
    parts = [_frame(marks, y), f'<polyline class="line series-1" points="{" ".join(path)}"/>']
    parts += [
        f'<text class="tick" x="{x(at):.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{at}'
        "</text>"
        for at in ticks
    ]
    return _chart(title, axis, (), parts)


def kaplan_meier(times: Sequence[tuple[int, bool]]) -> list[tuple[int, float]]:
    """(when, share still going) at each time at which something ended."""
    share, steps = 1.0, []
    for when in sorted({when for when, ended in times if ended}):
        watched = sum(each >= when for each, _ in times)
        ended = sum(each == when and over for each, over in times)
        share *= 1 - ended / watched
        steps.append((when, share))
    return steps


def _chart(title: str, axis: str, lines: Sequence[Curve], parts: Sequence[str]) -> str:
    height = _TOP + _HEIGHT + _BOTTOM
    below = (
        f'<text class="tick" x="{_LEFT + _WIDTH / 2}" y="{height - 6}" text-anchor="middle">'
        f"{escape(axis)}</text>"
    )
    legend = "".join(
        f'<circle class="spot series-{n}" cx="{_LEFT + 6 + 110 * n}" cy="10" r="4"/>'
        f'<text class="tick" x="{_LEFT + 15 + 110 * n}" y="14">{escape(line.label)}</text>'
        for n, line in enumerate(lines)
        if len(lines) > 1
    )
    return svg(_LEFT + _WIDTH + _RIGHT, height, title, [*parts, below, legend])
