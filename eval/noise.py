"""The noise floor: the base against itself, computed another way. What changes here is no damage.

Greedy answers depend on what else is in the batch, because sums of floats do. A part of the items
is answered again one at a time, and a few windows are scored again in one batch; both go through
the same metrics as the candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eval.asking import ask_all, read_reply
from eval.checks.registry import score_reply
from eval.evaluation import Exchange
from eval.measurement import Measurement
from eval.metrics import answers, divergence
from eval.metrics.answers import PairedItem
from eval.metrics.divergence import WindowScores
from eval.progress import Progress
from eval.stats import Sampling
from eval.targets.base import Advance, Answer, Prompt
from eval.targets.reference import ReferenceTarget
from eval.windows import Window
from eval.workload import Workload
from runtime.text import TextProcessor

_WINDOWS = 4
_DRAWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """measurements: the base against itself, by metric. note: how, and what came of it."""

    measurements: dict[str, Measurement]
    note: str


def measure_noise(
    workload: Workload,
    text: TextProcessor,
    reference: ReferenceTarget,
    stop_ids: Sequence[int],
    exchanges: Sequence[Exchange],
    *,
    count: int,
    sampling: Sampling,
    progress: Progress,
) -> Noise:
    """Ask the base `count` items again, alone. Nothing is asked, and nothing known, at 0."""
    if count == 0:
        return Noise(measurements={}, note="The noise floor was not measured (--noise-items 0).")
    items = [
        (index, item) for index, item in enumerate(workload.items)
        if item.follows is None and exchanges[index].base_answer.choice_logprobs is None
    ][:count]  # fmt: skip
    progress.stage("noise floor", len(items))

    def alone(prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
        return reference.generate(prompts, stop_ids, advance, together=False)

    part = replace(workload, items=tuple(item for _, item in items))
    asked = ask_all(part, text, alone, reference.choose, progress.advance)
    again = [a.answer for a in asked]
    pairs = [
        _paired(exchanges[index], answer, text)
        for (index, _), answer in zip(items, again, strict=True)
    ]
    sampling = replace(sampling, draws=min(sampling.draws, _DRAWS))
    windows = _windows(workload.windows, reference)
    found = {m.name: m for m in divergence.measure(windows, sampling)}
    if pairs:
        found |= {m.name: m for m in answers.measure(pairs, sampling)}
    changed = sum(
        exchanges[index].base_answer.token_ids != answer.token_ids
        for (index, _), answer in zip(items, again, strict=True)
    )
    return Noise(
        measurements=found,
        note=f"Noise floor (the base against itself, one at a time instead of in batches of "
        f"{reference.limits.rows}): {changed} of {len(items)} answers differ; mean KLD "
        f"{found['kl_mean'].estimate:.1e}, same top p {found['top1_agreement'].estimate:.1%} on "
        f"{found['kl_mean'].num_scored} tokens.",
    )


def _paired(exchange: Exchange, answer: Answer, text: TextProcessor) -> PairedItem:
    """The base's first answer against its second one."""
    reply = read_reply(answer, text)
    return replace(exchange.pair, candidate=score_reply(reply, exchange.pair.item.checks))


def _windows(windows: Sequence[Window], reference: ReferenceTarget) -> list[WindowScores]:
    few = windows[:_WINDOWS]
    tokens = [window.token_ids for window in few]
    pairs = zip(few, reference.logprobs(tokens), reference.logprobs_together(tokens), strict=True)
    return [_scores(window, one, other) for window, one, other in pairs]


def _scores(window: Window, one: torch.Tensor, other: torch.Tensor) -> WindowScores:
    """Both are [n - 1, V] log-probabilities of the same window."""
    first = window.num_context - 1
    one, other = one.double().cpu(), other.double().cpu()
    following = torch.tensor(window.token_ids[1:])[:, None]
    return WindowScores(
        window=window,
        base_nll=-one.gather(1, following)[first:, 0].numpy(),
        candidate_nll=-other.gather(1, following)[first:, 0].numpy(),
        kl=(one.exp() * (one - other)).sum(-1)[first:].numpy(),
        agrees=(one.argmax(-1) == other.argmax(-1))[first:].double().numpy(),
    )
