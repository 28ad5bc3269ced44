"""KV scales in a run: long texts are measured, and what each layer loses is reported, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from quant.api import load_recipe, quantize
from quant.calibration import load_calibration
from quant.recipe_keys import CalibrationSettings
from quant.report import KVLayerResult, RunReport
from quant.source import open_source

RECIPE = "scheme: dense\nmethod: none\nkv_cache: fp8-head\nkv_skip_layers: [1]\ndtype: bfloat16\n"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Rows of very different lengths."""
    rows = [f"row {i}: " + "the customer shall pay the fee. " * n
            for i, n in enumerate((2, 3, 40, 60, 5))]  # fmt: skip
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Lengths:
    samples: list[int]
    long: list[int]


def lengths(tokenizer: Any, texts: Path, longest: int, **settings: int) -> tuple[Lengths, str]:
    found = load_calibration(
        texts, tokenizer, CalibrationSettings(max_tokens=64, **settings), longest=longest
    )
    sizes = Lengths([len(s) for s in found.samples], [len(s) for s in found.long_samples])
    return sizes, found.digest


def test_long_windows_are_the_beginnings_of_the_longest_rows(
    tiny_model: Callable[..., Path], texts: Path
) -> None:
    tokenizer = open_source(str(tiny_model("llama"))).tokenizer()
    none, plain = lengths(tokenizer, texts, 0)
    assert none.long == []
    both, digest = lengths(tokenizer, texts, 200)
    assert both.samples == none.samples
    assert both.long == [200, 200, 77]
    assert digest != plain
    one, _ = lengths(tokenizer, texts, 10_000, kv_samples=1)
    assert len(one.long) == 1
    assert one.long[0] > 200
    assert lengths(tokenizer, texts, 64)[0].long == []  # windows are that long already


def test_each_layers_error_is_reported_also_after_a_resume(
    tiny_model: Callable[..., Path], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE + "calibration: {max_tokens: 64, kv_max_tokens: 150}\n")
    model = tiny_model("llama")
    whole = quantize(model, recipe, calib=texts, out=tmp_path / "whole")
    rows = json.loads((whole / "report.json").read_text())["kv_layers"]
    assert [(r["layer"], r["cache"], r["longest_text"]) for r in rows] == [
        (0, "fp8-head", 150), (1, "bfloat16", 150),
    ]  # fmt: skip
    for row in rows:
        assert len(row["key_scales"]) == len(row["value_scales"]) == 2
        assert 0 < row["error"] <= row["error_of_one"]

    class Stop(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("quant.pipeline.quantize_outer", stop)
        with pytest.raises(Stop):
            quantize(model, recipe, calib=texts, out=tmp_path / "resumed")
    resumed = quantize(model, recipe, calib=texts, out=tmp_path / "resumed")
    report = json.loads((resumed / "report.json").read_text())
    assert report["resumed_layers"] > 0
    assert report["kv_layers"] == rows
    assert (resumed / "artifact.json").read_bytes() == (whole / "artifact.json").read_bytes()


def test_int8_needs_no_text_and_fp8_does(tmp_path: Path) -> None:
    for kind, needs in (("int8", False), ("fp8", True)):
        recipe = tmp_path / f"{kind}.yaml"
        recipe.write_text(f"scheme: dense\nmethod: none\nkv_cache: {kind}\n")
        assert load_recipe(recipe, {}).needs_calibration == needs


def test_layers_that_stand_out_are_named(
    tiny_model: Callable[..., Path], texts: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("scheme: dense\nmethod: none\nkv_cache: fp8\n")
    path = quantize(tiny_model("llama"), recipe, calib=texts, out=tmp_path / "art")
    report = json.loads((path / "report.json").read_text())
    assert not [line for line in report["warnings"] if "kv_skip_layers" in line]
    rows = [KVLayerResult.from_json(report["kv_layers"][0])] * 5
    rows = [replace(row, layer=i, error=0.02) for i, row in enumerate(rows)]
    rows[3] = replace(rows[3], error=0.05)
    advice = list(replace(some_report(), kv_layers=tuple(rows)).all_warnings())
    assert any("layers 3 distorts" in line and "`kv_skip_layers: [3]`" in line for line in advice)
    kept = [replace(row, cache="bfloat16") if row.layer == 3 else row for row in rows]
    assert list(replace(some_report(), kv_layers=tuple(kept)).all_warnings()) == []


def some_report() -> RunReport:
    return RunReport(
        model="m", architecture="a", recipe="r", artifact="out", artifact_digest="ab" * 32,
        dtype="bfloat16", source_bytes=1, artifact_bytes=1, modules=(), seconds={},
        peak_memory_bytes=1,
    )  # fmt: skip
