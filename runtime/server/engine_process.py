"""The child process: read commands, step the engine, send what came of it.

Knows the engine and the pipe; no text, no HTTP. It ends when told to, when the pipe closes (the
parent is gone) or when the engine as a whole fails, and then with a non-zero exit code.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from runtime.config import ConfigError, EngineConfig, ResolvedConfig
from runtime.request import EngineStats, Request, RequestError, StepOutput
from runtime.server.messages import Commands, Loading, Ready, StartFailed, StepMessage

logger = logging.getLogger(__name__)


class EngineLike(Protocol):
    """What the loop needs of an engine; `runtime.engine.engine.Engine` has it."""

    @property
    def resolved(self) -> ResolvedConfig: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> StepOutput: ...
    def stats(self) -> EngineStats: ...
    def make_ready(self) -> bool: ...


Report = Callable[[Loading], None]
# The engine and its numerics; it reports while it loads.
EngineFactory = Callable[[Report], tuple[EngineLike, dict[str, str]]]


def load_engine(
    path: Path, config: EngineConfig, report: Report, digest: str | None = None
) -> tuple[EngineLike, dict[str, str]]:
    """The real factory. Imports the engine here so that only the child pays for it.

    ConfigError: what lies at `path` by now is not the artifact `digest`, whose stamp was read.
    """
    from runtime.engine import numerics
    from runtime.engine.engine import Engine

    engine = Engine.from_artifact(
        path, config, lambda it: report(Loading(layers=it.layers, num_layers=it.num_layers))
    )
    if digest is not None and engine.resolved.artifact_digest != digest:
        raise ConfigError(
            f"{path} was replaced by another artifact while it was loaded; start anew"
        )
    return engine, numerics(engine)


def main(connection: Connection, factory: EngineFactory) -> None:
    """Entry point of the child. Signals are the parent's business; its death ends us at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        engine, numerics = factory(connection.send)
    except Exception as error:
        connection.send(_start_failure(error))
        sys.exit(2)
    gc.collect()
    gc.freeze()  # what is loaded stays: no later collection has to look at it again
    connection.send(Ready(resolved=engine.resolved, stats=engine.stats(), numerics=numerics))
    try:
        serve_commands(connection, engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # the parent went away; there is nobody left to tell


def serve_commands(connection: Connection, engine: EngineLike) -> None:
    """The loop: take all waiting commands (sleep only without work), step, send one message.

    Idle moments after the first answer go into what makes later steps quick, piece by piece.
    """
    has_answered = False
    while True:
        while has_answered and not engine.has_work and not connection.poll():
            if not engine.make_ready():
                break
        commands = _receive(connection, block=not engine.has_work)
        if any(c.shutdown for c in commands):
            return
        admitted, refused = _apply(engine, commands)
        output = engine.step() if engine.has_work else None
        has_answered |= output is not None and not engine.has_work
        connection.send(
            StepMessage(stats=engine.stats(), output=output, admitted=admitted, refused=refused)
        )


def _receive(connection: Connection, block: bool) -> list[Commands]:
    received: list[Commands] = []
    if block:
        received.append(connection.recv())
    while connection.poll():
        received.append(connection.recv())
    return received


def _apply(
    engine: EngineLike, commands: list[Commands]
) -> tuple[list[str], dict[str, tuple[str, str | None]]]:
    admitted: list[str] = []
    refused: dict[str, tuple[str, str | None]] = {}
    for command in commands:
        for request in command.add:
            try:
                engine.add(request)
                admitted.append(request.id)
            except RequestError as error:
                refused[request.id] = (str(error), error.param)
        for request_id in command.abort:
            engine.abort(request_id)
    return admitted, refused


def _start_failure(error: Exception) -> StartFailed:
    """Errors of the house's trees and of the machine are for the user; the rest are ours."""
    expected = isinstance(error, (ValueError, OSError, MemoryError)) or _is_ours(error)
    if not expected:
        logger.error("the engine failed to start", exc_info=error)
    message = str(error) or type(error).__name__
    return StartFailed(
        message=message if expected else f"{type(error).__name__}: {message}", expected=expected
    )


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in {"quant", "runtime"}


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
