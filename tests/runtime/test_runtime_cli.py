"""The `runtime` command: help, refusals with exit code 2, and the real engine behind each verb."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer import rich_utils

from runtime.api import LLM
from runtime.cli import app, main
from runtime.config import ConfigError, EngineConfig
from runtime.server.engine_process import load_engine
from runtime.server.messages import Loading

REPO = Path(__file__).parents[2]
RUN = [sys.executable, "-c", "from runtime.cli import main; main()"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "120"}


def call(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    code = ended.value.code
    return code if isinstance(code, int) else 0


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must exit 2; its one line on stderr."""
    assert call(arguments) == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors


@pytest.fixture(scope="module")
def art(dense_artifact: Callable[..., Path], tiny_model: Callable[..., Path]) -> Path:
    return dense_artifact(tiny_model("llama"))


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["chat"], ["bench"]])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    check = (
        "import atexit, sys; from runtime.cli import main\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy'}\n"
        "atexit.register(lambda: print('loaded', sorted(heavy & set(sys.modules))))\n"
        f"main({[*command, '--help']!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: runtime" in done.stdout
    assert done.stdout.endswith("loaded []\n")


@pytest.mark.parametrize("name", ["serve", "generate", "chat", "bench"])
def test_help_at_80_columns_shows_every_option_whole(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)
    assert call([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    words = set(re.split(r"[\s,]+", shown))
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    longs = {
        option
        for param in command.params
        if not getattr(param, "hidden", False)
        for option in (*param.opts, *param.secondary_opts)
        if option.startswith("--")
    }
    assert len(longs) >= 7
    assert longs <= words
    assert "range" not in shown


def test_numbers_out_of_range_name_flag_and_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, bounds in (("--port", "70000", "from 0 to 65535"),
                                ("--gpu-memory-utilization", "nan", "from 0.01 to 1"),
                                ("--max-model-len", "0", "at least 1"),
                                ("--shutdown-timeout", "soon", "not a number")):  # fmt: skip
        error = refused(["serve", "art", flag, value], capsys)
        assert flag in error
        assert bounds in error


def test_a_switch_said_both_ways_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "contradict" in refused(["serve", "art", "--probe", "--no-probe"], capsys)


def test_threads_is_num_threads(art: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--threads", "--num-threads"):
        error = refused(["generate", str(art), "--prompt", "x", flag, "100000"], capsys)
        assert "num_threads 100000" in error


def test_version_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    assert re.fullmatch(r"runtime \(weighbridge\) [0-9.]+\n", capsys.readouterr().out)


def test_openmp_threads_sleep_unless_told_otherwise() -> None:
    check = (
        "import atexit, os; from runtime.cli import main\n"
        "atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY']))\n"
        "main(['--version'])"
    )
    for said, policy in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        clean = {k: v for k, v in environment().items() if k != "OMP_WAIT_POLICY"}
        done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True,
                              env={**clean, **said})  # fmt: skip
        assert done.stdout.splitlines()[-1] == policy


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert call([]) == 2
    assert "runtime serve my-model-w4a16" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--swap-space", "--port=x", "--max-num-seqs=0"])
def test_unknown_and_wrong_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag.split("=")[0] in refused(["serve", "art", flag], capsys)


@pytest.mark.parametrize("verb", ["serve", "chat", "generate"])
def test_what_is_no_artifact_is_refused_with_the_way_out(
    verb: str, tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    more = ["--prompt", "x"] if verb == "generate" else []
    port = ["--port", "0"] if verb == "serve" else []
    for path in (gguf, tiny_model("llama")):
        error = refused([verb, str(path), *more, *port], capsys)
        assert f"quantize convert {path}" in error.replace("\n", "")


@pytest.mark.parametrize("verb", ["serve", "chat", "generate"])
def test_what_is_no_model_is_not_sent_to_convert(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text("{}\n")
    (tmp_path / "folder").mkdir()
    more = ["--prompt", "x"] if verb == "generate" else []
    for name, found in (("none", "no such artifact"), ("text.jsonl", "it is a file, but no model"),
                        ("folder", "a directory without config.json")):  # fmt: skip
        error = refused([verb, str(tmp_path / name), *more], capsys).replace("\n", " ")
        assert found in error
        assert "convert" not in error
        with pytest.raises(ConfigError, match=found):
            LLM(tmp_path / name)


@pytest.mark.parametrize("verb", ["serve", "chat", "generate"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_copy_is_refused_before_torch_is_imported(
    verb: str, damage: str, art: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(art, copy)
    weights = next(copy.glob("*.safetensors"))
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
    more = ["--prompt", "x"] if verb == "generate" else []
    check = (
        "import atexit, sys; from runtime.cli import main\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"main({[verb, str(copy), *more]!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 2
    assert done.stdout == "False\n"
    assert weights.name in done.stderr
    assert ("missing" if damage == "missing" else "bytes") in done.stderr


def test_bad_values_name_the_flag(art: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--dtype", "int3"), ("--kv-cache-dtype", "int1"), ("--verify", "maybe")):
        error = refused(["serve", str(art), "--port", "0", flag, value], capsys)
        assert flag in error
        assert value in error


def test_an_unjudged_artifact_is_refused_on_demand(
    art: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(["serve", str(art), "--port", "0", "--require-accepted"], capsys)
    assert f"not judged; run: evaluate {art}" in error.replace("\n", "")


def test_generate_continues_a_text(art: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(art), "--prompt", "The customer", "--max-tokens", "8"]
    assert call(arguments) == 0
    first = capsys.readouterr().out
    assert call(arguments) == 0
    assert capsys.readouterr().out == first


def test_a_prompt_beyond_the_context_is_refused(
    art: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(["generate", str(art), "--prompt", "word " * 2000], capsys)
    assert "context holds 1024" in error.replace("\n", " ")


def test_chat_reads_piped_lines(
    art: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"hello\n\n/help\n/reset\n/wat\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))  # as a pipe is read
    assert call(["chat", str(art), "--max-tokens", "3", "--temperature", "0"]) == 0
    printed = capsys.readouterr().out
    assert "(forgotten)" in printed
    assert "unknown command /wat" in printed
    assert "never" not in printed


def test_the_real_engine_reports_its_layers(art: Path) -> None:
    heard: list[Loading] = []
    config = EngineConfig(device="cpu", num_gpu_blocks_override=24, probe=False)
    engine, _ = load_engine(art, config, heard.append)
    assert not engine.has_work
    num_layers = heard[-1].num_layers
    assert heard == [Loading(layers=n + 1, num_layers=num_layers) for n in range(num_layers)]


@pytest.fixture(scope="module")
def server(art: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """`runtime serve` on the real engine with a pool so small that it preempts."""
    log = tmp_path_factory.mktemp("serve") / "err"
    command = [*RUN, "serve", str(art), "--port", "0", "--served-model-name", "tiny",
               "--max-num-seqs", "4", "--num-gpu-blocks-override", "24"]  # fmt: skip
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        )
    assert process.stdout is not None
    banner = ""
    for line in process.stdout:
        banner += line
        if "curl" in line:
            break
    try:
        assert "serving" in banner, log.read_text()
        url = banner.split(" at ")[1].split("/v1")[0].strip()
        yield {"url": url, "banner": banner}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_banner_tells_what_runs_and_why(server: dict[str, Any]) -> None:
    for text in ("max_model_len", "kv_cache_dtype", "num_blocks", "not judged", "warning", "curl"):
        assert text in server["banner"]


def test_the_real_engine_answers_alike_streamed_alone_and_crowded(server: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "pay the fee"}], "max_tokens": 24,
            "temperature": 0, "logprobs": True, "top_logprobs": 2}  # fmt: skip
    url = f"{server['url']}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=60).json()
    choice = whole["choices"][0]
    crowd = httpx.post(url, json={**body, "n": 6}, timeout=60).json()["choices"]
    assert {c["message"]["content"] for c in crowd} == {choice["message"]["content"]}
    streamed = httpx.post(url, json={**body, "stream": True}, timeout=60).text.split("\n\n")
    chunks = [json.loads(frame[6:])["choices"][0] for frame in streamed[:-2]]
    assert "".join(c["delta"].get("content", "") for c in chunks) == choice["message"]["content"]
    data = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"])
    assert data.decode("utf-8", "replace") == choice["message"]["content"]


def test_growth_past_the_pool_and_prompts_beyond_it(server: dict[str, Any]) -> None:
    url = f"{server['url']}/v1/completions"
    small = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    alone = httpx.post(url, json=small, timeout=60).json()["choices"][0]["text"]
    too_long = httpx.post(url, json={"prompt": [9] * 500, "max_tokens": 4}, timeout=60)
    assert too_long.status_code == 400
    assert "KV pool" in too_long.json()["error"]["message"]
    grows = {"prompt": [9] * 300, "max_tokens": 200, "ignore_eos": True}
    grown = httpx.post(url, json=grows, timeout=60).json()
    assert grown["choices"][0]["finish_reason"] == "length"
    assert httpx.post(url, json=small, timeout=60).json()["choices"][0]["text"] == alone


def test_scoring_is_the_same_cold_and_warm(server: dict[str, Any]) -> None:
    url = f"{server['url']}/v1/completions"
    body = {"prompt": list(range(40, 90)), "echo": True, "logprobs": 1, "max_tokens": 1,
            "temperature": 0}  # fmt: skip
    cold, warm = (
        httpx.post(url, json=body, timeout=60).json()["choices"][0]["logprobs"] for _ in range(2)
    )
    assert len(cold["token_logprobs"]) == 51
    assert cold["token_logprobs"][1:] == pytest.approx(warm["token_logprobs"][1:], abs=1e-4)


def test_c03_any_bytes_the_model_says_are_json_and_exact(server: dict[str, Any]) -> None:
    """A random model at temperature 2 mostly says pieces of characters."""
    messages = [{"role": "user", "content": "hello"}]
    for seed in range(30):
        body = {"messages": messages, "temperature": 2.0, "seed": seed, "max_tokens": 1 + seed % 3,
                "logprobs": True, "top_logprobs": 2, "repetition_penalty": 1e-300}  # fmt: skip
        answer = httpx.post(f"{server['url']}/v1/chat/completions", json=body, timeout=60)
        choice = answer.json()["choices"][0]
        data = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert data.decode("utf-8", "replace") == choice["message"]["content"]


def test_gauges_return_to_their_start(server: dict[str, Any]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = httpx.get(f"{server['url']}/metrics", timeout=60).text
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if any(line.startswith(f"vllm:{name}{{") for name in names)
        ]
        if values == [0.0] * 3:
            return
        time.sleep(0.05)
    pytest.fail(f"gauges are {values}")


@pytest.mark.parametrize("command", [["generate", "--prompt", "-"], ["chat"]])
def test_input_that_is_not_utf8_is_refused(
    command: list[str],
    art: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    garbled = io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", garbled)
    assert "not valid Unicode" in refused([command[0], str(art), *command[1:]], capsys)


def test_an_empty_stop_string_is_refused(art: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(art), "--prompt", "a", "--stop", ""]
    assert "a stop string is empty" in refused(arguments, capsys)


@pytest.mark.parametrize("key", ["", " ", "k\u00e9y", "a\nb", "key "])
def test_a_key_that_cannot_be_sent_is_refused(
    key: str, art: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(["serve", str(art), "--port", "0", "--api-key", key], capsys)
    assert "--api-key must be" in error


def test_an_empty_key_in_the_environment_does_not_open_the_server(
    art: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNTIME_API_KEY", "")
    error = refused(["serve", str(art), "--require-accepted", "--port", "0"], capsys)
    assert "RUNTIME_API_KEY is set, but empty" in error


def test_a_load_test_that_does_not_end_leaves_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    refused(["bench", "http://", "--json", str(new)], capsys)
    assert not list(tmp_path.iterdir())
    old.write_text("earlier figures")

    def full_disk(path: Path, data: bytes, *, durable: bool) -> None:
        path.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("quant.artifact.staging._write", full_disk)
    bench = ["bench", "http://127.0.0.1:9", "--requests", "1", "--json", str(old)]
    assert "No space left" in refused(bench, capsys)
    assert old.read_text() == "earlier figures"
    assert list(tmp_path.iterdir()) == [old]


def test_figures_can_go_to_stdout() -> None:
    bench = ["bench", "http://127.0.0.1:9", "--requests", "1", "--json", "/dev/stdout"]
    done = subprocess.run([*RUN, *bench], stdout=subprocess.PIPE, check=False)
    figures = json.loads(done.stdout[done.stdout.index(b"{") :])
    assert (done.returncode, figures["sent"], figures["ok"]) == (1, 1, 0)


def test_a_report_that_cannot_be_written_is_refused_before_the_load_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "none" / "x.json"
    error = refused(["bench", "http://127.0.0.1:9", "--json", str(report)], capsys)
    assert "No such file or directory" in error
