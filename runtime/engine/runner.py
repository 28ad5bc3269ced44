"""What the engine asks of a runner: launch a schedule now, collect what came of it later.

The engine keeps at most `lag` steps in flight behind the one it just launched. Between launch and
collect the tokens a step draws are unknown to the host; a runner that runs behind keeps them, and
all that depends on them, on its device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from runtime.engine.batch import Piece
from runtime.engine.scheduler import Schedule
from runtime.engine.sequence import Sequence
from runtime.engine.step_cost import StepCost
from runtime.request import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one launched schedule gave.

    token_ids: one per sequence of `schedule.sampling`, in that order; those of faulty sequences
        are ignored. logprobs: of the drawn token, for the sequences that asked.
    prompt_logprobs: entries that follow those a sequence has already (entry 0, None, is there from
        the start).
    errors: why a sequence of the schedule cannot go on (drawing or not).
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[Sequence, str] = field(default_factory=dict)


class Runner(Protocol):
    """`launch` and `collect` for schedules; `forward` and `logits` for pieces of one's own."""

    @property
    def lag(self) -> int:
        """How many steps the host may run behind, a constant; 0 waits for every step."""
        ...

    @property
    def block_size(self) -> int: ...

    @property
    def rows_per_slice(self) -> int:
        """Rows of logits computed at once where a whole prompt's are wanted."""
        ...

    def can_run_behind(self, schedule: Schedule) -> bool:
        """Whether `schedule` can be launched while steps before it are still in flight. If not,
        they are collected first and a new schedule is made; this one is never launched."""
        ...

    def launch(self, schedule: Schedule) -> Any:
        """Start the step and return the ticket to collect it with.

        Called before the schedule is committed: a span of n tokens of `sequence` covers positions
        num_computed .. num_computed + n - 1 of `sequence.tokens`. Everything the step needs of the
        sequences is read now; they change as soon as this returns.
        """
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for a launched step. Tickets are collected in the order of their launch."""
        ...

    def release(self, sequence: Sequence) -> None:
        """`sequence` was preempted or has ended; steps in flight may still hold it. Unknown
        sequences are fine. It may come back, with every token known and from its start."""
        ...

    def abandon(self) -> None:
        """Forget all tickets and all that is known of sequences: a launch or collect failed."""
        ...

    def make_ready(self) -> bool:
        """Do one piece of what makes later steps quick; False once there is nothing left to do.

        For moments without requests: a piece may take some tenths of a second.
        """
        ...

    @property
    def step_cost(self) -> StepCost | None:
        """What steps cost on this machine, once `make_ready` has measured it."""
        ...

    def forward(self, pieces: Seq[Piece]) -> torch.Tensor: ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor: ...
