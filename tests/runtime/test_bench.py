"""runtime.bench against a mock server: what counts, when the first token came, how it failed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import ClassVar

import pytest

from runtime.bench import Load, Run, percentiles, run_load, summarize
from runtime.bench_client import Outcome
from runtime.bench_report import hint
from runtime.cli import main

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


def word(text: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


class Mock(BaseHTTPRequestHandler):
    """Answers request k (in order of arrival) by plan[k % len(plan)]."""

    plan: ClassVar[list[str]] = ["ok"]
    served: ClassVar[list[str]] = []
    lock: ClassVar[Lock] = Lock()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with self.lock:
            kind = self.plan[len(self.served) % len(self.plan)]
            self.served.append(kind)
        if kind == "503":
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if kind == "empty":
            self.frame(ROLE)
            self.wfile.write(b"data: [DONE]\n\n")
        elif kind != "nothing":
            self.answer(kind)

    def answer(self, kind: str) -> None:
        self.frame(ROLE)
        self.wfile.write(b": keep-alive\n\n")
        time.sleep(0.6 if kind == "slow" else 0)
        for text in "abc":
            self.frame(
                {"error": {"message": "x"}} if (kind, text) == ("error", "c") else word(text)
            )
        self.frame(USAGE)
        if kind != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def frame(self, chunk: dict[str, object]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mock)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    Mock.served.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_e09_ttft_is_the_first_content_not_the_role_or_a_keep_alive(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mock, "plan", ["slow"])
    load = Load(url=url, num_requests=4, concurrency=4)
    summary = summarize(run_load(load), load)
    assert summary.ok == 4
    assert summary.ttft_ms["p50"] >= 600
    assert summary.tpot_ms["p50"] < 300


def test_e11_failures_are_counted_by_kind_and_kept_out_of_the_figures(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["ok", "503", "ok", "error", "cut", "ok", "nothing", "empty", "503", "ok"]
    monkeypatch.setattr(Mock, "plan", plan)
    load = Load(url=url + "/v1", num_requests=20, concurrency=4)
    summary = summarize(run_load(load), load)
    assert len(Mock.served) == summary.sent == 20  # nothing is retried
    assert summary.ok == 8
    assert summary.failures == {"cut": 4, "empty": 2, "error_frame": 2, "http_503": 4}
    assert summary.failed_share == pytest.approx(0.6)
    assert summary.output_tok_s == pytest.approx(8 * 3 / summary.duration_s)


def test_nobody_there_is_a_failure_not_a_crash() -> None:
    load = Load(url="http://127.0.0.1:9", num_requests=2, concurrency=2, timeout_s=2)
    summary = summarize(run_load(load), load)
    assert (summary.ok, summary.failures) == (0, {"connect": 2})
    assert summary.ttft_ms == summary.tpot_ms == {}


def test_when_every_request_failed_kinds_and_hints_stand_for_the_table(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Mock, "plan", ["503", "cut"])
    with pytest.raises(SystemExit) as ended:
        main(["bench", url, "--requests", "4", "--concurrency", "1"])
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "4 requests sent, 0 ok, failed: cut 2, http_503 2" in shown
    assert "http_503: the server's queue is full" in shown
    assert "p50" not in shown
    assert "tokens/s" not in shown


@pytest.mark.parametrize(("kind", "words"), [
    ("connect", "is the server up"), ("http_401", "--api-key"), ("http_422", "by hand"),
    ("http_500", "its log"),
])  # fmt: skip
def test_every_kind_of_failure_has_a_hint(kind: str, words: str) -> None:
    assert words in hint(kind)


def test_a_server_that_says_nothing_times_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mock, "plan", ["slow"])
    load = Load(url=url, num_requests=1, concurrency=1, timeout_s=0.05)
    assert summarize(run_load(load), load).failures == {"timeout": 1}


def test_figures_are_over_successes_only() -> None:
    good = [Outcome(kind="ok", ttft_s=0.1, total_s=0.1 + 0.01 * 9, num_tokens=10)] * 3
    bad = [Outcome(kind="cut", ttft_s=0.001, total_s=0.001)] * 3
    summary = summarize(Run(good + bad, 2.0), Load(url="http://x", num_requests=6))
    assert summary.tpot_ms["mean"] == pytest.approx(10)
    assert summary.ttft_ms == {"p50": 100, "p90": 100, "p99": 100, "mean": 100}
    assert summary.output_tok_s == 15


def test_percentiles_interpolate() -> None:
    assert percentiles([i / 1000 for i in range(101)]) == {
        "p50": 50, "p90": 90, "p99": 99, "mean": 50,
    }  # fmt: skip


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x:port", "http://[::1",
     "http://a b", "http://h\u00f6st", "http://x/\u00fc"],
)  # fmt: skip
def test_a_url_must_be_one(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", url, "--requests", "1"])
    assert ended.value.code == 2
    assert "is not a URL" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["k\u00e9y", "a\nb", "\u043a\u043b"])
def test_a_key_that_no_header_holds_is_refused(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "http://127.0.0.1:9", "--requests", "1", "--api-key", key])
    assert ended.value.code == 2
    assert "--api-key must be" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "code"), [("0.0", 1), ("0.5", 0)])
def test_e11_the_exit_code_follows_the_failure_limit(
    url: str, limit: str, code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(Mock, "plan", ["ok", "503"])
    with pytest.raises(SystemExit) as ended:
        main(["bench", url, "--requests", "4", "--concurrency", "2", "--failure-limit", limit])
    assert (ended.value.code or 0) == code
    assert "4 requests sent, 2 ok, failed: http_503 2" in capsys.readouterr().out
