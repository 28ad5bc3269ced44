"""What a check reads (Reply), what it says (Outcome) and what a suite's row asked for (Check)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["stop", "length", "error"]
# A share in [0, 1], or the counts that a rate is made of (see the catalogue).
Value = float | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of one model.

    text: what a user sees. raw: the same with every special token spelled out. tokens: the answer's
    token ids, or its words where the target gives no ids. tool_calls: calls that a server parsed
    itself, [{"name", "arguments"}]; None where the calls, if any, stand in the text.
    choice_logprobs: log-likelihood of each choice in nats, for items answered by likelihood.
    """

    text: str
    raw: str
    finish: Finish
    tokens: tuple[int | str, ...] = ()
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    choice_logprobs: tuple[float, ...] | None = None

    @property
    def is_truncated(self) -> bool:
        """It hit its token limit, so that a parse error says little."""
        return self.finish == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one check found.

    values: metric name to value. signals: metric name to a fact that is only judged against the
    base's (a refusal, a script, a length). problem: the first thing wrong in words, or "".
    details: what a reader of the samples wants to see besides.
    """

    values: dict[str, Value] = field(default_factory=dict)
    signals: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check as a row asks for it; `options` is whatever its kind's `read` made of the row."""

    kind: str
    options: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of check.

    read: checks a row's mapping and returns the options; ValueError says what is wrong with it.
    score: the pure function itself.
    """

    read: Callable[[Mapping[str, Any]], Any]
    score: Callable[[Reply, Any], Outcome]


def no_options(row: Mapping[str, Any]) -> None:
    """`read` of a kind that takes no options."""
    only(row)


def only(row: Mapping[str, Any], *known: str) -> None:
    """ValueError for a key that would have no effect."""
    if unknown := sorted(set(row) - {"kind", *known}):
        raise ValueError(
            f"check {row['kind']!r}: unknown key {unknown[0]!r}; known: {', '.join(known)}"
        )


def printable(text: str) -> str:
    r"""Half a surrogate pair, which JSON can spell but no file can hold, as `\udXXX`."""
    return text.encode("utf-8", "backslashreplace").decode()
