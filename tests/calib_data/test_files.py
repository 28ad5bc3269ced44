"""The shipped files: bytes, shapes, sizes, exact gold answers, code that parses and runs."""

import ast
import json
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from calib_data import generate
from calib_data.banks import values
from calib_data.contracts import contract_record, contract_text
from calib_data.records import in_words, seeded

SHIPPED = Path(generate.__file__).parent
TRAIN = ("contracts.jsonl", "service.jsonl", "code.jsonl")
FILES = (*TRAIN, "gate/text.jsonl", "gate/extraction.jsonl", "gate/tasks.jsonl")
FLAGS, NUMBERS, KEYS = (values(f"py.{name}", "train") for name in ("flag", "num", "key"))
FENCE = re.compile(r"```(\w+)\n(.*?)\n```", re.DOTALL)


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHIPPED / name).read_text(encoding="utf-8").splitlines()]


def shape(row: dict) -> str:
    return next(key for key in ("text", "messages", "prompt", "turns") if key in row)


def text_of(row: dict) -> str:
    if shape(row) == "turns":
        return "\n\n".join(m["content"] for turn in row["turns"] for m in turn["messages"])
    if shape(row) == "messages":
        return "\n\n".join(message["content"] for message in row["messages"])
    return row["text"] if shape(row) == "text" else f"{row['prompt']}\n{row['completion']}"


def test_shipped_bytes_are_what_the_command_writes(tmp_path: Path) -> None:
    command = [sys.executable, SHIPPED / "generate.py", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.rglob("*.partial")) == []


def test_shipped_output_is_small() -> None:
    assert sum((SHIPPED / name).stat().st_size for name in FILES) <= 1_700_000


def test_rows_do_not_depend_on_how_many_are_made() -> None:
    few, many = list(generate.train_rows("contracts", 9)), generate.train_rows("contracts", 40)
    assert few == [row for row, _ in zip(many, range(9), strict=False)]
    assert few != list(generate.train_rows("contracts", 9, seed=1))


@pytest.mark.parametrize("name", TRAIN)
def test_train_files_mix_all_shapes_and_both_languages(name: str) -> None:
    found = rows(name)
    assert {shape(row) for row in found} == {"text", "messages", "prompt"}
    assert len({row["id"] for row in found}) == len(found) == generate.TRAIN_ROWS
    assert len({text_of(row) for row in found}) == len(found)
    assert {row["source"] for row in found} == {name.removesuffix(".jsonl")}
    chinese = sum(row["lang"] == "zh" for row in found) / len(found)
    assert 0.08 <= chinese <= 0.25


def test_the_language_tag_is_true() -> None:
    for name in FILES:
        for row in rows(name):
            assert (re.search("[\u4e00-\u9fff]", text_of(row)) is not None) == (row["lang"] == "zh")


