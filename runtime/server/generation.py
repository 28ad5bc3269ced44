"""Generation: the sequences of one HTTP request, from token ids to pieces of text.

Submits them, follows their events, detokenizes, finds stop strings, counts tokens and times.
Knows nothing of the shape of an answer; `runtime.server.answers` gives it one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from runtime.request import FinishReason, Request, TokenLogprobs
from runtime.server.engine_client import (
    EngineClient,
    EngineUnavailable,
    Lost,
    QueueFull,
    Refused,
    Rows,
)
from runtime.server.errors import ApiError, BadRequest, Unavailable
from runtime.server.metrics import Metrics, RequestTimer
from runtime.text import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sequence to generate and how to make text of it.

    keep_all_tokens: report log-probabilities of tokens that show no text too (scoring clients
    count entries); otherwise entries match the text sent.
    include_stop_token: a stop id's own text is part of the answer.
    """

    request: Request
    stream: TextStream
    keep_all_tokens: bool = False
    include_stop_token: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Log-probabilities of one token and the bytes it contributed to the text."""

    data: bytes
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new about one choice. `entries` describe exactly the tokens of `text`."""

    index: int
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of an answer; prompts count once however many choices they have."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class _Choice:
    """State of one sequence."""

    def __init__(self, index: int, job: Job, timer: RequestTimer) -> None:
        self.index = index
        self.job = job
        self.timer = timer
        self.num_tokens = 0
        self.cached_tokens = 0
        self.done = False
        self._logprobs: deque[TokenLogprobs | None] = deque()

    def advance(self, rows: Rows) -> Delta:
        """Take in what the engine said; the text that may be sent, and the end if this is it."""
        self.cached_tokens = rows.cached_tokens or self.cached_tokens
        ids = rows.token_ids
        hides_last = (
            rows.finish_reason is FinishReason.STOP and not self.job.include_stop_token and ids
        )
        shown = ids[:-1] if hides_last else ids
        self._logprobs.extend(rows.logprobs)
        stream = self.job.stream
        text = stream.push(shown)
        reason = "stop" if stream.stopped is not None else None
        self.num_tokens = stream.num_tokens
        if reason is None and rows.finish_reason is not None:
            reason = str(rows.finish_reason)
            text += stream.finish()
            self.num_tokens += bool(hides_last)
        self.done = reason is not None
        return Delta(
            index=self.index,
            text=text,
            entries=self._entries(),
            finish_reason=reason,
            prompt_logprobs=rows.prompt_logprobs,
        )

    def _entries(self) -> list[Entry]:
        settled = self.job.stream.take_settled()
        entries = [
            Entry(data=data, logprobs=logprobs)
            for data in settled
            if (logprobs := self._logprobs.popleft()) is not None
            and (data or self.job.keep_all_tokens)
        ]
        if self.done_by_id and self.job.keep_all_tokens and self._logprobs[0] is not None:
            entries.append(Entry(data=b"", logprobs=self._logprobs[0]))
        return entries

    @property
    def done_by_id(self) -> bool:
        """Whether a stop id, whose token is counted but not shown, ended the sequence."""
        return bool(self._logprobs) and self.num_tokens > self.job.stream.num_tokens


class Generation:
    """All sequences of one HTTP request. Use as a context manager; leaving it aborts the rest."""

    def __init__(self, client: EngineClient, metrics: Metrics, jobs: Sequence[Job], n: int) -> None:
        self._client = client
        self._metrics = metrics
        self._jobs = jobs
        self._n = n
        self._batch = client.open([job.request for job in jobs])
        self._choices: list[_Choice] = []

    def __enter__(self) -> Generation:
        """Submit. Unavailable (503) when the queue is full, draining or the engine is dead."""
        try:
            self._batch.__enter__()
        except QueueFull as error:
            self._metrics.count_rejection("queue_full")
            raise Unavailable(
                f"{error}; try again later", "queue_full", error.retry_after_s
            ) from error
        except EngineUnavailable as error:
            self._metrics.count_rejection("unavailable")
            raise Unavailable(str(error), "unavailable", 1) from error
        self._choices = [self._choice(i, job) for i, job in enumerate(self._jobs)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for choice in self._choices:
            if not choice.done:
                choice.timer.end("error" if isinstance(error, ApiError) else "abort")
        self._batch.__exit__(kind, error, None)

    async def admitted(self) -> None:
        """Wait until the engine has taken every sequence. BadRequest when it refuses one."""
        self._check(await self._batch.admission())

    async def deltas(self) -> AsyncIterator[Delta]:
        """Follow all sequences to their ends. ApiError when one fails."""
        async for event in self._batch.events():
            if self._choices[event.index].done:
                continue  # it ended at a stop string while this was under way
            self._check(event)
            if isinstance(event, Rows):
                yield self._advance(self._choices[event.index], event)

    def usage(self) -> Usage:
        """Tokens so far."""
        firsts = self._choices[:: self._n]
        return Usage(
            prompt_tokens=sum(len(choice.job.request.prompt) for choice in firsts),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
        )

    def _choice(self, index: int, job: Job) -> _Choice:
        num_prompt = len(job.request.prompt)
        limit = job.request.sampling.max_tokens
        room = self._client.resolved.max_model_len - num_prompt
        timer = RequestTimer(self._metrics, num_prompt, room if limit is None else limit, self._n)
        return _Choice(index, job, timer)

    def _check(self, event: object) -> None:
        if isinstance(event, Refused):
            raise BadRequest(event.message, event.param)
        if isinstance(event, Lost):
            raise Unavailable(event.message, "unavailable", 1)
        if isinstance(event, Rows) and event.finish_reason in (
            FinishReason.ERROR,
            FinishReason.ABORT,
        ):
            self._metrics.count_corrupted()
            raise ApiError(event.error or "the engine gave this request up", code="engine_error")

    def _advance(self, choice: _Choice, rows: Rows) -> Delta:
        delta = choice.advance(rows)
        if rows.token_ids:
            choice.timer.tokens(len(rows.token_ids))
        if rows.cached_tokens:
            self._metrics.count_cached(rows.cached_tokens)
        if delta.finish_reason is not None:
            choice.timer.end(delta.finish_reason)
            self._batch.drop(choice.index)
        return delta
