"""What the runner asks of a target. Text and templates are `eval.workload`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How an answer is drawn: temperature, nucleus, and the seed of its own random stream."""

    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt with every special token in place, and how many tokens the answer may have.

    choices: continuations as token ids, for a prompt that is answered by likelihood. messages,
    tools: what the ids were rendered from, for a target that applies the template itself. draw: how
    its answer is drawn, None for the greedy one.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    choices: tuple[tuple[int, ...], ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    draw: Draw | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer without its stop token, and why it ended.

    text: what a target that speaks text said (token_ids are then that text's). tool_calls: the
    calls a server parsed itself. choice_logprobs: nats of each choice, for a prompt with choices.
    """

    token_ids: tuple[int, ...]
    finish: Finish
    text: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    choice_logprobs: tuple[float, ...] | None = None


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
# Told of each answer as it comes: its prompt's place in the list, and the answer.
Keep = Callable[[int, Answer], None]


def forget(place: int, answer: Answer) -> None:
    """A Keep that keeps nothing."""


class Reference(Protocol):
    """The model that defines what is right. `description` says how it computes."""

    description: str
    digest: str

    def logprobs(self, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Per window [n - 1, V] float32 log-probabilities of the next token, one at a time."""

    def generate(
        self, prompts: Sequence[Prompt], stop_ids: Sequence[int], advance: Advance
    ) -> list[Answer]:
        """Answers as the prompts say, greedy or drawn; `advance(k)`: k more of them are there."""

    def choose(self, prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
        """The log-likelihood of each of the prompts' choices."""


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

    def generate(
        self, prompts: Sequence[Prompt], advance: Advance, keep: Keep = forget
    ) -> list[Answer]:
        """Answers as the prompts say, greedy or drawn; `advance(k)`: k more of them are there."""

    def choose(
        self, prompts: Sequence[Prompt], advance: Advance, keep: Keep = forget
    ) -> list[Answer]:
        """The log-likelihood of each of the prompts' choices."""
