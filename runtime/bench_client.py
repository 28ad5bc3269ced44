"""One request of a load test, start to end: what came, when, and how it ended.

The standard library's HTTP client with one connection a request: no pool, no retries and no limit
but the timeout. Knows nothing of our server.
"""

from __future__ import annotations

import errno
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from runtime.config import ConfigError

OK = "ok"
# No more open files or ports on this side: no fault of the server's.
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go. timeout_s: of one request, start to end."""

    url: str
    timeout_s: float = 300.0
    api_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request. kind: "ok" or why it failed; times in seconds, from sending the request.

    num_pieces: chunks that carried text; an answer in one piece has no time per token.
    lag_s: how much later it was sent than it was due. busy_s: until it had ended, however it did.
    """

    kind: str
    ttft_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    num_pieces: int = 2
    lag_s: float = 0.0
    busy_s: float = 0.0


def send(endpoint: Endpoint, body: dict[str, Any], path: str = "/v1/chat/completions") -> Outcome:
    """One request, start to end; never raises for what the network or the server does."""
    host, port, secure, prefix = _parts(endpoint.url)
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(host, port, timeout=endpoint.timeout_s)
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    started = time.perf_counter()
    try:
        connection.request("POST", prefix + path, json.dumps(body), headers)
        with connection.getresponse() as response:
            if response.status != 200:
                return Outcome(kind=f"http_{response.status}")
            return _follow(_frames(response, started + endpoint.timeout_s), started)
    except TimeoutError:
        return Outcome(kind="timeout")
    except (http.client.HTTPException, ConnectionResetError, BrokenPipeError):
        return Outcome(kind="cut")
    except OSError as error:
        return Outcome(kind="client_limit" if error.errno in _OWN_LIMITS else "connect")
    finally:
        connection.close()


def check_endpoint(endpoint: Endpoint) -> None:
    """ConfigError unless requests can be sent there, with this key."""
    _parts(endpoint.url)
    key = endpoint.api_key
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key must be printable ASCII: nothing else fits an HTTP header")


def _parts(url: str) -> tuple[str, int, bool, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from error
    plain = url.isascii() and url.isprintable() and " " not in url
    if not plain or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not a URL like http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return parts.hostname, port or (443 if secure else 80), secure, prefix


def _frames(response: http.client.HTTPResponse, deadline: float) -> Iterator[str]:
    """Data of each SSE frame; comments and keep-alives are not frames."""
    while line := response.readline():
        if time.perf_counter() > deadline:
            raise TimeoutError
        if line.startswith(b"data:"):
            yield line[5:].strip().decode("utf-8", "replace")


def _follow(frames: Iterator[str], started: float) -> Outcome:
    """The first token is there with the first text, or when the usage first counts one.

    A frame that only ends the answer or only sums up its usage (no choices) is neither.
    """
    first = last = 0.0
    num_pieces, num_tokens, ended = 0, None, False
    for frame in frames:
        if ended := frame == "[DONE]":
            break
        chunk = _chunk(frame)
        if chunk is None:
            return Outcome(kind="error_frame")
        counted = _num_tokens(chunk)
        has_text = has_content(chunk)
        if has_text or (counted and chunk.get("choices") and counted > (num_tokens or 0)):
            last = time.perf_counter()
            first = first or last
        num_pieces += has_text
        num_tokens = num_tokens if counted is None else counted
    if not ended:
        return Outcome(kind="cut")
    if not num_pieces:
        return Outcome(kind="empty")
    return Outcome(
        kind=OK,
        ttft_s=first - started,
        total_s=last - started,
        num_tokens=num_pieces if num_tokens is None else num_tokens,
        num_pieces=num_pieces,
    )


def _chunk(frame: str) -> dict[str, Any] | None:
    """A frame's object, None for an error and for what is no chunk at all."""
    try:
        chunk = json.loads(frame)
    except ValueError:
        return None
    if not isinstance(chunk, dict) or "error" in chunk:
        return None
    choices = chunk.get("choices") or []
    is_chunk = isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)
    return chunk if is_chunk else None


def _num_tokens(chunk: dict[str, Any]) -> int | None:
    usage = chunk.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return counted if isinstance(counted, int) else None


def has_content(chunk: dict[str, Any]) -> bool:
    """Whether a chunk carries generated text (a role, an empty delta or a usage do not count)."""
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        if choice.get("text") or any(
            delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")
        ):
            return True
    return False
