"""What calibrates never judges: the halves share no document, record or passage."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from calib_data import generate
from calib_data.banks import BANKS, Half, lines
from calib_data.contracts import contract_record
from calib_data.records import seeded
from calib_data.service import service_record
from calib_data.tuning import tuning_chat

SHIPPED = Path(generate.__file__).parent
WINDOW, CHINESE_WINDOW = 50, 20
CHINESE = re.compile("[\u4e00-\u9fff\uff00-\uffef\u3000-\u303f]{20,}")
COMMON = 5
NUMBERING = re.compile(r"^\s*(?:Section [\d.]+|\(\w\)|[\d.]+\.\d*|-)\s+")
# Pools whose values are facts of the world or of the law, not identities.
SHARED_POOLS = {"en.suffix", "zh.suffix", "zh.law", "currency"}


def load(*names: str) -> list[dict]:
    return [
        json.loads(line)
        for name in names
        for line in (SHIPPED / name).read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture(scope="module")
def train() -> list[dict]:
    return load("contracts.jsonl", "service.jsonl", "code.jsonl")


@pytest.fixture(scope="module")
def gate() -> list[dict]:
    return load("gate/text.jsonl", "gate/extraction.jsonl", "gate/tasks.jsonl")


def passages(row: dict) -> list[str]:
    if "turns" in row:
        return [m["content"] for turn in row["turns"] for m in turn["messages"]]
    if "messages" in row:
        return [message["content"] for message in row["messages"]]
    return [row["text"]] if "text" in row else [row["prompt"], row["completion"]]


def windows(text: str) -> set[str]:
    """All stretches of 50 characters within a line, and of 20 characters that are Chinese."""
    found: set[str] = set()
    for line in text.splitlines():
        said = NUMBERING.sub("", line)
        found.update(said[i : i + WINDOW] for i in range(len(said) - WINDOW + 1))
        for part in CHINESE.findall(said):
            found.update(part[i : i + CHINESE_WINDOW] for i in range(len(part)))
    return {window for window in found if len(window) in {WINDOW, CHINESE_WINDOW}}


def row_windows(row: dict) -> set[str]:
    return set().union(*map(windows, passages(row)))


def leaks(train: list[dict], gate: list[dict]) -> set[str]:
    """Windows of the gate that stand in train and are neither common nor an instruction."""
    known = set().union(*map(windows, instructions()))
    trained, judged = [[row_windows(row) for row in half] for half in (train, gate)]
    counts = Counter(window for found in (*trained, *judged) for window in found)
    shared = set().union(*trained) & set().union(*judged)
    return {window for window in shared if counts[window] <= COMMON} - known


def instructions() -> Iterator[str]:
    """What the task is, is said alike in both halves; what it is about is not."""
    for lang in ("en", "zh"):
        for bank in ("extraction", "tools"):
            for line in (BANKS / f"{bank}_{lang}.txt").read_text(encoding="utf-8").splitlines():
                if line.startswith("- "):
                    yield from line[2:].split("\\n")


def test_documents_are_disjoint(train: list[dict], gate: list[dict]) -> None:
    assert not {row["doc"] for row in train} & {row["doc"] for row in gate}
    assert not {row["id"] for row in train} & {row["id"] for row in gate}


def test_no_gate_text_stands_in_train(train: list[dict], gate: list[dict]) -> None:
    assert leaks(train, gate) == set()


def test_the_leak_check_finds_a_planted_copy(train: list[dict], gate: list[dict]) -> None:
    for row in gate[:3]:
        assert leaks([*train, {"text": row["text"]}], gate)


def test_most_of_the_held_out_text_is_not_even_boilerplate(
    train: list[dict], gate: list[dict]
) -> None:
    trained = set().union(*map(row_windows, train))
    held_out = [row_windows(row) for row in gate if "text" in row]
    shares = sorted(len(found & trained) / len(found) for found in held_out if found)
    assert shares[len(shares) // 2] < 0.1
    assert shares[-1] < 0.5


@pytest.mark.parametrize("other", ["train", "tune"])
def test_filled_records_are_disjoint(other: Half) -> None:
    fields = ("A", "B", "addr_a", "addr_b", "money", "date", "mail_a", "term", "law")
    for lang in ("en", "zh"):
        seen = []
        for half in (other, "gate"):
            records = [contract_record(seeded(half, i), half, lang) for i in range(400)]
            seen.append({key: {record.said[key] for record in records} for key in fields})
        for key in fields:
            shared = seen[0][key] & seen[1][key]
            assert not shared or (key == "law" and lang == "zh"), (lang, key, shared)


@pytest.mark.parametrize("other", ["train", "tune"])
def test_order_numbers_and_prices_are_disjoint(other: Half) -> None:
    for key in ("A", "order", "money", "product", "mail", "ticket", "addr"):
        seen = [
            {service_record(seeded(half, i), half, "en").said[key] for i in range(600)}
            for half in (other, "gate")
        ]
        assert not seen[0] & seen[1], key


@pytest.mark.parametrize("other", ["train", "tune"])
def test_pools_of_names_and_numbers_are_disjoint(other: Half) -> None:
    text = (BANKS / "pools.txt").read_text(encoding="utf-8")
    for pool in re.findall(r"^\[(.+)\]$", text, re.MULTILINE):
        halves = [
            {value for line in lines("pools", pool, half) for value in line.split("|")}
            for half in (other, "gate")
        ]
        assert all(halves), pool
        assert pool in SHARED_POOLS or not halves[0] & halves[1], pool


@pytest.mark.parametrize("bank", ["contracts_en", "contracts_zh", "service_en", "service_zh"])
def test_shared_wording_holds_nothing_that_is_filled(bank: str) -> None:
    section = ""
    for line in (BANKS / f"{bank}.txt").read_text(encoding="utf-8").splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        if line.startswith("- ") and section not in {"types", "headings", "question"}:
            assert not re.search(r"[{<]", line), (section, line)


def test_a_large_split_stays_disjoint(gate: list[dict]) -> None:
    train = [row for source in generate.SOURCES for row in generate.train_rows(source, 300, 77)]
    assert leaks(train, gate) == set()


def test_what_a_model_is_tuned_on_holds_nothing_of_the_gate(gate: list[dict]) -> None:
    chats = [{"messages": tuning_chat(seed, i)} for seed in (7, 8) for i in range(400)]
    assert leaks(chats, gate) == set()


def test_no_gate_answer_is_trained(gate: list[dict]) -> None:
    """Whole answers; what they are made of (an intent, a currency) is the same everywhere."""
    judged = {json.dumps(row["gold"], ensure_ascii=False) for row in gate if "gold" in row}
    trained = {
        message["content"]
        for i in range(2500)
        for message in tuning_chat(7, i)
        if message["role"] == "assistant"
    }
    assert not {answer for answer in judged & trained if '"null"' not in answer}
