"""A load test of a URL: any server with OpenAI's streaming chat API, closed or open loop.

Closed: so many clients, each sends its next request when its last one ended. Open (`rate`): they
are due at random times, whatever the server does; what was sent later than it was due shows as lag.
Threads, one connection a request, no retries; the only cap is `concurrency`, and it is reported.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import quantiles
from typing import Any

from quant.artifact.staging import replace_files, staged
from runtime.bench_client import OK, Endpoint, Outcome, check_endpoint, send
from runtime.config import ConfigError

Message = dict[str, str]
# A prompt as it is sent: a user's words, or a whole conversation.
PromptLike = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send: `prompt` with a running number before it, or `prompts` in turn as they are.

    concurrency: clients, so the most requests in flight. rate: requests due per second, by a
    Poisson process of `seed`; None sends as answers come. `extra` goes into each request body.
    """

    url: str
    num_requests: int = 64
    concurrency: int = 16
    rate: float | None = None
    seed: int = 0
    prompt: str = "Hello"
    prompts: tuple[PromptLike, ...] = ()
    max_tokens: int = 64
    temperature: float = 0.0
    timeout_s: float = 300.0
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(url=self.url, timeout_s=self.timeout_s, api_key=self.api_key)

    @property
    def num_clients(self) -> int:
        return min(self.concurrency, self.num_requests)

    @property
    def asked_sha256(self) -> str:
        """Of the prompts and how they are answered; not of how many are sent, or when."""
        asked = [self.prompts or self.prompt, self.temperature, self.extra]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def body(self, number: int) -> dict[str, Any]:
        said: PromptLike = f"({number}) {self.prompt}"
        if self.prompts:
            said = self.prompts[number % len(self.prompts)]
        is_text = isinstance(said, str)
        return {
            "messages": [{"role": "user", "content": said}] if is_text else list(said),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }

    def due_times(self) -> list[float] | None:
        """Seconds from the start at which each request is due; None in a closed loop."""
        if self.rate is None:
            return None
        draw = random.Random(self.seed)
        gaps = [draw.expovariate(self.rate) for _ in range(self.num_requests - 1)]
        return list(accumulate([0.0, *gaps]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a run. Latency and throughput are over successful requests only.

    concurrency: the cap of this side. most_in_flight, mean_in_flight: what it came to. rate: asked
    for, and sent_rate: reached. lag_ms: how late requests were sent. num_prompts: different ones.
    max_tokens, asked_sha256: of the load, so that runs under other loads are not compared.
    in_one_piece: answers of several tokens that came in one chunk, which have no time per token.
    """

    sent: int
    ok: int
    failures: dict[str, int]
    concurrency: int
    most_in_flight: int
    mean_in_flight: float
    rate: float | None
    sent_rate: float
    lag_ms: dict[str, float]
    num_prompts: int
    max_tokens: int
    asked_sha256: str
    duration_s: float
    output_tok_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]
    in_one_piece: int

    @property
    def failed_share(self) -> float:
        return 1 - self.ok / self.sent

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True, slots=True)
class Run:
    """Outcomes in the order they ended, how long it all took, the most requests at once."""

    outcomes: list[Outcome]
    duration_s: float
    most_in_flight: int = 0
    sending_s: float = 0.0


def check_writable(path: Path) -> None:
    """Raise ConfigError unless a report can be written there: before a load test, not after it."""
    with _json_errors(path):
        if _is_special(path):
            path.open("a").close()
        else:
            staged(path).open("a").close()
            staged(path).unlink()


def write_report(path: Path, text: str) -> None:
    """Whole or not at all: a full disk leaves what was there. ConfigError on failure."""
    with _json_errors(path):
        if _is_special(path):
            path.write_text(text)
        else:
            replace_files(path.parent, {path.name: text.encode()}, durable=False)


def _is_special(path: Path) -> bool:
    """What nothing may take the place of: a link, or no file at all, as /dev/stdout."""
    return path.is_symlink() or (path.exists() and not path.is_file())


@contextmanager
def _json_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from error


def read_prompts(path: Path) -> tuple[PromptLike, ...]:
    """One prompt a line: as it stands, or JSON with `prompt` or `messages`; ConfigError if not."""
    try:
        # Not splitlines(): form feeds and U+2028 stand inside prompts.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {path}: holds no prompt; expected one a line")
    return tuple(_prompt_of(line, f"--prompts {path}:{n}") for n, line in numbered)


def _prompt_of(line: str, where: str) -> PromptLike:
    if not line.lstrip().startswith("{"):
        return line
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if isinstance(said := row.get("prompt"), str):
        return said
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return tuple(messages)
    raise ConfigError(f"{where}: expected `prompt` (text) or `messages` (a list of objects)")


def run_load(load: Load) -> Run:
    """Send `num_requests` requests; a fault of this side ends the run and is raised."""
    check_endpoint(load.endpoint)
    crew = _Crew(load)
    threads = [threading.Thread(target=crew.work, daemon=True) for _ in range(load.num_clients)]
    for thread in threads:
        thread.start()
    crew.begin()
    for thread in threads:
        thread.join()
    return crew.result()


class _Crew:
    """The clients' common state. They start together, so no thread's birth counts as lag."""

    def __init__(self, load: Load) -> None:
        self._load, self._due = load, load.due_times()
        self._lock, self._go = threading.Lock(), threading.Event()
        self._numbers = iter(range(load.num_requests))
        self._outcomes: list[Outcome] = []
        self._faults: list[BaseException] = []
        self._in_flight = self._most = 0
        self._started = self._last_sent = 0.0

    def begin(self) -> None:
        self._started = time.perf_counter()
        self._go.set()

    def work(self) -> None:
        """One client: request after request until none is left."""
        self._go.wait()
        free = self._started
        try:
            while (number := self._next()) is not None:
                due = free if self._due is None else self._started + self._due[number]
                time.sleep(max(0.0, due - time.perf_counter()))
                free = self._one(number, due)
        except BaseException as fault:  # a thread's death would lose its requests silently
            self._faults.append(fault)

    def _next(self) -> int | None:
        with self._lock:
            return None if self._faults else next(self._numbers, None)

    def _one(self, number: int, due: float) -> float:
        """Send one request; the time when it had ended."""
        body = self._load.body(number)
        with self._lock:
            self._in_flight += 1
            self._most = max(self._most, self._in_flight)
            sent = self._last_sent = time.perf_counter()
        outcome = send(self._load.endpoint, body)
        ended = time.perf_counter()
        with self._lock:
            self._in_flight -= 1
            self._outcomes.append(replace(outcome, lag_s=sent - due, busy_s=ended - sent))
        return ended

    def result(self) -> Run:
        if self._faults:
            raise self._faults[0]
        duration = time.perf_counter() - self._started
        return Run(self._outcomes, duration, self._most, self._last_sent - self._started)


def summarize(run: Run, load: Load) -> Summary:
    """Count by kind; latency and throughput over the successful requests."""
    good = [outcome for outcome in run.outcomes if outcome.kind == OK]
    kinds = Counter(outcome.kind for outcome in run.outcomes if outcome.kind != OK)
    several = [o for o in good if o.num_tokens > 1]
    timed = [o for o in several if o.num_pieces > 1]
    sent = len(run.outcomes)
    lags = [outcome.lag_s for outcome in run.outcomes]
    return Summary(
        sent=sent,
        ok=len(good),
        failures=dict(sorted(kinds.items())),
        concurrency=load.num_clients,
        most_in_flight=run.most_in_flight,
        mean_in_flight=round(sum(o.busy_s for o in run.outcomes) / run.duration_s, 2),
        rate=load.rate,
        sent_rate=round((sent - 1) / run.sending_s, 3) if run.sending_s else 0.0,
        lag_ms={**percentiles(lags), "max": round(1000 * max(lags, default=0.0), 3)},
        num_prompts=min(len(load.prompts) or sent, sent),
        max_tokens=load.max_tokens,
        asked_sha256=load.asked_sha256,
        duration_s=run.duration_s,
        output_tok_s=sum(outcome.num_tokens for outcome in good) / run.duration_s,
        ttft_ms=percentiles([outcome.ttft_s for outcome in good]),
        tpot_ms=percentiles([(o.total_s - o.ttft_s) / (o.num_tokens - 1) for o in timed]),
        e2e_ms=percentiles([outcome.total_s for outcome in good]),
        in_one_piece=len(several) - len(timed),
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the mean, in milliseconds; empty for no samples."""
    if not seconds:
        return {}
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    shown = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "mean": sum(seconds) / len(seconds)}
    return {name: round(1000 * value, 3) for name, value in shown.items()}


def repeats(load: Load) -> Iterator[str]:
    """What must be known of the prompts before figures are read."""
    if 0 < len(load.prompts) < load.num_requests:
        yield (
            f"{len(load.prompts)} prompts for {load.num_requests} requests: each is sent "
            f"{load.num_requests / len(load.prompts):.3g} times, and a prefix cache makes repeats "
            "faster than new prompts"
        )
