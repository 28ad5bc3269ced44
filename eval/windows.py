"""Windows: held-out documents cut into token windows, every token but the first scored once.

No token is scored twice, and the perplexity of a run is exp(total NLL / number of scored tokens),
never a mean of window means. The special tokens that the tokenizer puts before a text (a BOS) start
every window; they are context and not scored. Without any, a later window starts with the last
token of the one before it, which is context there: the tokens at the seams are scored as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Protocol

from eval.suites import Document, pick

# A window this short says little and costs a full pass over the weights.
SHORTEST = 8


class Encoder(Protocol):
    """The one thing windows need of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive tokens of one document. The first `num_context` tokens are not scored."""

    document: str
    source: str
    lang: str
    start: int
    token_ids: tuple[int, ...]
    num_context: int

    @property
    def num_scored(self) -> int:
        """How many of its tokens are scored."""
        return len(self.token_ids) - self.num_context


def cut(document: Document, encoder: Encoder, width: int) -> list[Window]:
    """All windows of a document, each at most `width` tokens with its prefix; short tails left out.

    With a prefix of special tokens every text token is scored; without one, all but the first.
    """
    prefix = special_prefix(encoder)
    tokens = encoder.encode(document.text, add_special_tokens=False)
    size, step = width - len(prefix), width - max(len(prefix), 1)
    pieces = [(start, tokens[start : start + size]) for start in range(0, len(tokens), step)]
    return [
        Window(
            document=document.id,
            source=document.source,
            lang=document.lang,
            start=start,
            token_ids=(*prefix, *piece),
            num_context=max(len(prefix), 1),
        )
        for start, piece in pieces
        if len(piece) >= SHORTEST
    ]


def special_prefix(encoder: Encoder) -> tuple[int, ...]:
    """The special tokens that this tokenizer puts before a text (usually none or a BOS)."""
    plain = encoder.encode("a", add_special_tokens=False)
    full = encoder.encode("a", add_special_tokens=True)
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return tuple(full[:at])
    return ()


def pick_windows(
    documents: Sequence[Document], encoder: Encoder, *, count: int, width: int, seed: int
) -> list[Window]:
    """`count` windows: first one of each document in `pick`'s order, then their second ones.

    As many documents as possible give the most independent evidence per token.
    """
    order = pick(documents, len(documents), seed)
    # A document gives at least one window, so no more documents than windows need be read
    # unless some turn out too short.
    by_document: list[list[Window]] = []
    for document in order:
        if windows := cut(document, encoder, width):
            by_document.append(windows)
        if len(by_document) == count:
            break
    turns = chain.from_iterable(zip_longest(*by_document))
    return [window for window in turns if window is not None][:count]
