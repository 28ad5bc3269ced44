"""The life of a serving process: bind, load, announce, serve, drain, exit with an honest code.

0 after a shutdown that was asked for, 1 when the engine died, 2 (as an exception the command line
turns into one line) when it could not start. Knows no routes and no tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn

from quant.artifact.stamp import judged_by
from runtime.config import ConfigError, EngineConfig
from runtime.engine.build import build
from runtime.server.app import ModelInfo, ServedModel, create_app
from runtime.server.engine_client import EngineClient, start_process
from runtime.server.engine_process import EngineFactory, load_engine
from runtime.server.messages import Loading
from runtime.server.verdict import (
    judge,
    judged_with,
    open_for_serving,
    refuse_unless_accepted,
    why_not_judged,
)
from runtime.text import TextProcessor

ENGINE_DEATH_GRACE_S = 2.0
FLUSH_S = 0.2  # for error frames to reach their clients before connections close
GRACEFUL_CLOSE_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What `runtime serve` was told about serving (EngineConfig is about computing).

    Attributes:
        max_num_queued: requests that may wait beyond max_num_seqs running ones; more get a 503.
            None takes four times max_num_seqs.
        shutdown_timeout_s: how long SIGTERM lets running requests finish.
        require_accepted: refuse artifacts not accepted by `evaluate` under these very numerics.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    max_num_queued: int | None = None
    shutdown_timeout_s: float = 30.0
    require_accepted: bool = False


Announce = Callable[[ServedModel, str], None]  # called once the URL answers
Watch = Callable[[Loading], None]  # called as layers come into place, before that


def serve(
    artifact: Path,
    engine_config: EngineConfig,
    config: ServerConfig,
    announce: Announce,
    watch: Watch = lambda _: None,
) -> int:
    """Serve an artifact until told to stop; returns the exit code.

    Raises ConfigError, ArtifactError, TextError or EngineStartError when it cannot start; the port
    is taken before anything is loaded.
    """
    _check_api_key(config.api_key)
    if config.require_accepted and engine_config.verify != "full":
        raise ConfigError(
            "--require-accepted: a verdict is about bytes, and --verify fast does not hash them; "
            "leave --verify at full"
        )
    with contextlib.closing(bind(config.host, config.port)) as listener:
        opened = open_for_serving(artifact)
        stamp, without = opened.stamp, why_not_judged(opened)
        if config.require_accepted:
            refuse_unless_accepted(stamp, artifact)
        text = TextProcessor.load(artifact)
        factory = partial(load_engine, artifact, engine_config, digest=opened.digest)

        def describe(numerics: dict[str, str]) -> ModelInfo:
            template = text.chat_template_sha256
            verdict, warning = judge(stamp, numerics, template, without=without)
            if config.require_accepted and warning is not None:
                raise ConfigError(
                    f"--require-accepted: {warning}; judge it as it runs here: evaluate {artifact} "
                    "with the same --device, --dtype and --kv-cache-dtype"
                )
            return ModelInfo(
                name=config.served_model_name or artifact.resolve().name,
                root=artifact.name,
                digest=opened.digest,
                verdict=verdict,
                warning=warning,
                gates=None if stamp is None else judged_by(stamp),
                remark=judged_with(stamp, build()),
            )

        return run_server(listener, text, factory, describe, config, announce, watch)


def run_server(
    listener: socket.socket,
    text: TextProcessor,
    factory: EngineFactory,
    describe: Callable[[dict[str, str]], ModelInfo],
    config: ServerConfig,
    announce: Announce,
    watch: Watch = lambda _: None,
) -> int:
    """Start the engine process and serve it on `listener`. No orphan survives this call."""
    connection, process, ready = start_process(factory, watch)
    try:
        max_num_seqs = ready.resolved.max_num_seqs
        queued = 4 * max_num_seqs if config.max_num_queued is None else config.max_num_queued
        client = EngineClient(
            connection, ready, max_in_flight=max_num_seqs + queued, process=process
        )
        model = ServedModel(client, text, describe(ready.numerics))
        return asyncio.run(_run(listener, model, config, announce))
    finally:
        process.kill()
        process.join()


async def _run(
    listener: socket.socket, model: ServedModel, config: ServerConfig, announce: Announce
) -> int:
    app = create_app(model, config.api_key)
    server = _HttpServer(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACEFUL_CLOSE_S,
        )
    )
    lifecycle = Lifecycle(server, model.client, config.shutdown_timeout_s)
    lifecycle.install()
    announcing = asyncio.ensure_future(_announce_when_up(server, listener, model, announce))
    try:
        await server.serve(sockets=[listener])
    except OSError as error:  # somebody else began to listen while the engine loaded
        raise ConfigError(f"cannot listen on port {config.port}: {error.strerror}") from error
    finally:
        announcing.cancel()
        await asyncio.to_thread(model.client.close)
    return lifecycle.exit_code


class Lifecycle:
    """Shutdown in all its forms. The first signal drains, the second ends at once."""

    def __init__(
        self, server: uvicorn.Server, client: EngineClient, shutdown_timeout_s: float
    ) -> None:
        self.exit_code = 0
        self._server = server
        self._client = client
        self._timeout_s = shutdown_timeout_s
        self._ending: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Take over signals and watch the engine, on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._client.on_death = self._on_engine_death
        self._client.run()

    def _on_signal(self) -> None:
        if self._client.accepting:
            self._client.accepting = False
            self._ending = asyncio.ensure_future(self._drain())
        else:
            self._client.fail_all("the server is shutting down")
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._client.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._client.num_in_flight:
            self._client.fail_all("the server is shutting down")
            await asyncio.sleep(FLUSH_S)
        self._server.should_exit = True

    def _on_engine_death(self) -> None:
        if self._server.should_exit:
            return
        self.exit_code = 1
        self._ending = asyncio.ensure_future(self._exit_soon())

    async def _exit_soon(self) -> None:
        await asyncio.sleep(ENGINE_DEATH_GRACE_S)
        self._server.should_exit = True


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: Lifecycle decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _announce_when_up(
    server: uvicorn.Server, listener: socket.socket, model: ServedModel, announce: Announce
) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    announce(model, f"http://{shown}:{port}")


def _check_api_key(key: str | None) -> None:
    """Only a key that can be sent: HTTP trims header values, and clients send ASCII."""
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("--api-key must be printable ASCII without spaces, and not empty")


def bind(host: str, port: int) -> socket.socket:
    """The listening address, taken before anything expensive. ConfigError when it is not free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop what listens there or choose another --port"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
