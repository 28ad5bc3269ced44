"""An artifact evaluated again after people rejected its answers: no way around their review."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_rows import review_data

from eval import cli
from quant.artifact.stamp import read_stamp

GATES = "version: 1\nmetrics: {kl_mean: {max: 9}}\n"


def call(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def report_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())  # type: ignore[no-any-return]


def review_of(report: dict[str, Any], verdict: str, pack: str, path: Path) -> Path:
    names = {"artifact_digest": report["artifact"]["digest"], "pack": {"sha256": pack * 32},
             "samples_sha256": report["samples_sha256"]}  # fmt: skip
    path.write_text(json.dumps(review_data(verdict, **names)))
    return path


def test_a_review_that_rejected_these_answers_outlives_another_run(
    taught_model: Path,
    artifact: Callable[..., Path],
    suite_dir: Path,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(cache_dir))
    made = artifact(taught_model, method="rtn", scheme="w4a16", group_size="channel")
    (tmp_path / "gates.yaml").write_text(GATES)

    def judge(folder: str, *more: str) -> int:
        few = ("--items", "6", "--windows", "8", "--window-tokens", "48")
        gates = tmp_path / "gates.yaml"
        return call(made, "--suite", suite_dir, "--gates", gates, *few, "--out", tmp_path / folder,
                    *more)  # fmt: skip

    assert judge("first") == 0
    first = report_in(tmp_path / "first")
    rejecting = review_of(first, "rejected", "bb", tmp_path / "rejecting.json")
    assert call("report", tmp_path / "first", "--review", rejecting) == 0
    for folder in ("first", "second", "second"):  # the report knows it, or only the stamp
        assert judge(folder) == 1
        assert "Layer 3 FAILED: 150 pairs, 2 raters." in capsys.readouterr().out
        report, stamp = report_in(tmp_path / folder), read_stamp(made)
        assert stamp is not None
        assert stamp.review is not None
        assert (stamp.verdict, stamp.review.pack_sha256) == ("rejected", "bb" * 32)
        assert (report["verdict"], report["exit_code"]) == ("rejected", 1)
        assert report["measured"]["verdict"] == "accepted"
        cases = ET.parse(tmp_path / folder / "junit.xml").iter("testcase")
        assert "review" in {c.get("name") for c in cases if c.find("failure") is not None}
        for page in ("report.html", "report.md", "summary.md"):
            assert "150 pairs, 2 raters" in (tmp_path / folder / page).read_text(), page
    # A report of its own, and no stamp: the review is known all the same.
    (made / "gate.json").unlink()
    assert judge("second", "--no-stamp") == 1
    another = review_of(report, "accepted", "cc", tmp_path / "another.json")
    assert judge("second") == 1
    assert call("report", tmp_path / "second", "--review", another) == 2
    assert "another pack than the review that rejected" in capsys.readouterr().err
    more_raters = review_of(report, "accepted", "bb", tmp_path / "more.json")
    assert call("report", tmp_path / "second", "--review", more_raters) == 0
    assert report_in(tmp_path / "second")["verdict"] == "accepted"
    assert read_stamp(made).verdict == "accepted"  # type: ignore[union-attr]
