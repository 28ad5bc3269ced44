"""An OpenAI-compatible server for tests: answers by a plan, counts what it was asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

Reply = Callable[[str, dict[str, Any]], Any]


class Mock:
    """What the server does. `plan[k % len(plan)]` is how request k (by arrival) ends."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.plan = ["ok"]
        self.models: list[dict[str, Any]] = [{"id": "tiny"}]
        self.asked: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = Lock()

    def arrive(self, body: dict[str, Any]) -> str:
        with self.lock:
            kind = self.plan[len(self.asked) % len(self.plan)]
            self.asked.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return kind

    def leave(self) -> None:
        with self.lock:
            self.in_flight -= 1


def chat(text: str, finish: str | None = "stop", **usage: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


class _Server(ThreadingHTTPServer):
    request_queue_size = 256


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[str, Mock]]:
    """(URL, what it does and saw)."""
    mock = Mock(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, json.dumps({"data": mock.models}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            kind = mock.arrive(body)
            try:
                self.end(kind, body)
            finally:
                mock.leave()

        def end(self, kind: str, body: dict[str, Any]) -> None:
            if kind.isdigit():
                self.send(int(kind), b'{"error": {"message": "no room"}}')
            elif kind == "cut":
                self.send_response(200)
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices"')
                self.close_connection = True
            elif kind == "drip":
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):
                    for _ in range(100):
                        self.wfile.write(b" ")
                        time.sleep(0.05)
                self.close_connection = True
            elif kind in _BODIES:
                self.send(200, _BODIES[kind])
            else:
                self.send(200, json.dumps(mock.reply(self.path, body)).encode())

        def send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", mock
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_BODIES = {
    "empty": b"",
    "no choices": b'{"choices": []}',
    "error frame": b'{"error": {"message": "worker died"}}',
    "no end": json.dumps(chat("half an", None)).encode(),
    "no text": json.dumps({"choices": [{"message": {}, "finish_reason": "stop"}]}).encode(),
}
