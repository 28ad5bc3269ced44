"""Overlap of calibration and gate: copies in every disguise are found, templates are not."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from calib_data.generate import train_rows
from eval.leakage import read_texts
from quant.artifact import overlap
from quant.artifact.manifest import CalibrationRecord, SketchRecord
from quant.artifact.overlap import (
    Text,
    find_leaks,
    find_sketched_leaks,
    make_sketch,
    num_checkable,
    sketch_covers,
)

DATA = Path(__file__).parents[3] / "calib_data"


@pytest.fixture(scope="module")
def gate() -> list[Text]:
    return [text for path in sorted((DATA / "gate").glob("*.jsonl")) for text in read_texts(path)]


@pytest.fixture(scope="module")
def train() -> list[Text]:
    names = ("contracts", "service", "code")
    return [text for name in names for text in read_texts(DATA / f"{name}.jsonl")]


def test_the_shipped_halves_are_apart(gate: list[Text], train: list[Text]) -> None:
    """They share templates, instructions and schemas, and nothing that is filled in."""
    assert find_leaks(gate, train) == []
    sketch = make_sketch(train)
    assert find_sketched_leaks(gate, sketch) == []
    assert num_checkable(gate, sketch.keep) > 0.95 * len(gate)


def test_another_seed_is_apart_too(gate: list[Text]) -> None:
    rows = [
        Text(where=str(n), content="\n".join(v for v in row.values() if isinstance(v, str)))
        for n, row in enumerate(train_rows("contracts", 150, 12))
    ]
    assert find_leaks(gate, rows) == []
    assert find_sketched_leaks(gate, make_sketch(rows)) == []


def verbatim(words: list[str]) -> str:
    return " ".join(words)


def wrapped(words: list[str]) -> str:
    return textwrap.fill(" ".join(words), 33).upper().replace("\n", "\n  > ")


def edited(words: list[str]) -> str:
    """Every thirtieth word is another one."""
    return " ".join("whatever" if i % 30 == 7 else word for i, word in enumerate(words))


def within(words: list[str]) -> str:
    rng = random.Random(3)
    other = [f"w{rng.randrange(9000)}" for _ in range(4000)]
    return " ".join([*other[:2000], *words, *other[2000:]])


DISGUISES = [verbatim, wrapped, edited, within]


def long_rows(gate: list[Text]) -> list[Text]:
    return [text for text in gate if len(text.content.split()) > 60][::40]


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_copy_is_found(
    gate: list[Text], train: list[Text], disguise: Callable[[list[str]], str]
) -> None:
    copied = long_rows(gate)
    assert len(copied) >= 6
    planted = [Text(where=t.where, content=disguise(t.content.split())) for t in copied]
    leaks = find_leaks(gate, [*train, *planted])
    assert [(leak.row, leak.gate) for leak in leaks] == [(t.where, t.where) for t in copied]
    if disguise is not edited:
        found = find_sketched_leaks(gate, make_sketch([*train, *planted]))
        assert {leak.gate for leak in found} == {t.where for t in copied}


def test_a_lightly_edited_copy_of_a_long_document_shows_in_the_sketch(
    gate: list[Text], train: list[Text]
) -> None:
    longest = max(gate, key=lambda text: len(text.content))
    planted = Text(where="copy", content=edited(longest.content.split()))
    assert [leak.gate for leak in find_sketched_leaks(gate, make_sketch([*train, planted]))] == [
        longest.where
    ]


def test_an_excerpt_of_a_gate_document_is_found(gate: list[Text], train: list[Text]) -> None:
    longest = max(gate, key=lambda text: len(text.content))
    words = longest.content.split()
    planted = Text(where="excerpt", content=" ".join(words[len(words) // 2 :][:120]))
    assert [leak.gate for leak in find_leaks(gate, [*train, planted])] == [longest.where]


def test_chinese_is_read_by_the_character(gate: list[Text], train: list[Text]) -> None:
    chinese = next(t for t in gate if not t.content.isascii() and len(t.content) > 300)
    planted = Text(where="copy", content=chinese.content.replace("\u3002", " ")[20:])
    assert [leak.gate for leak in find_leaks(gate, [*train, planted])] == [chinese.where]


def test_the_same_filled_in_record_in_other_words_is_found(
    gate: list[Text], train: list[Text]
) -> None:
    row = next(t for t in gate if len([v for v in t.values if len(v) > 8]) >= 3)
    told = "A note: " + " and, as was said, ".join(row.values) + "."
    leaks = find_leaks(gate, [*train, Text(where="note", content=told)])
    assert [(leak.row, leak.gate, leak.sign) for leak in leaks] == [
        ("note", row.where, "the same filled-in record")
    ]
    assert (
        find_leaks(gate, [Text(where="note", content=told.replace(row.values[0], "Nobody"))]) == []
    )


def test_the_same_document_id_is_found() -> None:
    gate = [Text(where="g:1", content="some text", ids=frozenset({"contract-0017"}))]
    rows = [Text(where="c:1", content="other text", ids=frozenset({"contract-0017"}))]
    assert [leak.sign for leak in find_leaks(gate, rows)] == ["the same id contract-0017"]
    assert [leak.sign for leak in find_sketched_leaks(gate, make_sketch(rows))] == [
        "the same id contract-0017"
    ]
    assert overlap.telling_ids("17", "row 1", 3, None, "20260101", "contract-0017") == {
        "contract-0017"
    }


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(99999)}" for _ in range(count))


def test_what_many_documents_share_is_no_leak() -> None:
    prompt = words(0, 80)
    gate = [Text(where=f"g{n}", content=f"{prompt} {words(n, 30)}") for n in range(1, 4)]
    rows = [Text(where=f"c{n}", content=f"{prompt} {words(n, 30)}") for n in range(11, 16)]
    assert find_leaks(gate, rows) == []
    assert len(find_leaks(gate, rows[:1])) == 1  # four documents in all: it may be anything


def test_many_questions_about_one_document_do_not_make_it_boilerplate() -> None:
    contract = words(1, 200)
    gate = [Text(where=f"g{n}", content=f"{contract} {words(n, 20)}", group="contract-0001")
            for n in range(20, 40)]  # fmt: skip
    rows = [Text(where=f"c{n}", content=f"{words(n, 9)} {contract}", group="c-0001")
            for n in range(50, 70)]  # fmt: skip
    assert len(find_leaks(gate, rows)) == 20
    assert find_sketched_leaks(gate, make_sketch(rows))
    same = [Text(where=f"c{n}", content=contract) for n in range(10)]
    assert len(find_leaks(gate, same)) == 10


def test_nothing_and_next_to_nothing() -> None:
    empty = Text(where="e", content="")
    short = Text(where="s", content="two words")
    assert find_leaks([], [short]) == find_leaks([short], []) == find_leaks([empty], [empty]) == []
    assert find_sketched_leaks([], make_sketch([])) == []
    assert find_sketched_leaks([short], make_sketch([empty, short])) == []


def test_a_sketch_says_which_rows_it_is_of(train: list[Text]) -> None:
    sketch = make_sketch(train[:100])
    assert sketch_covers(sketch, train) == 1.0
    assert sketch_covers(sketch, train[100:]) < 0.5
    assert SketchRecord.of(make_sketch(train[:100][::-1])) == SketchRecord.of(sketch)


def test_a_sketch_stays_small(monkeypatch: pytest.MonkeyPatch, train: list[Text]) -> None:
    monkeypatch.setattr(overlap, "_SKETCH_RUNS", 2000)
    sketch = make_sketch(train)
    assert sketch.keep > 4
    assert sum(map(len, sketch.documents)) < 2500


def test_the_record_is_what_it_was_made_of(train: list[Text]) -> None:
    sketch = make_sketch(train[:5])
    record = SketchRecord.of(sketch)
    again = SketchRecord.model_validate_json(record.model_dump_json()).sketch()
    assert again.keep == sketch.keep
    assert again.ids == sketch.ids
    assert all(np.array_equal(a, b) for a, b in zip(again.documents, sketch.documents, strict=True))
    for garbage in ("????", "AAA=", "no"):
        with pytest.raises(ValueError, match="documents"):
            SketchRecord(keep=4, documents=(garbage,))
    assert "sketch" not in CalibrationRecord(digest="d", samples=1, tokens=1).model_dump()
