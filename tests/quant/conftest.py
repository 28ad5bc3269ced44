"""What the tests of `quant` share: the command, run in the test's own process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from said import Quantize, Said

from quant.cli import main
from quant.cli_steps import err_console, out_console


@pytest.fixture
def columns() -> int:
    """Of the terminal that the command believes to write to."""
    return 100


@pytest.fixture
def quantize(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> Quantize:
    """`quantize("--recipe", ...)` in the test's own folder, in this process."""
    monkeypatch.chdir(tmp_path)
    for console in (out_console, err_console):
        monkeypatch.setattr(console, "_width", columns)

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Said(code=int(caught.value.code or 0), out=out, err=err)

    return run


@pytest.fixture
def rounded_model(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model whose linears hold 15 values each, as 4-bit weights written as floats do."""
    model = shutil.copytree(tiny_model(), tmp_path / "rounded-model")
    tensors = load_file(model / "model.safetensors")
    for name, weight in tensors.items():
        if "proj" in name:
            step = weight.abs().amax() / 7
            tensors[name] = (weight / step).round() * step
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model
