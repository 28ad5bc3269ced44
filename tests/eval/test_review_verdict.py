"""Layer 3 in the verdict: demanded by a gates file, joined to report, pages and stamp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from junitparser import JUnitXml
from report_rows import report_data, review_data

from eval import cli
from eval.errors import GateSpecError, UsageError
from eval.gate import Result, Verdict, await_review
from eval.gate_spec import parse_gates
from eval.joining import join
from eval.redaction import redacted
from eval.report import pages
from eval.report_page import badges, worst
from eval.review.rules import ReviewDemand
from eval.review.verdict import State, joint
from quant.artifact.stamp import (
    MetricRecord,
    Numerics,
    ReviewRecord,
    Stamp,
    read_stamp,
    write_stamp,
)
from runtime.config import ConfigError
from runtime.server.verdict import refuse_unless_accepted

GATES = "version: 1\nmetrics: {kl_mean: {max: 0.05}}\n"
DEMAND = {"margin": 0.15, "max_critical": 0.03, "required": True}


@pytest.fixture
def data() -> dict[str, Any]:
    """Layers 1 and 2 passed, the gates demand a review, nobody was asked yet."""
    found = report_data()
    for finding in found["findings"]:
        finding["outcome"] = "pass"
    found["gates"]["review"] = DEMAND
    found["measured"] = {"verdict": "accepted", "summary": "All limits are kept."}
    return found | {"verdict": "inconclusive", "exit_code": 3, "summary": "Pending."}


def stamp_of(data: dict[str, Any], folder: Path, **changes: Any) -> Path:
    """An artifact's folder with the stamp that the evaluation wrote."""
    folder.mkdir()
    data["artifact"]["path"] = str(folder)
    stamp = Stamp(
        artifact_digest=data["artifact"]["digest"], verdict="inconclusive",
        judged_at=data["judged_at"], base="base", gates_sha256=data["gates"]["sha256"],
        numerics=Numerics(device_class="cpu", compute_dtype="float32", kv_cache_dtype="float32",
                          lm_head_scheme="none"),
        metrics=(MetricRecord(name="kl_mean", verdict="accepted"),),
        review=ReviewRecord(verdict="pending", required=True),
    )  # fmt: skip
    write_stamp(folder, stamp.model_copy(update=changes))
    return folder


