"""Answers over HTTP: every failure is counted by its kind; nothing is retried or guessed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from mock_server import Mock, chat, serving

from eval.amounts import Amounts
from eval.answer_log import AnswerLog
from eval.api import evaluate, make_job
from eval.errors import EvaluationError, TargetError, UsageError
from eval.targets.base import Answer, Prompt
from eval.targets.engine import EngineTarget
from eval.targets.server import ServerTarget, Service
from runtime.config import EngineConfig
from runtime.text import TextProcessor

DIGEST = "d" * 64


@pytest.fixture(scope="module")
def text(tiny_model: Callable[..., Path]) -> TextProcessor:
    return TextProcessor.load(tiny_model())


def prompts(text: TextProcessor, count: int) -> list[Prompt]:
    found = []
    for number in range(count):
        messages = ({"role": "user", "content": f"Case {number}?"},)
        ids = tuple(text.encode_chat(messages))
        found.append(Prompt(token_ids=ids, max_tokens=8, messages=messages))
    return found


def polite(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return chat("yes to " + body["messages"][-1]["content"])


@pytest.fixture
def served() -> Iterator[tuple[str, Mock]]:
    with serving(polite) as found:
        yield found


def target(url: str, text: TextProcessor, **options: Any) -> ServerTarget:
    return ServerTarget(Service(url=url, **options), text, DIGEST)


def silent(count: int) -> None:
    pass


def test_answers_come_back_in_order_and_as_asked(
    served: tuple[str, Mock], text: TextProcessor
) -> None:
    url, mock = served
    answers = target(url + "/v1/", text, api_key="k").generate(prompts(text, 9), silent)
    assert [a.text for a in answers] == [f"yes to Case {n}?" for n in range(9)]
    assert all(a.token_ids == tuple(text.encode(a.text or "")) for a in answers)
    body = mock.asked[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0.0, 8)


def test_e11_failures_are_counted_by_kind_and_never_retried(
    served: tuple[str, Mock], text: TextProcessor
) -> None:
    """20 % 503, 20 % errors in the body, 10 % cut, 10 % empty, 10 % without an end."""
    url, mock = served
    mock.plan = ["ok", "503", "error frame", "cut", "empty", "no end", "503", "no choices", "ok",
                 "no text"]  # fmt: skip
    kept: list[Answer] = []
    with pytest.raises(TargetError) as caught:
        target(url, text, concurrency=4).generate(
            prompts(text, 20), silent, lambda place, answer: kept.append(answer)
        )
    assert "failed 16 of 20 requests (cut 2, http_503 4, malformed 8, unfinished 2)" in str(
        caught.value
    )
    assert caught.value.exit_code == 4
    assert len(mock.asked) == 20
    assert len(kept) == 4


def test_a_server_that_says_nothing_times_out(
    served: tuple[str, Mock], text: TextProcessor
) -> None:
    url, mock = served
    mock.reply = lambda path, body: time.sleep(0.6)
    with pytest.raises(TargetError, match=r"1 of 1 requests \(timeout 1\)"):
        target(url, text, timeout_s=0.1).generate(prompts(text, 1), silent)


def test_a_server_that_drips_times_out_in_all(
    served: tuple[str, Mock], text: TextProcessor
) -> None:
    """Each byte comes in time, the answer never ends."""
    url, mock = served
    mock.plan = ["drip"]
    with pytest.raises(TargetError, match=r"1 of 1 requests \(timeout 1\)"):
        target(url, text, timeout_s=0.3).generate(prompts(text, 1), silent)


def test_half_a_surrogate_pair_is_no_answer(served: tuple[str, Mock], text: TextProcessor) -> None:
    url, mock = served
    mock.reply = lambda path, body: chat("\ud800")
    with pytest.raises(TargetError, match=r"malformed 1.*surrogate"):
        target(url, text).generate(prompts(text, 1), silent)


def test_likelihoods_that_are_no_numbers(served: tuple[str, Mock], text: TextProcessor) -> None:
    url, mock = served
    for nonsense in (float("nan"), float("-inf"), 3.0, True, "x"):
        mock.reply = lambda path, body, said=nonsense: {
            "choices": [{"logprobs": {"token_logprobs": [said] * 200}}]
        }
        with pytest.raises(TargetError, match="no number of at most 0"):
            target(url, text).choose([choice(text)], silent)


def test_e13_as_many_requests_are_in_flight_as_asked(
    served: tuple[str, Mock], text: TextProcessor
) -> None:
    """No cap of the HTTP client's own, and none above what was asked."""
    url, mock = served

    def when_all_are_here(path: str, body: dict[str, Any]) -> Any:
        deadline = time.monotonic() + 60
        while mock.most_in_flight < 120 and time.monotonic() < deadline:
            time.sleep(0.05)
        return chat("x")

    mock.reply = when_all_are_here
    server = target(url, text, concurrency=120)
    server.generate(prompts(text, 121), silent)
    assert mock.most_in_flight == 120
    mock.most_in_flight = 0
    mock.reply = polite
    server.at(1).generate(prompts(text, 5), silent)
    assert mock.most_in_flight == 1


