"""Bodies made to hurt: nobody else may notice, and the answer says what is wrong.

The scripted engine is behind all of it, so that a stall is the server's own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from runtime.request import Request
from runtime.server import engine_client
from runtime.server.app import create_app
from runtime.server.messages import Ready
from runtime.text import TextProcessor
from tests.runtime.server.in_process import served
from tests.runtime.server.scripted import Script, make_engine
from tests.runtime.server.tiny_tokenizers import byte_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONGEST_STALL_S = 1.5  # one C call over a whole body holds the loop; work per token may not


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.load(byte_level(tmp_path_factory.mktemp("tok")))


def ask(text: TextProcessor, path: str, raw: bytes, **headers: str) -> tuple[httpx.Response, float]:
    """The answer, and the longest stretch of work that held up the event loop; a plain request
    follows."""

    async def main() -> tuple[httpx.Response, float]:
        with served(text, Script()) as (model, _):
            model.client.run()
            transport = httpx.ASGITransport(create_app(model), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                gaps: deque[float] = deque([0.0])
                pulse = asyncio.ensure_future(beat(gaps))
                answer = await client.post(path, content=raw, headers=headers)
                pulse.cancel()
                after = await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 3})
                assert after.json()["choices"][0]["text"] == "abc"
                return answer, max(gaps)

    return asyncio.run(main())


async def beat(gaps: deque[float]) -> None:
    """CPU time between two beats, not wall time: others may have the processor meanwhile."""
    while True:
        started = time.process_time()
        await asyncio.sleep(0.01)
        gaps.append(time.process_time() - started)


def chat(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


SMALL_TEXT = "ab " * 600_000
HOSTILE = {
    "ids": (COMPLETIONS, json.dumps({"prompt": [1] * 2_000_000}).encode()),
    "ids to echo for many choices": (
        COMPLETIONS,
        json.dumps({"prompt": [1] * 2_000_000, "echo": True, "n": 8}).encode(),
    ),
    "text": (COMPLETIONS, json.dumps({"prompt": SMALL_TEXT}).encode()),
    "tiny lists": (COMPLETIONS, json.dumps({"prompt": [[]] * 1_000_000}).encode()),
    "wrong ids": ("/detokenize", json.dumps({"tokens": ["x"] * 1_000_000}).encode()),
    "metadata": (COMPLETIONS, json.dumps({"prompt": "a", "metadata": dict.fromkeys(
        map(str, range(200_000)), "x")}).encode()),
    "a role": (CHAT, chat({"role": SMALL_TEXT, "content": "x"})),
    "empty messages": (CHAT, chat(*[{"role": "user", "content": ""}] * 100_000)),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_large_bodies_are_refused_without_stopping_everybody(
    kind: str, text: TextProcessor
) -> None:
    path, raw = HOSTILE[kind]
    started = time.process_time()
    answer, stall_s = ask(text, path, raw)
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert stall_s < LONGEST_STALL_S
    assert time.process_time() - started < 6


def test_a_large_text_is_tokenized_beside_the_event_loop(text: TextProcessor) -> None:
    answer, stall_s = ask(text, "/tokenize", json.dumps({"prompt": SMALL_TEXT}).encode())
    assert answer.json()["count"] == len(answer.json()["tokens"])
    assert stall_s < LONGEST_STALL_S


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b'{"prompt": "\xed\xa0\x80"}', "utf-8"),  # a surrogate in UTF-8
        ('{"prompt": "a"}'.encode("utf-16"), "utf-8"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' comes twice"),
        (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "'1' comes twice"),
        (b'{"prompt": "a", "temperature": 1e999}', "finite"),
        (b'{"prompt": "a", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901, ""),
    ],
)
def test_json_that_is_not_quite(text: TextProcessor, raw: bytes, word: str) -> None:
    answer, _ = ask(text, COMPLETIONS, raw)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["prompt", "stop", "tools", "zzz", "n"])
def test_deep_nesting_is_a_400_wherever_it_is(text: TextProcessor, field: str) -> None:
    for depth in (500, 900, 930, 950, 970, 990, 100_000):
        raw = f'{{"{field}": {"[" * depth}{"]" * depth}}}'.encode()
        assert ask(text, COMPLETIONS, raw)[0].status_code == 400, depth


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_what_does_not_claim_to_be_json_is_415(
    text: TextProcessor, headers: dict[str, str]
) -> None:
    answer, _ = ask(text, COMPLETIONS, b'{"prompt": "a"}', **headers)
    assert answer.status_code == 415
    assert "not supported" in answer.json()["error"]["message"]


def test_json_with_a_charset_is_fine(text: TextProcessor) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert ask(text, COMPLETIONS, b'{"prompt": "a"}', **headers)[0].status_code == 200


def test_retry_after_leaves_idle_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 1 s each, an hour of nothing, then a burst: the hour says nothing about rate."""
    now = [0.0]
    monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine, numerics = make_engine(Script())
    ready = Ready(resolved=engine.resolved, stats=engine.stats(), numerics=numerics)
    ours, theirs = Pipe()
    with ours, theirs:
        client = engine_client.EngineClient(ours, ready, max_in_flight=20)
        for _ in range(8):
            with client.open([Request(id="one", prompt=(1,))]):
                now[0] += 1.0
        now[0] += 3600.0
        burst = client.open([Request(id=str(i), prompt=(1,)) for i in range(20)])
        with burst:
            refused = client.open([Request(id="late", prompt=(1,))])
            with pytest.raises(engine_client.QueueFull) as full, refused:
                pass
            assert 8 <= full.value.retry_after_s <= 11  # 20 wait: half of them need 10 s
            now[0] += 3600.0
            assert client.retry_after_s() == 60, "nothing has ended for an hour"
