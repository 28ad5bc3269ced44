"""Planted defects: an answer made worse on purpose, to see whether a rater reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

# Shorter answers have no half that could be spoilt.
_SHORT = 40
_WORDS = re.compile(r"\S+\s*|\s+")


def _loop(text: str) -> str:
    """A third of the answer, whose end then repeats: what 4-bit models do in long text."""
    pieces = _pieces(text)
    head = pieces[: max(1, len(pieces) // 3)]
    unit = "".join(head[-12:]).rstrip() + " "
    return "".join(head).rstrip() + " " + unit * 12


def _scrambled(text: str) -> str:
    """The second half in reversed order of words, every other one mirrored."""
    pieces = _pieces(text)
    half = len(pieces) // 3
    tail = [p[::-1] if n % 2 else p for n, p in enumerate(reversed(pieces[half:]))]
    return "".join(pieces[:half]) + "".join(tail)


def _broken_off(text: str) -> str:
    """Ends after its first fifth."""
    return text[: max(8, len(text) // 5)].rstrip()


def _refused(text: str) -> str:
    """Another answer altogether."""
    return "I'm sorry, I can't help with that."


def _pieces(text: str) -> list[str]:
    """Words with the space behind them; characters where a script has no spaces."""
    words = _WORDS.findall(text)
    return words if len(words) * 12 > len(text) else list(text)


DEFECTS: dict[str, Callable[[str], str]] = {
    "loop": _loop,
    "scrambled": _scrambled,
    "broken off": _broken_off,
    "refused": _refused,
}


def plant(text: str, turn: int) -> tuple[str, str]:
    """(the damaged answer, the defect's name); defects take turns, a short answer is refused."""
    kind = "refused" if len(text) < _SHORT else list(DEFECTS)[turn % len(DEFECTS)]
    return DEFECTS[kind](text), kind
