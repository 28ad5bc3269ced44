"""`quant.api.quantize`: the same job from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quant.api import load_recipe, quantize
from quant.artifact.artifact import open_artifact
from quant.errors import CalibrationError, PlanError, RecipeError


def test_quantize_returns_a_sealed_artifact(
    tiny_model: Callable[..., Path], calibration_file: Path, tmp_path: Path
) -> None:
    made = quantize(
        tiny_model(),
        "w4a16.yaml",
        calib=[calibration_file],
        out=tmp_path / "art",
        samples=2,
        max_tokens=64,
        group_size=32,
    )
    artifact = open_artifact(made, verify="full")
    labels = {scheme.label for scheme in artifact.schemes().values()}
    assert labels == {"w4a16-g32", "dense"}
    assert artifact.manifest.recipe.overrides["group_size"] == 32
    assert artifact.manifest.calibration is not None
    assert artifact.manifest.calibration.samples == 2


def test_same_inputs_same_bytes(
    tiny_model: Callable[..., Path], calibration_file: Path, tmp_path: Path
) -> None:
    """cases.md A27: the reports, which hold timings, are outside the digest."""
    digests = [
        open_artifact(
            quantize(
                tiny_model(),
                "mixed.yaml",
                calib=calibration_file,
                out=tmp_path / name,
                samples=3,
                max_tokens=48,
            )
        ).digest
        for name in ("a", "b")
    ]
    assert digests[0] == digests[1]
    assert (tmp_path / "a/report.json").exists()


def test_errors_leave_nothing_behind(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "art"
    with pytest.raises(CalibrationError, match="needs calibration text"):
        quantize(tiny_model(), "w4a16.yaml", out=out)
    with pytest.raises(PlanError, match="columns, group 128"):
        quantize(tiny_model(), "w4a16.yaml", out=out, strict=True, method="rtn")
    with pytest.raises(RecipeError, match="no model"):
        quantize(None, "none.yaml", out=out)
    with pytest.raises(RecipeError, match="no such file"):
        quantize(tiny_model(), "nope.yaml", out=out)
    assert list(tmp_path.iterdir()) == []


def test_the_model_may_stand_in_the_recipe(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_model())
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("scheme: w8a8\nmethod: rtn\nmodel: model\n")
    made = quantize(None, recipe, out=tmp_path / "art")
    assert open_artifact(made).manifest.recipe.name == "mine"


def test_calibration_keys_find_their_section() -> None:
    recipe = load_recipe("w4a16.yaml", {"samples": 7, "batch_tokens": 9, "dtype": "float32"})
    assert (recipe.calibration.samples, recipe.calibration.batch_tokens) == (7, 9)
    assert recipe.dtype == "float32"
    with pytest.raises(RecipeError, match="--sampels"):
        load_recipe("w4a16.yaml", {"sampels": 7})
