"""The server as a process: shutdown, a dead engine, vanished clients, the openai client.

Around the scripted engine, so that nothing here depends on how fast a model is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from runtime.config import ConfigError
from runtime.server.engine_client import EngineStartError, start_process
from runtime.server.messages import Commands, Loading
from runtime.server.serve import bind
from runtime.text import TextProcessor
from tests.runtime.server.scripted import Script, die_while_loading, make_engine
from tests.runtime.server.tiny_tokenizers import byte_level

REPO = Path(__file__).parents[3]
PATIENCE_S = 60.0  # of what comes at once, unless the machine is busy


class Server:
    """A server process; `url` once it answers. While `hold` is there, no request gets further."""

    def __init__(
        self, tokenizer: Path, config: dict[str, Any], script: dict[str, Any], hold: Path
    ) -> None:
        self.hold = hold
        script = {"hold": str(hold), **script}
        arguments = [str(tokenizer), json.dumps({"port": 0, **config}), json.dumps(script)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.server.launch", *arguments],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    @property
    def engine(self) -> psutil.Process:
        return next(c for c in self.children if "spawn_main" in " ".join(c.cmdline()))

    def end(self) -> int:
        """Wait for the exit; no child may survive it and nothing may be complained about."""
        code = self.process.wait(PATIENCE_S)
        psutil.wait_procs(self.children, timeout=PATIENCE_S)
        assert not [c for c in self.children if c.is_running()]
        return code

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_S)

    def gauge(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(f"vllm:{name}{{"))

    def is_idle(self) -> bool:
        return self.gauge("num_requests_running") == self.gauge("num_requests_waiting") == 0

    def is_draining(self) -> bool:
        return self.get("/health").status_code == 503


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tok"))


@pytest.fixture
def start(tokenizer: Path, tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def make(config: dict[str, Any] | None = None, **script: Any) -> Server:
        servers.append(Server(tokenizer, config or {}, script, tmp_path / "hold"))
        assert servers[-1].url, servers[-1].process.communicate()[1]
        return servers[-1]

    yield make
    for server in servers:
        server.process.kill()
        server.process.communicate()
        psutil.wait_procs(server.children, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def shared(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for tests that leave it running; it must stop cleanly and at once afterwards."""
    said = TextProcessor.load(tokenizer).encode("alpha beta gamma" * 8)
    config = {"max_num_queued": 40, "shutdown_timeout_s": 60.0}
    hold = tmp_path_factory.mktemp("shared") / "hold"
    server = Server(tokenizer, config, {"say": said, "step_s": 0.01}, hold)
    try:
        yield server
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        assert server.process.communicate() == ("", "")
    finally:
        server.process.kill()


def completion(server: Server, **body: Any) -> httpx.Response:
    body = {"prompt": "abc", "ignore_eos": True, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)


def test_sigterm_drains_running_requests_and_refuses_new_ones(start: Start) -> None:
    server = start(step_s=0.01)
    server.hold.touch()
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(completion, server, max_tokens=40, stream=i < 2) for i in range(4)]
        wait_for_running(server, 4)
        server.process.send_signal(signal.SIGTERM)
        wait_until(server.is_draining)
        assert completion(server).status_code == 503
        assert not any(future.done() for future in running)
        server.hold.unlink()
        answers = [future.result() for future in running]
    assert [a.status_code for a in answers] == [200] * 4
    assert all(a.text.endswith("data: [DONE]\n\n") for a in answers[:2])
    assert all(a.json()["usage"]["completion_tokens"] == 40 for a in answers[2:])
    assert server.end() == 0