def test_a_prompt_that_is_read_otherwise_is_an_error(
    served: tuple[str, Mock], text: TextProcessor
) -> None:
    """A BOS or a template applied twice shows in the number of prompt tokens."""
    url, mock = served
    [prompt] = prompts(text, 1)
    mock.reply = lambda path, body: chat("x", prompt_tokens=len(prompt.token_ids))
    target(url, text).generate([prompt], silent)
    mock.reply = lambda path, body: chat("x", prompt_tokens=len(prompt.token_ids) + 1)
    with pytest.raises(TargetError, match="BOS or template applied twice"):
        target(url, text).generate([prompt], silent)


def test_servers_that_are_not_the_one(served: tuple[str, Mock], text: TextProcessor) -> None:
    url, mock = served
    with pytest.raises(TargetError, match="nobody answers"):
        target("http://127.0.0.1:9", text)
    with pytest.raises(UsageError, match="is not a URL"):
        target("localhost:8000", text)
    with pytest.raises(UsageError, match="serves tiny; name the model with --served-model"):
        target(url, text, model="other")
    mock.models.append({"id": "second"})
    with pytest.raises(UsageError, match="serves tiny, second"):
        target(url, text)
    assert target(url, text, model="second").service.model == "second"
    mock.models[1]["weighbridge"] = {"artifact_digest": "e" * 64}
    with pytest.raises(TargetError, match="serves the artifact eeee"):
        target(url, text, model="second")


def choice(text: TextProcessor) -> Prompt:
    ids = tuple(text.encode("Is it?"))
    return Prompt(token_ids=ids, max_tokens=0, choices=((5, 6), (7,)))


def echoed(extra: int = 1) -> Callable[[str, dict[str, Any]], Any]:
    """Each token's log-probability is minus its id; the generated token's comes last."""

    def reply(path: str, body: dict[str, Any]) -> Any:
        assert path == "/v1/completions"
        assert (body["echo"], body["logprobs"], body["max_tokens"]) == (True, 1, 1)
        values = [None, *(-float(i) for i in body["prompt"][1:]), *[-99.0] * extra]
        values = values[: len(body["prompt"]) + extra]
        return {"choices": [{"text": "", "logprobs": {"token_logprobs": values}}]}

    return reply


def test_likelihoods_are_of_the_choice_alone(served: tuple[str, Mock], text: TextProcessor) -> None:
    url, mock = served
    mock.reply = echoed()
    [answer] = target(url, text).choose([choice(text)], silent)
    assert answer.choice_logprobs == (-11.0, -7.0)


