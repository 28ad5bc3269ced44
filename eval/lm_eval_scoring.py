"""What lm-eval asks of a model, answered by our engine: log-likelihoods and text up to a stop.

Token ids and plain text only; knows nothing of lm-eval, its tasks or its classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.errors import EvaluationError, UsageError
from eval.targets.engine import EngineTarget
from runtime.config import EngineConfig
from runtime.engine.score import Score, ScoreItem
from runtime.request import FinishReason, Request, RequestError, SamplingParams
from runtime.text import TextProcessor
from runtime.text.stream import TextStream

# Items given to the engine at once: it packs them by itself; this is how often progress shows.
SCORED_AT_ONCE = 64

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """log P(continuation | context) in nats, and whether greedy decoding would have said it."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A prompt to go on from, up to the first of `until`. `sampling` holds everything else."""

    prompt: str
    until: tuple[str, ...]
    sampling: SamplingParams


class EngineScorer:
    """One artifact, loaded once, for any number of tasks.

    Attributes:
        target: the engine. text: its tokenizer and chat template.
        max_length: tokens it can read at once (the model's context, or the KV pool if smaller).
        num_truncated: requests so far that lost the beginning of their context.
    """

    def __init__(self, artifact: Path, config: EngineConfig) -> None:
        self.text = TextProcessor.load(artifact)
        self.target = EngineTarget(artifact, config)
        resolved = self.target.engine.resolved
        self.max_length = min(resolved.max_model_len, resolved.num_blocks * resolved.block_size)
        self.num_truncated = 0

    def likelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], advance: Advance
    ) -> list[Likelihood]:
        """One Likelihood per (context ids, continuation ids); equal pairs are computed once.

        A context too long for the model loses its beginning, as in lm-eval's own models; a
        continuation too long by itself is refused.

        Raises:
            EvaluationError: the engine gives NaN. UsageError: a continuation does not fit.
        """
        wanted = [self._fitted(context, continuation) for context, continuation in pairs]
        unique = list(dict.fromkeys(wanted))
        scores: dict[tuple[tuple[int, ...], int], Likelihood] = {}
        for start in range(0, len(unique), SCORED_AT_ONCE):
            part = unique[start : start + SCORED_AT_ONCE]
            found = self._score(part)
            for key, score in zip(part, found, strict=True):
                scores[key] = _likelihood(score, *key)
            advance(len(part))
        advance(len(wanted) - len(unique))
        return [scores[key] for key in wanted]

    def _fitted(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[tuple[int, ...], int]:
        """The tokens to score, cut from the left to what fits, and how many of them count."""
        if not context or not continuation:
            raise EvaluationError(
                f"a context of {len(context)} tokens with a continuation of {len(continuation)}: "
                "nothing can be scored; check the task's doc_to_text and doc_to_target"
            )
        if len(continuation) > self.max_length:
            raise UsageError(
                f"a continuation has {len(continuation)} tokens, the model reads "
                f"{self.max_length} at once; use a task with shorter answers"
            )
        whole = (*context, *continuation)
        self.num_truncated += len(whole) > self.max_length + 1
        return whole[-(self.max_length + 1) :], len(continuation)

    def _score(self, wanted: Sequence[tuple[tuple[int, ...], int]]) -> list[Score]:
        """Of tokens, how many of them count: those at the end."""
        items = [ScoreItem(token_ids=ids, num_given=len(ids) - count) for ids, count in wanted]
        try:
            return self.target.engine.score(items)
        except RequestError as error:
            raise EvaluationError(f"the engine refused to score a request: {error}") from error

    def generate(self, jobs: Sequence[Generation], advance: Advance) -> list[str]:
        """Texts up to the first stop string, which is left out; all jobs are in flight together.

        Raises:
            EvaluationError: the engine failed on one of them. UsageError: an answer of
            `max_tokens` leaves no room for a prompt.
        """
        engine = self.target.engine
        answers = [_Answer(self._stream(job)) for job in jobs]
        for index, job in enumerate(jobs):
            self._add(index, job)
        while engine.has_work:
            step = engine.step()
            rows = zip(step.request_ids, step.token_ids, step.finish_reasons, strict=True)
            for request_id, token, reason in rows:
                if reason is FinishReason.ERROR:
                    message = step.errors.get(request_id, "no reason given")
                    raise EvaluationError(f"the engine failed on a request: {message}")
                answer = answers[int(request_id)]
                if answer.is_done:
                    continue
                answer.add(token)
                if answer.stream.stopped is not None and reason is None:
                    engine.abort(request_id)
                answer.is_done = reason is not None or answer.stream.stopped is not None
                advance(int(answer.is_done))
        return [self._text(job, answer) for job, answer in zip(jobs, answers, strict=True)]

    def _stream(self, job: Generation) -> TextStream:
        return self.text.stream([stop for stop in job.until if stop])

    def _add(self, index: int, job: Generation) -> None:
        try:
            self.target.engine.add(self._request(index, job))
        except RequestError as error:
            raise UsageError(f"the engine refused a request: {error}") from error

    def _request(self, index: int, job: Generation) -> Request:
        num_wanted = job.sampling.max_tokens or 0
        room = self.max_length - num_wanted
        if room <= 0:
            raise UsageError(
                f"{num_wanted} tokens are asked for, the model holds {self.max_length} with the "
                "prompt; give the task a smaller max_gen_toks"
            )
        ids = self.text.encode(job.prompt)
        if not ids:
            raise EvaluationError("an empty prompt: check the task's doc_to_text")
        self.num_truncated += len(ids) > room
        return Request(id=str(index), prompt=tuple(ids[-room:]), sampling=job.sampling)

    def stop_ids(self, until: Sequence[str]) -> tuple[int, ...]:
        """Stop strings that are one special token each: they never show in the text."""
        found = []
        for stop in until:
            ids = self.text.encode(stop, add_special_tokens=False) if stop else []
            if len(ids) == 1 and self.text.decode(ids) == "":
                found.append(ids[0])
        return tuple(found)

    def _text(self, job: Generation, answer: _Answer) -> str:
        """As lm-eval cuts it: the whole text decoded, then split at each stop in turn."""
        text = self.text.decode(answer.token_ids)
        for stop in job.until:
            text = text.split(stop)[0] if stop else text
        return text


class _Answer:
    """One answer under way."""

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self.token_ids: list[int] = []
        self.is_done = False

    def add(self, token: int) -> None:
        if token >= 0:
            self.token_ids.append(token)
            self.stream.push([token])


def _likelihood(score: Score, tokens: tuple[int, ...], num_scored: int) -> Likelihood:
    total = math.fsum(score.nll)
    if not math.isfinite(total):
        raise EvaluationError(
            "the engine gave NaN or Inf for a request's log-likelihood; nothing can be measured"
        )
    is_greedy = score.top1 == list(tokens[-num_scored:])
    return Likelihood(logprob=-total, is_greedy=is_greedy)
