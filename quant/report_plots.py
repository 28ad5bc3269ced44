"""The pictures of report.html: matplotlib figures as inline SVG that follow the page's colours.

Takes the data of report.json. Text stays text (a tenth of the size of outlines, and readable by
machines), nothing in it is read as a formula, and every cell of a map says its own value when
pointed at. Margins are computed from the labels instead of measured, which halves the time. Knows
no HTML; matplotlib is imported when the first picture is drawn, because a lean install lacks it.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Data = Mapping[str, Any]
Grid = Mapping[str, Mapping[int, float]]
# Stand-ins that become the page's own colours, light or dark.
_INK, _BAR, _PALE, _PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
_PAGE = {_INK: "currentColor", _BAR: "var(--bar)", _PALE: "var(--pale)", _PAPER: "var(--paper)"}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weighbridge",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": 8.5,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.width": 0.6,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"experts\.\d+")
_SMOOTHED = re.compile(r"output error (\S+) -> (\S+?),?(?:\s|$)")
_LABEL = 40
_LETTER = 0.068  # inches that a letter of a label takes, about
WIDTH = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """svg: one element. label: what it shows, for those who cannot see it. legend: (text, colour)
    pairs; of a map with a scale its two ends, with `ramp` the colours between them."""

    svg: str
    label: str
    legend: tuple[tuple[str, str], ...] = ()
    ramp: tuple[str, ...] = ()


def pictures(data: Data) -> dict[str, Picture]:
    """Every picture the data has something for, by name."""
    modules = data["modules"]
    inside = [module for module in modules if split_name(module["module"])[0] is not None]
    schemes = _schemes_in_order(inside)
    drawn = {
        "sizes": _bars(*_sizes(data), "Size by kind of module"),
        "schemes": _scheme_map(inside, schemes) if len(schemes) > 1 else None,
        "errors": _heat_map(_grid(modules, _sqnr, min), "{:.1f} dB", "Signal to error", worst=min),
        "sensitivity": _heat_map(
            sensitivity_grid(data["sensitivity"]), "{:.2g} nats", "Loss by group and layer",
            log=True,
        ),
        "losses": _layer_losses(data["sensitivity"]),
        "weights": _heat_map(_grid(modules, _weight_peak, max), "{:.1f}", "Weight outliers"),
        "inputs": _heat_map(
            _grid(modules, _input_peak, max), "{:.0f}", "Activation outliers", log=True
        ),
        "smoothing": _heat_map(
            _grid(modules, smoothing_ratio, max), "{:.2f}", "Output error left by smoothing"
        ),
        "lengths": _bars(_lengths(data["coverage"]), "samples", "Samples by length in tokens"),
        "seconds": _bars(list(data["seconds"].items()), "seconds", "Seconds by stage"),
    }  # fmt: skip
    return {name: picture for name, picture in drawn.items() if picture}


def split_name(module: str) -> tuple[int | None, str]:
    """Layer and the rest of a module's name; the experts of a layer share one name."""
    found = _LAYER.match(module)
    layer, leaf = (int(found[1]), found[2]) if found else (None, module)
    return layer, _EXPERT.sub("experts.*", leaf)


def sqnr(rel_error: float) -> float:
    """Signal to error in dB of a relative (Frobenius) error, from -120 (no finite one) to 120."""
    if not math.isfinite(rel_error):
        return -120.0
    return max(-120.0, min(120.0, -20 * math.log10(max(rel_error, 1e-6))))


def smoothing_ratio(module: Data) -> float | None:
    """Output error after smoothing over that before, where the module's note says both."""
    found = _SMOOTHED.search(module.get("smoothing") or "")
    try:
        before, after = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
    except ValueError:
        return None
    return after / before if before > 0 else None


def sensitivity_grid(rows: Sequence[Data]) -> Grid:
    """Loss of each group in the scheme that costs it most, by kind of group and layer."""
    grid: dict[str, dict[int, float]] = {}
    for row in rows:
        layer, kind = split_name(row["group"])
        if layer is not None:
            at = grid.setdefault(kind, {})
            at[layer] = max(row["loss"], at.get(layer, 1e-9))
    return grid


def _sqnr(module: Data) -> float | None:
    return None if module["rel_error"] is None else sqnr(module["rel_error"])


def _weight_peak(module: Data) -> float | None:
    return module["weight_outliers"][2] if module["weight_outliers"] else None


def _input_peak(module: Data) -> float | None:
    return module["input_outliers"][0][1] if module["input_outliers"] else None


