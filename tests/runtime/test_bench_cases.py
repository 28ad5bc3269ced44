"""Faults that load tools are known for: the time of the first token (E09), failures that vanish
(E11), limits of the client's own that look like the server's (E13)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, ClassVar

import pytest

from runtime import bench_client
from runtime.bench import Load, Summary, read_prompts, run_load, summarize
from runtime.cli import main
from runtime.config import ConfigError

Say = Callable[[Callable[[object], None]], None]


def delta(**said: Any) -> dict[str, Any]:
    return {"choices": [{"delta": said}]}


def together(count: int, pause_s: float = 0.0) -> Say:
    """Answers when so many requests wait for one, and fails them if no more come."""
    here = Barrier(count)

    def say(frame: Callable[[object], None]) -> None:
        here.wait(timeout=60)
        time.sleep(pause_s)
        frame(delta(content="x"))

    return say


def at_once(frame: Callable[[object], None]) -> None:
    frame(delta(content="x"))


class Mock(BaseHTTPRequestHandler):
    say: ClassVar[Say] = at_once
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        self.send_response(200)
        self.end_headers()
        type(self).say(self.frame)
        self.wfile.write(b"data: [DONE]\n\n")

    def frame(self, chunk: object) -> None:
        text = chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}"
        self.wfile.write(f"{text}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    server = Server(("127.0.0.1", 0), Mock)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def url(running: str) -> str:
    Mock.asked.clear()
    return running


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Say], None]:
    return lambda say: monkeypatch.setattr(Mock, "say", staticmethod(say))


def measured(load: Load) -> Summary:
    return summarize(run_load(load), load)


def bench(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert not ended.value.code


@pytest.mark.parametrize(
    "first", [delta(content="a"), delta(reasoning_content="hm"), delta(tool_calls=[{"index": 0}]),
              {**delta(), "usage": {"completion_tokens": 1}}],
    ids=["text", "reasoning", "tool call", "usage that grew"],
)  # fmt: skip
def test_e09_the_first_token_is_where_something_was_generated(
    url: str, says: Callable[[Say], None], first: dict[str, Any]
) -> None:
    def say(frame: Callable[[object], None]) -> None:
        frame(delta(role="assistant", content=""))
        frame(": keep-alive")
        frame({**delta(), "usage": {"completion_tokens": 0}})
        time.sleep(0.15)
        frame(first)
        time.sleep(1.0)
        frame(delta(content="b"))
        frame({"choices": [], "usage": {"completion_tokens": 2}})

    says(say)
    found = measured(Load(url=url, num_requests=2, concurrency=2))
    assert found.ok == 2
    assert found.ttft_ms["p50"] >= 150
    assert found.e2e_ms["p50"] - found.ttft_ms["p50"] > 500


def test_e09_an_answer_held_back_has_no_time_per_token(
    url: str, says: Callable[[Say], None]
) -> None:
    """64 tokens in one chunk would be endlessly fast; they are counted apart instead."""

    def say(frame: Callable[[object], None]) -> None:
        frame(delta(content="all of it"))
        frame({"choices": [], "usage": {"completion_tokens": 64}})

    says(say)
    found = measured(Load(url=url, num_requests=3, concurrency=1))
    assert (found.ok, found.in_one_piece, found.tpot_ms) == (3, 3, {})
    assert found.output_tok_s == pytest.approx(192 / found.duration_s)


@pytest.mark.parametrize(
    "broken", [{"choices": {"delta": 1}}, {"choices": ["x"]}, [1], "data: {half"], ids=str
)
def test_e11_a_frame_of_a_wrong_shape_is_a_failure_and_loses_nothing(
    url: str, says: Callable[[Say], None], broken: Any
) -> None:
    says(lambda frame: frame(broken))
    found = measured(Load(url=url, num_requests=6, concurrency=2))
    assert (found.sent, found.failures) == (6, {"error_frame": 6})


def test_e11_a_fault_of_this_side_is_raised_and_not_a_lost_request(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(chunk: object) -> bool:
        raise AttributeError("a slip of ours")

    monkeypatch.setattr(bench_client, "has_content", broken)
    with pytest.raises(AttributeError, match="a slip of ours"):
        run_load(Load(url=url, num_requests=50, concurrency=2))


def test_e13_so_many_are_in_flight_as_asked_and_it_is_measured(
    url: str, says: Callable[[Say], None]
) -> None:
    """No answer before the 512th request is there: nothing may be queued on this side."""
    says(together(512))
    found = measured(Load(url=url, num_requests=512, concurrency=512))
    assert found.ok == 512
    assert found.most_in_flight == 512
    assert 0 < found.mean_in_flight <= 512
    says(together(3))
    few = measured(Load(url=url, num_requests=3, concurrency=512))
    assert few.concurrency == few.most_in_flight == 3


def test_e13_an_open_loop_sends_when_due_and_shows_how_late(
    url: str, says: Callable[[Say], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits for no answer: none comes before the last request is there."""
    says(together(120))
    load = Load(url=url, num_requests=120, concurrency=1024, rate=60.0)
    due = load.due_times()
    assert due is not None
    assert due == load.due_times()
    assert due[0] == 0
    assert due[-1] == pytest.approx(119 / 60, rel=0.3)
    found = measured(load)
    assert found.ok == found.most_in_flight == 120
    assert found.sent_rate == pytest.approx(119 / due[-1], rel=0.3)
    assert {"p50", "p90", "p99", "mean", "max"} == set(found.lag_ms)
    says(together(4, pause_s=0.2))
    bench(url, "--requests", "20", "--rate", "200", "--concurrency", "4")
    shown = " ".join(capsys.readouterr().out.split())
    assert "200 requests/s asked, " in shown
    assert "the cap of this side (4 at once) was reached" in shown
    capped = measured(Load(url=url, num_requests=20, concurrency=4, rate=200.0))
    assert capped.lag_ms["max"] > 500  # five rounds of 0.2 s for what was due within 0.1


