"""The HTTP API against a scripted engine, in process: shapes, limits, refusals, stop strings."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from runtime.server.app import create_app
from runtime.server.engine_client import EngineClient
from runtime.text import TextProcessor
from tests.runtime.server.in_process import served
from tests.runtime.server.scripted import Script, ScriptedEngine
from tests.runtime.server.tiny_tokenizers import STRICT, TOOLS, byte_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAYS = "alpha beta gamma"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.load(byte_level(tmp_path_factory.mktemp("tok")))


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    directory = tmp_path_factory.mktemp("strict")
    return TextProcessor.load(byte_level(directory, bos=True, template=STRICT))


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.load(byte_level(tmp_path_factory.mktemp("tools"), template=TOOLS))


def say(text: TextProcessor, what: str = SAYS, **fields: Any) -> Script:
    return Script(say=tuple(text.encode(what, add_special_tokens=False)), **fields)


def run(
    text: TextProcessor,
    script: Script,
    work: Callable[[httpx.AsyncClient], Awaitable[Any]],
    api_key: str | None = None,
    after: Callable[[ScriptedEngine], None] = lambda engine: None,
) -> Any:
    """`work` with a client of an app around `script`; checks that nothing is left behind."""

    async def main() -> Any:
        with served(text, script) as (model, engine):
            model.client.run()
            transport = httpx.ASGITransport(create_app(model, api_key), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                result = await work(client)
            await settled(model.client, engine)
            after(engine)
            return result

    return asyncio.run(main())


async def settled(client: EngineClient, engine: ScriptedEngine) -> None:
    """Everything ended on both sides of the pipe."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        idle = client.num_in_flight == client.num_waiting == client.stats.num_running == 0
        if not client.alive or (idle and not engine.has_work):
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"left behind: {client.num_in_flight} in flight, {client.stats}")


