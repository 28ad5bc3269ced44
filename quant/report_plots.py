"""The pictures of report.html: matplotlib figures as inline SVG that follow the page's colours.

Takes the data of report.json. Text stays text, and nothing in it is read as a formula. Knows no
HTML; matplotlib is imported when the first picture is drawn, because a lean install lacks it.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Data = Mapping[str, Any]
# Stand-ins that become the page's own colours, light or dark.
_INK, _BAR, _PALE = "#010203", "#040506", "#070809"
_PAGE = {_INK: "currentColor", _BAR: "var(--bar)", _PALE: "var(--pale)"}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weighbridge",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"experts\.\d+")
_LABEL = 40
WIDTH = 8.0


def pictures(data: Data) -> dict[str, str]:
    """Every picture the data has something for, by name: SVG elements to set into a page."""
    modules = data["modules"]
    drawn = {
        "sizes": _bars(_sizes(data), "MB"),
        "errors": _heat_map(
            _grid(modules, _sqnr, min), "signal to error, dB (lower is worse)", "_r"
        ),
        "weights": _heat_map(_grid(modules, _weight_peak, max), "largest max|w| / rms of a group"),
        "inputs": _heat_map(_grid(modules, _input_peak, max), "largest |x| / rms of the input"),
        "sensitivity": _sensitivity(data["sensitivity"]),
        "lengths": _bars(_lengths(data["coverage"]), "samples"),
        "seconds": _bars(list(data["seconds"].items()), "seconds"),
    }
    return {name: svg for name, svg in drawn.items() if svg}


def split_name(module: str) -> tuple[int | None, str]:
    """Layer and the rest of a module's name; the experts of a layer share one name."""
    found = _LAYER.match(module)
    layer, leaf = (int(found[1]), found[2]) if found else (None, module)
    return layer, _EXPERT.sub("experts.*", leaf)


def sqnr(rel_error: float) -> float:
    """Signal to error in dB of a relative (Frobenius) error; at most 120."""
    return min(120.0, -20 * math.log10(max(rel_error, 1e-6)))


def _sqnr(module: Data) -> float | None:
    return None if module["rel_error"] is None else sqnr(module["rel_error"])


def _weight_peak(module: Data) -> float | None:
    return module["weight_outliers"][2] if module["weight_outliers"] else None


def _input_peak(module: Data) -> float | None:
    return module["input_outliers"][0][1] if module["input_outliers"] else None


def _sizes(data: Data) -> list[tuple[str, float]]:
    """MB by kind of module, and what is no linear module, adding up to the artifact."""
    sums: dict[str, float] = {}
    for module in data["modules"]:
        kind = split_name(module["module"])[1]
        sums[kind] = sums.get(kind, 0.0) + module["bytes"] / 1e6
    rest = data["artifact_bytes"] / 1e6 - sum(sums.values())
    found = [(kind, mb) for kind, mb in sums.items() if mb > 0]
    return [*found, *([("embedding, norms, other", rest)] if rest > 1e-6 else [])]


def _lengths(coverage: Data | None) -> list[tuple[str, float]]:
    histogram = coverage["length_histogram"] if coverage else {}
    names = ((f"up to {int(b):,}" if int(b) else "more", n) for b, n in histogram.items())
    return list(names)


def _grid(
    modules: Sequence[Data],
    value: Callable[[Data], float | None],
    worst: Callable[[float, float], float],
) -> dict[str, dict[int, float]]:
    """Value by kind of module and layer; of the experts of a layer the worst."""
    grid: dict[str, dict[int, float]] = {}
    for module in modules:
        layer, kind = split_name(module["module"])
        number = value(module)
        if number is not None and layer is not None:
            row = grid.setdefault(kind, {})
            row[layer] = worst(row.get(layer, number), number)
    return grid


