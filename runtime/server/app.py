"""The HTTP routes of one served model, in OpenAI's words.

Routes read, check and hand over; `GenerationResponse` does the rest. Knows no processes and no
signals: those are `runtime.server.serve`'s.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from runtime.server.answers import ChatWriter, CompletionWriter, Envelope, Writer
from runtime.server.engine_client import EngineClient
from runtime.server.errors import ApiError, BadRequest, NotFound, Unavailable, echo, error_body
from runtime.server.generation import Generation, Job
from runtime.server.http import (
    ApiKeyMiddleware,
    GenerationResponse,
    RequestIdMiddleware,
    error_response,
    json_response,
    read_body,
)
from runtime.server.intake import Intake
from runtime.server.metrics import Metrics
from runtime.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampling,
    TokenizeBody,
    parse_body,
    parse_messages,
)
from runtime.text import TextProcessor

MAX_BODY_BYTES = 8 * 2**20
SMALL_BODY_BYTES = 16 * 2**10  # handled on the event loop: a few milliseconds
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the server tells about the model it serves.

    name: served model name. root: where the artifact lies. digest: of the artifact.
    verdict: accepted, rejected, inconclusive, or "not judged". warning: why the verdict may not
    hold as the model is run here; None when it does. gates: by which gates it was judged.
    remark: what else is worth knowing of the verdict, and no reason to doubt it.
    """

    name: str
    root: str
    digest: str
    verdict: str
    warning: str | None = None
    gates: str | None = None
    remark: str | None = None

    @property
    def fingerprint(self) -> str:
        return f"wb-{self.digest[:12]}"


class ServedModel:
    """One model behind the API: the engine, its text side, its description, its metrics."""

    def __init__(self, client: EngineClient, text: TextProcessor, info: ModelInfo) -> None:
        self.client = client
        self.text = text
        self.info = info
        self.created = int(time.time())
        self.intake = Intake(text, client.resolved, client.max_in_flight)
        self.metrics = Metrics(
            client, info.name, {"digest": info.digest[:12], "verdict": info.verdict}
        )
        client.on_step = self.metrics.on_step

    async def read(
        self, request: Request, model: type[Body], use: Callable[[Body], Result]
    ) -> tuple[Body, Result]:
        """The checked body of a request for this model, and what `use` makes of it.

        All work that grows with the body happens in here, for large ones on a worker thread: the
        event loop must go on streaming to everybody else.
        """
        raw = await read_body(request, MAX_BODY_BYTES)

        def work() -> tuple[Body, Result]:
            body = self._parse(raw, model)
            return body, use(body)

        return work() if len(raw) <= SMALL_BODY_BYTES else await asyncio.to_thread(work)

    def _parse(self, raw: bytes, model: type[Body]) -> Body:
        body = parse_body(raw, model)
        name = getattr(body, "model", None)
        if name is not None and name != self.info.name:
            raise NotFound(
                f"the model {echo(name)} does not exist here; this server has {self.info.name!r}",
                "model",
                "model_not_found",
            )
        return body

    def envelope(self, prefix: str) -> Envelope:
        return Envelope(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.info.name,
            system_fingerprint=self.info.fingerprint,
        )

    def respond(self, body: Sampling, jobs: list[Job], writer: Writer) -> GenerationResponse:
        generation = Generation(self.client, self.metrics, jobs, body.n)
        return GenerationResponse(
            generation, writer, stream=body.stream, include_usage=body.include_usage
        )

    def card(self) -> dict[str, Any]:
        """The item of /v1/models."""
        return {
            "id": self.info.name,
            "object": "model",
            "created": self.created,
            "owned_by": "weighbridge",
            "root": self.info.root,
            "parent": None,
            "max_model_len": self.client.resolved.max_model_len,
            "weighbridge": {
                "verdict": self.info.verdict,
                "gates": self.info.gates,
                "remark": self.info.remark,
                "warning": self.info.warning,
                "artifact_digest": self.info.digest,
            },
        }


