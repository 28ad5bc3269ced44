"""Runs that are stopped from outside, that cannot write, or that meet another at the same output:
a clear word, an exit code, nothing half-written, and the same command goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from survival import Console, Nursery, Running, contents, staging_of

RECIPE = {"scheme": "w4a16", "method": "rtn", "group_size": 32}
SHARD_BYTES = 30_000  # about a layer's of the model below; its tokenizer.json is smaller


@pytest.fixture(scope="module")
def command(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    recipe = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE))
    return ["--recipe", str(recipe), "--model", str(tiny_model(num_hidden_layers=4))]


@pytest.fixture(scope="module")
def whole(
    forks: Nursery, command: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The files of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "art"
    ended = forks.start([*command, "--out", str(out)]).wait()
    assert ended.code == 0, ended.output
    return contents(out)


Begin = Callable[..., Running]


@pytest.fixture
def begin(forks: Nursery, command: list[str]) -> Begin:
    """`begin(out, "--flag", slowly=..., limit=...)`: the command, started."""

    def start(out: Path, *flags: str, **how: Any) -> Running:
        return forks.start([*command, *flags, "--out", str(out)], **how)

    return start


def wait_for_layers(run: Running, out: Path, count: int) -> None:
    """Until `count` shards are committed; the run must be at work still."""
    limit = time.monotonic() + 300
    while len(list(staging_of(out).glob("shard-*.json"))) < count:
        assert not run.is_over(), run.wait().output
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_is_answered_in_one_line_and_the_run_resumes(
    begin: Begin, whole: dict[str, str], tmp_path: Path, number: int, code: int
) -> None:
    out = tmp_path / "art"
    run = begin(out, slowly=True)
    wait_for_layers(run, out, 2)
    os.kill(run.pid, number)
    ended = run.wait()
    assert ended.code == code
    assert "the same command goes on from there" in ended.error
    assert not out.exists()
    again = begin(out).wait()
    assert again.code == 0
    assert "layers resumed" in again.output
    assert contents(out) == whole


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_at_any_moment(
    command: list[str], whole: dict[str, str], tmp_path: Path, number: int
) -> None:
    """The command as a user starts it, from the moment on in which it begins to import."""
    draw = random.Random(int(number))
    for i in range(6):
        out = tmp_path / f"art-{i}"
        arguments = [*command, "--out", str(out)]
        run = Console(arguments)
        time.sleep(draw.uniform(0.8, 5.0))
        if not run.is_over():
            os.kill(run.pid, number)
        ended = run.wait()
        assert "Traceback" not in ended.output, ended.output
        if ended.code == -number:  # it came before the command's first line: nothing was begun
            assert not staging_of(out).exists()
        else:
            assert ended.code in (0, 128 + number), ended.output
        assert Console(arguments).wait().code == 0
        assert contents(out) == whole


def test_a_second_run_on_one_output_is_refused(
    begin: Begin, whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "art"
    first = begin(out, slowly=True)
    wait_for_layers(first, out, 1)
    os.kill(first.pid, signal.SIGSTOP)
    second = begin(out).wait()
    os.kill(first.pid, signal.SIGCONT)
    assert second.code == 2
    assert f"{out} is being written by process {first.pid}; wait for it or stop it" in second.error
    assert first.wait().code == 0
    assert contents(out) == whole


def test_a_limit_on_file_sizes_names_path_limit_and_need(
    begin: Begin, whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "art"
    ended = begin(out, limit=SHARD_BYTES).wait()
    assert ended.code == 2
    assert str(out) in ended.error
    assert re.search(r"needs [\d,]{5,} bytes", ended.error)
    assert f"`ulimit -f`: {SHARD_BYTES:,} bytes" in ended.error
    assert not out.exists()
    assert not list(tmp_path.rglob("*.tmp"))
    assert begin(out).wait().code == 0
    assert contents(out) == whole


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`mounted("size=1m")`: an own file system in memory, where the tests may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done: list[Path] = []

    def mount(options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("mounting a small tmpfs needs privileges")
        done.append(folder)
        return folder

    yield mount
    for path in done:
        subprocess.run(["umount", str(path)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1024)):
            pass


def test_a_disk_that_fills_up_during_the_run(
    begin: Begin, whole: dict[str, str], mounted: Callable[[str], Path]
) -> None:
    """Room for what the plan needs when it starts; then someone else takes it."""
    disk = mounted("size=1m")
    out = disk / "art"
    run = begin(out, slowly=True)
    wait_for_layers(run, out, 2)
    hog = disk / "hog"
    fill(hog)
    ended = run.wait()
    assert ended.code == 2
    assert str(out) in ended.error
    assert re.search(r"the disk is full: .* needs [\d,]+ bytes, [\d,]+ are free", ended.error)
    assert not out.exists()
    assert not list(disk.rglob(".*.tmp"))
    hog.unlink()
    again = begin(out).wait()
    assert again.code == 0, again.output
    assert "layers resumed" in again.output
    assert contents(out) == whole


def test_a_folder_that_cannot_be_written(
    begin: Begin, tmp_path: Path, mounted: Callable[[str], Path]
) -> None:
    if os.geteuid() == 0:  # who may write anywhere, but not on a file system mounted for reading
        place = mounted("ro")
    else:
        place = tmp_path / "locked"
        place.mkdir(mode=0o555)
    ended = begin(place / "art").wait()
    assert ended.code == 2
    assert str(place) in ended.error
    assert "cannot be written" in ended.error
    assert list(place.iterdir()) == []


def test_what_lies_at_the_output_already(
    begin: Begin, whole: dict[str, str], tmp_path: Path
) -> None:
    """Something else is refused and left as it is; the very same artifact is left as it is."""
    out = tmp_path / "art"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    for flags in ((), ("--overwrite",)):
        ended = begin(out, *flags).wait()
        assert ended.code == 2
        assert "art is a folder with other things in it" in ended.error
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    (out / "thesis.txt").unlink()

    assert begin(out).wait().code == 0
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    same = begin(out).wait()
    assert same.code == 0
    assert "nothing left to do" in same.output
    other = begin(out, "--group-size", "64").wait()
    assert other.code == 2
    assert "already holds an artifact" in other.error
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before
    assert contents(out) == whole
