"""Going through the motions: launches of this thread only compile, others' run, and it ends."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest

from runtime.kernels.compile_ahead import compiling_ahead


def test_launches_compile_here_and_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, bool]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((args[0], warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    kernel = object.__new__(JITFunction)
    with compiling_ahead(2):
        kernel[(1,)]("here")
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
