"""Attempts to get a verdict that is not earned, or a crash that reads like a verdict."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from suite_rows import document_row, item_row, write_rows

from eval import cli, report, runner
from eval.cache import Cache
from eval.terminal import _one_line
from quant.artifact.stamp import read_stamp

OPTIONS = ("--windows", "24", "--window-tokens", "48")


@pytest.fixture
def call(
    suite_dir: Path,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """`evaluate ARGUMENTS` in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(cache_dir))

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        given = [str(argument) for argument in arguments]
        for flag, value in (("--suite", suite_dir), ("--out", tmp_path / "report")):
            given += [] if flag in given else [flag, str(value)]
        with pytest.raises(SystemExit) as ended:
            cli.main([*given, *OPTIONS])
        shown = capsys.readouterr()
        return int(str(ended.value.code)), shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def dense(taught_model: Path, dense_artifact: Callable[[Path], Path]) -> Path:
    return dense_artifact(taught_model)


def test_each_exit_code(
    dense: Path, taught_model: Path, artifact: Callable[..., Path], call: Callable[..., Any]
) -> None:
    coarse = artifact(taught_model, method="rtn", scheme="w4a16", group_size="channel")
    assert call(dense, "--no-stamp")[0] == 0
    assert call(coarse, "--no-stamp")[0] == 1
    assert call(dense, "--no-stamp", "--seed", "-1")[0] == 2
    assert call(dense, "--no-stamp", "--items", "30")[0] == 3
    assert call(dense, "--no-stamp", "--base", coarse)[0] == 4


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("code_parses: {max_drop: 0.1}", "code_parses, but no item of the suite has"),
        ("json_valid: {max_drop: 0.1, strata: {'lang:de': {max_drop: 0.1}}}",
         "json_valid in lang:de, but none of that is asked; there are: lang:en, lang:zh"),
        ("kl_mean: {max: 0.1, strata: {'genre:*': {max: 0.1}}}", "kl_mean in genre:*, but none of"),
    ],
)  # fmt: skip
def test_rules_with_nothing_to_judge_are_refused_before_a_model_is_loaded(
    dense: Path,
    call: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    said: str,
) -> None:
    monkeypatch.setattr("eval.opening.EngineTarget", lambda *_: 1 / 0)
    gates = tmp_path / "gates.yaml"
    gates.write_text(f"version: 1\nmetrics:\n  top1_agreement: {{min: 0.9}}\n  {rule}\n")
    code, _, error = call(dense, "--no-stamp", "--gates", gates)
    assert code == 4
    assert said in " ".join(error.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seed", "-1"), "--seed is -1; expected at least 0"),
        (("--threads", "0"), "--threads is 0; expected at least 1"),
        (("--base", "owner/no-such-model"), "could not be fetched from the hub"),
    ],
)
def test_wrong_options(
    dense: Path, call: Callable[..., Any], arguments: tuple[str, ...], message: str
) -> None:
    code, _, error = call(dense, "--no-stamp", *arguments)
    assert code == 2
    assert message in error


