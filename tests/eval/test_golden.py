"""Golden rows: one that is lost rejects, however many others there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from suite_rows import ANSWER, SCHEMA, document_row, item_row, write_rows

from eval.checks.base import Reply
from eval.checks.registry import score_reply
from eval.coverage import require_covered
from eval.errors import EvaluationError, SuiteError
from eval.gate import judge
from eval.gate_spec import GateSpec
from eval.metrics.answers import PairedItem, measure
from eval.stats import Sampling
from eval.suites import TaskItem, load_suite

RULES = GateSpec.model_validate({"version": 1, "metrics": {"json_valid": {"max_drop": 0.05}}})


def suite_items(folder: Path, rows: list[dict[str, Any]]) -> list[TaskItem]:
    write_rows(folder / "text.jsonl", [document_row(0)])
    write_rows(folder / "extraction.jsonl", [item_row(0)])
    write_rows(folder / "tasks.jsonl", rows)
    return [item for item in load_suite(folder).pick(10_000, 0) if item.id.startswith("task")]


def row(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"task-{number}", "source": "contracts", "lang": "en",
        "messages": [{"role": "user", "content": f"Case {number}?"}],
        "checks": [{"kind": "json_valid"}, {"kind": "schema_valid", "schema": SCHEMA}],
        "gold": ANSWER, **more,
    }  # fmt: skip


def paired(item: TaskItem, base: str, candidate: str) -> PairedItem:
    replies = [Reply(text=text, raw=text, finish="stop") for text in (base, candidate)]
    scores = [score_reply(reply, item.checks) for reply in replies]
    return PairedItem(item=item, base=scores[0], candidate=scores[1], num_prompt_tokens=9)


@pytest.mark.parametrize(("golden", "expected"), [("task-7", "rejected"), ("task-8", "accepted")])
def test_one_lost_golden_row_rejects(tmp_path: Path, golden: str, expected: str) -> None:
    items = suite_items(tmp_path, [row(n, golden=golden == f"task-{n}") for n in range(300)])
    assert [item.id for item in items if item.golden] == [golden]
    pairs = [paired(i, "{}", "oops" if i.id == "task-7" else "{}") for i in items]
    verdict = judge(RULES, {m.name: m for m in measure(pairs, Sampling(draws=1000))})
    assert verdict.result == expected


@pytest.mark.parametrize("metric", ["field_f1", "field_accuracy", "field_completeness"])
def test_a_golden_row_is_lost_with_the_first_of_its_fields(tmp_path: Path, metric: str) -> None:
    checks = [{"kind": "fields", "gold": ANSWER}]
    items = suite_items(tmp_path, [row(n, checks=checks, golden=n in (7, 8)) for n in range(300)])
    rules = GateSpec.model_validate({"version": 1, "metrics": {metric: {"max_drop": 0.05}}})
    whole, part = json.dumps(ANSWER), json.dumps({"ok": True})
    said = {"task-7": (whole, part), "task-8": (part, "{}")}
    pairs = [paired(i, *said.get(i.id, (whole, whole))) for i in items]
    verdict = judge(rules, {m.name: m for m in measure(pairs, Sampling(draws=1000))})
    assert verdict.result == "rejected"
    assert verdict.findings[0].measurement.golden_lost == ("task-7",)


def test_a_golden_row_that_no_rule_would_miss_is_refused(tmp_path: Path) -> None:
    checks = [{"kind": "language", "expect": "en"}]
    items = suite_items(tmp_path, [row(0, checks=checks, golden=True)])
    with pytest.raises(EvaluationError, match=r"task-0 is golden.*\(language_right\)"):
        require_covered(RULES, [], items)
    rules = {"json_valid": {"max_drop": 0.05, "if_measured": True},
             "language_right": {"max_drop": 0.05}}  # fmt: skip
    require_covered(GateSpec.model_validate({"version": 1, "metrics": {**rules}}), [], items)


def test_a_golden_row_that_the_base_gets_wrong_cannot_be_lost(tmp_path: Path) -> None:
    items = suite_items(tmp_path, [row(0, golden=True)])
    [found] = [m for m in measure([paired(items[0], "oops", "oops")], Sampling(draws=1000))
               if m.name == "json_valid"]  # fmt: skip
    assert found.golden_lost == ()


def test_golden_dialogs_and_slips(tmp_path: Path) -> None:
    turn = {"messages": [{"role": "user", "content": "Hi?"}], "checks": [{"kind": "json_valid"}]}
    dialog = {"id": "task-d", "source": "a", "lang": "en", "turns": [turn, turn], "golden": True}
    assert [item.golden for item in suite_items(tmp_path, [dialog])] == [True, True]
    with pytest.raises(SuiteError, match="'golden' to be true or false, found 'yes'"):
        suite_items(tmp_path, [row(0, golden="yes")])
