"""gate/tasks.jsonl: every kind is there, and the right answer passes every check of its row."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from calib_data import generate
from calib_data.tasks import task_rows
from eval.checks.base import Reply
from eval.checks.registry import score_reply
from eval.suites import TaskItem, load_suite

SHIPPED = Path(generate.__file__).parent / "gate"


def items() -> list[TaskItem]:
    suite = load_suite(SHIPPED)
    return [item for row in suite.tasks["tasks.jsonl"] for item in row.items]


def values(item: TaskItem, text: str, **more: Any) -> dict[str, Any]:
    reply = Reply(text=text, raw=text, finish="stop", tokens=tuple(text.split()), **more)
    return score_reply(reply, item.checks).values


def test_every_kind_comes_in_turn_and_three_sources_and_both_languages_are_there() -> None:
    rows = list(task_rows(120, generate.SEED))
    assert set(Counter(row["task"] for row in rows).values()) == {20}
    assert {row["source"] for row in rows} == {"service", "code", "contracts"}
    assert 10 <= sum(row["lang"] == "zh" for row in rows) <= 24
    assert rows[:30] == list(task_rows(30, generate.SEED))


def test_right_answers_pass_and_wrong_ones_do_not() -> None:
    passed: Counter[str] = Counter()
    for item in items():
        kind = item.checks[0].kind
        if kind in {"tool_call", "code", "state"}:
            assert item.gold_text
            right, wrong = values(item, item.gold_text), values(item, '{"a": (')
            names = {"tool_call": "tool_call", "code": "code_parses", "state": "dialog_state"}
            assert right[names[kind]] == 1, item.id
            assert wrong[names[kind]] == 0
            if kind == "code":
                assert right["code_fenced"] == right["code_defines"] == 1
                assert wrong["code_defines"] == 0
        passed[kind] += 1
    assert passed == {"tool_call": 20, "choice": 40, "code": 20, "constraints": 20, "state": 60}


def test_tools_are_sometimes_not_to_be_called() -> None:
    golds = [item.checks[0].options.gold for item in items() if item.checks[0].kind == "tool_call"]
    assert 2 <= sum(not gold for gold in golds) <= 10


def test_instructions_can_all_be_followed_at_once() -> None:
    """A reply put together from the instructions themselves passes the strict reading."""
    for item in items():
        if item.checks[0].kind == "constraints":
            rules = item.checks[0].options.instructions
            assert values(item, followed(rules, item.lang))["constraints"] == 1, rules


def followed(rules: Any, lang: str) -> str:
    asked = {rule.id: rule.kwargs for rule in rules}
    order = asked.get("keywords:existence", {}).get("keywords", [""])[0]
    chinese = f"\u60a8\u7684\u8ba2\u5355{order}\u5df2\u53d1\u51fa\u3002"
    line = chinese if lang == "zh" else f"order {order} is on its way."
    bullets = asked.get("detectable_format:number_bullet_lists", {}).get("num_bullets", 0)
    lines = [f"* {line}"] * bullets if bullets else [line] * 3
    text = "\n".join(lines)
    if "startend:end_checker" in asked:
        text += "\n" + asked["startend:end_checker"]["end_phrase"]
    if lang == "zh":
        return text.replace(order, f"\u201c{order}\u201d") if order else text
    return text.lower()


def test_dialogs_say_what_their_state_holds() -> None:
    for row in task_rows(120, generate.SEED):
        if row["task"] == "dialog":
            said = ""
            for turn in row["turns"]:
                said += turn["messages"][-1]["content"]
                state = turn["checks"][0]["gold"]
                assert all(str(v) in said for v in state.values() if v is not None), row["id"]
            assert json.dumps(row)
