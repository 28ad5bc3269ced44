"""A thin closed-loop load test against a URL: any server with OpenAI's streaming chat API.

Threads and the standard library's HTTP client: one connection per request, no retries, no hidden
limits below `concurrency`. Knows nothing of our server.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

from rich.console import Group
from rich.table import Table
from rich.text import Text

from runtime.config import ConfigError

OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send: `prompt` with a running number before it, or `prompts` in turn as they are.

    `extra` goes into each request body as it is.
    """

    url: str
    num_requests: int = 64
    concurrency: int = 16
    prompt: str = "Hello"
    prompts: tuple[str, ...] = ()
    max_tokens: int = 64
    temperature: float = 0.0
    timeout_s: float = 300.0
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, number: int) -> dict[str, Any]:
        numbered = f"({number}) {self.prompt}"
        content = self.prompts[number % len(self.prompts)] if self.prompts else numbered
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request. kind: "ok" or why it failed; times in seconds, from sending the request."""

    kind: str
    ttft_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a run. Everything but the counts is over successful requests only."""

    sent: int
    ok: int
    failures: dict[str, int]
    concurrency: int
    duration_s: float
    output_tok_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]

    @property
    def failed_share(self) -> float:
        return 1 - self.ok / self.sent

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True, slots=True)
class Run:
    """Outcomes in the order they ended, and how long it all took."""

    outcomes: list[Outcome]
    duration_s: float


def check_writable(path: Path) -> None:
    """Raise ConfigError unless a report can be written there: before a load test, not after it."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from error


def run_load(load: Load) -> Run:
    """Keep `concurrency` requests in flight until `num_requests` were sent."""
    numbers = count()
    lock = threading.Lock()
    outcomes: list[Outcome] = []

    def client() -> None:
        while True:
            with lock:
                number = next(numbers)
            if number >= load.num_requests:
                return
            outcome = send(load, load.body(number))
            with lock:
                outcomes.append(outcome)

    _endpoint(load.url)
    started = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(min(load.concurrency,
               load.num_requests))]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Run(outcomes, time.perf_counter() - started)


def send(load: Load, body: dict[str, Any], path: str = "/v1/chat/completions") -> Outcome:
    """One request, start to end; never raises for what the network or the server does."""
    host, port, secure, prefix = _endpoint(load.url)
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(host, port, timeout=load.timeout_s)
    headers = {"Content-Type": "application/json"}
    if load.api_key is not None:
        headers["Authorization"] = f"Bearer {load.api_key}"
    started = time.perf_counter()
    try:
        connection.request("POST", prefix + path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            return Outcome(kind=f"http_{response.status}")
        return _follow(_frames(response, started + load.timeout_s), started)
    except TimeoutError:
        return Outcome(kind="timeout")
    except (http.client.HTTPException, ConnectionResetError, BrokenPipeError):
        return Outcome(kind="cut")
    except OSError:
        return Outcome(kind="connect")
    finally:
        connection.close()


def _endpoint(url: str) -> tuple[str, int, bool, str]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not a URL like http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return parts.hostname, parts.port or (443 if secure else 80), secure, prefix


def _frames(response: http.client.HTTPResponse, deadline: float) -> Iterator[str]:
    """Data of each SSE frame; comments and keep-alives are not frames."""
    while line := response.readline():
        if time.perf_counter() > deadline:
            raise TimeoutError
        if line.startswith(b"data:"):
            yield line[5:].strip().decode("utf-8", "replace")


def _follow(frames: Iterator[str], started: float) -> Outcome:
    first = last = 0.0
    num_pieces, num_tokens, ended = 0, None, False
    for frame in frames:
        if ended := frame == "[DONE]":
            break
        try:
            chunk = json.loads(frame)
        except ValueError:
            return Outcome(kind="error_frame")
        if not isinstance(chunk, dict) or "error" in chunk:
            return Outcome(kind="error_frame")
        if has_content(chunk):
            last = time.perf_counter()
            first = first or last
            num_pieces += 1
        num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    if not ended:
        return Outcome(kind="cut")
    if not num_pieces:
        return Outcome(kind="empty")
    return Outcome(
        kind=OK,
        ttft_s=first - started,
        total_s=last - started,
        num_tokens=num_pieces if num_tokens is None else num_tokens,
    )


def has_content(chunk: dict[str, Any]) -> bool:
    """Whether a chunk carries generated text (a role, an empty delta or a usage do not count)."""
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        if choice.get("text") or any(
            delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")
        ):
            return True
    return False


def summarize(run: Run, load: Load) -> Summary:
    """Count by kind; latency and throughput over the successful requests."""
    good = [outcome for outcome in run.outcomes if outcome.kind == OK]
    kinds = Counter(outcome.kind for outcome in run.outcomes if outcome.kind != OK)
    per_token = [(o.total_s - o.ttft_s) / (o.num_tokens - 1) for o in good if o.num_tokens > 1]
    return Summary(
        sent=len(run.outcomes),
        ok=len(good),
        failures=dict(sorted(kinds.items())),
        concurrency=min(load.concurrency, load.num_requests),
        duration_s=run.duration_s,
        output_tok_s=sum(outcome.num_tokens for outcome in good) / run.duration_s,
        ttft_ms=percentiles([outcome.ttft_s for outcome in good]),
        tpot_ms=percentiles(per_token),
        e2e_ms=percentiles([outcome.total_s for outcome in good]),
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the mean, in milliseconds; empty for no samples."""
    if not seconds:
        return {}
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    shown = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "mean": sum(seconds) / len(seconds)}
    return {name: round(1000 * value, 3) for name, value in shown.items()}


_HINTS = {
    "connect": "nothing answers at this URL; is the server up, and the port the right one?",
    "timeout": "no answer in time; raise --timeout or lower --concurrency",
    "cut": "the connection ended before the answer did; see the server's log",
    "empty": "the answers hold no text; see what the server says to one request by hand",
    "error_frame": "the server began to answer and then reported an error; see its log",
    "http_401": "the server wants a key; pass --api-key",
    "http_403": "the server refuses this key; pass another --api-key",
    "http_404": "no /v1/chat/completions at this URL, or no such model there",
    "http_503": "the server's queue is full or it is shutting down; lower --concurrency",
}


def hint(kind: str) -> str:
    """What to try about a kind of failure."""
    if kind in _HINTS:
        return _HINTS[kind]
    if kind.startswith("http_4"):
        return "the server refuses these requests; send one by hand to see its words"
    return "the server failed; see its log"


def render_report(summary: Summary) -> Group:
    """The figures for a terminal."""
    failed = ", ".join(f"{kind} {number}" for kind, number in summary.failures.items()) or "none"
    counted = Text(f"{summary.sent} requests sent, {summary.ok} ok, failed: {failed}")
    if not summary.ok:
        return Group(
            counted,
            Text(f"nothing to measure: every request failed in {summary.duration_s:.2f} s"),
            *(Text(f"{kind}: {hint(kind)}") for kind in summary.failures),
        )
    table = Table(box=None, pad_edge=False)
    for column in ("ms", "p50", "p90", "p99", "mean"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name, values in (("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms),
                         ("end to end", summary.e2e_ms)):  # fmt: skip
        table.add_row(name, *(f"{value:.1f}" for value in values.values()))
    return Group(
        counted,
        Text(
            f"concurrency {summary.concurrency}, {summary.duration_s:.2f} s, "
            f"{summary.output_tok_s:.1f} output tokens/s"
        ),
        table,
    )
