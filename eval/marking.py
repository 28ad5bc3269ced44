"""Two texts with what differs marked, word by word, as HTML."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from html import escape

from markupsafe import Markup

# Comparing takes the product of both lengths, and more where words repeat: beyond this much, what
# lies between the first and the last difference is marked as a whole.
_MOST_PAIRS = 90_000


def marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Both texts with what differs marked."""
    first, second = _words(before), _words(after)
    head = _num_shared(first, second)
    tail = _num_shared(first[head:][::-1], second[head:][::-1])
    old_end, new_end = len(first) - tail, len(second) - tail
    old, new = _between(first[head:old_end], second[head:new_end])
    ends = escape("".join(first[:head])), escape("".join(first[old_end:]))
    return Markup(ends[0] + old + ends[1]), Markup(ends[0] + new + ends[1])


def _num_shared(first: Sequence[str], second: Sequence[str]) -> int:
    """How many words both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _between(first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
    if len(first) * len(second) > _MOST_PAIRS:
        return _mark("del", first), _mark("ins", second)
    old, new = [], []
    matcher = difflib.SequenceMatcher(a=first, b=second, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        is_same = kind == "equal"
        old.append(escape("".join(first[i:j])) if is_same else _mark("del", first[i:j]))
        new.append(escape("".join(second[k:m])) if is_same else _mark("ins", second[k:m]))
    return "".join(old), "".join(new)


def _mark(tag: str, words: Sequence[str]) -> str:
    return f"<{tag}>{escape(''.join(words))}</{tag}>" if words else ""


def _words(text: str) -> list[str]:
    """Words and the signs between them."""
    words: list[str] = []
    for character in text:
        if words and character.isalnum() and words[-1][-1].isalnum():
            words[-1] += character
        else:
            words.append(character)
    return words
