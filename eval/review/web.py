"""The rating page's server: 127.0.0.1 only, no outside reference, nothing about sides in it.

It has the pack and never the key. Answers travel as JSON and are put into the page as text.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.middleware.trustedhost import TrustedHostMiddleware

from eval.errors import EvaluationError, UsageError
from eval.review import ratings
from eval.review.pack import Item, Pack
from eval.review.ratings import History, Rating

HOST = "127.0.0.1"
HOST_NAMES = [HOST, "localhost"]
_FILES = {
    "page.html": ("/", "text/html; charset=utf-8"),
    "page.css": ("/page.css", "text/css; charset=utf-8"),
    "page.js": ("/page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Next = Callable[[Request], Awaitable[Response]]


class Who(BaseModel):
    """Whose turn it is."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rater: str


class NewRating(Who):
    """A rating of one item."""

    item: str
    rating: Rating


def make_app(pack: Pack, rater: str | None = None) -> FastAPI:
    """The application; `rater` fixes the name, otherwise the page asks for it."""
    app = FastAPI(title="Blind review", openapi_url=None, docs_url=None, redoc_url=None)
    _guard(app)
    _serve_files(app)
    _serve_pack(app, pack, rater)
    _take_ratings(app, pack, rater)
    return app


def _guard(app: FastAPI) -> None:
    """Only this page may talk to the server: no other host name, no other site."""

    @app.middleware("http")
    async def check_origin(request: Request, proceed: Next) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return JSONResponse({"error": "requests from another site are refused"}, 403)
        response = await proceed(request)
        response.headers.update(_HEADERS)
        return response

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOST_NAMES)

    @app.exception_handler(EvaluationError)
    async def in_words(request: Request, error: EvaluationError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400 if isinstance(error, UsageError) else 409)


def _serve_files(app: FastAPI) -> None:
    folder = files("eval.review") / "page"
    for name, (route, kind) in _FILES.items():
        app.add_api_route(route, _static((folder / name).read_bytes(), kind), methods=["GET"])


def _static(content: bytes, kind: str) -> Callable[[], Response]:
    def reply() -> Response:
        return Response(content, media_type=kind)

    return reply


def _serve_pack(app: FastAPI, pack: Pack, rater: str | None) -> None:
    @app.get("/api/pack")
    def about() -> dict[str, Any]:
        return {"num_items": len(pack.items), "redacted": pack.info.redacted, "rater": rater}

    @app.get("/api/items/{item}")
    def item_by_id(item: str) -> dict[str, Any]:
        if item not in pack.items:
            raise UsageError(f"the pack has no item {item!r}")
        found = pack.items[item]
        return {"id": item, "messages": _shown(found), "a": found.a, "b": found.b}


def _shown(item: Item) -> list[dict[str, str]]:
    """What a rater reads of a request: the tools that could be called, then the conversation."""
    tools = [json.dumps(tool, ensure_ascii=False, indent=1) for tool in item.tools or ()]
    declared = [{"role": "tools", "text": "\n".join(tools)}] if tools else []
    return [*declared, *({"role": m.role, "text": m.text} for m in item.messages)]


def _take_ratings(app: FastAPI, pack: Pack, fixed: str | None) -> None:
    def name_of(who: Who) -> str:
        name = ratings.rater_name(who.rater)
        if fixed is not None and name != fixed:
            raise UsageError(f"this page was started for {fixed!r}; restart without --rater")
        return name

    @app.post("/api/begin")
    def begin(who: Who) -> dict[str, Any]:
        history = ratings.read_history(pack, name_of(who))
        return {"order": ratings.order(pack, history.rater), **_state(history)}

    @app.post("/api/ratings")
    def rate(new: NewRating) -> dict[str, Any]:
        return _state(ratings.append(pack, name_of(new), new.item, new.rating))

    @app.post("/api/undo")
    def undo(who: Who) -> dict[str, Any]:
        name = name_of(who)
        undone = ratings.undo(pack, name)
        if undone is None:
            return {"item": None, **_state(ratings.read_history(pack, name))}
        return {"item": undone[0], **_state(undone[1])}


def _state(history: History) -> dict[str, Any]:
    return {
        "rater": history.rater,
        "ratings": {item: rating.model_dump() for item, rating in history.current.items()},
        "can_undo": bool(history.steps),
    }


def bind(port: int) -> socket.socket:
    """A listening socket on this machine only. UsageError when the port is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} cannot be used: {error.strerror}; pass another --port"
        ) from error
    return listener


def make_server(app: FastAPI) -> uvicorn.Server:
    """The server; `run(sockets=[listener])` serves until interrupted."""
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    )


@contextmanager
def serving(pack: Pack, rater: str | None = None) -> Iterator[str]:
    """The page served from a thread on any free port; its address."""
    listener = bind(0)
    server = make_server(make_app(pack, rater))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
