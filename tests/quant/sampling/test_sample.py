"""`quantize sample` through its front doors: `draw_sample` and the command."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.artifact.text_runs import normalised
from quant.calibration_rows import RowCounts, read_rows
from quant.cli import main
from quant.errors import CalibrationError
from quant.sampling.alike import jaccard, shingles
from quant.sampling.leakage import read_gate
from quant.sampling.records import calibration_row
from quant.sampling.sample import SampleSettings, draw_sample

REPO = Path(__file__).resolve().parents[3]


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(count))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(out: Path, *paths: Path, against: tuple[Path, ...] = (), **options: Any) -> Any:
    return draw_sample(paths, out, SampleSettings(**options), against=against)


def log_rows(count: int = 80) -> list[dict[str, Any]]:
    tickets = [{"text": words(i, 30), "source": "tickets"} for i in range(count)]
    contracts = [{"text": words(1000 + i, 2500), "source": "contracts"} for i in range(6)]
    return tickets + contracts


ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]
ANSWER = {"role": "assistant", "content": "On its way."}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "a"}, {"text": "a"}),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
        ({"messages": ASK}, {"messages": ASK}),
        ({"messages": ASK, "response": "On its way."}, {"messages": [*ASK, ANSWER]}),
        ({"messages": ASK, "choices": [{"message": ANSWER}]}, {"messages": [*ASK, ANSWER]}),
        (
            {"request": {"messages": ASK}, "response": {"choices": [{"message": ANSWER}]}},
            {"messages": [*ASK, ANSWER]},
        ),
        ({"custom_id": "r1", "body": {"messages": ASK}}, {"id": "r1", "messages": ASK}),
        ({"prompt": "a", "choices": [{"text": "b"}]}, {"prompt": "a", "completion": "b"}),
        ({"prompt": "a"}, {"text": "a"}),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant",
             "content": "yes"}]},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
        ({"messages": ASK, "response": {"status_code": 500, "body": {}}}, {"messages": ASK}),
        ({"messages": ASK, "tools": TOOLS}, {"messages": ASK, "tools": TOOLS}),
        (
            {"prompt": ASK, "completion": [ANSWER], "tools": TOOLS},
            {"prompt": ASK, "completion": [ANSWER], "tools": TOOLS},
        ),
    ],
)  # fmt: skip
def test_records_of_logs_become_calibration_rows(
    record: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    row = calibration_row(record, "f:1", "log")
    assert row == {"source": "log", **expected}
    path = write(tmp_path / "f.jsonl", [row])
    assert len(list(read_rows(path, RowCounts()))) == 1, "quantize --calib reads it"


CALL = {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASK, "functions": [{"name": "find"}]},
        {"messages": [*ASK, CALL]},
        {"messages": [*ASK, {"role": "function", "name": "find", "content": "here"}]},
        {"messages": ASK, "choices": [{"message": CALL}]},
        {"request": {"messages": ASK}, "response": {"body": {"choices": [{"message": CALL}]}}},
    ],
)
def test_the_older_form_of_tools_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(CalibrationError, match="f:1: functions and function_call are the older"):
        calibration_row(record, "f:1", "log")


def test_the_wrong_field_names_file_line_found_and_expected(tmp_path: Path) -> None:
    """cases.md A13."""
    path = write(tmp_path / "log.jsonl", [{"body_text": "a", "user": 1}] * 3)
    with pytest.raises(CalibrationError) as caught:
        draw(tmp_path / "out.jsonl", path)
    for part in ("log.jsonl:1", "body_text, user", '{"messages"}', "--text-field"):
        assert part in str(caught.value)
    assert draw(tmp_path / "out.jsonl", path, text_field="body_text").kept == 1


def test_a_field_of_the_wrong_type_is_told_from_a_missing_one() -> None:
    with pytest.raises(CalibrationError, match="f:1: text is a int, expected a string"):
        calibration_row({"text": 5}, "f:1", "log")
    with pytest.raises(CalibrationError, match="f:1: messages is a str, expected a list"):
        calibration_row({"messages": "no"}, "f:1", "log")
    with pytest.raises(CalibrationError, match="f:1: tools: found a string, expected a list"):
        calibration_row({"messages": ASK, "tools": json.dumps(TOOLS)}, "f:1", "log")


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [{"text": words(1, 20)}])
    (tmp_path / "out").mkdir()
    with pytest.raises(CalibrationError, match="is a folder"):
        draw(tmp_path / "out", log)
    assert not (tmp_path / "out.report.json").exists()


def test_text_files_have_no_fields_and_a_file_is_not_lost_silently(tmp_path: Path) -> None:
    """One field name for the tables of a mixed set must not cost its documents."""
    log = write(tmp_path / "log.jsonl", [{"body": words(i, 20)} for i in range(300)])
    (tmp_path / "contract.txt").write_text(words(1000, 50))
    report = draw(tmp_path / "out.jsonl", log, tmp_path / "contract.txt", text_field="body")
    assert report.malformed == 0
    other = write(tmp_path / "gold.jsonl", [{"gold": 1}] * 2)
    with pytest.raises(CalibrationError, match=r"gold.jsonl: no row of it can be used; the first"):
        draw(tmp_path / "two.jsonl", log, other, text_field="body")
    assert draw(tmp_path / "two.jsonl", log, other, text_field="body", skip_bad=True).malformed == 2


def test_blank_and_malformed_rows_are_counted_and_too_many_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [json.dumps({"text": words(i, 20)}) for i in range(300)]
    path.write_text("\n".join([*rows, "", "{not json", '{"text": ""}']))
    report = draw(tmp_path / "out.jsonl", path, samples=10)
    assert (report.rows, report.blank, report.malformed, report.kept) == (303, 2, 1, 10)
    path.write_text("\n".join([*rows, *["[]"] * 4]))
    with pytest.raises(CalibrationError, match=r"4 of 304 rows are malformed.*log.jsonl:301"):
        draw(tmp_path / "two.jsonl", path)
    assert not (tmp_path / "two.jsonl").exists()
    assert draw(tmp_path / "two.jsonl", path, skip_bad=True).malformed == 4
    path.write_text("\n\n")
    with pytest.raises(CalibrationError, match="no usable row"):
        draw(tmp_path / "three.jsonl", path)


@given(st.randoms(use_true_random=False), st.integers(0, 3))
@settings(max_examples=8, deadline=None)
def test_order_of_rows_and_files_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("order")
    rows = log_rows(40)
    rows += [{**row, "lang": "en"} for row in rows[:5]]  # equal texts, unequal rows
    first = draw(folder / "1.jsonl", write(folder / "a.jsonl", rows), samples=20, seed=seed)
    rng.shuffle(rows)
    files = [write(folder / "b.jsonl", rows[:17]), write(folder / "c.jsonl", rows[17:])]
    rng.shuffle(files)
    second = draw(folder / "2.jsonl", *files, samples=20, seed=seed)
    assert first.sha256 == second.sha256
    assert first.duplicates == second.duplicates == 5


def test_another_seed_draws_other_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", log_rows())
    reports = [draw(tmp_path / f"{s}.jsonl", path, samples=20, seed=s) for s in (0, 0, 1)]
    assert reports[0].sha256 == reports[1].sha256 != reports[2].sha256


def test_no_pair_above_the_threshold_survives(tmp_path: Path) -> None:
    rows = []
    for i in range(25):
        text = words(i, 60).split()
        for change in range(6):
            rows.append({"text": " ".join([*text[: 60 - change], *["zz"] * change])})
    report = draw(tmp_path / "o.jsonl", write(tmp_path / "a.jsonl", rows), samples=100)
    sets = [shingles(normalised(row["text"])) for row in read(tmp_path / "o.jsonl")]
    pairs = [(a, b) for i, a in enumerate(sets) for b in sets[:i]]
    assert all(jaccard(a, b) < 0.8 for a, b in pairs)
    assert 25 <= report.kept < 100
    assert report.near_duplicates > 50


def test_long_rows_are_never_starved(tmp_path: Path) -> None:
    """cases.md A11: and they are kept whole; `quantize` cuts them into windows."""
    report = draw(tmp_path / "o.jsonl", write(tmp_path / "a.jsonl", log_rows(400)), samples=24)
    longest = [s for s in report.strata if s.source == "contracts"]
    assert sum(s.drawn for s in longest) == 6
    kept = [r for r in read(tmp_path / "o.jsonl") if r["source"] == "contracts"]
    assert all(len(row["text"].split()) == 2500 for row in kept)


def test_a_budget_of_tokens_is_kept(tmp_path: Path) -> None:
    report = draw(tmp_path / "o.jsonl", write(tmp_path / "a.jsonl", log_rows()), tokens=9000)
    assert 5000 < report.tokens <= 9000


def test_a_budget_of_tokens_is_kept_when_longer_rows_take_the_place_of_leaks(
    tmp_path: Path,
) -> None:
    """Short and long rows of one bucket: 1,125 and 4,050 tokens."""
    lengths = [750 if i % 2 else 2700 for i in range(40)]
    rows = [{"text": words(i, n), "id": f"document-{i}"} for i, n in enumerate(lengths)]
    leaks = [{"text": "x", "id": f"document-{i}"} for i in range(1, 40, 2)]
    path, gate = write(tmp_path / "a.jsonl", rows), write(tmp_path / "gate.jsonl", leaks)
    for tokens in range(9000, 15000, 1000):
        out = tmp_path / "o.jsonl"
        report = draw(out, path, against=(gate,), tokens=tokens, drop_leaks=True)
        assert 0 < report.tokens <= tokens


def test_rows_are_there_in_the_place_of_any_number_of_leaks(tmp_path: Path) -> None:
    rows = [{"text": words(i, 30), "id": f"document-{i}"} for i in range(200)]
    path = write(tmp_path / "a.jsonl", rows)
    most = write(tmp_path / "most.jsonl", [{"text": "x", "id": r["id"]} for r in rows[:150]])
    report = draw(tmp_path / "o.jsonl", path, against=(most,), samples=40, drop_leaks=True)
    assert report.kept == 40
    assert not {row["id"] for row in read(tmp_path / "o.jsonl")} & {r["id"] for r in rows[:150]}
    assert report.leaks_dropped <= 150
    assert report.near_duplicates == 0
    every = write(tmp_path / "every.jsonl", [{"text": "x", "id": r["id"]} for r in rows])
    with pytest.raises(CalibrationError, match="the gate holds all 200 distinct rows too"):
        draw(tmp_path / "none.jsonl", path, against=(every,), drop_leaks=True)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_budget_that_not_one_row_fits_in_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", log_rows())
    with pytest.raises(CalibrationError, match="--tokens 900 does not hold the first row"):
        draw(tmp_path / "o.jsonl", path, tokens=900)
    assert 0 < draw(tmp_path / "o.jsonl", path, tokens=900, long_share=0).tokens <= 900


def test_what_is_called_gz_is_packed_and_tables_are_not_written(tmp_path: Path) -> None:
    path, out = write(tmp_path / "a.jsonl", log_rows()), tmp_path / "o.jsonl.gz"
    report = draw(out, path)
    assert len(list(read_rows(out, RowCounts()))) == report.kept
    assert report.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    with pytest.raises(CalibrationError, match=r"o.csv: what is written is JSONL"):
        draw(tmp_path / "o.csv", path)


def test_a_repeated_system_prompt_is_reported(tmp_path: Path) -> None:
    """cases.md A17: 64 rows sharing a 200-token prefix with 20 fresh tokens."""
    system = {"role": "system", "content": words(7, 160)}
    chats = [{"messages": [system, {"role": "user", "content": words(i, 16)}]} for i in range(64)]
    report = draw(tmp_path / "o.jsonl", write(tmp_path / "a.jsonl", chats))
    assert report.kept == 64, "a shared prompt does not make requests alike"
    assert report.template_share > 0.8
    assert any("system prompt" in warning for warning in report.warnings())


def test_personal_data_is_replaced_counted_or_left(tmp_path: Path) -> None:
    rows = [{"text": "Please write to ann@example.com soon; key sk-abcdefghijklmnopqrst12"}]
    path = write(tmp_path / "a.jsonl", rows)
    texts = {}
    for pii in ("on", "report", "off"):
        report = draw(tmp_path / f"{pii}.jsonl", path, pii=pii)
        texts[pii] = read(tmp_path / f"{pii}.jsonl")[0]["text"]
        assert report.rows_with_secrets == (0 if pii == "on" else 1)
        assert report.redacted == ({} if pii == "off" else {"EMAIL": 1, "SECRET": 1})
    assert texts["on"] == "Please write to [EMAIL_1] soon; key [SECRET_1]"
    assert texts["report"] == texts["off"] == rows[0]["text"]


def test_the_shipped_halves_do_not_leak_and_a_planted_copy_does(tmp_path: Path) -> None:
    shipped = [REPO / "calib_data" / f"{name}.jsonl" for name in ("contracts", "service", "code")]
    gate = REPO / "calib_data" / "gate"
    assert draw(tmp_path / "o.jsonl", *shipped, against=(gate,), samples=400).kept == 400
    texts = read(gate / "text.jsonl")
    copies = [{"text": texts[0]["text"]}, {"text": texts[-1]["text"].upper() + " And more."}]
    half = texts[3]["text"]
    copies.append({"text": half[: len(half) // 2]})
    copies.append({"text": words(1, 30), "doc": texts[5]["doc"]})
    task = read(gate / "extraction.jsonl")[0]
    copies.append({"prompt": task["messages"][-1]["content"], "completion": "x"})
    for copy in copies:
        planted = write(tmp_path / "planted.jsonl", [copy])
        with pytest.raises(CalibrationError, match=r"1 of .* repeat the gate set: .*planted"):
            draw(tmp_path / "p.jsonl", planted, against=(gate,))
    write(tmp_path / "planted.jsonl", copies)
    report = draw(
        tmp_path / "p.jsonl", shipped[1], tmp_path / "planted.jsonl", against=(gate,),
        samples=1000, drop_leaks=True,
    )  # fmt: skip
    assert report.leaks_dropped == len(copies)
    assert report.kept == 144


def test_the_same_filled_record_leaks_in_other_words(tmp_path: Path) -> None:
    gold = {"party": "Glenholt Logistics", "sum": "48,210.00", "town": "Westerlund"}
    gate = write(tmp_path / "gate.jsonl", [{"messages": ASK, "gold": gold}])
    assert read_gate([gate])[0].values
    row = {"text": "In Westerlund, glenholt logistics pays EUR 48,210.00 at once to the seller."}
    with pytest.raises(CalibrationError, match="the same filled-in record"):
        draw(tmp_path / "o.jsonl", write(tmp_path / "a.jsonl", [row]), against=(gate,))


def test_a_number_as_id_is_no_document(tmp_path: Path) -> None:
    gate = write(tmp_path / "gate.jsonl", [{"text": words(1, 40), "id": 3, "doc": "7"}])
    log = write(tmp_path / "a.jsonl", [{"text": words(2, 40), "id": 3, "doc": "7"}])
    assert draw(tmp_path / "o.jsonl", log, against=(gate,)).kept == 1


def test_kinds_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "a.txt").write_text(words(1, 20) + "\n\n" + words(2, 20) + "\n")
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": words(3, 20)}) + "\n")
    with (folder / "c.csv").open("w", newline="") as out:
        csv.writer(out).writerows([["text", "source"], [words(4, 20), "mail"]])
    assert draw(tmp_path / "o.jsonl", folder).kept == 3
    assert {row["source"] for row in read(tmp_path / "o.jsonl")} == {"notes", "b", "mail"}
    assert draw(tmp_path / "o.jsonl", folder, split_text=True).kept == 4
    (folder / "b.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(CalibrationError, match=r"b.jsonl.gz: cannot read"):
        draw(tmp_path / "o.jsonl", folder)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `sample` is not installed")
    from pyarrow import parquet

    rows = [{"messages": [{"role": "user", "content": words(i, 9)}], "id": i} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert draw(tmp_path / "o.jsonl", tmp_path / "a.parquet").kept == 5


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quant.sampling.readers.find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(CalibrationError, match=r"weighbridge\[sample\]"):
        draw(tmp_path / "o.jsonl", tmp_path / "a.parquet")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["sample", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def test_the_command_writes_rows_and_an_account_without_text(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    path, out = write(tmp_path / "log.jsonl", log_rows()), tmp_path / "calib.jsonl"
    code, shown, err = command("--from", path, "--out", out, "--samples", 20)
    assert (code, err) == (0, "")
    assert "contracts" in shown
    account = json.loads((tmp_path / "calib.report.json").read_text())
    assert account["kept"] == 20
    assert sum(s["drawn"] for s in account["strata"]) == 20
    assert "not read" not in shown
    assert read(out)[0].get("text", "")[:20] not in json.dumps(account)
    code, _, err = command("--from", path, "--out", out)
    assert code == 2
    assert "--overwrite" in err
    assert command("--from", path, "--out", out, "--overwrite")[0] == 0
    folder = tmp_path / "logs"
    folder.mkdir()
    shutil.copy(path, folder / "a.jsonl")
    (folder / "b.JSONL").write_text("{}")
    (folder / ".hidden").write_text("")
    _, shown, _ = command("--from", folder, "--out", out, "--overwrite", "--samples", 20)
    assert "not read  b.JSONL: of no kind that is read" in shown
    assert command("--from", out, "--out", out, "--overwrite")[0] == 2


def test_an_interruption_leaves_nothing(
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quant.sampling.sample.near_duplicates", interrupt)
    path = write(tmp_path / "log.jsonl", log_rows())
    code, _, err = command("--from", path, "--out", tmp_path / "o.jsonl")
    assert code == 130
    assert "nothing was written" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": ASK[1:]}, "<|im_start|>user\nWhere is it?<|im_end|>\n"),
        (
            {"prompt": "a", "completion": "b"},
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
        ),
        (
            {"prompt": ASK[1:], "completion": [ANSWER]},
            "<|im_start|>user\nWhere is it?<|im_end|>\n"
            "<|im_start|>assistant\nOn its way.<|im_end|>\n",
        ),
    ],
)
def test_a_models_own_tokenizer_counts(
    row: dict[str, Any],
    text: str,
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    command: Callable[..., tuple[int, str, str]],
) -> None:
    """As calibrating on the row will."""
    path = write(tmp_path / "a.jsonl", [row])
    code, _, err = command("--from", path, "--out", tmp_path / "o.jsonl", "--model", tiny_model())
    assert code == 0, err
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert json.loads((tmp_path / "o.report.json").read_text())["tokens"] == len(ids)


def test_csv_holds_long_texts_over_several_lines(tmp_path: Path) -> None:
    path, text = tmp_path / "c.csv", "first line\n" + words(4, 40_000)
    with path.open("w", newline="", encoding="utf-8-sig") as out:
        csv.writer(out).writerows([["text"], [text]])
    draw(tmp_path / "o.jsonl", path)
    assert [row["text"] for row in read(tmp_path / "o.jsonl")] == [text]


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.csv", "text\n\ncaf\xe9 au lait\n".encode("latin-1"), "a.csv:3: not UTF-8: byte 0xe9"),
        ("a.csv", b"text\rab\rcd", "a.csv: cannot read: new-line character"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\xff" * 40, "cannot read: Error -3"),
    ],
)
def test_files_that_cannot_be_read_say_why(
    tmp_path: Path, name: str, raw: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(CalibrationError, match=message):
        draw(tmp_path / "o.jsonl", tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
