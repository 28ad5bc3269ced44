"""What a launched step will give, and how it becomes a StepResult once its copies have arrived.

Knows tensors on their way to the host and the sequences they belong to; launches nothing.

Shape legend: R rows that drew, K alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from runtime.engine.model_runner import NOT_FINITE
from runtime.engine.runner import StepResult
from runtime.engine.scheduler import Schedule
from runtime.engine.sequence import Sequence
from runtime.engine.transfer import Download
from runtime.kernels.sampling import RowLogprobs
from runtime.kernels.store_drawn import FAULTY
from runtime.request import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Log-probs of some prompt tokens of a sequence: `token_ids` are what the rows predict."""

    sequence: Sequence
    token_ids: Seq[int]
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A launched step. `download` brings, in this order: the drawn ids [R] where any were drawn,
    four tensors of RowLogprobs where `reports`, and five of each prompt part (whether its logits
    are finite, then its RowLogprobs).

    wanted: whose tokens the engine asked for, in its order; sampling: the same, in the order of
        rows. reports: per row, alternatives asked for, None where log-probs are not wanted; empty
        if no row wants any. errors: what failed at launch.
    """

    download: Download | None
    wanted: Seq[Sequence] = ()
    sampling: Seq[Sequence] = ()
    reports: Seq[int | None] = ()
    prompts: Seq[PromptPart] = ()
    errors: dict[Sequence, str] = field(default_factory=dict)

    @staticmethod
    def failed(schedule: Schedule, message: str) -> Ticket:
        """A step of which nothing came."""
        return Ticket(
            download=None,
            wanted=schedule.sampling,
            errors=dict.fromkeys(schedule.spans, message),
        )


def tensors_of(logprobs: RowLogprobs) -> list[Tensor]:
    return [logprobs.chosen_R, logprobs.rank_R, logprobs.top_ids_RK, logprobs.top_values_RK]


def collected(ticket: Ticket) -> StepResult:
    """Wait for the step, and say what it gave."""
    if ticket.download is None:
        return StepResult(token_ids=[FAULTY] * len(ticket.wanted), errors=ticket.errors)
    arrived = iter(ticket.download.wait())
    token_ids = next(arrived).tolist() if ticket.sampling else []
    drawn = dict(zip(ticket.sampling, token_ids, strict=True))
    result = StepResult(token_ids=[drawn[sequence] for sequence in ticket.wanted])
    for sequence, token_id in zip(ticket.sampling, token_ids, strict=True):
        if token_id == FAULTY:
            result.errors[sequence] = NOT_FINITE
    if ticket.reports:
        entries = _entries(arrived, token_ids, ticket.reports)
        for sequence, entry in zip(ticket.sampling, entries, strict=True):
            if entry is not None and sequence not in result.errors:
                result.logprobs[sequence] = entry
    for part in ticket.prompts:
        _add_prompt(part, arrived, result)
    return result


def _add_prompt(part: PromptPart, arrived: Iterator[Tensor], result: StepResult) -> None:
    is_finite = bool(next(arrived))
    entries = _entries(arrived, part.token_ids, [part.num_top] * len(part.token_ids))
    if is_finite:
        found = [entry for entry in entries if entry is not None]
        result.prompt_logprobs.setdefault(part.sequence, []).extend(found)
    else:
        result.errors[part.sequence] = NOT_FINITE


def _entries(
    arrived: Iterator[Tensor], token_ids: Seq[int], num_top: Seq[int | None]
) -> list[TokenLogprobs | None]:
    values, ranks, top_ids, top_values = (next(arrived).tolist() for _ in range(4))
    return [
        None
        if k is None
        else TokenLogprobs(
            token_id=token_ids[row],
            value=values[row],
            rank=ranks[row],
            top_ids=tuple(top_ids[row][:k]),
            top_values=tuple(top_values[row][:k]),
        )
        for row, k in enumerate(num_top)
    ]
