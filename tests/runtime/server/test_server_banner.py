"""What `runtime serve` prints once it answers, on a terminal of 80 columns."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from runtime.server.app import ModelInfo, ServedModel
from runtime.server.banner import curl_example, loading_line, render_banner
from runtime.server.messages import Loading
from runtime.text import TextProcessor
from tests.runtime.server.in_process import served
from tests.runtime.server.scripted import Script
from tests.runtime.server.tiny_tokenizers import byte_level

URL = "http://127.0.0.1:8000"


def printed(item: object, *, soft_wrap: bool) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(item, soft_wrap=soft_wrap)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("api_key", [False, True])
@pytest.mark.parametrize("name", ["tiny", "a-long-name-" * 8, 'it\'s \\ "odd"'])
def test_the_example_pastes_into_a_shell(name: str, api_key: bool) -> None:
    shown = printed(curl_example(name, URL, api_key), soft_wrap=True)
    words = shlex.split(shown)
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    assert ("Authorization: Bearer KEY" in words) == api_key
    body = json.loads(words[-1])
    assert body["model"] == name
    assert body["temperature"] == 0
    assert body["max_tokens"] > 0
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    if name == "tiny":
        assert max(map(len, shown.splitlines())) <= 80


def test_the_banner_and_the_card_say_by_which_gates(tmp_path: Path) -> None:
    text = TextProcessor.load(byte_level(tmp_path))
    with served(text, Script()) as (model, _):
        info = ModelInfo(name="m", root="m", digest="d" * 64, verdict="accepted",
                         gates="own gates (sha256 abcd)")  # fmt: skip
        judged = ServedModel(model.client, text, info)
        shown = printed(render_banner(judged, URL), soft_wrap=False)
        assert "verdict accepted by own gates (sha256 abcd)" in shown
        assert judged.card()["weighbridge"]["gates"] == "own gates (sha256 abcd)"
        assert isinstance(curl_example("m", URL, False), Text)


def test_a_start_shows_its_layers() -> None:
    lines = [loading_line(Loading(layers=n, num_layers=32)) for n in (1, 32)]
    assert lines == ["1 of 32 layers loaded", "32 of 32 layers loaded; checking"]