def test_e13_repeated_prompts_are_announced(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten rows for forty requests; rows may be text, prompts or whole conversations."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hm?"}]
    rows = [f"Question {n}?" for n in range(8)]
    rows += [json.dumps({"prompt": "From JSON"}), json.dumps({"messages": turns})]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(rows) + "\n")
    written = tmp_path / "figures.json"
    bench(url, "--requests", "40", "--prompts", str(file), "--json", str(written))
    shown = " ".join(capsys.readouterr().out.split())
    assert "10 prompts for 40 requests: each is sent 4 times" in shown
    figures = json.loads(written.read_text())
    assert (figures["num_prompts"], figures["max_tokens"]) == (10, 64)
    bench(url, "--requests", "10", "--prompts", str(file), "--json", str(written))
    assert json.loads(written.read_text())["asked_sha256"] == figures["asked_sha256"]
    bench(url, "--requests", "10", "--json", str(written))
    assert json.loads(written.read_text())["asked_sha256"] != figures["asked_sha256"]
    del Mock.asked[40:]
    asked = [json.dumps(body["messages"]) for body in Mock.asked]
    assert len(asked) == 40
    assert {asked.count(one) for one in asked} == {4}
    assert asked.count(json.dumps(turns)) == 4


@pytest.mark.parametrize("mark", ["\x0b", "\x0c", "\x1e", "\x85", "\u2028", "\u2029"])
def test_e13_only_line_ends_end_a_prompt(tmp_path: Path, mark: str) -> None:
    file = tmp_path / "prompts"
    said = json.dumps({"prompt": "one\u2028two"}, ensure_ascii=False)
    file.write_text(f"page one{mark}page two\r\n\n{said}\n", encoding="utf-8", newline="")
    assert read_prompts(file) == (f"page one{mark}page two", "one\u2028two")


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no prompt"), ("{half", ":1: not JSON"), ('a\n{"x": 1}', ":2: expected `prompt`")],
)
def test_e13_a_prompt_file_must_hold_prompts(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "gone")


def test_e13_running_out_of_ports_is_this_sides_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("socket.create_connection", refuse)
    found = measured(Load(url="http://127.0.0.1:9", num_requests=1))
    assert found.failures == {"client_limit": 1}
