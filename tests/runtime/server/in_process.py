"""A ServedModel around the scripted engine, in this process: for tests over in-process ASGI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from threading import Thread
from typing import Any

from runtime.server.app import ModelInfo, ServedModel
from runtime.server.engine_client import EngineClient
from runtime.server.engine_process import serve_commands
from runtime.server.messages import Ready
from runtime.text import TextProcessor
from tests.runtime.server.scripted import Script, ScriptedEngine, make_engine


def describe(numerics: dict[str, str]) -> ModelInfo:
    return ModelInfo(name="tiny", root="tiny", digest="d" * 64, verdict="not judged")


@contextmanager
def served(
    text: TextProcessor, script: Script, max_num_queued: int = 8
) -> Iterator[tuple[ServedModel, ScriptedEngine]]:
    """A ServedModel whose engine loop runs on a thread of this process (call `client.run()`)."""
    ours, theirs = Pipe()
    engine, numerics = make_engine(script)
    ready = Ready(resolved=engine.resolved, stats=engine.stats(), numerics=numerics)
    client = EngineClient(ours, ready, max_in_flight=script.max_num_seqs + max_num_queued)
    thread = Thread(target=_loop, args=(theirs, engine))
    thread.start()
    try:
        yield ServedModel(client, text, describe(numerics)), engine
    finally:
        client.close()
        thread.join()


def _loop(connection: Any, engine: ScriptedEngine) -> None:
    try:
        serve_commands(connection, engine)
    except (RuntimeError, EOFError, OSError):
        pass
    finally:
        connection.close()
