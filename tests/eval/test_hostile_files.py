"""Files and answers that were damaged, edited or made to harm: told in a line, never believed."""

from __future__ import annotations

import json
import signal
import xml.etree.ElementTree as ET
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mock_server import serving
from report_rows import report_data, review_data
from suite_rows import document_row, item_row, write_rows

from eval import cli
from eval.checks import patience
from eval.checks.base import Reply
from eval.checks.patience import TooSlowError, at_most
from eval.checks.registry import read_checks, score_reply
from eval.errors import GateSpecError, SuiteError, TargetError, UsageError
from eval.gate_spec import load_gates
from eval.joining import join
from eval.places import beside, check_out, write_files
from eval.reading import read_report
from eval.redaction import INVENTED, redacted
from eval.report import pages
from eval.suites import load_suite
from eval.targets.server import ServerTarget, Service
from quant.artifact.errors import ArtifactError, ManifestError
from quant.artifact.stamp import (
    MetricRecord,
    Numerics,
    ReviewRecord,
    Stamp,
    read_stamp,
    write_stamp,
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"metrics: " + b"[" * 20_000, "nested too deeply"),
        (b"metrics: " + b"{a: " * 3000, "nested too deeply"),
        (b"version: 1 # \xe9\nmetrics: {kl_mean: {max: 1.0}}\n", "not UTF-8 at byte 13"),
    ],
)
def test_gates_files(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "gates.yaml").write_bytes(content)
    with pytest.raises(GateSpecError, match=said):
        load_gates(tmp_path / "gates.yaml")


