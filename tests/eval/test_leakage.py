"""The gate must not hold what calibrated: an error before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from suite_rows import write_rows

from eval.api import evaluate
from eval.errors import UsageError
from eval.leakage import LeakageError, check_leakage, read_texts
from quant.api import quantize
from quant.artifact.artifact import open_artifact
from quant.artifact.manifest import CalibrationRecord, SketchRecord
from quant.artifact.overlap import make_sketch


def judged(*files: Path, has_sketch: bool = True) -> Any:
    """What check_leakage reads of an artifact that was calibrated with these files."""
    rows = [text for path in files for text in read_texts(path)]
    sketch = SketchRecord.of(make_sketch(rows)) if has_sketch else None
    record = CalibrationRecord(digest="d", samples=1, tokens=1, sketch=sketch) if files else None
    return SimpleNamespace(path=Path("art"), manifest=SimpleNamespace(calibration=record))


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir()
    text = [{"id": f"gate-text-{n}", "text": long_text(n)} for n in range(8)]
    items = [
        {
            "id": f"gate-item-{n}",
            "messages": [{"role": "user", "content": "Extract. " + long_text(n)}],
            "checks": [{"kind": "fields", "gold": {"party": f"Nordwind {n * 7919} AG",
                                                   "town": f"Hafenstadt-{n * 104729}"}}],
        }
        for n in range(20, 24)
    ]  # fmt: skip
    write_rows(folder / "text.jsonl", text)
    write_rows(folder / "more.jsonl", items)
    return folder


def long_text(number: int) -> str:
    return " ".join(f"word{number * 1000 + i * i}" for i in range(80))


@pytest.fixture
def calib(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: dict[str, Any]) -> Path:
        path = tmp_path / f"calib-{len(rows)}.jsonl"
        write_rows(path, [*({"text": long_text(n)} for n in range(100, 110)), *rows])
        return path

    return write


def test_how_it_was_checked_is_said(suite: Path, calib: Callable[..., Path]) -> None:
    clean = calib()
    assert check_leakage(judged(), suite).by == "none"
    assert check_leakage(judged(clean), suite).by == "sketch"
    by_file = check_leakage(judged(clean), suite, [clean])
    assert (by_file.by, by_file.num_checked) == ("file", 12)
    unknown = check_leakage(judged(clean, has_sketch=False), suite)
    assert unknown.by == "unknown"
    assert "pass --calib FILE" in unknown.note
    assert check_leakage(judged(clean, has_sketch=False), suite, [clean]).by == "file"


@pytest.mark.parametrize(
    "row",
    [
        {"text": long_text(3)},
        {"messages": [{"role": "user", "content": "Please: " + long_text(22).upper()}]},
        {"prompt": long_text(200) + long_text(21), "completion": "done"},
        {"id": "gate-text-5", "text": "quite another text"},
    ],
)
def test_a_planted_row_is_an_error(
    suite: Path, calib: Callable[..., Path], row: dict[str, Any]
) -> None:
    leaky = calib(row)
    for files in ((), (leaky,)):
        with pytest.raises(LeakageError, match="1 of 12 gate rows stand in what calibrated") as e:
            check_leakage(judged(leaky), suite, files)
        assert e.value.exit_code == 4


def test_the_gold_of_a_check_is_a_filled_record(suite: Path, calib: Callable[..., Path]) -> None:
    leaky = calib({"text": "Once in Hafenstadt-2094580, Nordwind 158380 AG was founded."})
    with pytest.raises(LeakageError, match=r"gate-item-20.*the same filled-in record"):
        check_leakage(judged(leaky), suite, [leaky])


def test_a_file_that_did_not_calibrate_is_refused(suite: Path, calib: Callable[..., Path]) -> None:
    other = calib({"text": long_text(300)}, {"text": long_text(301)})
    write_rows(other, [{"text": long_text(n)} for n in range(300, 310)])
    with pytest.raises(UsageError, match="is not what calibrated art"):
        check_leakage(judged(calib()), suite, [other])


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no row"), ("{", "not JSON"), ("[]", "expected a JSON object")],
)
def test_calibration_files_that_cannot_be_read(
    suite: Path, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        check_leakage(judged(), suite, [path])


def test_an_artifact_calibrated_on_the_gate_is_not_judged(
    taught_model: Path, suite_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through both front doors: quantize keeps the sketch, evaluate finds the gate in it."""
    rows = (suite_dir / "text.jsonl").read_text().splitlines()
    calib = tmp_path / "calib.jsonl"
    calib.write_text("\n".join([rows[3], json.dumps({"text": long_text(1)})]))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("method: gptq\nscheme: w4a16\ngroup_size: 32\nskip: [lm_head]\n")
    made = quantize(str(taught_model), recipe, calib=calib, out=tmp_path / "art")
    record = open_artifact(made).manifest.calibration
    assert record is not None
    assert record.sketch is not None
    assert len(record.sketch.documents) == 2
    monkeypatch.setattr("eval.opening.EngineTarget", None)
    with pytest.raises(LeakageError, match="text-3"):
        evaluate(made, suite=suite_dir, out=tmp_path / "out", cache=tmp_path / "cache")
    with pytest.raises(UsageError, match="--calib"):
        evaluate(made, suite=suite_dir, out=tmp_path / "out", calib=["no-such.jsonl"])
