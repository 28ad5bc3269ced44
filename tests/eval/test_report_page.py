"""report.html, junit.xml and summary.md from report.json's values, and `evaluate report`."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

from eval import cli
from eval.charts import Bar, bars, forest, share_of_limit
from eval.redaction import redacted
from eval.report import pages
from eval.report_page import badges, marked, worst

HOSTILE = '<script>alert("1")</script> & "Foo GmbH"'


def answer(text: str, *, is_right: bool, problem: str = "") -> dict[str, Any]:
    return {
        "text": text, "finish": "stop", "truncated": False, "failed": False, "problem": problem,
        "values": {"schema_valid": float(is_right), "json_valid": float(is_right),
                   "field_accuracy": [float(is_right), 1.0]},
        "details": {"wrong_fields": [] if is_right else ["party", "lines[2]"],
                    "calls": [] if is_right else [HOSTILE]},
    }  # fmt: skip


def item(name: str, base: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name, "source": "contracts", "lang": "en", "gold": {"party": "Foo GmbH"},
        "messages": [{"role": "user", "content": "Foo GmbH signs"}], "base": base,
        "candidate": ours, "first_divergence": 0,
    }  # fmt: skip


def measurement(unit: str, estimate: float, lower: float | None, upper: float | None) -> Any:
    return {
        "label": unit.title(), "unit": unit, "base": None, "candidate": None,
        "estimate": estimate, "lower": lower, "upper": upper, "num_tokens": 100,
        "num_clusters": 9, "num_nonfinite": 0,
    }  # fmt: skip


def finding(metric: str, label: str, outcome: str, limit: dict[str, Any], **more: Any) -> Any:
    return {
        "metric": metric, "label": label, "outcome": outcome, "required": True, "limit": limit,
        "reason": f"{label}: as measured", "stratum": "", "num_needed": None,
        "regression_suspected": False,
        **more,
    }  # fmt: skip


@pytest.fixture
def data() -> dict[str, Any]:
    """An evaluation that broke two limits of four, one question open, one of the guards."""
    schema = measurement("drop", 0.16, 0.124, 0.192) | {
        "label": "Schema valid", "base": 0.98, "candidate": 0.82, "num_items": 400, "lost": 64,
        "gained": 0, "mcnemar_p": 1e-9, 
        "domains": {"lang:zh": measurement("drop", 0.3, 0.2, 0.4),
                    "lang:en": measurement("drop", 0.1, 0.0, 0.2)},
    }  # fmt: skip
    return {
        "format_version": "1.1", "verdict": "rejected", "exit_code": 1, "summary": "It lost much.",
        "judged_at": "2026-11-30T11:24:29+00:00", "seconds": 81.2,
        "artifact": {"path": "out/contracts-w4", "digest": "ab" * 32, "recipe": "w4a16",
                     "schemes": {"w4a16-g64": 210}, "tools": {"torch": "2.13.0"}},
        "sizes": {"artifact_bytes": 98_000_000, "dense_bytes": 269_000_000},
        "base": {"name": "base", "digest": "cd" * 32, "description": "transformers, float32"},
        "numerics": {"description": "engine, float32", "chat_template_sha256": None},
        "gates": {"path": "gates.yaml", "sha256": "ef" * 32},
        "suite": {"directory": "gate", "sha256": {"text.jsonl": "01" * 32}},
        "method": {"confidence": 0.95, "seed": 0, "draws": 10000, "unit": "per token",
                   "detectable": "6.3 pp could have been seen."},
        "findings": [
            finding("perplexity_ratio", "PPL(Q)/PPL(base)", "pass", {"max": 1.05}),
            finding("kl_mean", "Mean KLD", "fail", {"max": 0.05}),
            finding("schema_valid", "Schema valid", "fail", {"max_drop": 0.02},
                    regression_suspected=True),
            finding("schema_valid", "Schema valid in lang:zh", "fail", {"max_drop": 0.05},
                    stratum="lang:zh"),
            finding("field_f1", "Field F1", "inconclusive", {"max_drop": 0.05}),
            finding("json_valid", "JSON valid", "inconclusive", {"max_drop": 0.05},
                    required=False),
        ],
        "measurements": {
            "perplexity_ratio": measurement("ratio", 1.02, 1.01, 1.03),
            "kl_mean": measurement("nats", 0.1, 0.08, 0.12),
            "schema_valid": schema,
            "field_f1": measurement("drop", 0.04, None, None),
            "json_valid": measurement("drop", 0.0, -0.1, 0.1),
        },
        "kld": {"num_tokens": 6120, "mean": 0.1, "p50": 0.05, "p99.9": 3.0, "max": 4.0,
                "share_above_0.1": 0.4},
        "answers": {}, "notes": ["The base is itself rounded."],
        "items": [
            item("same", answer("{}", is_right=True), answer("{}", is_right=True)),
            item("worse", answer("{}", is_right=True),
                 answer(HOSTILE, is_right=False, problem=f"not JSON: {HOSTILE}")),
            item("better", answer("x", is_right=False), answer("{}", is_right=True)),
        ],
    }  # fmt: skip


class References(HTMLParser):
    """What a page would fetch, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [f"{tag} {key}={value}" for key, value in attrs if key in ("src", "href")]


