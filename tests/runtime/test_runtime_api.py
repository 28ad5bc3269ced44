"""runtime.api.LLM: the engine in process, text in and out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, zip_longest
from pathlib import Path

import pytest

from runtime.api import LLM, GenerationError
from runtime.config import ConfigError
from runtime.request import FinishReason, RequestError, StepOutput
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


def test_log_probabilities_that_were_asked_for_are_in_the_answer(llm: LLM) -> None:
    plain = llm.generate("The fee", **GREEDY)[0]
    assert plain.logprobs is None
    assert plain.prompt_logprobs is None
    asked = llm.generate("The fee", logprobs=2, prompt_logprobs=0, **GREEDY)[0]
    assert asked.logprobs is not None
    assert asked.prompt_logprobs is not None
    assert [entry.token_id for entry in asked.logprobs] == list(asked.token_ids)
    assert all(entry.rank == 1 and len(entry.top_ids) == 2 for entry in asked.logprobs)
    said = [None if entry is None else entry.token_id for entry in asked.prompt_logprobs]
    assert said == [None, *llm.text.encode("The fee")[1:]]


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


def test_streams_beside_other_calls_lose_nothing(llm: LLM) -> None:
    """Each call steps the one engine: rows of another's sequence are for that one."""
    prompts = ["The fee", "def add(a"]
    wholes = [result.text for result in llm.generate(prompts, **GREEDY)]
    streams = [llm.stream(llm.text.encode(prompt), **GREEDY) for prompt in prompts]
    pieces = list(islice(zip_longest(*streams, fillvalue=""), 100))
    assert ["".join(mine) for mine in zip(*pieces, strict=True)] == wholes
    stream = llm.stream(llm.text.encode(prompts[0]), **GREEDY)
    first = next(stream)
    assert llm.generate(prompts[1], **GREEDY)[0].text == wholes[1]
    assert first + "".join(islice(stream, 100)) == wholes[0]
    assert not llm.engine.has_work


def test_a_sequence_given_up_is_its_own_calls_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(llm.text.encode("The fee"), **GREEDY)
    next(stream)
    with monkeypatch.context() as patched:
        row = {"request_ids": list(llm._runs), "token_ids": [-1], "logprobs": [None]}
        broken = StepOutput(
            **row, finish_reasons=[FinishReason.ERROR], errors=dict.fromkeys(llm._runs, "NaN")
        )
        outputs = iter([broken])
        real = llm.engine.step
        patched.setattr(llm.engine, "step", lambda: next(outputs, None) or real())
        assert llm.generate("def add(a", **GREEDY)[0].finish_reason == "length"
    with pytest.raises(GenerationError, match="NaN"):
        next(stream)
    assert not llm.engine.has_work


def test_one_stop_string_needs_no_list(llm: LLM) -> None:
    whole = llm.generate("The fee", **GREEDY)[0].text
    stop = whole[len(whole) // 2 :][:3]
    alone, listed = (llm.generate("The fee", stop=s, **GREEDY)[0].text for s in (stop, [stop]))
    assert alone == listed == whole[: whole.index(stop)]


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
