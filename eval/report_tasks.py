"""Layer 2 on the page: what was lost and gained, where, and how the answers part.

Counted from report.json's items; knows no model and draws nothing but through `eval.charts_lines`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.charts_lines import Curve, Point, curves, survival
from eval.stats import clopper_pearson_lower, clopper_pearson_upper

MOST_FIELDS, MOST_PATHS, MOST_LENGTH_CHARTS = 12, 10, 4
# Fewer items in a quarter show nothing; fewer answers make no curve.
FEWEST_IN_QUARTER, FEWEST_ANSWERS = 10, 10
_QUARTERS, _CONFIDENCE = 4, 0.95
_PATH = re.compile(r"(\$[^:]*): (\w+)")

_INDEX = re.compile(r"\[\d+\]")
_LINE = re.compile(r"line \d+")

Items = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One metric of pass or fail under both models, in items."""

    label: str
    both: int
    lost: int
    gained: int
    neither: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A field within one source. heat: 0 (no worse) to 4 (wrong in every answer that was right)."""

    base: int
    candidate: int
    heat: int


def matrices(measured: Mapping[str, Any]) -> list[Matrix]:
    """Of each metric that an item passes or fails, those that changed most first."""
    found = []
    for m in measured.values():
        if "lost" not in m or m["base"] is None:
            continue
        total = int(m.get("num_items", 0))
        right = round(m["base"] * total)
        found.append(
            Matrix(
                label=m["label"], both=right - m["lost"], lost=m["lost"], gained=m["gained"],
                neither=total - right - m["gained"],
            )
        )  # fmt: skip
    return sorted(found, key=lambda m: (-m.lost, -m.gained))


def heat_map(items: Items) -> dict[str, Any]:
    """Fields (rows, what got worse most first) by source (columns): wrong answers of each model."""
    wrong = {side: _wrong_fields(items, side) for side in ("base", "candidate")}
    asked = Counter(item["source"] for item in items if "field_accuracy" in item["base"]["values"])
    fields = {field for side in wrong.values() for field, _ in side}

    def worse(field: str) -> int:
        return sum(wrong["candidate"][field, s] - wrong["base"][field, s] for s in asked)

    names = sorted(fields, key=lambda field: (-worse(field), field))
    sources = sorted(asked)
    rows = [
        (name, [_cell(wrong, name, source, asked[source]) for source in sources])
        for name in names[:MOST_FIELDS]
    ]
    return {
        "sources": [(s, asked[s]) for s in sources],
        "rows": rows,
        "more": len(names[MOST_FIELDS:]),
    }


def _wrong_fields(items: Items, side: str) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for item in items:
        names = {_top(name) for name in item[side]["details"].get("wrong_fields", ())}
        found.update((name, item["source"]) for name in names)
    return found


def _top(field: str) -> str:
    """The field without its places in lists: `columns[2]` is `columns`."""
    return field.partition("[")[0]


def _cell(
    wrong: Mapping[str, Counter[tuple[str, str]]], field: str, source: str, asked: int
) -> Cell:
    base, ours = (wrong[side][field, source] for side in ("base", "candidate"))
    worse = max(0, ours - base) / max(1, asked - base)
    return Cell(base=base, candidate=ours, heat=min(4, math.ceil(worse * 8)))


def paths(items: Items) -> list[tuple[str, int, int]]:
    """(first thing wrong in an answer, how often in the base, in the candidate)."""
    base, ours = (
        Counter(_problem(item[side]["problem"]) for item in items if item[side]["problem"])
        for side in ("base", "candidate")
    )
    names = sorted(base | ours, key=lambda name: (-ours[name], -base[name], name))
    return [(name, base[name], ours[name]) for name in names[:MOST_PATHS]]


def _problem(text: str) -> str:
    """`$.lines[3].unit: type` is `$.lines[*].unit: type`; `not JSON: ...` is `not JSON`."""
    if found := _PATH.fullmatch(text):
        path = _INDEX.sub("[*]", found[1])
        return f"{path}: {found[2]}"
    if text.startswith("chose "):
        return "another choice"
    kind, _, rest = text.partition(":")
    return f"code:{rest}" if _LINE.fullmatch(kind) else kind


def by_length(items: Items, measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Shares that pass, base and candidate, by quarters of the prompt's length in tokens.

    Of the metrics that lost most items, where each quarter has enough of them.
    """
    judged = [name for name, m in measured.items() if m.get("lost") is not None]
    judged.sort(key=lambda name: -measured[name]["lost"])
    charts = [_by_length(items, name, measured[name]["label"]) for name in judged]
    return [chart for chart in charts if chart][:MOST_LENGTH_CHARTS]


def _by_length(items: Items, metric: str, label: str) -> dict[str, Any] | None:
    asked = sorted(
        (item["num_prompt_tokens"], *(item[s]["values"][metric] for s in ("base", "candidate")))
        for item in items
        if metric in item["base"]["values"] and item.get("num_prompt_tokens")
    )
    quarters = [asked[len(asked) * q // 4 : len(asked) * (q + 1) // 4] for q in range(_QUARTERS)]
    is_flawless = all(row[1:] == (1, 1) for row in asked)
    if min(map(len, quarters)) < FEWEST_IN_QUARTER or is_flawless or asked[0][0] == asked[-1][0]:
        return None
    places = [f"{part[0][0]}-{part[-1][0]}" for part in quarters]
    lines = [
        Curve(label=who, points=[_passed([row[side] for row in part]) for part in quarters])
        for side, who in ((1, "base"), (2, "candidate"))
    ]
    axis = f"tokens of the prompt, quarters of {len(asked)} items"
    return {"label": label, "svg": curves(f"{label} by input length", places, lines, axis=axis)}


def _passed(values: Sequence[float]) -> Point:
    n, right = len(values), sum(value == 1 for value in values)
    return Point(
        value=right / n,
        lower=clopper_pearson_lower(right, n, _CONFIDENCE),
        upper=clopper_pearson_upper(right, n, _CONFIDENCE),
    )


def parting(items: Items) -> str:
    """The share of answers that are still the same by token; "" where there are too few."""
    written = [
        i for i in items if "chosen" not in i["base"]["details"] and "num_tokens" in i["base"]
    ]
    times = [_until(item) for item in written]
    if len(times) < FEWEST_ANSWERS or not any(over for _, over in times):
        return ""
    title = "Share of answers that are still the same"
    return survival(title, times, axis="token of the answer")


def _until(item: Mapping[str, Any]) -> tuple[int, bool]:
    """When the two answers part; an answer that never does was watched to its end."""
    if (apart := item["first_divergence"]) is not None:
        return apart, True
    return item["base"]["num_tokens"], False


def sources(items: Items) -> dict[str, int]:
    """How many items each source has."""
    found: dict[str, int] = defaultdict(int)
    for item in items:
        found[item["source"]] += 1
    return dict(sorted(found.items()))
