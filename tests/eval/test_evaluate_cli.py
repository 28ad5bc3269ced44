"""The command: help, exit codes, subcommands before artifacts, and what a person reads."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from eval import cli
from eval.cli_options import KVKind
from runtime.config import KVCacheDType


def call(*arguments: str) -> int:
    """Exit code of `evaluate ARGUMENTS` in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_help_is_quick_and_complete() -> None:
    started = time.process_time()
    command = [sys.executable, "-X", "importtime", "-m", "eval.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    heavy = re.findall(r"\| +(torch|transformers|jsonschema|fastapi)$", done.stderr, re.MULTILINE)
    assert not heavy, f"--help imports {heavy}"
    assert time.process_time() - started < 1
    for word in ("--base", "--gates", "--suite", "--no-stamp", "Exit codes", "WEIGHBRIDGE_CACHE",
                 "0 accepted, 1 rejected, 2 wrong usage, 3 inconclusive"):  # fmt: skip
        assert word in " ".join(done.stdout.split()), word


def test_every_kv_cache_the_server_runs_can_be_judged() -> None:
    assert {kind.value for kind in KVKind} == set(get_args(KVCacheDType))


def test_no_arguments_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    call()
    assert "Usage: evaluate [OPTIONS]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-artifact"], "no-such-artifact is not an artifact: there is no such directory"),
        (["--items", "many", "x"], "Invalid value for '--items'"),
        (["x", "--bogus"], "No such option: --bogus"),
        (["x", "--device", "tpu"], "'tpu' is not one of"),
        (["x", "--gates", "none.yaml"], "none.yaml"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_subcommand_wins_over_an_artifact_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weigh").mkdir()
    monkeypatch.chdir(tmp_path)
    app = typer.Typer(cls=cli.ArtifactFirst)
    app.command(name=cli.DEFAULT_COMMAND)(lambda artifact: typer.echo(f"judged {artifact}"))
    app.command(name="weigh")(lambda: typer.echo("subcommand"))
    app(["weigh"], standalone_mode=False)
    app(["./weigh"], standalone_mode=False)
    assert capsys.readouterr().out.split("\n")[:2] == ["subcommand", "judged ./weigh"]


def test_a_judged_artifact(
    taught_model: Path,
    artifact: Callable[..., Path],
    suite_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache_dir: Path,
) -> None:
    """Plain text, one line per rule, next steps and files; the exit code is the verdict's."""
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(cache_dir))
    made = artifact(taught_model, method="rtn", scheme="w4a16", group_size="channel")
    out = tmp_path / "report"
    code = call(str(made), "--suite", str(suite_dir), "--windows", "24", "--window-tokens", "48",
                "--out", str(out), "--no-stamp")  # fmt: skip
    shown = capsys.readouterr().out
    verdict = {0: "ACCEPTED", 1: "REJECTED", 3: "INCONCLUSIVE"}[code]
    assert re.search(rf"^{verdict}  ", shown, re.MULTILINE)
    for label in ("PPL(Q)/PPL(base)", "Mean KLD", "Same top p", "Schema valid", "Fields complete"):
        assert re.search(rf"^{re.escape(label)} .*(pass|FAIL|undecided)", shown, re.MULTILINE)
    assert max(map(len, table_lines(shown))) <= 80
    assert "Next" in shown
    assert str(out / "report.html") in shown
    assert "none written (--no-stamp)" in shown
    assert "\x1b" not in shown
    assert {path.name for path in out.iterdir()} == {
        "report.html", "report.json", "report.md", "junit.xml", "summary.md",
        "samples.jsonl",
    }  # fmt: skip
    assert not (made / "gate.json").exists()


def table_lines(shown: str) -> list[str]:
    lines = shown.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("metric"))
    return lines[first : first + 9]


def test_defaults_of_command_and_api_agree() -> None:
    import inspect

    from eval.api import evaluate
    from eval.targets.server import DEFAULT_CONCURRENCY

    parameters = inspect.signature(cli.judge).parameters
    by_command: dict[str, Any] = {name: p.default for name, p in parameters.items()}
    for name, parameter in inspect.signature(evaluate).parameters.items():
        if name not in ("artifact", "cache"):
            shown = by_command[name]
            if name == "concurrency":  # not said, so that saying it without a server is refused
                assert shown is None
                shown = (DEFAULT_CONCURRENCY,)
            assert getattr(shown, "value", shown) == parameter.default, name
