"""Done-when: 20 kills -9 at drawn moments, each followed by the same command: the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from survival import Console, Nursery, survive

GPTQ = {"scheme": "w4a16", "method": "gptq", "group_size": 32}
W8A8 = {"scheme": "w8a8", "method": "rtn", "smoothing": "search", "kv_cache": "fp8"}
CALIBRATION = {"samples": 8, "max_tokens": 64}


@pytest.fixture(params=["gptq", "smooth-w8a8-fp8kv", "moe", "convert"])
def command(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], calibration_file: Path,
    tmp_path: Path,
) -> list[str]:  # fmt: skip
    """The command's arguments but for --out."""
    if request.param == "convert":
        return ["convert", str(tiny_model(num_hidden_layers=4))]
    moe = request.param == "moe"
    model = tiny_model("qwen3_moe" if moe else "llama", num_hidden_layers=3 if moe else 4)
    recipe = tmp_path / "recipe.yaml"
    chosen = W8A8 if request.param.startswith("smooth") else GPTQ
    recipe.write_text(json.dumps({**chosen, "calibration": CALIBRATION}))
    return ["--recipe", str(recipe), "--calib", str(calibration_file), "--model", str(model)]


@pytest.mark.parametrize("command", ["gptq"], indirect=True)
def test_three_kills(command: list[str], forks: Nursery, tmp_path: Path) -> None:
    happened = survive(forks.start, command, tmp_path, kills=3, seed=3)
    assert happened.artifacts >= 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_kills(command: list[str], tmp_path: Path) -> None:
    """The command as users start it; kills from its start to after its last file."""
    happened = survive(Console, command, tmp_path, kills=20, seed=20)
    print(happened)  # noqa: T201  shown by pytest -s
    assert len(happened.kills) == 3, "every phase was hit"