ASKED = {"id": "c", "source": "s", "lang": "en", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"checks": [{"kind": "schema_valid", "schema": {"$ref": "#"}}]}, "without an end"),
        ({"checks": [{"kind": "json_valid"}], "source": "\x1b[2J"}, "'source' to be printable"),
        ({"checks": [{"kind": "json_valid"}], "gold": float("inf")}, "out of range"),
        (
            {"checks": [{"kind": "schema_valid", "schema": {"pattern": "a{99999999999}"}}]},
            "the repetition number is too large",
        ),
    ],
)
def test_suites(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    write_rows(tmp_path / "text.jsonl", [document_row(1)])
    line = json.dumps({**ASKED, **row}).replace("Infinity", "1e999")
    (tmp_path / "tasks.jsonl").write_text(line)
    with pytest.raises(SuiteError, match=said):
        load_suite(tmp_path)


def test_answers_that_never_end_inside_a_recursive_schema() -> None:
    schema = {"properties": {"a": {"$ref": "#"}}}
    checks = read_checks([{"kind": "json_valid"}, {"kind": "schema_valid", "schema": schema}])
    text = '{"a": ' * 300 + "{}" + "}" * 300
    scored = score_reply(Reply(text=text, raw=text, finish="stop", tokens=()), checks)
    assert scored.values["schema_valid"] == 0
    wide = "{" + ", ".join(f'"k{n}": 1' for n in range(100_000)) + "}"
    scored = score_reply(Reply(text=wide, raw=wide, finish="stop", tokens=()), checks)
    assert scored.values["json_unique_keys"] == 1


BACKTRACKING = r"^(\w+\s?)*$"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"pattern": BACKTRACKING}}},
        {"additionalProperties": False, "patternProperties": {BACKTRACKING: {}}},
    ],
)
def test_a_pattern_that_backtracks_without_end_is_named(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.checks.schema.PATIENCE_S", 0.05)
    endless = "ab " * 20 + "!"
    checks = read_checks([{"kind": "schema_valid", "schema": schema}])
    text = json.dumps({"a": endless, endless: 1})
    with pytest.raises(SuiteError, match=r"more than 0.05 s of computing.*\(\^\(\\w\+"):
        score_reply(Reply(text=text, raw=text, finish="stop", tokens=()), checks)
    before = signal.getsignal(signal.SIGVTALRM)
    quick = json.dumps({"a": "ab"})
    score_reply(Reply(text=quick, raw=quick, finish="stop", tokens=()), checks)
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def spin(seconds: float) -> None:
    with at_most(seconds):
        while True:
            pass


def spin_twice_within(seconds: float) -> None:
    with at_most(seconds):
        with pytest.raises(TooSlowError):
            spin(0.02)
        with suppress(TooSlowError):  # as a finalizer loses what is raised in it
            spin(60)
        while True:
            pass


def test_limits_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_AGAIN_S", 0.02)
    with pytest.raises(TooSlowError):
        spin_twice_within(0.1)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_an_answer_too_large_to_check_is_wrong_and_the_suite_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eval.checks.schema.PATIENCE_S", 0.02)
    checks = read_checks([{"kind": "schema_valid", "schema": {"uniqueItems": True}}])
    text = json.dumps([{"a": n} for n in range(2000)])
    scored = score_reply(Reply(text=text, raw=text, finish="stop", tokens=()), checks)
    assert scored.values["schema_valid"] == 0
    assert scored.problem == "too large to be checked against its schema"


def test_pages_hold_no_character_that_acts() -> None:
    data = report_data()
    hostile = "\x1b[2J\x00\u202e\ufffe\ud800]]><script>"
    data["findings"][1]["label"] = data["findings"][1]["reason"] = hostile
    data["items"][1]["candidate"] |= {"text": hostile, "details": {"value": float("inf")}}
    made = pages(data)
    for name in ("report.html", "report.md", "summary.md", "junit.xml"):
        assert not set("\x1b\x00\u202e\ufffe\ud800") & set(made[name])
    assert "<script>" not in made["report.html"]
    ET.fromstring(made["junit.xml"])
    found = json.loads(made["report.json"], parse_constant=pytest.fail)
    assert found["items"][1]["candidate"]["details"] == {"value": None}


def test_redaction_hides_tools_and_twice_is_once() -> None:
    data = report_data()
    data["items"][0]["tools"] = [{"name": "pay", "description": "Pays Foo GmbH"}]
    once = redacted(data)
    assert "Foo GmbH" not in json.dumps(once)
    assert redacted(once) == once


def test_redaction_hides_names_that_a_model_made_up() -> None:
    data = report_data()
    item = data["items"][0]
    item["gold"] = {"party": {"name": "x"}, "n": 1}
    item["candidate"]["details"] = {
        "wrong_fields": ["party.name", "Foo GmbH owes 12,000"],
        "calls": [{"name": "pay", "arguments": {"Foo GmbH": {"Foo street": 1}, "sum": "12"}}],
        "missed": ["punctuation:no_comma"],
    }
    once = redacted(data)
    assert "Foo" not in json.dumps(once["items"][0])
    assert once["items"][0]["candidate"]["details"] == {
        "wrong_fields": ["party.name", INVENTED],
        "calls": [["[3 characters]", "[number]", "[2 characters]"]],
        "missed": ["punctuation:no_comma"],
    }
    assert redacted(once) == once


def write(folder: Path, name: str, data: dict[str, Any]) -> Path:
    (folder / name).write_text(json.dumps(data))
    return folder / name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": "accepted", "exit_code": 0}, "so it was edited"),
        ({"measured": {"verdict": "accepted", "summary": ""}}, "so it was edited"),
        ({"findings": []}, "findings: List should have at least 1"),
        ({"verdict": 1}, "verdict: Input should be"),
        ({"review": {"verdict": "accepted"}}, "review.format_version: Field required"),
        ({"items": 3}, "its pages cannot be made"),
        ({"kld": {}, "answers": []}, "its pages cannot be made"),
    ],
)
def test_reports_that_were_edited_or_are_foreign(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    read_report(write(tmp_path, "report.json", report_data()))
    with pytest.raises(UsageError) as error:
        read_report(write(tmp_path, "report.json", report_data() | changes))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": "splendid"}, "verdict: Input should be"),
        ({"verdict": "accepted", "answers": []}, "(pending), so it was edited"),
        ({"verdict": "accepted", "num_rated": 0}, "(pending), so it was edited"),
        ({"verdict": "accepted", "answers": review_data("rejected")["answers"]},
         "(rejected), so it was edited"),
        ({"rules": "lax"}, "rules: "),
        ({"items": [{"votes": [1]}]}, "items.0.votes.0: "),
    ],
)  # fmt: skip
def test_reviews_that_were_edited(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        join(report_data(), review_data() | changes, "review.json")
    assert said in str(error.value)


PASSED = (MetricRecord(name="kl_mean", verdict="accepted"),)
STAMP = Stamp(
    artifact_digest="ab" * 32, verdict="rejected", judged_at="2026-11-30T11:24:29+00:00",
    base="base", gates_sha256="ef" * 32,
    metrics=(MetricRecord(name="kl_mean", verdict="rejected"),),
    numerics=Numerics(device_class="cpu", compute_dtype="float32", kv_cache_dtype="float32",
                      lm_head_scheme="none"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "kl_mean is rejected"),
        ({"metrics": ()}, "names nothing that was judged"),
        ({"metrics": PASSED, "review": ReviewRecord(verdict="pending", required=True)},
         "the review is pending"),
        ({"metrics": PASSED, "review": ReviewRecord(verdict="rejected", required=False)},
         "the review is rejected"),
    ],
)  # fmt: skip
def test_a_stamp_edited_to_accepted_contradicts_itself(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_stamp(tmp_path, STAMP.model_copy(update=changes))
    assert read_stamp(tmp_path) is not None
    path = tmp_path / "gate.json"
    path.write_text(
        path.read_text().replace('"verdict": "rejected"\n}', '"verdict": "accepted"\n}')
    )
    with pytest.raises(ManifestError, match=said):
        read_stamp(tmp_path)


def test_a_report_edited_to_pass_does_not_turn_the_stamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = report_data()
    for finding in data["findings"]:
        finding["outcome"] = "pass"
    data |= {"verdict": "accepted", "measured": {"verdict": "accepted", "summary": "All kept."}}
    data["artifact"]["path"] = str(tmp_path)
    write_stamp(tmp_path, STAMP)
    before = (tmp_path / "gate.json").read_bytes()
    write(tmp_path, "report.json", data)
    review = write(tmp_path, "review.json", review_data())
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path), "--review", str(review)])
    assert ended.value.code == 2
    assert "one of them was edited" in capsys.readouterr().err
    assert (tmp_path / "gate.json").read_bytes() == before
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["artifact.json"], "is the artifact itself"),
        (["config.json"], "is a model's folder"),
        (["text.jsonl"], "is a suite"),
        (["pack.json", "items.jsonl"], "lies in the pack"),
    ],
)
def test_places(tmp_path: Path, files: list[str], said: str) -> None:
    check_out(tmp_path / "new")
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=said):
        check_out(tmp_path)


