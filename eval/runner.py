"""The run: open both models, ask them, measure, judge. `weighed` is the whole story.

Nothing is written here; `eval.api` writes once the verdict exists, so a crash on the way leaves
neither a report nor a stamp.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from eval.amounts import Amounts, SampledPasses
from eval.answer_log import AnswerLog
from eval.asking import Asked, DrawOf, ask_all, drawn, greedy, read_reply
from eval.checks.registry import score_reply
from eval.errors import EvaluationError
from eval.evaluation import Evaluation, Exchange, num_differing
from eval.gate import await_review, judge
from eval.measurement import Measurement
from eval.metrics import answers, divergence, drift, ladder, load, sampled
from eval.metrics.answers import PairedItem
from eval.metrics.divergence import WindowScores
from eval.noise import measure_noise
from eval.opening import Job, Level, Opened, notes_on, numerics_of, open_all
from eval.preflight import artifact_facts, require_unchanged
from eval.progress import Progress
from eval.stats import Sampling
from eval.suites import TaskItem
from eval.targets.base import Advance, Answer, Candidate, Prompt, Reference, TokenScores
from eval.windows import Window
from eval.workload import Workload
from runtime.text import TextProcessor

# Reference log-probabilities held at once, in floats (256 MiB).
_HELD_FLOATS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What both models gave. by_level: the greedy answers at each level, the last judged.

    passes: the drawn answers, a list of exchanges for each seed; empty unless asked for.
    """

    scores: list[WindowScores]
    by_level: list[list[Exchange]]
    passes: list[list[Exchange]]

    @property
    def exchanges(self) -> list[Exchange]:
        """The greedy answers that are judged."""
        return self.by_level[-1]


@contextmanager
def weighed(job: Job, progress: Progress) -> Iterator[Evaluation]:
    """One artifact, judged. Its answers are kept for another try unless the block ends well.

    Raises what `open_all` does, and EvaluationError for a base with NaN.
    """
    started = time.monotonic()
    opened = open_all(job, progress)
    log = AnswerLog(job.cache, opened.log_key)
    yield _weigh(opened, job, log, progress, started)
    log.finish()


def _weigh(
    opened: Opened, job: Job, log: AnswerLog, progress: Progress, started: float
) -> Evaluation:
    """Ask, measure, judge. started: by time.monotonic."""
    found = ask(opened, job.amounts, log, progress)
    rules = opened.gates.spec
    sampling = Sampling(confidence=rules.confidence, draws=rules.draws, seed=job.amounts.seed)
    noise = measure_noise(
        opened.workload, opened.text, opened.reference, opened.candidate.stop_ids, found.exchanges,
        count=job.amounts.num_noise_items, sampling=sampling, progress=progress,
    )  # fmt: skip
    progress.stage("bootstrap", 1)
    measurements = measure(found, sampling, rules.length_edges)
    verdict = await_review(
        judge(rules, {m.name: m for m in measurements}, noise.measurements),
        rules.review,
        num_differing(found.exchanges),
    )
    require_unchanged(opened.artifact)
    if opened.server is not None:
        opened.server.require_unchanged()
    progress.advance(1)
    return Evaluation(
        **provenance(opened, job),
        sampling=sampling,
        measurements=measurements,
        ladder=divergence.ladder(found.scores),
        layer1=ladder.describe(found.scores, sampling),
        exchanges=tuple(found.exchanges),
        verdict=verdict,
        notes=(*notes_on(opened, job.amounts), *notes_on_answers(found, job.amounts, log),
               noise.note),
        judged_at=datetime.now(UTC),
        seconds=time.monotonic() - started,
    )  # fmt: skip


def provenance(opened: Opened, job: Job) -> dict[str, Any]:
    """The fields of an Evaluation that say what was judged, against what and how."""
    windows = opened.workload.windows
    return {
        "artifact": artifact_facts(opened.artifact),
        "base": opened.base,
        "suite": opened.suite,
        "gates": opened.gates,
        "amounts": job.amounts,
        "numerics": numerics_of(opened),
        "num_windows": len(windows),
        "num_documents": len({window.document for window in windows}),
        "said": job.said,
    }


def ask(opened: Opened, amounts: Amounts, log: AnswerLog, progress: Progress) -> Found:
    """Put everything to both models: the held-out text, the items, and the items again, drawn."""
    workload, text, reference = opened.workload, opened.text, opened.reference
    stop_ids = opened.candidate.stop_ids
    scores = score_windows(workload.windows, reference, opened.candidate, progress)
    base = ask_base(workload, text, reference, stop_ids, progress)
    by_level = [
        pair(workload, text, base, ask_candidate(workload, text, level, log, progress))
        for level in opened.levels
    ]
    passes = []
    # A choice is answered by likelihood: there is nothing to draw.
    written = replace(workload, items=tuple(i for i in workload.items if not i.choices))
    draws = _draws(amounts.sampled) if written.items else []
    for number, how in enumerate(draws, start=1):
        which = f", draw {number} of {len(draws)}"
        said = ask_base(written, text, reference, stop_ids, progress, how, which)
        other = ask_candidate(written, text, opened.levels[-1], log, progress, how, which)
        passes.append(pair(written, text, said, other))
    return Found(scores=scores, by_level=by_level, passes=passes)


def _draws(passes: SampledPasses | None) -> list[DrawOf]:
    return [] if passes is None else [drawn(passes, seed) for seed in passes.seeds]


