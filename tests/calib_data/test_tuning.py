"""Tuning chats and tool tasks: repeatable, well formed, and wide where the train half is narrow."""

import json
import re
from collections import Counter

import pytest

from calib_data.banks import Half
from calib_data.generate import extraction_items
from calib_data.records import seeded
from calib_data.service import TOOLS
from calib_data.tools import ToolItem, tool_item
from calib_data.tuning import tuning_chat

CALL = re.compile(r"<tool_call>(.*)</tool_call>")


def test_a_chat_depends_on_its_seed_and_index_alone() -> None:
    assert [tuning_chat(7, i) for i in (3, 900)] == [tuning_chat(7, i) for i in (3, 900)]
    assert tuning_chat(7, 3) != tuning_chat(8, 3)


def test_chats_alternate_and_end_with_the_assistant() -> None:
    for index in range(800):
        roles = [message["role"] for message in tuning_chat(1, index)]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]


def test_kinds_and_languages_are_mixed() -> None:
    chats = [tuning_chat(2, i) for i in range(1500)]
    kinds = Counter(
        "tool" if "tool_call" in chat[0]["content"] or "tool_call" in chat[-1]["content"]
        else "code" if "```" in chat[-1]["content"]
        else "json" if chat[-1]["content"].startswith("{")
        else "words"
        for chat in chats
    )  # fmt: skip
    assert kinds["json"] > 0.8 * len(chats)
    assert min(kinds[name] for name in ("tool", "code", "words")) > 10
    chinese = sum(bool(re.search("[\u4e00-\u9fff]", chat[0]["content"])) for chat in chats)
    assert 0.08 < chinese / len(chats) < 0.2


def test_names_and_numbers_hardly_repeat() -> None:
    items = list(extraction_items(1800, seed=3, half="tune"))
    parties = [i["gold"]["party_a"] for i in items if i["task"] == "parties"]
    assert len(set(parties)) > 0.98 * len(parties)
    days = {int(str(i["gold"]["effective_date"])[-2:]) for i in items if i["task"] == "parties"}
    assert {1, 2, 3, 27, 28} <= days
    due = Counter(i["gold"]["due_days"] for i in items if i["task"] == "payment")
    assert len(due) > 40


@pytest.mark.parametrize("half", ["train", "gate", "tune"])
def test_the_right_call_is_among_the_tools_or_there_is_none(half: Half) -> None:
    items = [tool_item(seeded(half, i), half, "zh" if i % 4 == 3 else "en") for i in range(300)]
    assert 0.6 < sum(bool(item.calls) for item in items) / len(items) < 0.9
    for item in items:
        check_call(item)


def check_call(item: ToolItem) -> None:
    names = [str(tool["name"]) for tool in item.tools]
    assert len(set(names)) == len(names)
    assert 3 <= len(names) <= 5
    assert set(names) <= set(TOOLS.values())
    assert all(name in item.messages[0]["content"] for name in names)
    found = CALL.fullmatch(item.answer)
    assert (found is not None) == bool(item.calls)
    if found is None:
        assert item.answer in item.messages[0]["content"]
        return
    call = json.loads(found[1])
    assert [call] == item.calls
    fields = next(tool for tool in item.tools if tool["name"] == call["name"])["parameters"]
    assert set(call["arguments"]) == set(fields["required"])
    for value in call["arguments"].values():
        assert value.rstrip(".") in item.messages[1]["content"]