def _sizes(data: Data) -> tuple[list[tuple[str, float]], str]:
    """Size by kind of module, and what is no linear module, adding up to the artifact; unit."""
    whole = data["artifact_bytes"]
    unit, factor = ("GB", 1e9) if whole >= 1e10 else ("MB", 1e6) if whole >= 1e7 else ("kB", 1e3)
    sums: dict[str, float] = {}
    for module in data["modules"]:
        kind = split_name(module["module"])[1]
        sums[kind] = sums.get(kind, 0.0) + module["bytes"]
    rest = whole - sum(sums.values())
    found = [(kind, size / factor) for kind, size in sums.items() if size > 0]
    return [*found, *([("embedding, norms, other", rest / factor)] if rest > 0 else [])], unit


def _lengths(coverage: Data | None) -> list[tuple[str, float]]:
    histogram = coverage["length_histogram"] if coverage else {}
    names = ((f"up to {int(b):,}" if int(b) else "more", n) for b, n in histogram.items())
    return list(names)


def _grid(
    modules: Sequence[Data],
    value: Callable[[Data], float | None],
    worst: Callable[[float, float], float],
) -> Grid:
    """Value by kind of module and layer; of the experts of a layer the worst."""
    grid: dict[str, dict[int, float]] = {}
    for module in modules:
        layer, kind = split_name(module["module"])
        number = value(module)
        if number is not None and math.isfinite(number) and layer is not None:
            row = grid.setdefault(kind, {})
            row[layer] = worst(row.get(layer, number), number)
    return grid


def _schemes_in_order(modules: Sequence[Data]) -> list[str]:
    """Schemes of the modules, the fewest bits per weight first."""
    bits: dict[str, float] = {}
    for module in modules:
        each = module["bytes"] / (module["shape"][0] * module["shape"][1])
        bits[module["scheme"]] = min(each, bits.get(module["scheme"], each))
    return sorted(bits, key=lambda scheme: bits[scheme])


def _bars(rows: Sequence[tuple[str, float]], unit: str, label: str) -> Picture | None:
    """A waterfall: every bar begins where the one above it ended."""
    if not rows:
        return None
    names, values = [_short(name) for name, _ in rows], [number for _, number in rows]

    def draw(axes: Axes) -> None:
        starts = [sum(values[:i]) for i in range(len(values))]
        bars = axes.barh(range(len(rows)), values, left=starts, color=_BAR, height=0.7)
        axes.bar_label(bars, [f" {value:,.3g}" for value in values], padding=2)
        axes.set_yticks(range(len(rows)), names)
        axes.set_xlim(0, sum(values) * 1.12 or 1)
        axes.invert_yaxis()
        axes.set_xlabel(unit)

    told = ", ".join(f"{name} {value:,.3g}" for name, value in zip(names, values, strict=True))
    return Picture(svg=_svg(draw, 0.24 * len(rows), names), label=f"{label}: {told}")


def _heat_map(
    grid: Grid,
    form: str,
    label: str,
    *,
    worst: Callable[..., Any] = max,
    log: bool = False,
) -> Picture | None:
    """A map of kinds by layers, its cells titled with their value in `form`; the worst is bright,
    be it the largest or the smallest."""
    if not grid:
        return None
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize, to_hex

    cells = [(value, kind, layer) for kind, row in grid.items() for layer, value in row.items()]
    low, high = min(cells)[0], max(cells)[0]
    colours = colormaps["viridis" if worst is max else "viridis_r"]
    ramp = tuple(to_hex(colours(i / 8)) for i in range(9))
    value, kind, layer = worst(cells)
    return Picture(
        svg=_map(
            grid, form.format, cmap=colours,
            norm=(LogNorm if log and 0 < low < high else Normalize)(low, high),
        ),
        label=f"{label} by kind of module and layer, from {form.format(low)} to "
        f"{form.format(high)}; the worst is {_short(kind)} in layer {layer}",
        legend=((form.format(low), ramp[0]), (form.format(high), ramp[-1])),
        ramp=ramp,
    )  # fmt: skip