def create_app(model: ServedModel, api_key: str | None = None) -> FastAPI:
    """The ASGI application serving `model`."""
    app = FastAPI(title="Weighbridge", docs_url=None, redoc_url=None, openapi_url=None)
    _add_generation_routes(app, model)
    _add_text_routes(app, model)
    _add_model_routes(app, model)
    _add_operator_routes(app, model)
    _add_error_handlers(app)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)
    app.add_middleware(RequestIdMiddleware)
    return app


def _add_generation_routes(app: FastAPI, model: ServedModel) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body, jobs = await model.read(request, ChatBody, model.intake.chat_jobs)
        writer = ChatWriter(
            envelope=model.envelope("chatcmpl"),
            num_choices=len(jobs),
            logprobs=body.logprobs,
            usage_in_stream=body.include_usage,
            token_bytes=model.text.token_bytes,
        )
        return model.respond(body, jobs, writer)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, (jobs, echoed) = await model.read(
            request, CompletionBody, model.intake.completion_jobs
        )
        writer = CompletionWriter(
            envelope=model.envelope("cmpl"),
            num_choices=len(jobs),
            logprobs=body.logprobs is not None,
            usage_in_stream=body.include_usage,
            token_bytes=model.text.token_bytes,
            prompts=echoed,
        )
        return model.respond(body, jobs, writer)


def _add_text_routes(app: FastAPI, model: ServedModel) -> None:
    def tokenized(body: TokenizeBody) -> Response:
        if body.prompt is not None:
            ids = model.text.encode(body.prompt, body.add_special_tokens)
        else:
            messages = parse_messages(body.messages)
            ids = model.intake.chat_ids(messages, body.add_generation_prompt)
        pieces = (model.text.token_bytes(i).decode("utf-8", "replace") for i in ids)
        return json_response(
            {
                "count": len(ids),
                "max_model_len": model.client.resolved.max_model_len,
                "tokens": ids,
                "token_strs": list(pieces) if body.return_token_strs else None,
            }
        )

    def detokenized(body: DetokenizeBody) -> Response:
        vocab = model.client.resolved.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise BadRequest(f"tokens holds {token}; ids are 0 to {vocab - 1}", "tokens")
        return json_response({"prompt": model.text.decode(body.tokens, skip_special_tokens=False)})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return (await model.read(request, TokenizeBody, tokenized))[1]

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return (await model.read(request, DetokenizeBody, detokenized))[1]

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        text = model.text
        return json_response(
            {
                "vocab_size": text.vocab_size,
                "bos_token": text.bos_token,
                "eos_token": text.eos_token,
                "pad_token": text.pad_token,
                "chat_template": text.chat_template,
                "max_length": model.client.resolved.max_model_len,
            }
        )


def _add_model_routes(app: FastAPI, model: ServedModel) -> None:
    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> Response:
        return json_response({"object": "list", "data": [model.card()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != model.info.name:
            raise NotFound(
                f"the model {echo(name)} does not exist here", "model", "model_not_found"
            )
        return json_response(model.card())


def _add_operator_routes(app: FastAPI, model: ServedModel) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if not model.client.alive:
            raise Unavailable("the engine process died", "engine_dead")
        if not model.client.accepting:
            raise Unavailable("the server is shutting down", "draining")
        return json_response({"status": "ok"})

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        return Response(model.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.api_route("/version", methods=["GET", "HEAD"])
    async def show_version() -> Response:
        return json_response({"version": package_version()})


def _add_error_handlers(app: FastAPI) -> None:
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _on_api_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    body = error_body(f"{request.method} {request.url.path[:200]}: {error.detail}",
                      "invalid_request_error")  # fmt: skip
    return json_response(body, error.status_code, dict(error.headers or {}))


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(request: Request, error: Exception) -> Response:
    return json_response(error_body("internal error; see the server's log", "internal_error"), 500)


def package_version() -> str:
    """The installed distribution's version; "0" when run from a bare checkout."""
    try:
        return version("weighbridge")
    except PackageNotFoundError:
        return "0"
