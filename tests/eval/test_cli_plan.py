"""`evaluate plan` on the command line: the shipped gates, one's own margins, an earlier report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.cli import main

GATES = """version: 1
metrics:
  schema_valid: {max_drop: 0.05, strata: {"source:*": {max_drop: 0.1, required: false}}}
  json_valid: {max_drop: 0.05}
  kl_mean: {max: 0.1}
"""


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_the_default_plan_says_what_180_items_can_do(plan: Callable[..., Any]) -> None:
    code, out, _ = plan()
    assert code == 0
    assert "5 pp" in out
    assert "What 180 items can do" in out
    row = next(line for line in out.splitlines() if line.startswith("Schema valid"))
    assert row.split() == ["Schema", "valid", "180", "5", "pp", "2.0%", "97%", "8.4", "pp", "10.8",
                           "pp", "124"]  # fmt: skip


def test_ones_own_margins_and_suite(
    plan: Callable[..., Any], suite_dir: Path, tmp_path: Path
) -> None:
    gates = tmp_path / "g.yaml"
    gates.write_text(GATES)
    code, out, _ = plan("--gates", gates, "--suite", suite_dir, "--items", 140, "--json",
                        "--margin", 0.02, "--discordance", 0.02)  # fmt: skip
    assert code == 0
    made = json.loads(out)
    assert made["needed"] == {"0.02": [398], "0.05": [124], "0.1": [made["needed"]["0.1"][0]]}
    sizes = {row["label"]: row["ability"]["num_items"] for row in made["metrics"]}
    assert sizes["Schema valid"] == sizes["JSON valid"] == 140
    assert sum(n for label, n in sizes.items() if " in source:" in label) in (139, 140)
    assert not any("KLD" in label for label in sizes)
    required = [row["ability"]["accepts_equal"] for row in made["metrics"] if row["required"]]
    assert made["accepts_all"] == pytest.approx(required[0] * required[1])
    assert "holds 70 of the 140 items" in " ".join(made["remarks"])


def test_only_items_with_a_metrics_check_count_for_it(
    plan: Callable[..., Any], suite_dir: Path, tmp_path: Path
) -> None:
    """Six questions and two dialogs beside a file that has another check in every row."""
    suite, gates = tmp_path / "suite", tmp_path / "g.yaml"
    suite.mkdir()
    (suite / "text.jsonl").write_bytes((suite_dir / "text.jsonl").read_bytes())

    def turn(number: int, kind: str, gold: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Which law governs contract {number}?"}]
        return {"messages": messages, "checks": [{"kind": kind, "gold": gold}]}

    laws = [{"id": f"q{n}", "source": "law", "lang": "en", **turn(n, "match", "Denmark")}
            for n in range(6)]  # fmt: skip
    states = [turn(n, "state", {"law": "Denmark"}) for n in (6, 7, 8, 9)]
    dialogs = [{"id": f"d{n}", "source": "talk", "lang": "en", "turns": states[n : n + 2]}
               for n in (0, 2)]  # fmt: skip
    (suite / "law.jsonl").write_text("\n".join(map(json.dumps, [*laws, *dialogs])) + "\n")
    gates.write_text(
        "version: 1\nmetrics:\n"
        "  normalised_match: {max_drop: 0.1, strata: {'source:*': {max_drop: 0.2},"
        " 'lang:de': {max_drop: 0.2}}}\n"
        "  dialog_state: {max_drop: 0.1, if_measured: true}\n"
        "  code_parses: {max_drop: 0.1, if_measured: true}\n"
        "  schema_valid: {max_drop: 0.1}\n"
    )
    code, out, err = plan("--gates", gates, "--suite", suite, "--items", 8, "--json")
    assert code == 0, err
    made = json.loads(out)
    sizes = {row["label"]: row["ability"]["num_items"] for row in made["metrics"]}
    assert sizes == {"Normalised match": 6, "Dialog state": 4}
    remarks = " ".join(made["remarks"])
    assert "No item of the suite has a check for Schema valid" in remarks
    assert "No item with Normalised match is in lang:de: evaluate will not judge" in remarks


def test_a_report_brings_its_discordance(plan: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    row = {"base": 0.9, "lost": 6, "gained": 4, "num_items": 100}
    report.write_text(json.dumps({"measurements": {"schema_valid": row, "kl_mean": {}}}))
    _, out, _ = plan("--report", report, "--json")
    metrics = {row["label"]: row["ability"] for row in json.loads(out)["metrics"]}
    assert metrics["Schema valid"]["discordance"] == pytest.approx(0.1)
    assert metrics["JSON valid"]["discordance"] == pytest.approx(0.02)


@pytest.mark.parametrize("limit", ["floor: 0.8", "at_least: 0.95"])
def test_a_base_that_the_gate_calls_too_weak_is_never_planned_to_pass(
    plan: Callable[..., Any], tmp_path: Path, limit: str
) -> None:
    gates, report = tmp_path / "gates.yaml", tmp_path / "report.json"
    gates.write_text(f"version: 1\nmetrics: {{schema_valid: {{max_drop: 0.06, {limit}}}}}\n")
    for base, accepts in ((0.91, False), (0.99, True)):
        row = {"base": base, "lost": 1, "gained": 1, "num_items": 400}
        report.write_text(json.dumps({"measurements": {"schema_valid": row}}))
        made = json.loads(plan("--report", report, "--gates", gates, "--json")[1])
        (metric,) = made["metrics"]
        assert (metric["ability"]["accepts_equal"] > 0.5) is accepts
        assert (metric["needed"] is not None) is accepts
        assert ("no number of items" in " ".join(made["remarks"])) is not accepts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gates", "none.yaml"], "none.yaml"),
        (["--items", "0"], "--items"),
        (["--margin", "2"], "--margin"),
        (["--report", "no-report.json"], "cannot read the report"),
        (["--suite", "no-suite"], "no suite at no-suite"),
    ],
)
def test_wrong_usage(plan: Callable[..., Any], arguments: list[str], message: str) -> None:
    code, _, err = plan(*arguments)
    assert code == 2
    assert message in err


def test_a_file_that_is_no_report(plan: Callable[..., Any], tmp_path: Path) -> None:
    for content in ("[]", "{", '{"measurements": {"a": {"lost": 1}}}'):
        (tmp_path / "r.json").write_text(content)
        code, _, err = plan("--report", tmp_path / "r.json")
        assert code == 2
        assert "no report.json of evaluate" in err