def call(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def joined(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return join(data, review_data(**changes), "review.json")


@pytest.mark.parametrize("measured", get_args(Result))
@pytest.mark.parametrize("found", get_args(State))
@pytest.mark.parametrize("demanded", [True, False])
def test_the_verdict_of_all_layers(measured: Result, found: State, demanded: bool) -> None:
    result = joint(measured, found, demanded=demanded)
    if result == "accepted":
        assert measured == "accepted"
        assert found == "pass" or not demanded
    assert (result == "rejected") == (measured == "rejected" or found == "fail")
    if found == "pass":
        assert result == measured


def test_answers_that_a_review_rejected_are_not_packed_until_one_accepts() -> None:
    rejected = joined(report_data(), verdict="rejected")
    assert joined(rejected)["review"]["verdict"] == "accepted", "more raters of the same pack"
    with pytest.raises(UsageError, match=r"pack sha256 bbbbbbbb.*asking until one accepts"):
        joined(rejected, pack={"sha256": "cc" * 32})
    open_still = joined(report_data(), verdict="inconclusive")
    assert joined(open_still, pack={"sha256": "cc" * 32})["review"]["verdict"] == "accepted"


def test_a_gates_file_may_demand_a_review() -> None:
    assert parse_gates(GATES).review is None
    found = parse_gates(GATES + "review: {margin: 0.1}\n").review
    assert found == ReviewDemand(required=True, margin=0.1, max_critical=0.03)
    with pytest.raises(
        GateSpecError, match=r":3: unknown key 'review.requird'; did you mean 'requ"
    ):
        parse_gates(GATES + "review: {requird: true}\n")
    with pytest.raises(GateSpecError, match=r"review.margin: .* \(found 2\.0\)"):
        parse_gates(GATES + "review: {margin: 2.0}\n")


def test_a_demand_keeps_the_measured_verdict_open() -> None:
    accepted, rejected = (Verdict(result=r, findings=()) for r in ("accepted", "rejected"))
    demand = ReviewDemand()
    assert await_review(accepted, demand, 7).result == "inconclusive"
    assert await_review(accepted, demand, 7).exit_code == 3
    assert await_review(rejected, demand, 7).result == "rejected"
    # Where all answers are the base's there is nothing to ask.
    assert await_review(accepted, demand, 0).result == "accepted"
    assert await_review(accepted, ReviewDemand(required=False), 7).result == "accepted"
    assert await_review(accepted, None, 7) is accepted


@pytest.mark.parametrize(
    ("verdict", "of_all", "badge", "rows"),
    [
        ("accepted", "accepted", "pass", {"preference": [], "critical_faults": []}),
        ("rejected", "rejected", "fail", {"preference": [], "critical_faults": ["rejected"]}),
        ("inconclusive", "inconclusive", "inconclusive",
         {"preference": [], "critical_faults": ["inconclusive"]}),
        ("pending", "inconclusive", "pending", {"review": ["pending"]}),
        (None, "inconclusive", "pending", {"review": ["pending"]}),
    ],
)  # fmt: skip
def test_every_page_says_where_layer_3_stands(
    data: dict[str, Any], tmp_path: Path, verdict: str | None, of_all: str, badge: str,
    rows: dict[str, list[str]],
) -> None:  # fmt: skip
    changes = {"answers": [], "preference": None, "faults": None} if verdict == "pending" else {}
    if verdict is not None:
        data = joined(data, verdict=verdict, **changes)
    assert data["verdict"] == of_all
    assert badges(data)[2].state == badge
    texts = pages(data)
    assert badges(data)[2].word in texts["summary.md"]
    assert badges(data)[2].word in texts["report.html"]
    (tmp_path / "junit.xml").write_text(texts["junit.xml"], encoding="utf-8")
    [suite] = JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    found = {c.name: [r.type for r in c.result] for c in suite if c.classname == "evaluate.review"}
    assert found == rows


def test_what_nobody_demands_and_nobody_gave_has_no_row(data: dict[str, Any]) -> None:
    data["gates"]["review"] = None
    assert badges(data)[2].state == "none"
    assert "evaluate.review" not in pages(data)["junit.xml"]
    # Given without being asked for, an open review is told and does not stand in the way.
    open_ = joined(data, verdict="inconclusive")
    assert open_["verdict"] == "accepted"
    assert 'skipped type="inconclusive" message="3 of 150' in pages(open_)["junit.xml"]


def test_what_people_found_worse_comes_first(data: dict[str, Any]) -> None:
    assert worst(joined(data, verdict="rejected"))[0] == "People: 3 of 150 do harm"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"artifact_digest": "cd" * 32}, "review of other artifact"),
        ({"artifact_digest": None}, "review of other artifact"),
        ({"samples_sha256": "00" * 32}, "review of other answers"),
        ({"format_version": "2.0"}, "is no review.json"),
        ({"rules": {"margin": 0.3, "max_critical": 0.03}}, "margin 0.3 (demanded 0.15)"),
        ({"rules": {"margin": 0.15, "max_critical": 0.03, "confidence": 0.9}},
         "confidence 0.9 (demanded 0.95)"),
    ],
)  # fmt: skip
def test_other_reviews_and_lax_ones_are_refused(
    data: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as error:
        joined(data, **changes)
    assert said in str(error.value)


def test_the_stamp_holds_the_review(data: dict[str, Any], tmp_path: Path) -> None:
    artifact = stamp_of(data, tmp_path / "art")
    with pytest.raises(ConfigError, match="inconclusive: .*: evaluate review score PACK"):
        refuse_unless_accepted(read_stamp(artifact), artifact)
    (tmp_path / "report.json").write_text(json.dumps(data))
    (tmp_path / "review.json").write_text(json.dumps(review_data()))
    assert call("report", tmp_path, "--review", tmp_path / "review.json", "--redact") == 0
    stamp = read_stamp(artifact)
    assert stamp is not None
    refuse_unless_accepted(stamp, artifact)
    found = stamp.review
    assert found is not None
    assert (found.verdict, found.required, found.num_raters) == ("accepted", True, 2)
    assert (found.preference, found.critical_high) == (-0.02, 0.018)
    assert (found.pack_sha256, found.samples_sha256) == ("bb" * 32, "aa" * 32)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"], report["exit_code"]) == ("accepted", 0)
    for name in ("report.json", "report.html", "summary.md"):
        shown = (tmp_path / name).read_text()
        assert not [word for word in ("Foo", "Ann", "Bob", "ann-0") if word in shown], name
    assert [r["rater"] for r in report["review"]["raters"]] == ["rater 1", "rater 2", "rater 3"]
    assert report["review"]["items"][0]["votes"][0]["rater"] == "rater 1"
    assert report["review"]["agreement"]["pairs"][0]["raters"] == ["rater 1", "rater 2"]
    assert redacted(report) == report


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"judged_at": "2026-01-01T00:00:00+00:00"}, "its judged_at is 2026-01-01"),
        ({"artifact_digest": "99" * 32}, "its artifact digest is 9999"),
        ({"gates_sha256": "99" * 32}, "its gates_sha256 is 9999"),
    ],
)
def test_another_evaluations_stamp_is_left_alone(
    data: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    said: str,
) -> None:
    artifact = stamp_of(data, tmp_path / "art", **changes)
    before = (artifact / "gate.json").read_bytes()
    (tmp_path / "report.json").write_text(json.dumps(data))
    (tmp_path / "review.json").write_text(json.dumps(review_data()))
    assert call("report", tmp_path, "--review", tmp_path / "review.json") == 2
    assert said in capsys.readouterr().err
    assert (artifact / "gate.json").read_bytes() == before
    assert not (tmp_path / "report.html").exists()
    assert call("report", tmp_path, "--review", tmp_path / "review.json", "--no-stamp") == 0
    assert (artifact / "gate.json").read_bytes() == before


def test_an_artifact_without_a_stamp_gets_none(data: dict[str, Any], tmp_path: Path) -> None:
    data["artifact"]["path"] = str(tmp_path / "elsewhere")
    (tmp_path / "report.json").write_text(json.dumps(data))
    (tmp_path / "review.json").write_text(json.dumps(review_data()))
    assert call("report", tmp_path, "--review", tmp_path / "review.json") == 0
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "accepted"
