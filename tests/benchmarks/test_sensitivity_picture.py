"""The picture of sensitivity: measured on a tiny model, drawn from the JSON alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import sensitivity


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A split of three made-up contracts, shaped as the real one."""
    folder = tmp_path / "data"
    (folder / "cuad-contracts").mkdir(parents=True)
    text = "The customer shall pay the fee within thirty days of the invoice date. " * 12
    for name in "abc":
        (folder / "cuad-contracts" / f"{name}.txt").write_text(name + text)
    (folder / "wiki.txt").write_text(text)
    part = {"files": ["a.txt", "b.txt", "c.txt"], "max_windows": 2, "num_windows": 6}
    split = {
        "window_tokens": 48, "calibration": part, "heldout": part,
        "wikitext": {"file": "wiki.txt", "num_windows": 2},
    }  # fmt: skip
    (folder / "split.json").write_text(json.dumps(split))
    return folder


def test_what_is_measured_can_be_drawn(
    tiny_model: Callable[..., Path], data_folder: Path, tmp_path: Path
) -> None:
    out, svg = tmp_path / "s.json", tmp_path / "docs" / "s.svg"
    sensitivity.main(
        ["measure", "--model", str(tiny_model()), "--data", str(data_folder), "--out", str(out),
         "--windows", "4", "--tokens", "32", "--draws", "1", "--cache", str(tmp_path / "c.json"),
         "--commit", "none", "--shape", "tiny"]
    )  # fmt: skip
    data = json.loads(out.read_text())
    assert (data["windows"], data["window_tokens"], data["model"]) == (4, 32, "tiny")
    rows = data["rows"]
    assert {row["group"] for row in rows} == {
        "q_proj|k_proj|v_proj", "o_proj", "gate_proj|up_proj", "down_proj"
    }  # fmt: skip
    assert {row["layer"] for row in rows} == {0, 1}
    assert all(row["kl"] > 0 for row in rows)
    pytest.importorskip("matplotlib")
    sensitivity.main(["draw", str(out), str(svg), "--scheme", "w4a16-g32"])
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    first = svg.read_bytes()
    sensitivity.main(["draw", str(out), str(svg), "--scheme", "w4a16-g32"])
    assert svg.read_bytes() == first, "the same JSON, the same picture"
    with pytest.raises(SystemExit, match="no row of scheme 'w2'"):
        sensitivity.main(["draw", str(out), str(svg), "--scheme", "w2"])