def test_the_page_fetches_nothing_and_quotes_safely(data: dict[str, Any]) -> None:
    page = pages(data)["report.html"]
    parser = References()
    parser.feed(page)
    assert parser.found == []
    assert parser.tags.isdisjoint({"script", "link", "iframe", "img", "object"})
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[^\"' )]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "&lt;" in page


def test_the_first_screen_says_what_matters(data: dict[str, Any]) -> None:
    page = pages(data)["report.html"]
    order = [page.index(text) for text in ("REJECTED", "2.7 times smaller", "1 Divergence",
                                           "98.0% → 82.0%", "Every metric")]  # fmt: skip
    assert order == sorted(order)
    assert [badge.state for badge in badges(data)] == ["fail", "fail", "none"]
    assert [line.partition(":")[0] for line in worst(data)] == [
        "Schema valid", "Schema valid in lang", "Mean KLD"
    ]  # fmt: skip


def test_people_have_the_third_badge(data: dict[str, Any]) -> None:
    data["review"] = {"verdict": "accepted", "summary": "150 pairs"}
    assert badges(data)[2].state == "pass"


@pytest.mark.parametrize(
    ("value", "unit", "limit", "expected"),
    [
        (1.025, "ratio", {"max": 1.05}, 0.5),
        (0.1, "nats", {"max": 0.05}, 2.0),
        (0.96, "share", {"min": 0.92}, 0.5),
        (-0.02, "drop", {"max_drop": 0.02}, -1.0),
        (1.0, "ratio", {"max": 1.0}, None),
    ],
)
def test_losses_are_drawn_in_shares_of_their_limit(
    value: float, unit: str, limit: dict[str, float], expected: float | None
) -> None:
    assert share_of_limit(value, unit, limit) == pytest.approx(expected)


def test_the_forest_has_an_interval_where_there_is_one(data: dict[str, Any]) -> None:
    lines = bars(data["findings"], data["measurements"])
    assert [(bar.lower is None) for bar in lines] == [
        False, False, False, False, True, False
    ]  # fmt: skip
    picture = forest(lines)
    assert picture.count('class="whisker') == 5
    assert picture.count('class="dot') == 6


def test_an_interval_of_a_share_keeps_its_order() -> None:
    found = bars(
        [{"metric": "top1", "label": "Same top p", "outcome": "pass", "limit": {"min": 0.9}}],
        {"top1": {"unit": "share", "estimate": 0.95, "lower": 0.93, "upper": 0.97}},
    )
    [bar] = found
    assert isinstance(bar, Bar)
    assert (bar.lower, bar.estimate, bar.upper) == pytest.approx((0.3, 0.5, 0.7))


def test_differences_are_marked_by_words() -> None:
    before, after = marked("the laws of Denmark", "the law of Denmark")
    assert str(before) == "the <del>laws</del> of Denmark"
    assert str(after) == "the <ins>law</ins> of Denmark"


def test_long_answers_are_compared_too() -> None:
    before, _ = marked("a b " * 3000, "a c " * 3000)
    assert re.sub(r"</?del>", "", str(before)) == "a b " * 3000


def test_redacted_pages_hold_no_word_of_an_item(data: dict[str, Any]) -> None:
    for name, text in pages(redacted(data)).items():
        assert "Foo" not in text, name
        assert "alert" not in text, name
    kept = redacted(data)["items"][1]
    assert kept["candidate"]["problem"] == "not JSON"
    assert kept["gold"] == {"party": "[8 characters]"}
    assert data["items"][1]["gold"] == {"party": "Foo GmbH"}


def test_junit_is_read_by_a_consumer(data: dict[str, Any], tmp_path: Path) -> None:
    data["findings"][1]["reason"] = "bad \x00 \ud800 <text>"
    path = tmp_path / "junit.xml"
    path.write_text(pages(data)["junit.xml"], encoding="utf-8")
    [suite] = JUnitXml.fromfile(str(path))
    assert (suite.tests, suite.failures, suite.skipped, suite.errors) == (7, 4, 1, 0)
    results = {case.name: [r.type for r in case.result] for case in suite}
    assert results["perplexity_ratio"] == []
    assert results["schema_valid"] == ["rejected"]
    assert results["field_f1"] == ["inconclusive"]
    assert results["schema_valid[lang:zh]"] == ["rejected"]
    assert results["schema_valid[lang:en]"] == []


def test_the_summary_fits_a_comment(data: dict[str, Any]) -> None:
    data["findings"] = data["findings"] * 12
    text = pages(data)["summary.md"]
    assert text.startswith("### REJECTED: contracts-w4\n")
    assert len(text.splitlines()) <= 40


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def test_the_pages_are_made_anew(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(data))
    (tmp_path / "report.md").write_text("Foo GmbH")
    review = tmp_path / "review.json"
    review.write_text(json.dumps({"verdict": "accepted", "artifact_digest": "ab" * 32}))
    assert call("report", str(tmp_path), "--review", str(review), "--redact") == 0
    page = (tmp_path / "report.html").read_text()
    assert "Foo" not in page
    assert not (tmp_path / "report.md").exists()
    assert json.loads((tmp_path / "report.json").read_text())["review"]["verdict"] == "accepted"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON text"),
        ("[]", "expected an object"),
        ('{"report_version": "1.0"}', "expected 1.x"),
        ('{"format_version": "1.0"}', "it lacks artifact"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    (tmp_path / "report.json").write_text(content)
    assert call("report", str(tmp_path)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_review_of_another_artifact_is_refused(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(data))
    review = tmp_path / "review.json"
    review.write_text(json.dumps({"verdict": "accepted", "artifact_digest": "cd" * 32}))
    assert call("report", str(tmp_path), "--review", str(review)) == 2
