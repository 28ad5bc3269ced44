"""Suites and windows: errors with file and line, a balanced pick, and each token scored once."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suite_rows import document_row, item_row, write_rows

from eval.errors import SuiteError
from eval.suites import Document, load_suite, pick
from eval.windows import SHORTEST, cut, pick_windows, special_prefix

SHIPPED = Path(__file__).parents[2] / "calib_data" / "gate"


class Letters:
    """A tokenizer of one id per character, with or without a BOS."""

    def __init__(self, bos: bool = False) -> None:
        self._prefix = [1] if bos else []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(char) for char in text]
        return [*self._prefix, *ids] if add_special_tokens else ids


def document(length: int, number: int = 0) -> Document:
    return Document(id=f"d{number}", source="code", lang="en", text="abcdefghij" * (length // 10)
                    + "k" * (length % 10))  # fmt: skip


def test_shipped_suite_loads_and_covers_every_domain() -> None:
    suite = load_suite(SHIPPED)
    for rows in (suite.documents, suite.items):
        assert {row.source for row in rows} == {"contracts", "service", "code"}
        assert {row.lang for row in rows} == {"en", "zh"}
    assert all(len(digest) == 64 for digest in suite.digests.values())


def bad_item(**changes: Any) -> dict[str, Any]:
    return {**item_row(1), **changes}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "extraction.jsonl:2: not JSON: Expecting property name"),
        ("[1]", "extraction.jsonl:2: expected a JSON object"),
        (json.dumps(bad_item(id="")), "expected a non-empty 'id'"),
        (json.dumps(item_row(0)), "the id 'item-0' stands in line 1 too"),
        (json.dumps({**item_row(0), "id": "copy"}), "the same content stands in line 1 too"),
        (json.dumps(bad_item(critical=None)), "'critical' to be a list of field names, found None"),
        (json.dumps(bad_item(critical=[["sum"]])), "'critical' to be a list of field names"),
        (json.dumps(bad_item(messages=[{"role": "user", "content": 5}])), "both of them text"),
        (json.dumps(bad_item(gold={"ok": True, "sum": math.nan})), "NaN is not JSON"),
        (json.dumps(bad_item(lang="\ud800")), "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(bad_item(schema={"properties": {"ok": {"$ref": "#/$defs/no"}}})),
         "refers to '/$defs/no', which it does not hold"),
        (json.dumps(bad_item(schema={"properties": {"ok": {"$ref": "http://127.0.0.1:1/a"}}})),
         "refers to 'http://127.0.0.1:1/a'"),
        (json.dumps(bad_item(gold={"ok": "yes", "sum": 1})), "gold breaks its own schema"),
        (json.dumps(bad_item(critical=["nope"])), r"critical fields ['nope'] are not in gold"),
        (json.dumps(bad_item(schema={"type": 3})), "the JSON Schema is not valid"),
        (json.dumps(bad_item(messages=[{"role": "user"}])), "needs 'role' and 'content'"),
    ],
)  # fmt: skip
def test_bad_rows_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    write_rows(tmp_path / "text.jsonl", [document_row(0)])
    (tmp_path / "extraction.jsonl").write_text(json.dumps(item_row(0)) + "\n" + line + "\n")
    with pytest.raises(SuiteError) as caught:
        load_suite(tmp_path)
    assert message in str(caught.value)
    assert ":2: " in str(caught.value)


def test_missing_and_empty_suites(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="no suite at"):
        load_suite(tmp_path / "none")
    with pytest.raises(SuiteError, match=r"cannot read .*text\.jsonl"):
        load_suite(tmp_path)
    (tmp_path / "text.jsonl").write_text("\n\n")
    with pytest.raises(SuiteError, match="holds no rows"):
        load_suite(tmp_path)
    (tmp_path / "text.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(SuiteError, match="not UTF-8"):
        load_suite(tmp_path)


def test_pick_is_balanced_seeded_and_grows_by_adding() -> None:
    rows = [
        Document(id=f"{source}-{n}", source=source, lang="en", text="x")
        for source, count in (("code", 50), ("contracts", 5), ("service", 20))
        for n in range(count)
    ]
    twelve = pick(rows, 12, seed=1)
    assert Counter(row.source for row in twelve) == {"code": 4, "contracts": 4, "service": 4}
    assert pick(list(reversed(rows)), 12, seed=1) == twelve
    assert pick(rows, 30, seed=1)[:12] == twelve
    assert pick(rows, 12, seed=2) != twelve
    assert len(pick(rows, 1000, seed=1)) == 75


@given(st.integers(0, 400), st.integers(20, 64), st.booleans())
def test_each_token_but_the_first_of_a_document_is_scored_once(
    length: int, width: int, bos: bool
) -> None:
    encoder = Letters(bos)
    windows = cut(document(length), encoder, width)
    scored = [w.start + i for w in windows for i in range(_first(w), len(w.token_ids) - bos)]
    assert len(scored) == len(set(scored)) == sum(window.num_scored for window in windows)
    assert all(len(window.token_ids) <= width for window in windows)
    following = length if bos else max(length - 1, 0)
    tail = following % (width - 1)
    assert len(scored) == following - (tail if tail + (not bos) < SHORTEST else 0)


def _first(window: Any) -> int:
    """Offset within the piece of the first scored token."""
    return 0 if window.token_ids[0] == 1 else 1


def test_bos_starts_every_window_and_is_never_scored() -> None:
    windows = cut(document(110), Letters(bos=True), 32)
    assert special_prefix(Letters(bos=True)) == (1,)
    assert special_prefix(Letters()) == ()
    assert len(windows) == 4
    for window in windows:
        assert window.token_ids.count(1) == 1
        assert window.token_ids[0] == 1
        assert window.num_context == 1


def test_windows_come_from_many_documents_first() -> None:
    documents = [document(200, n) for n in range(5)]
    windows = pick_windows(documents, Letters(), count=7, width=50, seed=0)
    assert len({window.document for window in windows[:5]}) == 5
    assert [window.start for window in windows] == [0] * 5 + [49] * 2
    assert pick_windows([document(3)], Letters(), count=3, width=50, seed=0) == []