def test_a_server_without_likelihoods_says_so(
    served: tuple[str, Mock], text: TextProcessor
) -> None:
    url, mock = served
    mock.plan = ["400"]
    with pytest.raises(TargetError, match="gives no likelihoods of a prompt .*no room"):
        target(url, text).choose([choice(text)], silent)
    mock.plan, mock.reply = ["ok"], echoed(-1)
    with pytest.raises(TargetError, match="log-probabilities for .* prompt tokens"):
        target(url, text).choose([choice(text)], silent)
    mock.reply = lambda path, body: {"choices": [{"text": "only the answer"}]}
    with pytest.raises(TargetError, match="`echo` with no log-probabilities"):
        target(url, text).choose([choice(text)], silent)


def test_tool_calls_a_server_parsed(served: tuple[str, Mock], text: TextProcessor) -> None:
    url, mock = served
    call = {"name": "f", "arguments": "{}"}
    message = {"content": None, "tool_calls": [{"type": "function", "function": call}]}
    mock.reply = lambda path, body: {
        "choices": [{"message": message, "finish_reason": "tool_calls"}]
    }
    [answer] = target(url, text).generate(prompts(text, 1), silent)
    assert (answer.text, answer.tool_calls, answer.finish) == ("", (call,), "stop")


@pytest.fixture(scope="module")
def real(
    taught_model: Path, dense_artifact: Callable[[Path], Path]
) -> tuple[Path, Callable[[str, dict[str, Any]], Any]]:
    """A dense artifact, and a reply function that runs it."""
    made = dense_artifact(taught_model)
    engine, text, lock = EngineTarget(made, EngineConfig()), TextProcessor.load(made), Lock()

    known: dict[tuple[int, ...], Answer] = {}

    def reply(path: str, body: dict[str, Any]) -> Any:
        ids = tuple(text.encode_chat(body["messages"]))
        with lock:
            if ids not in known:
                prompt = Prompt(token_ids=ids, max_tokens=body["max_tokens"])
                [known[ids]] = engine.generate([prompt], silent)
        return chat(text.decode(known[ids].token_ids), known[ids].finish, prompt_tokens=len(ids))

    return made, reply


