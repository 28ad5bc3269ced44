"""The three commands as README has them, on the real model, from a directory of the user's own."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from quant.artifact.stamp import read_stamp
from quant.cli import main as quantize_main

pytestmark = pytest.mark.e2e
EXIT_CODES = {"accepted": 0, "rejected": 1, "inconclusive": 3}


def command(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / name
    return subprocess.run(
        [str(script), *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def artifact(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W8A8 of the real model, made by the command (the quickest that quantizes inputs too)."""
    folder = tmp_path_factory.mktemp("user")
    made = command(
        "quantize", "--recipe", "w8a8.yaml", "--calib", "contracts.jsonl",
        "--model", str(smollm2_gguf), "--out", "mine", "--smoothing", "none",
        "--samples", "4", "--max-tokens", "128", cwd=folder,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder / "mine"


@pytest.fixture(scope="module")
def judged(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same artifact after `evaluate` on a handful of items."""
    folder = tmp_path_factory.mktemp("elsewhere")
    result = command(
        "evaluate", str(artifact), "--items", "2", "--windows", "4", "--window-tokens", "128",
        cwd=folder,
    )  # fmt: skip
    stamp = read_stamp(artifact)
    assert stamp is not None, result.stderr
    assert result.returncode == EXIT_CODES[stamp.verdict], result.stderr
    return artifact


@pytest.fixture(scope="module")
def server(
    judged: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(sys.executable).parent / "runtime"
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(script), "serve", str(judged), "--port", str(port), "--max-model-len", "1024"],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, log)
        yield url, process
    finally:
        process.kill()
        process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/health", timeout=20).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError("the server was not ready in time")


def asked_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and all output of `quantize ARGUMENTS` without a process of its own."""
    with pytest.raises(SystemExit) as ended:
        quantize_main(arguments)
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out + shown.err


def test_the_artifact_verifies_and_says_what_it_is(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked_here(capsys, "verify", str(artifact))[0] == 0
    assert "w8a8-channel" in asked_here(capsys, "inspect", str(artifact))[1]


def test_the_verdict_is_bound_to_the_artifact(judged: Path) -> None:
    stamp = json.loads((judged / "gate.json").read_text())
    assert stamp["verdict"] in EXIT_CODES
    assert stamp["numerics"]["compute_dtype"] == "float32"
    report = judged.parent / "mine-evaluation"
    assert {"report.md", "report.json"} <= {path.name for path in report.iterdir()}


def test_plain_and_streamed_answers_agree(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is a contract? Answer in one sentence."}]
    plain = client.chat.completions.create(
        model=model, messages=messages, max_tokens=24, temperature=0
    )
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=24, temperature=0, stream=True
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert plain.choices[0].message.content == streamed
    assert "contract" in streamed.lower()


def test_the_server_shows_the_stamp_and_shuts_down_cleanly(
    server: tuple[str, subprocess.Popen[bytes]], judged: Path
) -> None:
    url, process = server
    card = httpx.get(f"{url}/v1/models").json()["data"][0]
    stamp = read_stamp(judged)
    assert stamp is not None
    assert card["weighbridge"]["verdict"] == stamp.verdict
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0


def test_an_altered_byte_is_found_by_verify_and_refused_by_serve(
    judged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(judged, damaged)
    shard = max(damaged.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(-1000, 2)
        byte = file.read(1)
        file.seek(-1000, 2)
        file.write(bytes([byte[0] ^ 1]))
    code, said = asked_here(capsys, "verify", str(damaged))
    assert code == 1
    assert shard.name in said.replace("\n", "")
    served = command("runtime", "serve", str(damaged), "--port", "0", cwd=tmp_path)
    assert served.returncode == 2
    assert shard.name in served.stderr
