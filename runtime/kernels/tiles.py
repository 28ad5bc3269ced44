"""Tile tables: which constants a kernel is launched with, measured per card and kept as JSON.

`tiles/<card>.json` maps an op to problems to rows of inputs to constants:

    {"w4a16": {"6144x4096 g128": {"1": {"kernel": "warp", "block_n": 16, ...}, "16": {...}}}}

A row count takes the entry of the smallest count that is not below it; problems are spelled by the
op. Nothing here knows what the constants mean: an op turns them into its own value and has a rule
of its own for problems, row counts and cards without an entry. Nothing is tuned while serving.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

Constants = dict[str, Any]


def card_key(name: str) -> str:
    """The file name of a card: "NVIDIA H200" -> "h200", "NVIDIA A100-SXM4-80GB" -> "a100"."""
    words = [word for word in name.lower().replace("-", " ").split() if word != "nvidia"]
    return words[0] if words else ""


@cache
def _table(card: str) -> dict[str, dict[str, dict[int, Constants]]]:
    file = resources.files("runtime.kernels").joinpath("tiles", f"{card}.json")
    if not card or not file.is_file():
        return {}
    ops = json.loads(file.read_text())
    return {
        op: {
            problem: {int(rows): constants for rows, constants in sorted_rows(by_rows)}
            for problem, by_rows in problems.items()
        }
        for op, problems in ops.items()
    }


def sorted_rows(by_rows: dict[str, Constants]) -> list[tuple[str, Constants]]:
    """Entries in rising order of their row count."""
    return sorted(by_rows.items(), key=lambda item: int(item[0]))


def lookup(card_name: str, op: str, problem: str, num_rows: int) -> Constants | None:
    """The measured constants for `num_rows` rows of inputs, or None where nobody measured."""
    by_rows = _table(card_key(card_name)).get(op, {}).get(problem, {})
    return next((found for rows, found in by_rows.items() if num_rows <= rows), None)
