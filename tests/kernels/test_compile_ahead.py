"""Going through the motions: launches of this thread only compile, others' run, and it ends."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.kernels.compile_ahead import (
    WORTH_FORKING,
    compile_in_forks,
    compiling_ahead,
    look_up_compiler,
)


def kernel_body(WHERE: Any) -> None:
    """Never compiled: only its signature counts."""


kernel_body.__annotations__ = {"WHERE": "tl.constexpr"}


def test_launches_compile_here_and_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, bool]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((args[0], warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    kernel = JITFunction(kernel_body)
    with compiling_ahead(2):
        kernel[(1,)]("here")
        kernel[(2,)]("here")
        other = Thread(target=lambda: kernel[(1,)]("elsewhere"))
        other.start()
        other.join()
    kernel[(1,)]("afterwards")
    assert launched == [("here", True), ("elsewhere", False), ("afterwards", False)]


def test_an_error_within_puts_everything_back() -> None:
    from triton.runtime.jit import JITFunction

    plain = JITFunction.run
    with pytest.raises(KeyError), compiling_ahead(1):
        raise KeyError("within")
    assert JITFunction.run is plain


def test_the_compiler_is_looked_up_beside_other_work() -> None:
    from triton.runtime.cache import triton_key

    thread = look_up_compiler()
    thread.join()
    assert triton_key.cache_info().currsize


class Compiler:
    """Stands for Triton's: a kernel is a file in a folder, where whoever made it signs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import _async_compile, cache, jit
        from triton.runtime.driver import driver

        self.folder, self.done = folder, {}  # type: Path, dict[str, Any]
        self._modes, self._run = _async_compile, jit.JITFunction
        self.launchers = folder / "launchers"
        manager = lambda key: SimpleNamespace(cache_dir=str(folder / key))  # noqa: E731
        monkeypatch.setattr(cache, "get_cache_manager", manager)
        active = SimpleNamespace(
            get_current_device=lambda: 0, set_current_device=lambda device: None,
            launcher_cls=lambda src, metadata: None,
        )  # fmt: skip
        monkeypatch.setattr(type(driver), "active", active, raising=False)

    def launch(self, name: str, compile_it: Any = None) -> None:
        from hashlib import sha256

        place = self.folder / sha256(name.encode()).hexdigest()

        def kernel() -> Any:
            if not (place / "__grp__kernel.json").exists():
                if compile_it is not None:
                    compile_it()
                place.mkdir(exist_ok=True)
                (place / "__grp__kernel.json").write_text(str(os.getpid()))
            signed = int((place / "__grp__kernel.json").read_text())
            return SimpleNamespace(src=None, metadata=None, run=None, signed=signed)

        mode = self._modes.active_mode.get()
        finalize = lambda made: self.done.__setitem__(name, made.signed)  # noqa: E731
        extra = [lambda *_: None] * (mode.submit.__code__.co_argcount - 4)  # 3.9 has a clean-up
        mode.submit(name, kernel, finalize, *extra)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def test_what_is_missing_is_compiled_by_forks_and_taken_from_disk(compiler: Compiler) -> None:
    names = [str(i) for i in range(2 * WORTH_FORKING)]
    with compiling_ahead(3):
        for name in names:
            compiler.launch(name)
        assert not compiler.done
    assert sorted(compiler.done) == names
    assert os.getpid() not in compiler.done.values()


def test_few_kernels_are_compiled_here(compiler: Compiler) -> None:
    with compiling_ahead(3):
        compiler.launch("one")
    assert compiler.done == {"one": os.getpid()}


def test_what_forks_cannot_compile_is_tried_here(compiler: Compiler) -> None:
    here = os.getpid()

    def fails_in_forks() -> None:
        if os.getpid() != here:
            raise RuntimeError("not in a fork")

    def dies_in_forks() -> None:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)

    def fails() -> None:
        raise ValueError("never")

    with compiling_ahead(2):
        compiler.launch("failing", fails_in_forks)
        compiler.launch("dying", dies_in_forks)
        compiler.launch("never", fails)
        for i in range(WORTH_FORKING):
            compiler.launch(str(i))
    assert compiler.done["failing"] == compiler.done["dying"] == here
    assert "never" not in compiler.done
    assert len(compiler.done) == 2 + WORTH_FORKING


def test_forks_share_out_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, children = os.fork, list[int]()

    def remembered() -> int:
        child = fork()
        children.append(child)
        return child

    monkeypatch.setattr(os, "fork", remembered)

    def job(number: int) -> Any:
        def write() -> None:
            with (tmp_path / str(number)).open("x") as file:
                file.write(str(os.getpid()))
            raise KeyError("whatever a compiler says")

        return write

    compile_in_forks([job(i) for i in range(300)], 3)
    assert {int(path.name) for path in tmp_path.iterdir()} == set(range(300))
    assert len(children) == 3
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


class Held:
    """Something in a circle whose end only its own process may see."""

    def __init__(self, place: Path) -> None:
        self.place, self.circle = place, self

    def __del__(self) -> None:
        self.place.with_name(str(os.getpid())).touch()


def test_forks_free_nothing_of_their_parents(tmp_path: Path) -> None:
    def collects() -> None:
        gc.set_threshold(10, 1, 1)
        made = [[i] for i in range(10_000)]
        (tmp_path / "ran").write_text(str(len(made)))
        raise KeyError("whatever a compiler says")

    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1_000_000)  # what is held must still be there when the fork begins
    try:
        Held(tmp_path / "held")
        compile_in_forks([collects], 1)
        assert (tmp_path / "ran").exists()
        assert list(tmp_path.iterdir()) == [tmp_path / "ran"]
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert (tmp_path / str(os.getpid())).exists()


# Around every number of rows at which W4A16 changes its kernel, and beyond.
TOKENS = (
    *(1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 300, 384, 385, 512, 513, 777),
    *(1024, 1500, 2049, 4096, 4097, 5000, 8192),
)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8", "int8", "fp8+bfloat16"])
def test_nothing_is_left_to_compile_for_a_first_answer(kv_dtype: str) -> None:
    """Of the 8B shape on the reference card; the chunk that a long prompt ends in included."""
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(here.parents[1])
    command = [sys.executable, str(here / "launch_record.py"), kv_dtype, *map(str, TOKENS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.pop("ahead") > 20
    assert {phase: kernels for phase, kernels in found.items() if kernels} == {}
    assert len(found) == 1 + len(TOKENS)
