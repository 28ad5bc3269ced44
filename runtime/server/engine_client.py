"""The parent's face of the engine process: submit requests, get events, never hang.

Owns the pipe, one thread that reads it and one that writes it; everything else runs on the event
loop. A dead child turns into an error event for each request in flight. Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from runtime.config import ConfigError
from runtime.request import FinishReason, Request, StepOutput, TokenLogprobs
from runtime.server.engine_process import EngineFactory, main
from runtime.server.messages import Commands, Loading, Ready, StartFailed, StepMessage

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60


class EngineStartError(Exception):
    """The engine process could not start; one line, already logged in full where it is ours."""


class EngineUnavailable(Exception):
    """No new work is taken: the engine died or the server is shutting down."""


class QueueFull(Exception):
    """As many requests are in flight as may be. `retry_after_s` comes from the drain rate."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("the request queue is full")
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Rows:
    """Everything one message said about one request, in order."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The engine took the request."""

    index: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine refused the request: the user's mistake (message, param)."""

    index: int
    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The server gives the request up: the engine died, or the shutdown deadline passed."""

    index: int
    message: str


Event = Rows | Admitted | Refused | Lost


class Batch:
    """Requests that belong to one HTTP request. A context manager: leaving it aborts the rest."""

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._requests = requests
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._open = set(range(len(requests)))

    def __enter__(self) -> Batch:
        self._client._enter(self, self._requests)
        return self

    def __exit__(self, *_: object) -> None:
        for index in sorted(self._open):
            self.drop(index)

    def drop(self, index: int) -> None:
        """End one request early (a stop string was found, or nobody listens any more)."""
        if index in self._open:
            self._open.discard(index)
            self._client._abort(self._requests[index].id)

    def post(self, event: Event) -> None:
        """Called by the client: something happened to one of the requests."""
        if event.index not in self._open:
            return
        self._events.put_nowait(event)
        if isinstance(event, Refused | Lost) or (isinstance(event, Rows) and event.finish_reason):
            self._open.discard(event.index)

    async def admission(self) -> Event | None:
        """Wait until the engine took all requests: None, or the event that says it did not."""
        for _ in self._requests:
            event = await self._events.get()
            if not isinstance(event, Admitted):
                return event
        return None

    async def events(self) -> AsyncIterator[Event]:
        """Events of all requests until each has ended (or was dropped)."""
        while self._open or not self._events.empty():
            yield await self._events.get()


class EngineClient:
    """Talks to one engine process. Create it with `start_process` (or over any pipe, in tests)."""

    def __init__(
        self,
        connection: Connection,
        ready: Ready,
        *,
        max_in_flight: int,
        process: BaseProcess | None = None,
    ) -> None:
        self.resolved = ready.resolved
        self.stats = ready.stats
        self.max_in_flight = max_in_flight
        self.alive = True
        self.accepting = True  # False while draining
        self.on_death: Callable[[], None] = lambda: None
        self.on_step: Callable[[StepMessage], None] = lambda _: None
        self._connection = connection
        self._process = process
        self._in_flight: dict[str, tuple[Batch, int]] = {}
        self._outbox: queue.SimpleQueue[Commands | None] = queue.SimpleQueue()
        self._gaps_s: deque[float] = deque(maxlen=64)  # between endings, idle time left out
        self._gap_start = 0.0
        self._unsynced: set[str] = set()
        self._writer = threading.Thread(target=self._write, daemon=True)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet: in the engine's queue or still on their way to it."""
        return self.stats.num_waiting + len(self._unsynced)

    def run(self) -> None:
        """Start the pipe threads; call it on the event loop that will use the client."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        self._writer.start()

    def open(self, requests: Sequence[Request]) -> Batch:
        """A batch to enter with `with`; entering raises QueueFull or EngineUnavailable."""
        return Batch(self, requests)

    def fail_all(self, message: str) -> None:
        """Tell every request in flight that it is lost, and abort it."""
        for request_id, (batch, index) in list(self._in_flight.items()):
            batch.post(Lost(index, message))
            self._abort(request_id)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the child (by force if need be) and the threads. Blocks up to `timeout_s`."""
        self._outbox.put(Commands(shutdown=True))
        self._outbox.put(None)
        if self._writer.ident is not None:
            self._writer.join(timeout_s)
        if self._process is not None:
            self._process.join(timeout_s)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._connection.close()

    def retry_after_s(self) -> int:
        """Seconds until half the queue should have drained, at the rate of the last 64 endings."""
        if not self._gaps_s:
            return 1
        since_last = time.monotonic() - self._gap_start
        per_request = (sum(self._gaps_s) + since_last) / (len(self._gaps_s) + 1)
        return min(MAX_RETRY_AFTER_S, max(1, ceil(per_request * (1 + self.num_waiting / 2))))

    def _enter(self, batch: Batch, requests: Sequence[Request]) -> None:
        if not self.alive:
            raise EngineUnavailable("the engine process died")
        if not self.accepting:
            raise EngineUnavailable("the server is shutting down")
        if self.num_in_flight + len(requests) > self.max_in_flight:
            raise QueueFull(self.retry_after_s())
        if not self._in_flight:
            self._gap_start = time.monotonic()
        for index, request in enumerate(requests):
            self._in_flight[request.id] = (batch, index)
            self._unsynced.add(request.id)
        self._outbox.put(Commands(add=list(requests)))

    def _abort(self, request_id: str) -> None:
        if self._in_flight.pop(request_id, None) is not None and self.alive:
            self._note_ending()
            self._outbox.put(Commands(abort=[request_id]))

    def _note_ending(self) -> None:
        now = time.monotonic()
        self._gaps_s.append(now - self._gap_start)
        self._gap_start = now

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                message = self._connection.recv()
                loop.call_soon_threadsafe(self._dispatch, message)
        except (EOFError, OSError):
            pass  # the child is gone, or close() was called
        try:
            loop.call_soon_threadsafe(self._die)
        except RuntimeError:
            logger.debug("the event loop ended before the engine did")

    def _write(self) -> None:
        """One message for all commands that piled up; a full pipe blocks only this thread."""
        while True:
            first = self._outbox.get()
            batch = [first]
            while not self._outbox.empty():
                batch.append(self._outbox.get())
            commands = [c for c in batch if c is not None]
            try:
                if commands:
                    self._connection.send(merge(commands))
            except OSError:
                return  # the reader sees the closed pipe too and reports the death
            if None in batch:
                return

    def _die(self) -> None:
        if self.alive:
            self.alive = False
            self.fail_all("the engine process died")
            self._unsynced.clear()
            self.on_death()

    def _dispatch(self, message: StepMessage) -> None:
        self.stats = message.stats
        self._unsynced.difference_update(message.admitted, message.refused)
        for request_id in message.admitted:
            self._post(request_id, Admitted)
        for request_id, (text, param) in message.refused.items():
            self._post(request_id, partial(Refused, message=text, param=param))
            self._in_flight.pop(request_id, None)
        if message.output is not None:
            self._dispatch_output(message.output)
        self.on_step(message)

    def _dispatch_output(self, output: StepOutput) -> None:
        for request_id, rows in gather_rows(output).items():
            batch, index = self._in_flight.get(request_id, (None, -1))
            if batch is None:
                continue  # aborted while the step ran
            rows.index = index
            if rows.finish_reason is not None:
                del self._in_flight[request_id]
                self._note_ending()
            batch.post(rows)

    def _post(self, request_id: str, make: Callable[[int], Event]) -> None:
        if request_id in self._in_flight:
            batch, index = self._in_flight[request_id]
            batch.post(make(index))


