"""Reads the wording banks under banks/ and fills their gaps.

A bank is a text file of `[section]` headings and lines that begin with a mark: `t` for the
train half only, `g` for the gate half only, `-` for both, `u` for the tuning split only (which
reads the train half and more). It knows nothing of contracts,
dialogs or code; those modules decide which section is said when.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

Half = Literal["train", "gate", "tune"]
Lang = Literal["en", "zh"]
Item = TypeVar("Item")

BANKS = Path(__file__).resolve().parent / "banks"
_MARKS = {"train": "t-", "gate": "g-", "tune": "tu-"}
_CHOICE = re.compile(r"<([^<>]*\|[^<>]*)>")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeio])(?!one\b)")
_GAP = re.compile(r"\{(\w+)\}")


def pick(rng: Random, items: Sequence[Item]) -> Item:
    """One item, by `random()` alone: `choice` is not promised to stay the same across Pythons."""
    return items[int(rng.random() * len(items))]


def between(rng: Random, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def chance(rng: Random, probability: float) -> bool:
    return rng.random() < probability


def shuffled(rng: Random, items: Sequence[Item]) -> list[Item]:
    return [item for _, item in sorted(((rng.random(), i), x) for i, x in enumerate(items))]


@cache
def _sections(name: str) -> dict[str, tuple[tuple[str, str], ...]]:
    sections: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in (BANKS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            current.append((line[0], line[2:].replace("\\n", "\n")))
    return {key: tuple(lines) for key, lines in sections.items()}


@cache
def lines(bank: str, section: str, half: Half) -> tuple[str, ...]:
    """The lines of a section that this half may use, in file order; empty if there is none."""
    found = _sections(bank).get(section, ())
    return tuple(text for mark, text in found if mark in _MARKS[half])


@cache
def values(key: str, half: Half) -> tuple[str, ...]:
    """The values of one pool (banks/pools.txt) that this half may use."""
    return tuple(value for line in lines("pools", key, half) for value in line.split("|"))


def choose(text: str, rng: Random, half: Half) -> str:
    """Settle every `<a|b|c>`: the last alternative is the gate's, the others are train's."""

    def settle(match: re.Match[str]) -> str:
        options = match.group(1).split("|")
        return options[-1] if half == "gate" else pick(rng, options[:-1])

    return _CHOICE.sub(settle, text)


def fill(text: str, value: Callable[[str], str]) -> str:
    """Replace every `{name}` by `value(name)`; what it raises for an unknown name passes on."""
    return with_article(_GAP.sub(lambda match: value(match.group(1)), text))


def with_article(text: str) -> str:
    """`a order` becomes `an order`, since a line does not know what will fill it."""
    return _ARTICLE.sub(r"\1n ", text)
