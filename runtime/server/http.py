"""HTTP manners: bodies with a limit, the race against a vanished client, SSE, middleware.

Knows nothing of models; plain ASGI throughout.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import uuid
from collections.abc import Coroutine
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.answers import Writer
from runtime.server.errors import ApiError, echo, error_body
from runtime.server.generation import Generation

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
MAX_REQUEST_ID_CHARS = 128


class BodyTooLarge(ApiError):
    """413."""

    status = 413
    type = "invalid_request_error"


class UnsupportedType(ApiError):
    """415."""

    status = 415
    type = "invalid_request_error"


def dumps(value: object) -> bytes:
    """Strict JSON (no NaN, no Infinity) in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(dumps(body), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The error object; 503 with Retry-After, a body that is not read closes the connection."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status in (413, 415):
        headers["Connection"] = "close"
    return json_response(error.body(), error.status, headers)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. BodyTooLarge as soon as more than `limit_bytes` are announced or sent."""
    _check_type(request.headers)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLarge(f"the body has {announced} bytes; at most {limit_bytes} are read")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes")
    return bytes(body)


def _check_type(headers: Headers) -> None:
    """UnsupportedType unless the body is (or does not say that it is not) plain JSON.

    The types refused are also all that a web page may send to a foreign server without asking it.
    """
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in ("", "application/json") and not kind.endswith("+json"):
        raise UnsupportedType(f"Content-Type {echo(kind)} is not supported; use application/json")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedType(f"Content-Encoding {echo(encoding)} is not supported; send it plain")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, but cancel it as soon as the client is gone (the body must have been read)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GenerationResponse(Response):
    """Runs a generation and answers with it, whole or as server-sent events.

    Submitting happens here and not in the route, so that one `with` spans everything that could be
    interrupted: whatever happens to the client, leaving it aborts what still runs.
    """

    def __init__(
        self, generation: Generation, writer: Writer, *, stream: bool, include_usage: bool
    ) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._stream = stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            with self._generation as generation:
                await generation.admitted()
                if started := self._stream:
                    await self._send_events(generation, send)
                    return
                deltas = [delta async for delta in generation.deltas()]
                body = self._writer.body(deltas, generation.usage())
        except ApiError as error:
            if not started:
                raise
            await _send_event(send, dumps(error.body()))
            await _end(send)
            return
        await json_response(body)(scope, receive, send)

    async def _send_events(self, generation: Generation, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        for chunk in self._writer.prelude():
            await _send_event(send, dumps(chunk))
        async for delta in generation.deltas():
            if (update := self._writer.chunk(delta)) is not None:
                await _send_event(send, dumps(update))
        if self._include_usage:
            await _send_event(send, dumps(self._writer.usage_chunk(generation.usage())))
        await _send_event(send, b"[DONE]")
        await _end(send)


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _send_event(send: Send, data: bytes) -> None:
    body = b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestIdMiddleware:
    """Echoes X-Request-Id, or makes one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS
        request_id = given if given and usable else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer KEY` everywhere but on OPEN_PATHS."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                body = error_body(
                    "missing or wrong API key", "authentication_error", None, "invalid_api_key"
                )
                response = json_response(body, 401, {"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)