def test_a_report_that_was_interrupted_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_files({"report.json": "{}"}, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [("--concurrency", "4"), ("--api-key", "k"), ("--timeout", "3")])
def test_options_of_a_server_without_one(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["art", *option])
    assert ended.value.code == 2
    assert "pass --against URL too" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich ends with 1 then."""

    def gone(**_: Any) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(cli, "app", gone)
    with pytest.raises(SystemExit) as ended:
        cli.main(["art"])
    assert ended.value.code == 141


def test_a_server_that_changes_its_model() -> None:
    with serving(lambda path, body: {}) as (url, mock):
        mock.models = [{"id": "tiny", "weighbridge": {"artifact_digest": "d" * 64}}]
        target = ServerTarget(Service(url=url), None, "d" * 64)  # type: ignore[arg-type]
        target.require_unchanged()
        mock.models[0]["weighbridge"]["artifact_digest"] = "e" * 64
        with pytest.raises(TargetError, match="serves the artifact eeee"):
            target.require_unchanged()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"timeout_s": float("nan")}, "--timeout is nan"), ({"timeout_s": -1.0}, "--timeout is -1"),
     ({"api_key": "k\u00e9y"}, "--api-key holds"), ({"api_key": "a\nb"}, "--api-key holds")],
)  # fmt: skip
def test_options_that_no_server_could_take(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ServerTarget(Service(url="http://127.0.0.1:9", **options), None, "d")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"format_version": "2.0"}', '{"format_version": 1}']
)
def test_a_stamp_that_cannot_be_read_says_how_to_get_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "gate.json").write_text(content)
    with pytest.raises(ArtifactError, match="run `evaluate` again"):
        read_stamp(tmp_path)


def test_a_suite_still_loads(tmp_path: Path) -> None:
    write_rows(tmp_path / "text.jsonl", [document_row(1)])
    write_rows(tmp_path / "tasks.jsonl", [item_row(n) for n in range(3)])
    assert len(load_suite(tmp_path).items) == 3


def test_what_lies_beside_is_called_as_one_would_type_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "art").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (Path("art"), Path("./art/"), tmp_path / "art"):
        assert beside(name, "-evaluation") == Path("art-evaluation")
    monkeypatch.chdir(tmp_path / "art")
    assert beside(Path(), "-evaluation") == tmp_path / "art-evaluation"
