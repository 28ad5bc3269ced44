"""runtime.api.LLM: the engine in process, text in and out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.api import LLM
from runtime.config import ConfigError
from runtime.request import RequestError
from runtime.text import ChatTemplateError


@pytest.fixture(scope="module")
def llm(dense_artifact: Callable[..., Path], tiny_model: Callable[..., Path]) -> LLM:
    return LLM(dense_artifact(tiny_model("llama")), max_num_seqs=4)


GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


def test_prompts_together_answer_as_alone(llm: LLM) -> None:
    prompts = ["The customer shall", "def add(a", '{"party"']
    together = llm.generate(prompts, **GREEDY)
    assert [llm.generate(p, **GREEDY)[0].text for p in prompts] == [r.text for r in together]
    assert all(r.finish_reason == "length" and len(r.token_ids) == 16 for r in together)
    assert together[0].num_prompt_tokens == len(llm.text.encode(prompts[0]))


def test_streaming_joins_to_the_whole(llm: LLM) -> None:
    ids = llm.text.encode("The fee")
    whole = llm.generate("The fee", **GREEDY)[0].text
    assert "".join(llm.stream(ids, **GREEDY)) == whole
    assert not llm.engine.has_work


def test_a_stream_left_early_frees_everything(llm: LLM) -> None:
    stream = llm.stream(llm.text.encode("The fee"), **GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.stats().num_used_blocks == 0
    llm.engine.audit()


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    whole = llm.generate("The fee", **GREEDY)[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = llm.generate("The fee", stop=[stop], **GREEDY)[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert not llm.engine.has_work


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = llm.chat(messages, **GREEDY)
    assert answer.num_prompt_tokens == len(llm.text.encode_chat(messages))
    with pytest.raises(ChatTemplateError):
        llm.chat([{"role": "user"}], **GREEDY)


def test_refusals(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="context holds"):
        llm.generate(["ok", "x" * 5000], **GREEDY)
    assert not llm.engine.has_work
    with pytest.raises(ConfigError, match=r"without config\.json, so no model either"):
        LLM(tmp_path)
