"""The run: open both models, ask them, measure, judge. `weigh` is the whole story.

Nothing is written here; `eval.api` writes once the verdict exists, so a crash on the way leaves
neither a report nor a stamp.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import numpy as np
import torch

from eval.answer_log import AnswerLog
from eval.asking import Asked, ask_all, read_reply
from eval.checks.registry import score_reply
from eval.errors import EvaluationError
from eval.evaluation import Evaluation, Exchange, num_differing
from eval.gate import await_review, judge
from eval.metrics import answers, divergence, ladder, load
from eval.metrics.answers import PairedItem
from eval.metrics.divergence import WindowScores
from eval.noise import measure_noise
from eval.opening import Job, Level, notes_on, numerics_of, open_all
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


def weigh(job: Job, progress: Progress) -> Evaluation:
    """Judge one artifact. Raises what `open_all` does, and EvaluationError for a base with NaN."""
    started = time.monotonic()
    opened = open_all(job, progress)
    reference, candidate, workload = opened.reference, opened.candidate, opened.workload
    text = opened.text
    scores = score_windows(workload.windows, reference, candidate, progress)
    base = ask_base(workload, text, reference, candidate.stop_ids, progress)
    log = AnswerLog(job.cache, opened.log_key)
    by_level = [
        pair(
            workload, opened.text, base, ask_candidate(workload, opened.text, level, log, progress)
        )
        for level in opened.levels
    ]
    exchanges = by_level[-1]
    rules = opened.gates.spec
    sampling = Sampling(confidence=rules.confidence, draws=rules.draws, seed=job.amounts.seed)
    noise = measure_noise(
        workload, opened.text, reference, candidate.stop_ids, exchanges,
        count=job.amounts.num_noise_items, sampling=sampling, progress=progress,
    )  # fmt: skip
    progress.stage("bootstrap", 1)
    measurements = (
        *divergence.measure(scores, sampling),
        *answers.measure([e.pair for e in exchanges], sampling),
        *(load.measure(by_level[0], exchanges, sampling) if len(by_level) > 1 else ()),
    )
    verdict = await_review(
        judge(rules, {m.name: m for m in measurements}, noise.measurements),
        rules.review,
        num_differing(exchanges),
    )
    require_unchanged(opened.artifact)
    log.finish()
    progress.advance(1)
    return Evaluation(
        artifact=artifact_facts(opened.artifact),
        base=opened.base,
        suite=opened.suite,
        gates=opened.gates,
        amounts=job.amounts,
        sampling=sampling,
        numerics=numerics_of(opened),
        num_windows=len(workload.windows),
        num_documents=len({window.document for window in workload.windows}),
        measurements=measurements,
        ladder=divergence.ladder(scores),
        layer1=ladder.describe(scores, sampling),
        exchanges=tuple(exchanges),
        verdict=verdict,
        notes=(*notes_on(opened, job.amounts), *notes_on_answers(by_level, log), noise.note),
        judged_at=datetime.now(UTC),
        seconds=time.monotonic() - started,
        said=job.said,
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
) -> list[Asked]:
    """The base's answers to all items."""

    def generate(prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
        return reference.generate(prompts, stop_ids, advance)

    progress.stage("answers of the base", len(workload.items))
    return ask_all(workload, text, generate, reference.choose, progress.advance)


def ask_candidate(
    workload: Workload, text: TextProcessor, level: Level, log: AnswerLog, progress: Progress
) -> list[Asked]:
    """The candidate's answers to all items, written down as they come."""
    progress.stage(f"answers of the {level.name}", len(workload.items))
    generate, choose = log.kept(level.name, level.generate), log.kept(level.name, level.choose)
    return ask_all(workload, text, generate, choose, progress.advance)


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


def notes_on_answers(by_level: Sequence[Sequence[Exchange]], log: AnswerLog) -> list[str]:
    """How the answers came about, where a reader should know."""
    notes = []
    if log.num_resumed:
        notes.append(f"{log.num_resumed} answers are from a run that was interrupted before.")
    if len(by_level) > 1 and (at := load.first_divergence(by_level[0], by_level[-1])) is not None:
        notes.append(f"Answers that differ under load part at token {at} (median).")
    return notes