def settings(suite_dir: Path, cache_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {"suite": suite_dir, "cache": cache_dir, "out": tmp_path / "out", "windows": 24,
            "window_tokens": 48, "items": 60}  # fmt: skip


def test_the_same_suite_alone_and_under_load(
    real: tuple[Path, Any], suite_dir: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """A server whose batches change its answers passes alone and is caught among others."""
    made, reply = real
    options = settings(suite_dir, cache_dir, tmp_path)
    copy = shutil.copytree(made, tmp_path / "art", ignore=shutil.ignore_patterns("gate.json"))
    with serving(reply) as (url, mock):
        service = Service(url=url)
        verdict = evaluate(copy, against=service, concurrency=(1, 6), **options)
        assert verdict.exit_code == 0
        assert 2 <= mock.most_in_flight <= 6
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        for name in ("load_text_agreement", "load_check_agreement"):
            assert report["measurements"][name]["estimate"] == 1
        assert url in report["numerics"]["description"]
        assert not (copy / "gate.json").exists()
        assert report["next"] == []

        def crowded(path: str, body: dict[str, Any]) -> Any:
            said = reply(path, body)
            number = int(body["messages"][-1]["content"].split()[1].rstrip("?"))
            if number % 3 == 0 and mock.crowd:
                said["choices"][0]["message"]["content"] += "}"
            return said

        mock.crowd = False
        mock.reply = crowded
        mock.asked.clear()
        done = Mock.leave

        def leave(self: Mock) -> None:
            done(self)
            self.crowd = len(self.asked) >= 60

        mock.leave = leave.__get__(mock)
        verdict = evaluate(copy, against=service, concurrency=(1, 6), **options)
        assert verdict.result == "rejected"
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        agreed = report["measurements"]["load_check_agreement"]["estimate"]
        assert 0.5 < agreed < 0.8
        assert any("part at token" in note for note in report["notes"])

        mock.asked.clear()
        evaluate(copy, against=service, concurrency=(6, 6), **options)
        assert len(mock.asked) == 2 * 60
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["measurements"]["load_check_agreement"]["estimate"] < 1

        gates = tmp_path / "gates.yaml"
        gates.write_text(
            "version: 1\nreview: {required: true}\nmetrics: {top1_agreement: {min: 0.5}}\n"
        )
        verdict = evaluate(copy, against=service, concurrency=(6,), gates=gates, **options)
        assert verdict.exit_code == 3
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["next"][-1].endswith("--no-stamp")


def test_a_run_that_failed_half_way_asks_only_for_the_rest(
    real: tuple[Path, Any], suite_dir: Path, cache_dir: Path, tmp_path: Path
) -> None:
    made, reply = real
    options = settings(suite_dir, cache_dir, tmp_path)
    with serving(reply) as (url, mock):
        mock.plan = ["ok", "ok", "503"]
        with pytest.raises(EvaluationError, match=r"failed 20 of 60 requests \(http_503 20\)"):
            evaluate(made, against=Service(url=url), **options)
        assert not (tmp_path / "out").exists()
        mock.plan = ["ok"]
        mock.asked.clear()
        assert evaluate(made, against=Service(url=url), **options).exit_code == 0
        assert len(mock.asked) == 20
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert any(note.startswith("40 answers are from a run") for note in report["notes"])
        mock.asked.clear()
        evaluate(made, against=Service(url=url), **options)
        assert len(mock.asked) == 60  # a run that ended leaves nothing to go on with


def test_a_kill_loses_no_answer_that_was_given(tmp_path: Path) -> None:
    asked: list[Prompt] = []
    wanted = [Prompt(token_ids=(n,), max_tokens=4) for n in range(6)]

    def engine(stop_after: int) -> Any:
        def generate(prompts: Any, advance: Any, keep: Any) -> list[Answer]:
            answers = []
            for place, prompt in enumerate(prompts):
                if place == stop_after:
                    raise KeyboardInterrupt
                asked.append(prompt)
                answers.append(Answer(token_ids=prompt.token_ids, finish="stop",
                                      choice_logprobs=(-1.5,)))  # fmt: skip
                keep(place, answers[-1])
            return answers

        return generate

    with pytest.raises(KeyboardInterrupt):
        AnswerLog(tmp_path, ["a"]).kept("x", engine(4))(wanted, silent)
    [file] = (tmp_path / "eval" / "unfinished").iterdir()
    with file.open("a") as log:
        log.write('["cut off')
    asked.clear()
    resumed = AnswerLog(tmp_path, ["a"])
    answers = resumed.kept("x", engine(99))(wanted, silent)
    assert [a.token_ids for a in answers] == [(n,) for n in range(6)]
    assert answers[0].choice_logprobs == (-1.5,)
    assert asked == wanted[4:]
    assert resumed.num_resumed == 4
    other = AnswerLog(tmp_path, ["b"])
    other.kept("x", engine(99))(wanted[:1], silent)
    assert other.num_resumed == 0
    resumed.finish()
    assert not file.exists()


def test_failed_answers_are_asked_for_again(tmp_path: Path) -> None:
    prompt = Prompt(token_ids=(1,), max_tokens=4)

    def broken(prompts: Any, advance: Any, keep: Any) -> list[Answer]:
        keep(0, Answer(token_ids=(), finish="error"))
        return [Answer(token_ids=(), finish="error")]

    AnswerLog(tmp_path, ["a"]).kept("x", broken)([prompt], silent)
    again = AnswerLog(tmp_path, ["a"])
    again.kept("x", broken)([prompt], silent)
    assert again.num_resumed == 0


def test_concurrency_must_be_one_or_more(real: tuple[Path, Any]) -> None:
    for wrong in ((), (0,), (1, -2)):
        with pytest.raises(UsageError, match="--concurrency is"):
            make_job(real[0], None, None, suite=None, amounts=Amounts(), engine=EngineConfig(),
                     concurrency=wrong)  # fmt: skip
