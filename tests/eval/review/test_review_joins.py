"""From a demand in the gates to an accepted artifact: pack, rate, score into the evaluation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from report_rows import report_data
from review_rows import opened_at, prefer, rate_all, sample_row, sound, write_samples

from eval import cli

DEMAND = {"margin": 0.2, "max_critical": 0.04, "required": True}


def call(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """The folder of an evaluation whose gates demand a review, with many samples."""
    folder = write_samples(tmp_path / "report", [sample_row(n) for n in range(200)])
    data: dict[str, Any] = report_data()
    data["gates"]["review"] = DEMAND
    data["measured"] = {"verdict": "accepted", "summary": "All limits are kept."}
    data |= {"verdict": "inconclusive", "exit_code": 3}
    for finding in data["findings"]:
        finding["outcome"] = "pass"
    data["samples_sha256"] = hashlib.sha256((folder / "samples.jsonl").read_bytes()).hexdigest()
    (folder / "report.json").write_text(json.dumps(data))
    return folder


def verdict(folder: Path) -> str:
    return str(json.loads((folder / "report.json").read_text())["verdict"])


def test_the_packs_rules_are_the_gates(
    evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    laxer = call("review", "pack", evaluation, "--out", tmp_path / "lax", "--margin", "0.3")
    assert laxer == 2
    assert "laxer than the 0.2" in capsys.readouterr().err
    assert not (tmp_path / "lax").exists()
    out = tmp_path / "blind"
    assert call("review", "pack", evaluation, "--out", out, "--max-critical", "0.02") == 0
    rules = json.loads((out / "pack.json").read_text())["rules"]
    assert rules == {"margin": 0.2, "max_critical": 0.02, "confidence": 0.95}


@pytest.mark.parametrize(("liked", "code", "expected"), [("tie", 0, "accepted"),
                                                         ("base", 1, "rejected")])  # fmt: skip
def test_a_scored_pack_completes_the_verdict(
    evaluation: Path, tmp_path: Path, liked: str, code: int, expected: str
) -> None:
    out = tmp_path / "blind"
    assert call("review", "pack", evaluation, "--out", out, "--n", "70") == 0
    # Before anyone rated: pending, and the evaluation says so.
    assert call("review", "score", out, "--evaluation", evaluation) == 3
    assert verdict(evaluation) == "inconclusive"
    pack, key = opened_at(out)
    rate_all(pack, key, "Ann", lambda e: prefer(e, liked) if e.kind == "request" else sound(e))
    assert call("review", "score", out, "--evaluation", evaluation) == code
    assert verdict(evaluation) == expected
    assert "Layer 3" in (evaluation / "summary.md").read_text()


def test_a_pack_of_another_evaluation_changes_nothing(
    evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "blind"
    assert call("review", "pack", evaluation, "--out", out) == 0
    data = json.loads((evaluation / "report.json").read_text()) | {"samples_sha256": "00" * 32}
    (evaluation / "report.json").write_text(json.dumps(data))
    before = (evaluation / "report.json").read_bytes()
    assert call("review", "score", out, "--evaluation", evaluation) == 2
    assert "review of other answers" in capsys.readouterr().err
    assert (evaluation / "report.json").read_bytes() == before