def test_chats_alternate_and_end_with_the_assistant() -> None:
    for name in TRAIN:
        for row in rows(name):
            if shape(row) != "messages":
                continue
            roles = [message["role"] for message in row["messages"]]
            assert roles[0] == "system"
            assert roles[1:] == ["user", "assistant"] * (len(roles) // 2)


def test_no_gap_is_left_open() -> None:
    for name in FILES:
        for row in rows(name):
            text = text_of(row)
            assert not re.search(r"@\w+@|<[^<>]*\|[^<>]*>|\bNone None\b", text), row["id"]
            if row["source"] != "code":
                assert not re.search(r"\{[A-Za-z_]\w*\}", text), row["id"]


def test_mail_and_telephone_are_reserved_for_fiction() -> None:
    for name in FILES:
        for row in rows(name):
            for host in re.findall(r"@([a-z0-9.-]+[a-z])", text_of(row)):
                assert host.endswith(".example.com"), row["id"]
            for number in re.findall(r"\+\d[\d-]{6,}", text_of(row)):
                assert re.fullmatch(r"\+1-\d00-555-01\d\d", number), row["id"]


def test_contracts_fill_long_windows() -> None:
    words = [len(row["text"].split()) for row in rows("contracts.jsonl")
             if shape(row) == "text" and row["lang"] == "en"]  # fmt: skip
    assert min(words) < 500
    assert sum(count > 700 for count in words) >= 40
    assert max(words) > 2000


def test_a_contract_states_what_its_gold_says() -> None:
    for index in range(60):
        record = contract_record(seeded("gold", index), "train", "en", "services")
        record.spell_numbers = False
        text, gold = contract_text(record, "long"), record.gold
        assert str(gold["party_a"]) in text
        assert str(gold["party_b"]).rstrip(".") in text
        assert f"{gold['currency']} {gold['amount']:,}" in text
        assert f"laws of {gold['governing_law']}" in text
        assert re.search(rf"\b{gold['term_months']} months", text)
        assert f"{gold['due_days']} days" in text


def test_gold_answers_are_valid_and_stand_in_the_passage() -> None:
    for row in rows("gate/extraction.jsonl"):
        Draft202012Validator.check_schema(row["schema"])
        validator = Draft202012Validator(row["schema"])
        assert row["schema"]["additionalProperties"] is False
        validator.validate(row["gold"])
        example = json.loads(row["messages"][2]["content"])
        validator.validate(example)
        assert example != row["gold"]
        assert list(example) == list(row["gold"]) == row["schema"]["required"]
        assert row["critical"]
        assert set(row["critical"]) <= set(row["gold"])
        verbatim = {"party_a", "party_b", "order_id", "product", "function", "table", "service"}
        for key in verbatim & set(row["gold"]):
            assert str(row["gold"][key]).rstrip(".") in row["messages"][-1]["content"], row["id"]


def test_every_prefix_of_the_extraction_suite_is_stratified() -> None:
    found = rows("gate/extraction.jsonl")
    assert len(found) == generate.GATE_ITEMS
    for size in (24, 60, 120, 240):
        part = found[:size]
        assert set(Counter(row["source"] for row in part).values()) == {size // 3}
        assert len({row["task"] for row in part}) == 12
        assert any(row["lang"] == "zh" for row in part)
    assert len({text_of(row) for row in found}) == len(found)


def test_held_out_text_is_enough_for_perplexity_windows() -> None:
    found = rows("gate/text.jsonl")
    assert 60 <= len(found) <= 90
    for source in generate.SOURCES:
        characters = sum(len(row["text"]) for row in found if row["source"] == source)
        assert 60_000 <= characters <= 100_000, source


def test_python_in_answers_parses_and_tests_in_answers_pass() -> None:
    parsed = proved = 0
    for row in generate.train_rows("code", 400):
        if shape(row) != "messages" or len(row["messages"]) != 3:
            continue
        request, answer = (message["content"] for message in row["messages"][1:])
        for language, code in FENCE.findall(answer):
            if language != "python":
                continue
            ast.parse(code)
            parsed += 1
            if code.startswith("def test_"):
                space: dict = {}
                exec(f"{FENCE.search(request)[2]}\n{code}", space)
                next(value for name, value in space.items() if name.startswith("test_"))()
                proved += 1
    assert parsed > 100
    assert proved > 15


def test_shell_and_sql_in_answers_are_understood() -> None:
    checked: Counter[str] = Counter()
    for row in generate.train_rows("code", 300):
        for language, code in FENCE.findall(text_of(row)):
            if language == "sh" and checked["sh"] < 20:
                subprocess.run(["sh", "-n"], input=code.encode(), check=True)
            elif language == "sql":
                explain(code)
            checked[language] += 1
    assert checked["sh"] > 5
    assert checked["sql"] > 20


def explain(query: str) -> None:
    """Let SQLite compile the query over a table that has every column it may name."""
    columns = [*FLAGS, *NUMBERS, *KEYS, "created_at"]
    table = re.search(r"FROM (\w+)", query)[1]
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
        database.execute(f"EXPLAIN {query.replace('DATE ', '')}")


def test_code_documents_hold_true_tests() -> None:
    modules = [row["text"] for row in rows("gate/text.jsonl") if row["text"].startswith('"""')]
    assert modules
    for text in modules:
        space: dict = {}
        exec(text, space)
        for name in [name for name in space if name.startswith("test_")]:
            space[name]()


def test_repairs_change_the_code() -> None:
    repairs = 0
    for row in generate.train_rows("code", 400):
        if shape(row) == "messages" and len(row["messages"]) == 3:
            before = FENCE.findall(row["messages"][1]["content"])
            after = FENCE.findall(row["messages"][2]["content"])
            if before and after and before[0][0] == after[0][0] == "python":
                repairs += before[0][1] != after[0][1]
                assert before[0][1] != after[0][1] or len(before[0][1].splitlines()) < 2
    assert repairs > 60


def test_training_items_for_tuning_have_the_gates_shape() -> None:
    items = list(generate.extraction_items(300, seed=5, half="train"))
    assert {tuple(item) for item in items} == {tuple(rows("gate/extraction.jsonl")[0])}
    assert all(str(item["doc"]).startswith("t-") for item in items)


@pytest.mark.parametrize("said", [["--n", "0"], ["--n", "many"], ["--split", "half"]])
def test_bad_arguments_exit_with_usage(said: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        generate.main([*said, "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_split_writes_only_its_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--split", "gate", "--gate-n", "6", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == [
        "extraction.jsonl",
        "tasks.jsonl",
        "text.jsonl",
    ]
    assert "bytes" in capsys.readouterr().out


def test_numbers_in_words() -> None:
    assert [in_words(n) for n in (0, 14, 20, 45, 99)] == [
        "zero", "fourteen", "twenty", "forty-five", "ninety-nine",
    ]  # fmt: skip