def _bars(rows: Sequence[tuple[str, float]], unit: str) -> str:
    """A waterfall: every bar begins where the one above it ended."""
    if not rows:
        return ""

    def draw(axes: Axes) -> None:
        names, values = [_short(name) for name, _ in rows], [number for _, number in rows]
        starts = [sum(values[:i]) for i in range(len(values))]
        bars = axes.barh(range(len(rows)), values, left=starts, color=_BAR, height=0.7)
        axes.bar_label(bars, [f" {value:,.3g}" for value in values], padding=2)
        axes.set_yticks(range(len(rows)), names)
        axes.set_xlim(0, sum(values) * 1.12 or 1)
        axes.invert_yaxis()
        axes.set_xlabel(unit)

    return _svg(draw, 0.8 + 0.26 * len(rows))


def _heat_map(grid: Mapping[str, Mapping[int, float]], label: str, flip: str = "") -> str:
    if not grid:
        return ""

    def draw(axes: Axes) -> None:
        layers = range(1 + max(layer for row in grid.values() for layer in row))
        cells = [[row.get(layer, math.nan) for layer in layers] for row in grid.values()]
        edges = [i - 0.5 for i in range(len(layers) + 1)]
        mesh = axes.pcolormesh(
            edges, [i - 0.5 for i in range(len(grid) + 1)], cells, cmap=f"viridis{flip}"
        )
        axes.set_yticks(range(len(grid)), [_short(kind) for kind in grid])
        step = max(1, len(layers) // 16)
        axes.set_xticks(layers[::step])
        axes.invert_yaxis()
        axes.set_xlabel("layer")
        figure = axes.get_figure()
        assert figure is not None
        figure.colorbar(mesh, ax=axes, label=label, pad=0.02)

    return _svg(draw, max(2.0, 0.9 + 0.24 * len(grid)))


def _sensitivity(rows: Sequence[Data]) -> str:
    """One line per scheme over the groups, a dot where the scheme was chosen."""
    if not rows:
        return ""
    groups = list(dict.fromkeys(row["group"] for row in rows))

    def draw(axes: Axes) -> None:
        for i, scheme in enumerate(dict.fromkeys(row["scheme"] for row in rows)):
            mine = [row for row in rows if row["scheme"] == scheme]
            at = [groups.index(row["group"]) for row in mine]
            losses = [max(row["loss"], 1e-9) for row in mine]
            axes.plot(at, losses, color=f"C{i}", linewidth=1, label=_short(scheme))
            chosen = [(x, y) for x, y, row in zip(at, losses, mine, strict=True) if row["chosen"]]
            axes.plot(*zip(*chosen, strict=True), "o", color=f"C{i}") if chosen else None
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        step = max(1, len(groups) // 24)
        axes.set_xticks(range(0, len(groups), step), [_short(g) for g in groups[::step]])
        axes.tick_params(axis="x", labelrotation=90)
        axes.set_ylabel("loss (nats)")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)

    return _svg(draw, 4.0)


def _short(text: str) -> str:
    """Short enough for a label, in one line, without what no XML may hold."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return plain if len(plain) <= _LABEL else f"{plain[: _LABEL - 3]}..."


def _svg(draw: Callable[[Axes], None], height: float) -> str:
    """The picture as one SVG element of its own ids, in the page's colours."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(
            text, format="svg", transparent=True,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )  # fmt: skip
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, colour in _PAGE.items():
        svg = svg.replace(stand_in, colour)
    return svg


def unique_ids(svgs: Mapping[str, str]) -> dict[str, str]:
    """The pictures with ids that are told apart on one page."""
    numbers: Iterator[int] = count()
    found = {}
    for name, svg in svgs.items():
        mark = f"p{next(numbers)}-"
        svg = re.sub(r'\bid="', f'id="{mark}', svg)
        svg = re.sub(r'xlink:href="#', f'xlink:href="#{mark}', svg)
        found[name] = re.sub(r"url\(#", f"url(#{mark}", svg)
    return found