def test_a_fault_of_our_own_does_not_read_like_a_rejection(
    dense: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An uncaught exception would end with 1, which says "rejected"."""
    monkeypatch.setattr(runner, "judge", lambda *_: 1 / 0)
    code, _, error = call(dense, "--no-stamp")
    assert code == 4
    assert "ZeroDivisionError" in error


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(
    dense: Path, suite_dir: Path, cache_dir: Path, tmp_path: Path, name: signal.Signals
) -> None:
    copy = shutil.copytree(dense, tmp_path / "art", ignore=shutil.ignore_patterns("gate.json"))
    before = {path.name for path in copy.iterdir()}
    line = [sys.executable, "-c", INTERRUPTIBLE, str(copy), "--suite", str(suite_dir),
            "--out", str(tmp_path / "report"), *OPTIONS]  # fmt: skip
    environment = {**os.environ, "WEIGHBRIDGE_CACHE": str(cache_dir)}
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        while "judging" not in process.stdout.readline():
            time.sleep(0.01)
        process.send_signal(name)
        _, error = process.communicate(timeout=300)
    told = {signal.SIGINT: 130}
    assert process.returncode == told.get(name, -name)
    assert ("interrupted; the same command goes on" in error) == (name in told)
    assert {path.name for path in copy.iterdir()} == before
    assert not (tmp_path / "report").exists()


def test_answers_outlive_a_report_that_could_not_be_written(
    dense: Path, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = (dense, *OPTIONS, "--items", "4", "--noise-items", "0", "--no-stamp")
    with monkeypatch.context() as patch:
        patch.setattr("eval.places.replace_files", refused)
        code, _, error = call(*words)
    assert code == 2
    assert "No space left" in error
    report = tmp_path / "report" / "report.json"
    for is_second in (True, False):
        call(*words)
        notes = " ".join(json.loads(report.read_text())["notes"])
        assert ("answers are from a run that was interrupted" in notes) == is_second


INTERRUPTIBLE = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from eval import cli, report, runner
def slow(*_):
    print("judging", flush=True)
    time.sleep(60)
runner.judge = slow
cli.main()
"""


def test_places_inside_the_artifact_or_a_model(
    dense: Path, taught_model: Path, call: Callable[..., Any]
) -> None:
    for out, message in (
        (dense / "report", "lies inside the artifact"),
        (taught_model, "is a model's folder"),
    ):
        code, _, error = call(dense, "--no-stamp", "--out", out)
        assert code == 2
        assert message in error
    assert not (dense / "report").exists()


def test_names_that_look_like_markup_and_any_working_directory(
    dense: Path, suite_dir: Path, call: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    place = tmp_path / "a [b] \u00fc [/x]"
    copy = shutil.copytree(dense, place / "art 1")
    suite = place / "suite"
    shutil.copytree(suite_dir, suite)
    odd = {"source": "[/red]|x", "lang": "[bold]"}
    write_rows(suite / "extraction.jsonl", [{**item_row(n), **odd} for n in range(70)])
    monkeypatch.chdir(place)
    code, shown, _ = call("art 1", "--suite", "suite", "--out", "out [/y]")
    assert code == 0
    assert "runtime serve '" in shown
    assert (place / "out [/y]" / "report.md").is_file()
    assert "[/red]\\|x" in (place / "out [/y]" / "report.md").read_text()
    stamp = read_stamp(copy)
    assert stamp is not None
    assert stamp.verdict == "accepted"


@pytest.mark.parametrize(("module", "step"), [(runner, "judge"), (report, "write_report")])
def test_an_artifact_replaced_while_it_is_judged(
    dense: Path, taught_model: Path, artifact: Callable[..., Path], call: Callable[..., Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str,
) -> None:  # fmt: skip
    copy = shutil.copytree(dense, tmp_path / "art", ignore=shutil.ignore_patterns("gate.json"))
    other = artifact(taught_model, method="rtn", scheme="w4a16", group_size="channel")
    original = getattr(module, step)

    def swap(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(copy)
        shutil.copytree(other, copy, ignore=shutil.ignore_patterns("gate.json"))
        return original(*arguments, **options)

    monkeypatch.setattr(module, step, swap)
    code, _, error = call(copy)
    assert code == 4
    assert not (copy / "gate.json").exists()
    assert "was replaced while it was being judged" in error
    assert read_stamp(copy) is None


def test_the_same_seed_gives_the_same_report_whatever_became_of_the_cache(
    dense: Path, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged entry would move the numbers that everything is held to."""
    cache = tmp_path / "own-cache"
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(cache))
    reports = []
    for harm in (lambda data: data, flip_last_bit, lambda data: data[:40], lambda data: b""):
        for entry in cache.rglob("*.*"):
            entry.write_bytes(harm(entry.read_bytes()))
        assert call(dense, "--no-stamp")[0] == 0
        report = json.loads((tmp_path / "report" / "report.json").read_text())
        reports.append({k: v for k, v in report.items() if k not in ("seconds", "judged_at")})
    assert all(report == reports[0] for report in reports)


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 0x40])


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file")
    cache.put_json(["key"], 1)
    assert cache.json(["key"]) is None


def altered(
    model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> Path:
    """A copy of the model with its tensors and its config changed."""
    copy = shutil.copytree(model, folder / "base")
    tensors = load_file(copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def lose_a_weight(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors["model.layers.0.mlp.down_proj.weight"]


def name_a_compression(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["compression_config"] = {"quant_method": "compressed-tensors"}


def widen_the_vocabulary(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 20))
    config["vocab_size"] = len(tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_weight, "lacks 1 weights (model.layers.0.mlp.down_proj.weight"),
        (name_a_compression, "is itself quantized"),
        (widen_the_vocabulary, "it was not made from this model"),
    ],
)
def test_bases_that_cannot_judge(
    dense: Path, taught_model: Path, call: Callable[..., Any], tmp_path: Path,
    change: Callable[..., None], message: str,
) -> None:  # fmt: skip
    """A missing weight would be made up at random by transformers, and the artifact rejected."""
    code, _, error = call(dense, "--no-stamp", "--base", altered(taught_model, tmp_path, change))
    assert code == 4
    assert message in error


def test_garbled_bases(
    dense: Path, taught_model: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    base = shutil.copytree(taught_model, tmp_path / "base")
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, _, error = call(dense, "--no-stamp", "--base", base)
    assert code == 4
    assert error.startswith("error: the base ")
    assert error.count("\n") == 1
    (base / "config.json").write_text("[]")
    code, _, error = call(dense, "--no-stamp", "--base", base)
    assert code == 4
    assert "holds no JSON object" in error


def test_a_base_of_another_place_is_named(
    dense: Path, taught_model: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    base = shutil.copytree(taught_model, tmp_path / "elsewhere")
    _, shown, _ = call(dense, "--no-stamp", "--base", base)
    assert "was named by hand; the artifact was made from" in " ".join(shown.split())


def test_a_base_that_changed_since_is_named(
    taught_model: Path, dense_artifact: Callable[[Path], Path], call: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    base = shutil.copytree(taught_model, tmp_path / "base")
    made = dense_artifact(base)
    _, shown, _ = call(made, "--no-stamp")
    assert "is not what it was" not in " ".join(shown.split())
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] *= 1.001
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    _, shown, _ = call(made, "--no-stamp")
    assert "is not what it was when the artifact was made from it" in " ".join(shown.split())


def test_too_few_documents_are_never_accepted_and_say_why(
    dense: Path, suite_dir: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    """Also not by an estimate, whose interval nobody can know."""
    write_rows(tmp_path / "text.jsonl", [document_row(n) for n in range(4)])
    shutil.copy(suite_dir / "extraction.jsonl", tmp_path)
    gates = tmp_path / "gates.yaml"
    gates.write_text("version: 1\nmetrics: {kl_mean: {max: 1.0, judge: estimate}}")
    for extra in ((), ("--gates", gates)):
        code, shown, _ = call(dense, "--no-stamp", "--suite", tmp_path, *extra)
        text = " ".join(shown.split())
        assert code == 3
        assert "[no interval]" in shown
        assert "Mean KLD is undecided: an interval needs at least 5 documents, not 4." in text
        assert "on a suite with at least 5 documents" in text


def test_next_steps_repeat_what_was_asked(dense: Path, call: Callable[..., Any]) -> None:
    _, shown, _ = call(dense, "--no-stamp", "--items", "30", "--seed", "3")
    line = next(line for line in shown.splitlines() if "Decide with more evidence" in line)
    for part in ("--suite", "--window-tokens 48", "--seed 3", "--items 59"):
        assert part in line


def test_one_next_step_mends_all_that_is_wanting(
    dense: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of too few documents and too few items; the suite itself has documents enough."""
    monkeypatch.setattr(f"{__name__}.OPTIONS", (*OPTIONS, "--windows", "4"))
    _, shown, _ = call(dense, "--no-stamp", "--items", "30")
    line = next(line for line in shown.splitlines() if "Decide with more evidence" in line)
    assert "--items 59" in line
    assert "--windows 36" in line
    assert "on a suite with at least" not in shown


def test_an_answer_cannot_drive_the_terminal() -> None:
    console = Console(force_terminal=True, width=80)
    with console.capture() as shown:
        console.print(_one_line("\x1b[2J ok \x07\u202e"), markup=False)
    assert "\x1b[2J" not in shown.get()
    assert "ok" in shown.get()