def _scheme_map(modules: Sequence[Data], schemes: Sequence[str]) -> Picture:
    """Which scheme each module has: one colour per scheme, the fewest bits the darkest."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap, to_hex

    last = max(1, len(schemes) - 1)
    colours = [to_hex(colormaps["viridis"](0.12 + 0.8 * i / last)) for i in range(len(schemes))]
    grid = _grid(modules, lambda module: float(schemes.index(module["scheme"])), max)
    norm = BoundaryNorm([i - 0.5 for i in range(len(schemes) + 1)], len(schemes))
    counts = [sum(module["scheme"] == scheme for module in modules) for scheme in schemes]
    names = [f"{_short(s)} ({n:,})" for s, n in zip(schemes, counts, strict=True)]
    return Picture(
        svg=_map(grid, lambda v: _short(schemes[int(v)]), cmap=ListedColormap(colours), norm=norm),
        label=f"Scheme by kind of module and layer: {', '.join(names)}",
        legend=tuple(zip(names, colours, strict=True)),
    )


def _map(grid: Grid, title: Callable[[float], str], **colours: Any) -> str:
    """The cells of a grid as SVG, each with a title."""
    layers = range(1 + max(layer for row in grid.values() for layer in row))
    kinds = [_short(kind) for kind in grid]
    cells = [[row.get(layer, math.nan) for layer in layers] for row in grid.values()]

    def draw(axes: Axes) -> None:
        axes.pcolormesh(
            [i - 0.5 for i in range(len(layers) + 1)], [i - 0.5 for i in range(len(kinds) + 1)],
            cells, edgecolors=_PAPER, linewidth=1.0 if len(layers) <= 64 else 0.0, **colours,
        )  # fmt: skip
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set_xticks(layers[:: math.ceil(len(layers) / 32)])
        axes.invert_yaxis()
        axes.set_xlabel("layer")
        for side in axes.spines.values():
            side.set_visible(False)

    svg = _svg(draw, 0.24 * len(kinds), kinds)
    # A kind may be missing in some layers (experts beside dense layers): no value to name there.
    titles = [
        f"{kind}, layer {layer}: {'none' if math.isnan(value) else title(value)}"
        for kind, row in zip(kinds, cells, strict=True)
        for layer, value in zip(layers, row, strict=True)
    ]
    return _titled(svg, titles)


def _titled(svg: str, titles: Sequence[str]) -> str:
    """The cells of the one mesh in `svg` with their titles, when there are as many."""
    start = svg.find('id="QuadMesh')
    stop = svg.find("</g>", start)
    parts = svg[start:stop].split("/>")
    if start < 0 or len(parts) != len(titles) + 1:
        return svg
    cells = (f"{p}><title>{escape(t)}</title></path>" for p, t in zip(parts, titles, strict=False))
    return svg[:start] + "".join(cells) + parts[-1] + svg[stop:]


def _layer_losses(rows: Sequence[Data]) -> Picture | None:
    """The predicted loss of each layer in the schemes that were chosen."""
    sums: dict[int, float] = {}
    for row in rows:
        layer = split_name(row["group"])[0]
        if row["chosen"] and layer is not None:
            sums[layer] = sums.get(layer, 0.0) + row["loss"]
    if not sums:
        return None

    def draw(axes: Axes) -> None:
        axes.bar(list(sums), list(sums.values()), color=_BAR, width=0.8)
        axes.set_xlim(min(sums) - 0.6, max(sums) + 0.6)
        axes.set_xticks(sorted(sums)[:: math.ceil(len(sums) / 32)])
        axes.set_xlabel("layer")
        axes.set_ylabel("nats")
        axes.yaxis.set_major_formatter("{x:.2g}")

    worst = max(sums, key=lambda layer: sums[layer])
    return Picture(
        svg=_svg(draw, 1.5, ["0.00001"]),
        label=f"Predicted loss by layer in the chosen schemes, {sum(sums.values()):.3g} nats in "
        f"all; layer {worst} loses most, {sums[worst]:.3g}",
    )


def _short(text: str) -> str:
    """Short enough for a label, in one line, without what no XML may hold."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return plain if len(plain) <= _LABEL else f"{plain[: _LABEL - 3]}..."


def _svg(draw: Callable[[Axes], None], height: float, labels: Sequence[str]) -> str:
    """The picture as one SVG element of its own ids, in the page's colours; the axes are `height`
    inches high, and `labels` stand left of them."""
    import matplotlib
    from matplotlib.figure import Figure

    left = 0.15 + _LETTER * max(map(len, labels))
    bottom, top, right = 0.42, 0.06, 0.12
    whole = bottom + height + top
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(WIDTH, whole))
        place = (left / WIDTH, bottom / whole, (WIDTH - left - right) / WIDTH, height / whole)
        draw(figure.add_axes(place))
        text = io.StringIO()
        figure.savefig(
            text, format="svg", transparent=True,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )  # fmt: skip
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, colour in _PAGE.items():
        svg = svg.replace(stand_in, colour)
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)


def unique_ids(drawn: Mapping[str, Picture]) -> dict[str, Picture]:
    """The pictures with ids that are told apart on one page."""
    numbers: Iterator[int] = count()
    return {name: _with_marks(picture, f"p{next(numbers)}-") for name, picture in drawn.items()}


def _with_marks(picture: Picture, mark: str) -> Picture:
    svg = re.sub(r'\bid="', f'id="{mark}', picture.svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{mark}', svg)
    svg = re.sub(r"url\(#", f"url(#{mark}", svg)
    return replace(picture, svg=svg)
