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

from eval.errors import EvaluationError
from eval.evaluation import Evaluation, Exchange
from eval.gate import judge
from eval.metrics import divergence, extraction
from eval.metrics.divergence import WindowScores
from eval.metrics.extraction import PairedItem, score_answer
from eval.opening import Job, notes_on, numerics_of, open_all
from eval.preflight import artifact_facts, require_unchanged
from eval.progress import Progress
from eval.stats import Sampling
from eval.targets.base import Answer, Candidate, Reference, TokenScores
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
    scores = score_windows(workload.windows, reference, candidate, progress)
    exchanges = exchange(workload, opened.text, reference, candidate, progress)
    progress.stage("bootstrap", 1)
    rules = opened.gates.spec
    sampling = Sampling(confidence=rules.confidence, draws=rules.draws, seed=job.amounts.seed)
    measurements = (
        *divergence.measure(scores, sampling),
        *extraction.measure([e.pair for e in exchanges], sampling),
    )
    verdict = judge(rules, {m.name: m for m in measurements})
    require_unchanged(opened.artifact)
    progress.advance(1)
    return Evaluation(
        artifact=artifact_facts(opened.artifact),
        base=opened.base,
        suite=opened.suite,
        gates=opened.gates,
        amounts=job.amounts,
        sampling=sampling,
        numerics=numerics_of(candidate, opened.text),
        num_windows=len(workload.windows),
        num_documents=len({window.document for window in workload.windows}),
        measurements=measurements,
        ladder=divergence.ladder(scores),
        exchanges=tuple(exchanges),
        verdict=verdict,
        notes=notes_on(opened, job.amounts),
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


def exchange(
    workload: Workload,
    text: TextProcessor,
    reference: Reference,
    candidate: Candidate,
    progress: Progress,
) -> list[Exchange]:
    """Greedy answers of both models to every prompt, scored and paired."""
    progress.stage("answers of the base", len(workload.prompts))
    base = reference.generate(workload.prompts, candidate.stop_ids, progress.advance)
    progress.stage("answers of the candidate", len(workload.prompts))
    ours = candidate.generate(workload.prompts, progress.advance)
    return [
        _exchange(workload, text, index, answers)
        for index, answers in enumerate(zip(base, ours, strict=True))
    ]


def _exchange(
    workload: Workload, text: TextProcessor, index: int, answers: tuple[Answer, Answer]
) -> Exchange:
    item = workload.items[index]
    texts = tuple(text.decode(answer.token_ids) for answer in answers)
    base, candidate = (
        score_answer(
            item, shown, truncated=answer.finish == "length", failed=answer.finish == "error"
        )
        for shown, answer in zip(texts, answers, strict=True)
    )
    return Exchange(
        pair=PairedItem(item=item, base=base, candidate=candidate),
        base_text=texts[0],
        candidate_text=texts[1],
        base_answer=answers[0],
        candidate_answer=answers[1],
    )
