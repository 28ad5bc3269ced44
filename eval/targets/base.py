"""What the runner asks of a target. Token ids only: text and templates are `eval.workload`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt with every special token in place, and how many tokens the answer may have."""

    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A greedy answer without its stop token, and why it ended."""

    token_ids: tuple[int, ...]
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """One window under the candidate, for each token but the first: lists of n - 1 values.

    nll: of the given next token, nats. kl: KL(reference || candidate), nats. agrees: whether both
    models' likeliest next token is the same.
    """

    nll: list[float]
    kl: list[float]
    agrees: list[bool]


Advance = Callable[[int], None]


class Reference(Protocol):
    """The model that defines what is right. `description` says how it computes."""

    description: str
    digest: str

    def logprobs(self, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Per window [n - 1, V] float32 log-probabilities of the next token, one at a time."""

    def generate(
        self, prompts: Sequence[Prompt], stop_ids: Sequence[int], advance: Advance
    ) -> list[Answer]:
        """Greedy answers; `advance(k)` is called as k more prompts are done."""


class Candidate(Protocol):
    """The model being judged, on the very kernels that will serve."""

    description: str

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""

    def score(
        self, windows: Sequence[Sequence[int]], references: Sequence[Tensor]
    ) -> list[TokenScores]:
        """Score windows against the reference's [n - 1, V] log-probabilities."""

    def generate(self, prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
        """Greedy answers; `advance(k)` is called as k more prompts are done."""
