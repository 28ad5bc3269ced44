"""report.html, junit.xml and summary.md from report.json's values, and `evaluate report`."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from report_rows import answer, item, report_data

from eval import cli, report_tasks
from eval.charts import Bar, bars, forest, share_of_limit
from eval.charts_lines import kaplan_meier
from eval.marking import marked
from eval.redaction import redacted
from eval.report import pages
from eval.report_page import badges, worst


@pytest.fixture
def data() -> dict[str, Any]:
    """An evaluation that broke two limits of four, one question open, one of the guards."""
    return report_data()


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
    order = [page.index(text) for text in ("REJECTED", "2.7× smaller", "not measured here",
                                           "1 Divergence",
                                           "98.0% → 82.0%", "Every metric")]  # fmt: skip
    assert order == sorted(order)
    assert [badge.state for badge in badges(data)] == ["fail", "fail", "none"]
    assert [line.partition(":")[0] for line in worst(data)] == [
        "Schema valid", "Schema valid in lang", "Token probabilities moved. Mean KLD", "Field F1",
        "Unseen text is predicted worse. PPL(Q)/PPL(base)",
    ]  # fmt: skip
    assert worst(data)[3].endswith("(undecided)")
    assert worst(data)[4].endswith("(within its limit)")


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


def test_survival_is_kaplan_and_meiers() -> None:
    # Worked by hand: 5 watched at 1 (one ends), 4 at 3 (one ends, one leaves at 3), 2 at 7.
    times = [(1, True), (3, True), (3, False), (7, True), (9, False)]
    assert kaplan_meier(times) == [(1, pytest.approx(4 / 5)), (3, pytest.approx(3 / 5)),
                                   (7, pytest.approx(3 / 10))]  # fmt: skip
    assert kaplan_meier([(4, False)]) == []


def lengths(data: dict[str, Any], count: int, lost_from: int) -> list[dict[str, Any]]:
    """The charts of `count` items by length, of which those above `lost_from` are lost."""
    items = [
        item(str(n), answer("{}", is_right=True), answer("{}", is_right=n < lost_from))
        | {"num_prompt_tokens": 100 + n}
        for n in range(count)
    ]
    return report_tasks.by_length(items, data["measurements"])


def test_metrics_by_input_length_where_there_is_something_to_see(data: dict[str, Any]) -> None:
    [chart] = lengths(data, 40, 30)
    assert chart["label"] == "Schema valid"
    places = re.findall(r"<title>(base|candidate), (\d+-\d+): ([\d.]+)</title>", chart["svg"])
    assert [p for p in places if p[0] == "candidate"] == [
        ("candidate", "100-109", "1"), ("candidate", "110-119", "1"),
        ("candidate", "120-129", "1"), ("candidate", "130-139", "0"),
    ]  # fmt: skip
    assert lengths(data, 39, 30) == []  # too few in a quarter
    assert lengths(data, 40, 40) == []  # nothing was ever wrong


def test_fields_and_paths_are_counted_by_hand(data: dict[str, Any]) -> None:
    heat = report_tasks.heat_map(data["items"])
    assert heat["sources"] == [("contracts", 3)]
    # lines and party: wrong once in each model's answers, though not in the same answer.
    assert [(name, cell.base, cell.candidate) for name, [cell] in heat["rows"]] == [
        ("lines", 1, 1), ("party", 1, 1)
    ]  # fmt: skip
    worse = [item("a", answer("{}", is_right=True), answer("", is_right=False))] * 4
    assert {cell.heat for _, [cell] in report_tasks.heat_map(worse)["rows"]} == {4}
    problems = ["$.lines[3].unit: type", "$.lines[11].unit: type", "not JSON: line 1", "chose 'x'"]
    wrong = [item("b", answer("", is_right=True), answer("", is_right=False, problem=text))
             for text in problems]  # fmt: skip
    assert report_tasks.paths(wrong) == [
        ("$.lines[*].unit: type", 0, 2), ("another choice", 0, 1), ("not JSON", 0, 1)
    ]  # fmt: skip


def test_the_matrix_of_a_metric(data: dict[str, Any]) -> None:
    [found] = report_tasks.matrices(data["measurements"])
    assert (found.both, found.lost, found.gained, found.neither) == (328, 64, 0, 8)


def test_no_picture_of_nothing(data: dict[str, Any]) -> None:
    for part in data["layer1"]["domains"].values():
        for name in part:
            if name.endswith("KLD"):
                part[name] = {"estimate": 0.0} if name == "Mean KLD" else 0.0
                if name == "Mean KLD":
                    part[name] |= {"lower": None, "upper": None}
    del data["layer1"]["positions"][1:], data["layer1"]["lengths"][1:]
    page = pages(data)["report.html"]
    assert page.count("<svg") == 1
    assert "do not differ at any token" in page


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
    assert call("report", str(tmp_path), "--redact") == 0
    for name in ("report.html", "report.md", "report.json", "summary.md", "samples.jsonl"):
        assert "Foo" not in (tmp_path / name).read_text(), name


def bench(folder: Path, name: str, **changes: Any) -> str:
    """A file of `runtime bench --json`."""
    times = {"p50": 20.0, "p90": 30.0, "p99": 40.0, "mean": 22.0}
    run = {"sent": 64, "ok": 64, "concurrency": 16, "output_tok_s": 100.0, "ttft_ms": times,
           "tpot_ms": times, "max_tokens": 64, "asked_sha256": "ab", **changes}  # fmt: skip
    path = folder / name
    path.write_text(json.dumps(run))
    return str(path)


def test_speed_is_what_was_measured(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(data))
    ours, base = bench(tmp_path, "a", output_tok_s=250.0), bench(tmp_path, "b")
    assert call("report", str(tmp_path), "--bench", ours, "--bench-base", base) == 0
    page = (tmp_path / "report.html").read_text()
    assert "2.50× as fast" in page
    assert "Under load" in page


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"concurrency": 8}, "different loads (concurrency 16 and 8) and cannot be compared"),
        ({"max_tokens": 16}, "run both with the same --max-tokens"),
        ({"asked_sha256": "cd"}, "run both with the same --prompt or --prompts"),
        ({"ok": 60}, "only 60 of 64 requests"),
        ({"rate": 2.0}, "open loop (--rate 2)"),
        ({"tpot_ms": {}}, "64 of 64 requests were answered with text"),
    ],
)
def test_speeds_that_say_nothing_are_refused(
    data: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    said: str,
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(data))
    ours, base = bench(tmp_path, "a"), bench(tmp_path, "b", **changes)
    assert call("report", str(tmp_path), "--bench", ours, "--bench-base", base) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "expected an object"),
        ("{}", "expected 1.x"),
        ('{"report_version": "1.0"}', "give the folder that `evaluate` wrote"),
        ('{"format_version": "1.0"}', "verdict: Field required"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    (tmp_path / "report.json").write_text(content)
    assert call("report", str(tmp_path)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