def post(text: TextProcessor, script: Script, path: str, **body: Any) -> httpx.Response:
    return run(text, script, lambda client: client.post(path, json=body))


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each SSE frame; checks the end marker."""
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def test_chat_answer_has_openais_shape(text: TextProcessor) -> None:
    body = post(text, say(text), CHAT, model="tiny", messages=HI).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["system_fingerprint"] == "wb-" + "d" * 12
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": SAYS, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    num_prompt = len(text.encode_chat(HI))
    num_said = len(text.encode(SAYS)) + 1  # and the end-of-text token
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_said,
        "total_tokens": num_prompt + num_said,
        "prompt_tokens_details": {"cached_tokens": num_prompt - 1},
    }


@pytest.mark.parametrize("include", [True, False, None])
def test_usage_in_the_stream_is_exactly_one_last_chunk(
    text: TextProcessor, include: bool | None
) -> None:
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    whole = post(text, say(text), CHAT, messages=HI, n=2).json()
    chunks = events(post(text, say(text), CHAT, messages=HI, n=2, stream=True, **options))
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    if include:
        assert chunks[-1]["choices"] == []
        assert chunks.pop()["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
        assert streamed_text(chunks, index) == SAYS


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "text_out"),
    [
        ("a g", "alpha bet"),
        ("beta gamma", "alpha "),
        (["gamma", "a gam"], "alpha bet"),
        ("alpha", ""),
        ("omega", SAYS),
    ],
)
def test_stop_strings(text: TextProcessor, stop: Any, text_out: str, tokens_per_step: int) -> None:
    script = say(text, tokens_per_step=tokens_per_step)
    whole = post(text, script, CHAT, messages=HI, stop=stop).json()
    chunks = events(
        post(text, script, CHAT, messages=HI, stop=stop, stream=True,
             stream_options={"include_usage": True})
    )  # fmt: skip
    assert whole["choices"][0]["message"]["content"] == text_out == streamed_text(chunks)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"] == chunks[-1]["usage"]
    num_tokens = whole["usage"]["completion_tokens"]
    ids = [*text.encode(SAYS), 2]
    assert text_out == SAYS or stop_found(text, ids[:num_tokens], stop)
    assert not stop_found(text, ids[: num_tokens - 1], stop)


def stop_found(text: TextProcessor, ids: list[int], stop: str | list[str]) -> bool:
    strings = [stop] if isinstance(stop, str) else stop
    return any(s in text.decode(ids) for s in strings)


def test_the_stop_string_can_be_kept(text: TextProcessor) -> None:
    body = post(text, say(text), CHAT, messages=HI, stop="a g", include_stop_str_in_output=True)
    assert body.json()["choices"][0]["message"]["content"] == "alpha beta g"


def test_stop_ids_end_without_their_text(text: TextProcessor) -> None:
    ids = text.encode(SAYS)
    body = post(text, say(text), COMPLETIONS, prompt="x", stop_token_ids=[ids[3]]).json()
    assert body["choices"][0]["text"] == text.decode(ids[:3])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 4


def test_min_tokens_holds_stop_strings_off(text: TextProcessor) -> None:
    body = post(text, say(text), COMPLETIONS, prompt="x", stop=["al", "gam"], min_tokens=4).json()
    assert body["choices"][0]["text"] == "alpha beta "


@pytest.mark.parametrize("tokens_per_step", [1, 2, 100])
@pytest.mark.parametrize("longer", ["alpine", "phantom of", "gamut"])
def test_a_stop_string_that_came_before_min_tokens_stays_without_effect(
    text: TextProcessor, longer: str, tokens_per_step: int
) -> None:
    """Also while its text is held back, because it may be the beginning of a longer one."""
    early = len(text.encode("al"))
    body = {"prompt": "x", "stop": ["al", longer], "min_tokens": early + 1}
    script = say(text, tokens_per_step=tokens_per_step)
    assert post(text, script, COMPLETIONS, **body).json()["choices"][0]["text"] == SAYS


@pytest.mark.parametrize("stop", [None, "a g", "beta gamma", "gamma"])
def test_logprobs_describe_exactly_the_text(text: TextProcessor, stop: str | None) -> None:
    said = SAYS + " \u5408\u540c caf\u00e9 \U0001f600"
    body = {"messages": HI, "logprobs": True, "top_logprobs": 3, "stop": stop}
    whole = post(text, say(text, said), CHAT, **body).json()["choices"][0]
    chunks = events(post(text, say(text, said), CHAT, stream=True, **body))
    content = whole["logprobs"]["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in content)
    assert data.decode() == whole["message"]["content"]
    assert all(entry["bytes"] for entry in content)
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    parts = [c["choices"][0] for c in chunks]
    streamed = [e for c in parts if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == content


def test_a_truncated_character_is_replaced_only_at_the_end(text: TextProcessor) -> None:
    said = "ok \U0001f600"
    num_tokens = len(text.encode(said))
    for limit in range(1, num_tokens + 1):
        body = {"prompt": "x", "max_tokens": limit}
        whole = post(text, say(text, said), COMPLETIONS, **body).json()["choices"][0]["text"]
        chunks = events(post(text, say(text, said), COMPLETIONS, stream=True, **body))
        assert streamed_text(chunks) == whole
        assert "\ufffd" not in whole[:-1]
        assert whole.rstrip("\ufffd") == said[: len(whole.rstrip("\ufffd"))]


def test_completions_of_several_prompts_with_n_and_echo(text: TextProcessor) -> None:
    prompts = ["one", "two", "three"]
    body = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 2}
    whole = post(text, say(text), COMPLETIONS, **body).json()["choices"]
    chunks = events(post(text, say(text), COMPLETIONS, stream=True, **body))
    ids = [text.encode(p) for p in prompts]
    by_ids = post(text, say(text), COMPLETIONS, **{**body, "prompt": ids}).json()["choices"]
    assert [c["index"] for c in whole] == list(range(6))
    for choice in whole:
        prompt = prompts[choice["index"] // 2]
        assert choice["text"] == prompt + "alpha"
        assert choice["finish_reason"] == "length"
        assert streamed_text(chunks, choice["index"]) == choice["text"]
    assert by_ids == whole


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_logprobs_score_the_prompt_as_lm_eval_needs(
    text: TextProcessor, stream: bool
) -> None:
    ids = text.encode("alpha pays")
    said = say(text, "")  # the generated token is end-of-text: it must be counted all the same
    body = {"prompt": [ids, ids[:4]], "echo": True, "logprobs": 1, "max_tokens": 1,
            "temperature": 0, "seed": 1234}  # fmt: skip
    response = post(text, said, COMPLETIONS, stream=stream, **body)
    if stream:
        choices = [c for chunk in events(response) for c in chunk["choices"] if c["logprobs"]]
        choices.sort(key=lambda choice: choice["index"])
    else:
        choices = response.json()["choices"]
    for choice, prompt in zip(choices, [ids, ids[:4]], strict=True):
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {len(prompt) + 1}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["tokens"][:-1] == [text.token_bytes(i).decode() for i in prompt]
        offsets = logprobs["text_offset"]
        assert [choice["text"][a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)] == (
            logprobs["tokens"][:-1]
        )
        pairs = zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
        assert all(value == max(top.values()) for value, top in pairs)


def test_max_tokens_0_scores_without_generating(text: TextProcessor) -> None:
    body = post(text, say(text), COMPLETIONS, prompt="alpha", echo=True, logprobs=0, max_tokens=0)
    choice = body.json()["choices"][0]
    assert choice["text"] == "alpha"
    assert len(choice["logprobs"]["tokens"]) == len(text.encode("alpha"))
    assert body.json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stop", [None, "beta gamut", "gamma"])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_the_same_streamed_and_point_at_their_tokens(
    text: TextProcessor, echo: bool, stop: str | None
) -> None:
    """Bytes that are no text among them, and tokens of which a part is held back for a while."""
    broken = [text.encode("\u00e9")[0], text.encode("\U0001f600")[-1]]
    said = [*text.encode("a \U0001f600b"), *broken, *text.encode(SAYS), broken[0]]
    script = Script(say=tuple(said))
    body = {"prompt": "x\u00e9", "logprobs": 1, "echo": echo, "stop": stop, "max_tokens": 99}
    whole = post(text, script, COMPLETIONS, **body).json()["choices"][0]
    chunks = events(post(text, script, COMPLETIONS, stream=True, **body))
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    columns = whole["logprobs"]
    assert {name: [v for part in parts for v in part[name]] for name in columns} == columns
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        if not token.startswith("bytes:") and offset < len(whole["text"]):
            assert whole["text"].startswith(token, offset), (token, offset)


def test_the_models_own_bos_has_no_width_in_offsets(strict: TextProcessor) -> None:
    body = post(strict, say(strict), COMPLETIONS, prompt="hi", echo=True, logprobs=1, max_tokens=1)
    logprobs = body.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][0] == "<s>"
    assert logprobs["text_offset"][:3] == [0, 0, 1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"audio": {"voice": "x"}}, "audio"),
        (CHAT, {"guided_json": {}}, "guided_json"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"conversation": HI}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"max_length": 1}}, "chat_template_kwargs"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"max_tokens": True}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 1.0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": "12"}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 2**63}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"n": 129}, "n"),
        (COMPLETIONS, {"n": 100}, "n"),  # more than the server holds at once
        (COMPLETIONS, {"temperature": -0.1}, "temperature"),
        (COMPLETIONS, {"top_p": 0}, "top_p"),
        (COMPLETIONS, {"stop": ""}, "stop"),
        (COMPLETIONS, {"stop": ["x"] * 10_000}, "stop"),
        (COMPLETIONS, {"stop": ["x" * 10_000]}, "stop"),
        (COMPLETIONS, {"stop": 5}, "stop"),
        (COMPLETIONS, {"logit_bias": {"350": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"1.0": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias.1"),
        (COMPLETIONS, {"stop_token_ids": [350]}, "stop_token_ids"),
        (COMPLETIONS, {"stop_token_ids": [True]}, "stop_token_ids.0"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
        (COMPLETIONS, {"prompt": [350]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**9]}, "prompt"),
        (COMPLETIONS, {"prompt": [2**63]}, "prompt"),
        (COMPLETIONS, {"prompt": ["12", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 1.0]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 1000}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"tempratur": 1}, "tempratur"),
        (COMPLETIONS, {"cache_salt": "x" * 2000}, "cache_salt"),
    ],
)
def test_refused_with_400_and_the_field(
    text: TextProcessor, path: str, body: dict[str, Any], param: str
) -> None:
    needed = {"messages": HI} if path == CHAT else {"prompt": "hi"}

    async def bad_then_good(client: httpx.AsyncClient) -> httpx.Response:
        refused = await client.post(path, json={**needed, **body})
        assert (await client.post(path, json=needed)).status_code == 200
        return refused

    error = error_of(run(text, say(text), bad_then_good))
    assert error["param"] == param
    assert param.split(".")[0] in error["message"]
    assert len(error["message"]) < 600


@pytest.mark.parametrize(
    "neutral",
    [{"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "text"}},
     {"user": "u"}, {"stop": None}, {"max_tokens": None}, {"logit_bias": {}}, {"top_k": -1}],
)  # fmt: skip
def test_fields_that_ask_for_nothing_pass(text: TextProcessor, neutral: dict[str, Any]) -> None:
    assert post(text, say(text), CHAT, messages=HI, **neutral).status_code == 200


def test_an_unknown_field_gets_the_nearest_name(text: TextProcessor) -> None:
    error = error_of(post(text, say(text), COMPLETIONS, prompt="x", max_token=3))
    assert "did you mean max_tokens?" in error["message"]
    assert error["code"] == "unknown_field"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}',
     b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000,
     b'{"max_tokens": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_garbled_bodies(text: TextProcessor, raw: bytes) -> None:
    error = error_of(run(text, say(text), lambda client: client.post(COMPLETIONS, content=raw)))
    assert len(error["message"]) < 300


def test_a_huge_body_is_413_before_it_is_read(text: TextProcessor) -> None:
    body = b'{"prompt": "' + b"x" * 9 * 2**20 + b'"}'
    response = run(text, say(text), lambda client: client.post(COMPLETIONS, content=body))
    error_of(response, 413)
    assert response.headers["connection"] == "close"


def test_errors_echo_little(text: TextProcessor) -> None:
    for body in (
        {"prompt": "x", "stop": {"k": "v" * 5000}}, {"prompt": "x", "k" * 5000: 1},
        {"prompt": "x", "model": "m" * 5000}, {"prompt": {"k": "\u5408" * 5000}},
    ):  # fmt: skip
        response = run(
            text, say(text), lambda client, body=body: client.post(COMPLETIONS, json=body)
        )
        assert len(response.content) < 900


@pytest.mark.parametrize(("num_prompt", "limit", "status"), [
    (255, 1, 200), (256, 1, 400), (255, 2, 400), (200, 56, 200), (200, 57, 400), (2560, 1, 400),
])  # fmt: skip
def test_the_context_fits_exactly_or_is_refused(
    text: TextProcessor, num_prompt: int, limit: int, status: int
) -> None:
    response = post(
        text, Script(), COMPLETIONS, prompt=[7] * num_prompt, max_tokens=limit, ignore_eos=True
    )
    if status == 200:
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert response.json()["usage"]["total_tokens"] == num_prompt + limit
    else:
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"]


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 4}, {"max_completion_tokens": 4}])
def test_a_conversation_too_long_is_about_messages(
    text: TextProcessor, limits: dict[str, int]
) -> None:
    messages = [{"role": "user", "content": "x" * 256}]
    error = error_of(post(text, Script(), CHAT, messages=messages, **limits))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "lower max_tokens" not in error["message"]  # it would not help


def test_a_limit_too_high_is_about_the_limit_that_was_sent(text: TextProcessor) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        error = error_of(post(text, Script(), CHAT, messages=HI, **{name: 256}))
        assert error["param"] == name
        assert "lower max_tokens" in error["message"]
    error = error_of(post(text, Script(), COMPLETIONS, prompt=[7] * 256))
    assert error["param"] == "prompt"
    assert "lower max_tokens" not in error["message"]


@pytest.mark.parametrize(("field", "value"), [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
])  # fmt: skip
def test_a_refused_feature_comes_with_what_works(
    text: TextProcessor, field: str, value: object
) -> None:
    error = error_of(post(text, say(text), CHAT, messages=HI, **{field: value}))
    assert (error["param"], error["code"]) == (field, "unsupported")
    assert error["message"].startswith(f"{field} is not supported yet")
    assert "prompt" in error["message"]
    assert "JSON" in error["message"]


def test_hopeless_texts_are_refused_without_tokenizing(text: TextProcessor) -> None:
    error = error_of(post(text, say(text), COMPLETIONS, prompt="x " * 500_000))
    assert "at least" in error["message"]


def test_chat_without_a_limit_may_fill_the_context(text: TextProcessor) -> None:
    body = post(text, Script(), CHAT, messages=HI, ignore_eos=True).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 256


def test_completions_default_to_16_tokens(text: TextProcessor) -> None:
    body = post(text, Script(), COMPLETIONS, prompt="abc", ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("messages", [
    "hi", [], None, [3], [{"role": "user"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": []}], [{"role": "user", "content": 5}], [{"content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["x"]}],
    [{"role": "assistant", "content": None}], [{"role": "user", "content": "x", "wat": 1}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}],
])  # fmt: skip
def test_bad_messages_are_pointed_at(text: TextProcessor, messages: Any) -> None:
    error = error_of(post(text, say(text), CHAT, messages=messages))
    assert error["param"].startswith("messages")


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_content_parts_are_joined_and_tool_results_kept(text: TextProcessor) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one = [{"role": "user", "content": "ab"}]
    for messages, plain in (
        ([{"role": "user", "content": parts}], one),
        ([*one, {"role": "tool", "content": "7", "tool_call_id": "1"}],
         [*one, {"role": "tool", "content": "7"}]),
        ([{"role": "developer", "content": "x"}], [{"role": "system", "content": "x"}]),
    ):  # fmt: skip
        response = post(text, say(text), CHAT, messages=messages)
        assert response.json()["usage"]["prompt_tokens"] == len(text.encode_chat(plain))


@pytest.mark.parametrize("content", [None, "", "I look it up."])
def test_tool_calls_reach_the_template_or_are_refused(
    text: TextProcessor, tools: TextProcessor, content: str | None
) -> None:
    turns = [*HI, {"role": "assistant", "content": content, "tool_calls": [CALL]}]
    response = post(tools, say(tools), CHAT, messages=turns)
    called = [*HI, {"role": "assistant", "tool_calls": [{**CALL, "function": {
        "name": "f", "arguments": {}}}]}]  # fmt: skip
    assert response.json()["usage"]["prompt_tokens"] == len(tools.encode_chat(called))
    error = error_of(post(text, say(text), CHAT, messages=turns))
    assert (error["param"], error["code"]) == ("messages[1].tool_calls", "unsupported")
    assert "no place for tool_calls" in error["message"]


def test_an_empty_list_of_tool_calls_is_none(text: TextProcessor, tools: TextProcessor) -> None:
    plain = [*HI, {"role": "assistant", "content": "The answer."}, *HI]
    turns = [plain[0], {**plain[1], "tool_calls": []}, plain[2]]
    for model in (text, tools):
        response = post(model, say(model), CHAT, messages=turns)
        assert response.json()["usage"]["prompt_tokens"] == len(model.encode_chat(plain))


def test_the_templates_refusal_is_a_400_with_its_message(strict: TextProcessor) -> None:
    twice = [{"role": "user", "content": "a"}] * 2
    error = error_of(post(strict, say(strict), CHAT, messages=twice))
    assert "roles must alternate" in error["message"]


def test_one_bos_on_every_path(strict: TextProcessor) -> None:
    async def count(client: httpx.AsyncClient) -> list[int]:
        chat = await client.post("/tokenize", json={"messages": HI})
        plain = await client.post("/tokenize", json={"prompt": strict.render_chat(HI)})
        assert chat.json()["tokens"] == plain.json()["tokens"]
        answered = await client.post(CHAT, json={"messages": HI})
        assert answered.json()["usage"]["prompt_tokens"] == chat.json()["count"]
        return list(chat.json()["tokens"])

    assert run(strict, say(strict), count).count(0) == 1


def test_tokenize_and_detokenize(text: TextProcessor) -> None:
    async def round_trip(client: httpx.AsyncClient) -> str:
        body = {"prompt": "caf\u00e9", "return_token_strs": True}
        tokens = (await client.post("/tokenize", json=body)).json()
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        error_of(await client.post("/detokenize", json={"tokens": [999]}))
        error_of(await client.post("/tokenize", json={}))
        info = (await client.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|im_end|>"
        answer = await client.post("/detokenize", json={"tokens": tokens["tokens"]})
        return str(answer.json()["prompt"])

    assert run(text, say(text), round_trip) == "caf\u00e9"


def test_models_and_unknown_model(text: TextProcessor) -> None:
    async def look(client: httpx.AsyncClient) -> None:
        card = (await client.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("tiny", 256)
        assert card["weighbridge"]["verdict"] == "not judged"
        assert (await client.get("/v1/models/tiny")).json() == card
        error_of(await client.get("/v1/models/other"), 404)
        body = {"model": "other", "prompt": "x"}
        assert error_of(await client.post(COMPLETIONS, json=body), 404)["param"] == "model"
        error_of(await client.get("/nowhere"), 404)
        error_of(await client.get(CHAT), 405)

    run(text, say(text), look)


def test_api_key_guards_everything_but_probes(text: TextProcessor) -> None:
    async def knock(client: httpx.AsyncClient) -> None:
        for key in (None, "Bearer wrong", "right", "Bearer right "):
            headers = {} if key is None else {"Authorization": key}
            error_of(await client.get("/v1/models", headers=headers), 401)
        right = {"Authorization": "Bearer right"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200
            assert (await client.head(path)).status_code == 200

    run(text, say(text), knock, api_key="right")


def test_request_id_is_echoed(text: TextProcessor) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        answer = await client.get("/health", headers={"X-Request-Id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        assert len((await client.get("/health")).headers["x-request-id"]) == 32

    run(text, say(text), ask)


@pytest.mark.parametrize("stream", [False, True])
def test_one_requests_fault_is_that_requests(text: TextProcessor, stream: bool) -> None:
    script = say(text, fault_at=3)

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        bad = await client.post(CHAT, json={"messages": HI, "stream": stream})
        good = await client.post(CHAT, json={"messages": HI, "max_tokens": 2})
        assert good.status_code == 200
        return bad

    check_failure(run(text, script, ask), stream, 500, "NaN")


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_breaks_fails_everybody_clearly(text: TextProcessor, stream: bool) -> None:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        body = {"messages": HI, "stream": stream}
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(3)))
        error_of(await client.get("/health"), 503)
        error_of(await client.post(CHAT, json={"messages": HI}), 503)
        return answers[0]

    check_failure(run(text, say(text, crash_at=5), ask), stream, 503, "died")


def check_failure(response: httpx.Response, stream: bool, status: int, word: str) -> None:
    if not stream:
        assert word in error_of(response, status)["message"]
        return
    *before, last, end = response.text.split("\n\n")
    assert end == ""
    assert word in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in response.text
    assert not any('"finish_reason":"' in frame for frame in before)


def test_a_full_queue_is_503_with_retry_after(text: TextProcessor) -> None:
    script = Script(step_s=0.01, max_num_seqs=2)

    async def flood(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True}
        first = [client.post(COMPLETIONS, json=body) for _ in range(14)]
        return list(await asyncio.gather(*first))

    answers = run(text, script, flood)
    refused = [a for a in answers if a.status_code == 503]
    assert len(refused) == 4  # 2 may run and 8 may wait
    for answer in refused:
        assert error_of(answer, 503)["code"] == "queue_full"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert [a.status_code for a in answers].count(200) == 10


def test_streams_get_their_own_tokens_only(text: TextProcessor) -> None:
    words = [f"stream-{i}-of-many " for i in range(12)]

    async def many(client: httpx.AsyncClient) -> list[str]:
        bodies = [
            {"prompt": w, "max_tokens": 2 * len(text.encode(w)), "stream": True, "ignore_eos": True}
            for w in words
        ]
        answers = await asyncio.gather(*(client.post(COMPLETIONS, json=b) for b in bodies))
        return [streamed_text(events(a)) for a in answers]

    assert run(text, Script(), many) == [word * 2 for word in words]


def test_metrics_have_vllms_names_and_add_up(text: TextProcessor) -> None:
    async def measure(client: httpx.AsyncClient) -> str:
        await client.post(CHAT, json={"messages": HI, "n": 2})
        await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
        await client.post(COMPLETIONS, json={"prompt": "x", "nope": 2})
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            shown = (await client.get("/metrics")).text
            if all(line in shown for line in at_last):
                break
            await asyncio.sleep(0.01)
        return shown

    labels = 'engine="0",model_name="tiny"'
    num_tokens = 2 * (len(text.encode(SAYS)) + 1) + 2
    at_last = [
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:num_requests_waiting{{{labels}}} 0.0",
        f"vllm:generation_tokens_total{{{labels}}} {float(num_tokens)}",
    ]
    shown = run(text, say(text), measure)
    assert (
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 2.0'
        in shown
    )
    assert not [line for line in at_last if line not in shown]
    assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 3.0" in shown
    for name in (
        "kv_cache_usage_perc", "prefix_cache_hits_total", "num_preemptions_total",
        "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_sum",
    ):  # fmt: skip
        assert f"vllm:{name}{{" in shown