def measure(found: Found, sampling: Sampling, edges: Sequence[int]) -> tuple[Measurement, ...]:
    """Every metric of the text, of the answers, under load, by length and over drawn answers."""
    pairs = [exchange.pair for exchange in found.exchanges]
    by_item = list(zip(*([x.pair for x in one] for one in found.passes), strict=True))
    under_load = len(found.by_level) > 1
    return (
        *divergence.measure(found.scores, sampling, edges),
        *answers.measure(pairs, sampling, edges),
        *drift.measure(pairs, sampling, edges),
        *sampled.measure(by_item, sampling, edges),
        *(load.measure(found.by_level[0], found.exchanges, sampling) if under_load else ()),
    )


def score_windows(
    windows: Sequence[Window], reference: Reference, candidate: Candidate, progress: Progress
) -> list[WindowScores]:
    """Both models over every window, a few at a time: full-vocabulary rows never pile up.

    EvaluationError: the base itself gives NaN or Inf.
    """
    progress.stage("held-out text", len(windows))
    scores: list[WindowScores] = []
    for batch, logprobs in _held(windows, reference):
        tokens = [window.token_ids for window in batch]
        for window, rows, found in zip(
            batch, logprobs, candidate.score(tokens, logprobs), strict=True
        ):
            scores.append(_window_scores(window, rows, found))
        progress.advance(len(batch))
    return scores


def _held(
    windows: Sequence[Window], reference: Reference
) -> Iterator[tuple[list[Window], list[torch.Tensor]]]:
    """Windows with their reference rows, in batches whose rows fit _HELD_FLOATS."""
    rows = reference.logprobs([window.token_ids for window in windows])
    pending = iter(windows)
    held: list[tuple[Window, torch.Tensor]] = []
    for window in pending:
        held.append((window, next(rows)))
        if (len(held) + 1) * held[0][1].numel() > _HELD_FLOATS:
            yield [w for w, _ in held], [r for _, r in held]
            held = []
    if held:
        yield [w for w, _ in held], [r for _, r in held]


def _window_scores(window: Window, rows: torch.Tensor, found: TokenScores) -> WindowScores:
    """Line both models up on the scored tokens. rows: [n - 1, V]; row t - 1 scores token t."""
    first = window.num_context - 1
    following = torch.tensor(window.token_ids[1:], device=rows.device)
    base_nll = -rows.gather(1, following[:, None])[:, 0].double().cpu().numpy()
    if not np.isfinite(base_nll).all():
        raise EvaluationError(
            f"the base gives NaN or Inf on document {window.document}; nothing can be held to it"
        )
    return WindowScores(
        window=window,
        base_nll=base_nll[first:],
        candidate_nll=np.array(found.nll, dtype=np.float64)[first:],
        kl=np.array(found.kl, dtype=np.float64)[first:],
        agrees=np.array(found.agrees, dtype=np.float64)[first:],
    )


def ask_base(
    workload: Workload,
    text: TextProcessor,
    reference: Reference,
    stop_ids: Sequence[int],
    progress: Progress,
    draw_of: DrawOf = greedy,
    which: str = "",
) -> list[Asked]:
    """The base's answers to all items. which: the draw, for the progress shown."""

    def generate(prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
        return reference.generate(prompts, stop_ids, advance)

    progress.stage(f"answers of the base{which}", len(workload.items))
    return ask_all(workload, text, generate, reference.choose, progress.advance, draw_of)


def ask_candidate(
    workload: Workload,
    text: TextProcessor,
    level: Level,
    log: AnswerLog,
    progress: Progress,
    draw_of: DrawOf = greedy,
    which: str = "",
) -> list[Asked]:
    """The candidate's answers to all items, written down as they come. which: as in ask_base."""
    progress.stage(f"answers of the {level.name}{which}", len(workload.items))
    generate, choose = log.kept(level.name, level.generate), log.kept(level.name, level.choose)
    return ask_all(workload, text, generate, choose, progress.advance, draw_of)


def pair(
    workload: Workload, text: TextProcessor, base: Sequence[Asked], candidate: Sequence[Asked]
) -> list[Exchange]:
    """Both models' answers, scored."""
    rows = zip(workload.items, base, candidate, strict=True)
    return [_exchange(text, item, *asked) for item, *asked in rows]


def _exchange(text: TextProcessor, item: TaskItem, base: Asked, candidate: Asked) -> Exchange:
    replies = [read_reply(asked.answer, text) for asked in (base, candidate)]
    scores = [score_reply(reply, item.checks) for reply in replies]
    return Exchange(
        pair=PairedItem(
            item=item,
            base=scores[0],
            candidate=scores[1],
            num_prompt_tokens=len(base.prompt.token_ids),
        ),
        base_text=replies[0].text,
        candidate_text=replies[1].text,
        base_answer=base.answer,
        candidate_answer=candidate.answer,
    )


def notes_on_answers(found: Found, amounts: Amounts, log: AnswerLog) -> list[str]:
    """How the answers came about, where a reader should know."""
    notes = []
    levels = found.by_level
    if log.num_resumed:
        notes.append(f"{log.num_resumed} answers are from a run that was interrupted before.")
    if len(levels) > 1 and (at := load.first_divergence(levels[0], levels[-1])) is not None:
        notes.append(f"Answers that differ under load part at token {at} (median).")
    if found.passes and amounts.sampled:
        how, every = amounts.sampled, [x for one in found.passes for x in one]
        same = sum(x.base_text == x.candidate_text for x in every) / len(every)
        notes.append(
            f"Besides the greedy answers, {len(how.seeds)} were drawn of each of "
            f"{len(found.passes[0])} items by both models (temperature {how.temperature:g}, top_p "
            f"{how.top_p:g}, seeds {', '.join(map(str, how.seeds))}, the same random numbers for "
            f"both); {same:.1%} of them are the same."
        )
    return notes
