"""Runs that are ended from outside, or that nobody can be told of: whole files and a true code."""

from __future__ import annotations

import errno
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eval import cli, scratch
from eval.errors import EvaluationError
from eval.preflight import require_finite
from eval.scratch import scratch_folder
from eval.targets.base import Prompt
from eval.terminal import TerminalProgress
from eval.workload import check_ids
from quant.artifact.artifact import Artifact


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 4, "the output was cut off"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, "the output was cut off"),
        (PermissionError(errno.EACCES, "Permission denied", "base/x"), 4, "base/x: Permission"),
    ],
)
def test_what_the_system_refuses_is_no_verdict_and_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: OSError, code: int, said: str,
) -> None:  # fmt: skip
    def refused(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "app", refused)
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan"])
    assert ended.value.code == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_a_signal_counts_and_not_what_a_library_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(**_: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 2)
        except BaseException as error:
            raise ModuleNotFoundError("transformers.models") from error

    monkeypatch.setattr(cli, "app", ended)
    with pytest.raises(SystemExit) as end:
        cli.main(["art"])
    assert end.value.code == 143
    assert capsys.readouterr().err.startswith("error: interrupted; the same command goes on")


def test_a_code_that_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error about the error would end with 1, which says "rejected"."""
    monkeypatch.setattr("sys.stderr", Full())
    with pytest.raises(SystemExit) as ended:
        cli.main(["no-such-artifact"])
    assert ended.value.code == 2


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("file", [Full(), Gone()])
def test_a_log_on_a_full_disk_does_not_end_the_work(
    monkeypatch: pytest.MonkeyPatch, file: io.StringIO
) -> None:
    monkeypatch.setattr(os, "dup2", lambda *_: 0)  # rich lets go of stdout for good
    with TerminalProgress(Console(file=file)) as progress:
        for stage in ("text", "answers"):
            progress.stage(stage, 1)
            progress.advance(1)


def test_scratch_folders_of_the_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "test-left"
    (left / "copy").mkdir(parents=True)
    with scratch_folder("test-") as mine:
        assert left.exists()  # perhaps its maker has not come to lock it
        monkeypatch.setattr(scratch, "_NEW_S", -1.0)
        with scratch_folder("test-") as other:
            assert not left.exists()
            assert mine.is_dir()
            assert other.is_dir()
    assert not list(tmp_path.iterdir())


class Reader:
    def __init__(self, **tensors: torch.Tensor) -> None:
        self.names = tuple(tensors)
        self.tensor = tensors.__getitem__

    def close(self) -> None: ...


def test_weights_that_no_text_of_the_suite_reaches() -> None:
    sound = {"w": torch.ones(3, 4), "codes": torch.ones(4, dtype=torch.int32)}
    bad = torch.ones(3, 4)
    bad[2, 1] = torch.inf
    for stored in (bad, bad.bfloat16(), (bad * 0).to(torch.float8_e4m3fn)):
        artifact = Artifact.__new__(Artifact)
        object.__setattr__(artifact, "path", Path("art"))
        object.__setattr__(artifact, "reader", Reader(**sound))
        require_finite(artifact)
        object.__setattr__(artifact, "reader", Reader(**sound, head=stored))
        with pytest.raises(EvaluationError, match="art: tensor head holds NaN or Inf"):
            require_finite(artifact)


def test_ids_that_the_model_has_no_row_for() -> None:
    prompt = Prompt(token_ids=(1, 2), max_tokens=1, choices=((3,), (7, 4)))
    check_ids((), [prompt], 8)
    with pytest.raises(EvaluationError, match="gives the id 7, but the model has 7 tokens"):
        check_ids((), [prompt], 7)
