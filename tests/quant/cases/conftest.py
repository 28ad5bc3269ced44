"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from front_door import Quantize, Said
from survival import Nursery, nursery

from quant.cli import main
from quant.cli_steps import err_console, out_console


@pytest.fixture(scope="session")
def forks() -> Iterator[Nursery]:
    """Starts the command without the seconds of its imports."""
    with nursery() as started:
        yield started


@pytest.fixture
def quantize(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Quantize:
    """`quantize("--recipe", ...)` in the test's own folder, in this process."""
    monkeypatch.chdir(tmp_path)
    for console in (out_console, err_console):
        monkeypatch.setattr(console, "_width", 200)

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Said(code=int(caught.value.code or 0), out=out, err=err)

    return run