@pytest.mark.parametrize("how", ["deadline", "second signal"])
def test_the_end_of_patience_is_an_error_frame(start: Start, how: str) -> None:
    server = start({"shutdown_timeout_s": 0.3 if how == "deadline" else 60.0}, step_s=0.01)
    server.hold.touch()
    with ThreadPoolExecutor() as pool:
        streamed = pool.submit(completion, server, max_tokens=200, stream=True)
        plain = pool.submit(completion, server, max_tokens=200)
        wait_for_running(server, 2)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            wait_until(server.is_draining)
            server.process.send_signal(signal.SIGINT)
        frames = streamed.result().text.split("\n\n")
        assert plain.result().status_code == 503
    assert "shutting down" in json.loads(frames[-2].removeprefix("data: "))["error"]["message"]
    assert server.end() == 0


def test_a_killed_engine_fails_its_requests_and_the_server(start: Start) -> None:
    server = start(step_s=0.01)
    server.hold.touch()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
    stream = client.completions.create(model="tiny", prompt="abc", max_tokens=200, stream=True)
    with ThreadPoolExecutor() as pool:
        streamed = pool.submit(completion, server, max_tokens=200, stream=True)
        plain = pool.submit(completion, server, max_tokens=200)
        wait_for_running(server, 3)
        server.engine.kill()
        assert plain.result().status_code == 503
        frames = streamed.result().text.split("\n\n")
    with pytest.raises(openai.APIError, match="engine process died"):
        list(stream)
    assert (
        "engine process died" in json.loads(frames[-2].removeprefix("data: "))["error"]["message"]
    )
    assert server.get("/health").status_code == 503
    assert server.end() == 1


def test_the_engine_goes_when_the_server_is_killed(start: Start) -> None:
    server = start(step_s=300.0)
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(completion, server)
        wait_for_running(server, 1, gauge="num_requests_waiting")
        server.process.kill()
        with pytest.raises(httpx.HTTPError):
            lost.result()
    assert server.end() == -signal.SIGKILL


def test_vanished_clients_leave_nothing_behind(shared: Server) -> None:
    server = shared
    server.hold.touch()
    host, port = server.url.removeprefix("http://").split(":")
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 2}
    sockets = []
    for i in range(20):
        raw = json.dumps({**body, "stream": i % 2 == 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head.encode() + (raw if i else raw[:5]))  # the first stops mid-body
        sockets.append(connection)
    wait_for_running(server, 4)
    wait_for_running(server, 34, "num_requests_waiting")
    for connection in sockets:
        connection.close()
    wait_until(server.is_idle)
    server.hold.unlink()
    assert completion(server, max_tokens=2).json()["choices"][0]["text"] == "alpha"
    ended = server.get("/metrics").text
    label = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} '
    assert label + f"{19 * 2}.0" in ended  # counted once each


def test_a_taken_port_is_reported() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        bind("no.such.host.invalid", 0)


def test_an_engine_that_cannot_load_says_why() -> None:
    with pytest.raises(ConfigError, match="bad shard"):
        start_process(partial(make_engine, Script(refuse_to_load="bad shard")))
    with pytest.raises(EngineStartError, match="died while loading"):
        start_process(die_while_loading)


def test_the_parent_hears_how_far_loading_is() -> None:
    heard: list[Loading] = []
    connection, process, ready = start_process(partial(make_engine, Script()), heard.append)
    try:
        assert heard == [Loading(layers=n, num_layers=2) for n in (1, 2)]
        assert ready.resolved.device == "cpu"
        connection.send(Commands(shutdown=True))
        process.join(timeout=PATIENCE_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        connection.close()


def test_the_openai_client_is_happy(shared: Server) -> None:
    client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="k", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    assert client.models.list().data[0].id == "tiny"
    whole = client.chat.completions.create(
        model="tiny", messages=messages, logprobs=True, top_logprobs=2, stop=["gamma"]
    )
    assert whole.choices[0].message.content == "alpha beta "
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "alpha beta gamma" * 8
    assert chunks[-1].usage is not None
    plain = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2, echo=True)
    assert [c.text for c in plain.choices] == ["aalpha", "balpha"]
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(
            model="tiny", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)


def wait_for_running(server: Server, count: int, gauge: str = "num_requests_running") -> None:
    wait_until(lambda: server.gauge(gauge) >= count)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