def merge(commands: Sequence[Commands]) -> Commands:
    """All commands as one. Adds precede aborts there: an abort never comes before its add."""
    return Commands(
        add=[request for c in commands for request in c.add],
        abort=[request_id for c in commands for request_id in c.abort],
        shutdown=any(c.shutdown for c in commands),
    )


def gather_rows(output: StepOutput) -> dict[str, Rows]:
    """The columns of a step, turned into one Rows per request (its index is not known here)."""
    gathered: dict[str, Rows] = {}
    logprobs = output.logprobs or [None] * len(output.request_ids)
    columns = zip(
        output.request_ids, output.token_ids, output.finish_reasons, logprobs, strict=True
    )
    for request_id, token_id, finish_reason, logprob in columns:
        rows = gathered.setdefault(request_id, Rows(index=-1))
        if token_id >= 0:
            rows.token_ids.append(token_id)
            rows.logprobs.append(logprob)
        rows.finish_reason = finish_reason or rows.finish_reason
    for request_id in output.prompt_logprobs:  # may come before the first token
        gathered.setdefault(request_id, Rows(index=-1))
    for request_id, rows in gathered.items():
        rows.prompt_logprobs = output.prompt_logprobs.get(request_id)
        rows.cached_tokens = output.cached_tokens.get(request_id)
        rows.error = output.errors.get(request_id)
    return gathered


def start_process(
    factory: EngineFactory, watch: Callable[[Loading], None] = lambda _: None
) -> tuple[Connection, BaseProcess, Ready]:
    """Spawn the engine process and wait until it is loaded; `watch` is told how far it is.

    ConfigError: the child refused the artifact or a setting. EngineStartError: it failed otherwise.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs, factory), name="engine", daemon=True)
    process.start()
    theirs.close()
    try:
        while isinstance(answer := ours.recv(), Loading):
            watch(answer)
    except EOFError:
        process.join()
        raise EngineStartError(
            f"the engine process died while loading (exit code {process.exitcode})"
        ) from None
    except BaseException:  # interrupted: the child ignores signals, so it must be killed
        process.kill()
        process.join()
        raise
    if isinstance(answer, StartFailed):
        process.join()
        raise ConfigError(answer.message) if answer.expected else EngineStartError(answer.message)
    return ours, process, answer
