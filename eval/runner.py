"""The run: preflight, ask both models, measure, judge. `weigh` is the whole story.

Nothing is written here; `eval.report` and `eval.api` write once the verdict exists, so a crash on
the way leaves neither a report nor a stamp.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from eval.amounts import Amounts
from eval.cache import Cache
from eval.errors import EvaluationError
from eval.evaluation import BaseFacts, Evaluation, Exchange, Numerics
from eval.gate import judge
from eval.gate_spec import LoadedGates, load_gates
from eval.metrics import divergence, extraction
from eval.metrics.divergence import WindowScores
from eval.metrics.extraction import PairedItem, score_answer
from eval.preflight import artifact_facts, open_judgeable, source_of
from eval.progress import Progress
from eval.stats import Sampling
from eval.suites import load_suite
from eval.targets.base import Answer, Candidate, Reference, TokenScores
from eval.targets.checkpoint import Checkpoint, locate
from eval.targets.engine import EngineTarget
from eval.targets.reference import (
    ReferenceTarget,
    load_tokenizer,
    quiet_transformers,
    versions,
)
from eval.windows import Window
from eval.workload import (
    Workload,
    check_same_reading,
    prepare,
    reading_digest,
    template_sha256,
)
from runtime.config import EngineConfig
from runtime.text import TextProcessor

# Reference log-probabilities held at once, in floats (256 MiB).
_HELD_FLOATS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to judge, against what, by which rules, how."""

    artifact: Path
    base: str | None
    gates: Path
    suite: Path
    amounts: Amounts
    engine: EngineConfig
    cache: Path | None


def weigh(job: Job, progress: Progress) -> Evaluation:
    """Judge one artifact.

    Raises:
        EvaluationError: it could not be judged, or (UsageError) something given is wrong.
        ArtifactError, TextError, ...: the artifact cannot be loaded; see `eval.api`.
    """
    started = time.monotonic()
    quiet_transformers()
    if job.engine.num_threads is not None:
        torch.set_num_threads(job.engine.num_threads)
    gates, suite = load_gates(job.gates), load_suite(job.suite)
    progress.stage("open artifact and base", 4)
    artifact = open_judgeable(job.artifact)
    checkpoint = locate(job.base or source_of(artifact))
    text = TextProcessor.load(job.artifact)
    progress.advance(1)
    workload = prepare(suite, text, job.amounts)
    cache = Cache(job.cache)
    base_template = _read_alike(workload, text, checkpoint, cache)
    progress.advance(1)
    candidate = EngineTarget(job.artifact, job.engine)
    progress.advance(1)
    _check_room(workload, candidate.max_tokens)
    reference = ReferenceTarget(checkpoint, device=candidate.engine.resolved.device, cache=cache)
    progress.advance(1)
    sampling = _sampling(gates, job.amounts)
    scores = score_windows(workload.windows, reference, candidate, progress)
    exchanges = exchange(workload, text, reference, candidate, progress)
    progress.stage("bootstrap", 1)
    measurements = (
        *divergence.measure(scores, sampling),
        *extraction.measure([e.pair for e in exchanges], sampling),
    )
    verdict = judge(gates.spec, {m.name: m for m in measurements})
    progress.advance(1)
    return Evaluation(
        artifact=artifact_facts(artifact),
        base=BaseFacts(
            name=checkpoint.name,
            digest=reference.digest,
            description=reference.description,
            chat_template_sha256=base_template,
        ),
        suite=suite,
        gates=gates,
        amounts=job.amounts,
        sampling=sampling,
        numerics=_numerics(candidate, text),
        num_windows=len(workload.windows),
        num_documents=len({window.document for window in workload.windows}),
        measurements=measurements,
        ladder=divergence.ladder(scores),
        exchanges=tuple(exchanges),
        verdict=verdict,
        notes=_notes(reference, text, base_template, job, workload),
        judged_at=datetime.now(UTC),
        seconds=time.monotonic() - started,
    )


def _sampling(gates: LoadedGates, amounts: Amounts) -> Sampling:
    return Sampling(confidence=gates.spec.confidence, draws=gates.spec.draws, seed=amounts.seed)


def _read_alike(
    workload: Workload, text: TextProcessor, checkpoint: Checkpoint, cache: Cache
) -> str | None:
    """Check that the base reads every text as the artifact does; the sha256 of its chat template.

    Opening the tokenizer inside a GGUF file takes seconds, so a check that was passed is kept.
    """
    key = ["reading", checkpoint.digest, versions(), reading_digest(workload, text)]
    if (known := cache.json(key)) is not None:
        return str(known[0]) if known[0] else None
    tokenizer = load_tokenizer(checkpoint)
    check_same_reading(workload, text, tokenizer)
    found = template_sha256(tokenizer.chat_template)
    cache.put_json(key, [found])
    return found


def _check_room(workload: Workload, max_tokens: int) -> None:
    """Every window and every prompt with its answer must fit the model's context."""
    widest = max(len(window.token_ids) for window in workload.windows)
    if widest > max_tokens:
        raise EvaluationError(
            f"windows of {widest} tokens exceed the model's context of {max_tokens}; "
            "pass a smaller --window-tokens"
        )
    for item, prompt in zip(workload.items, workload.prompts, strict=True):
        needed = len(prompt.token_ids) + prompt.max_tokens
        if needed > max_tokens:
            raise EvaluationError(
                f"item {item.id} needs {needed} tokens with its answer, but the model's context "
                f"has {max_tokens}; use a suite with shorter items"
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


def _numerics(candidate: EngineTarget, text: TextProcessor) -> Numerics:
    found = candidate.numerics()
    return Numerics(
        description=candidate.description,
        device_class=found["device_class"],
        compute_dtype=found["compute_dtype"],
        kv_cache_dtype=found["kv_cache_dtype"],
        lm_head_scheme=found["lm_head_scheme"],
        chat_template_sha256=text.chat_template_sha256,
        num_threads=torch.get_num_threads(),
    )


def _notes(
    reference: ReferenceTarget,
    text: TextProcessor,
    base_template: str | None,
    job: Job,
    workload: Workload,
) -> tuple[str, ...]:
    """What a reader should know before trusting the numbers."""
    notes: list[str] = []
    if "de-quantized" in reference.description:
        notes.append(
            "The base was itself de-quantized from GGUF, so it sits on a coarse grid: schemes that "
            "meet that grid (asymmetric, small groups) look better here than on the original."
        )
    if text.chat_template is None:
        notes.append("The model has no chat template: messages were joined by blank lines.")
    elif base_template != text.chat_template_sha256:
        notes.append(
            "The chat templates of base and artifact differ in their text, but render every "
            "prompt of this suite alike."
        )
    if len(workload.windows) < job.amounts.num_windows:
        found = len(workload.windows)
        notes.append(f"The suite gave {found} of {job.amounts.num_windows} windows asked for.")
    if len(workload.items) < job.amounts.num_items:
        notes.append(
            f"The suite gave {len(workload.items)} of {job.amounts.num_items} items asked for."
        )
    return tuple(notes)
