"""Ratings survive a kill at any byte, several writers, and undo."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from review_rows import opened, packed

from eval.errors import EvaluationError, UsageError
from eval.review.pack import Pack
from eval.review.ratings import (
    Rating,
    append,
    order,
    rater_name,
    ratings_path,
    read_all,
    read_history,
    undo,
)


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return opened(packed(tmp_path))[0]


def test_what_was_rated_is_there_again(pack: Pack) -> None:
    said = Rating(choice="a", critical=["b"], note="wrong \u91d1\u989d \u2028 here", seconds=3.5)
    append(pack, "Ann", "001", said)
    append(pack, "Ann", "002", Rating(choice="tie"))
    append(pack, "Ann", "001", said.model_copy(update={"choice": "b"}))
    found = read_history(pack, "Ann").current
    assert found["001"].choice == "b"
    assert found["001"].note == said.note
    assert set(found) == {"001", "002"}


def test_a_kill_at_any_byte_of_the_last_line_loses_that_rating_only(pack: Pack) -> None:
    append(pack, "Ann", "001", Rating(choice="a"))
    path = ratings_path(pack, "Ann")
    whole = path.read_bytes()
    append(pack, "Ann", "002", Rating(choice="b", note="n"))
    last = path.read_bytes()[len(whole) :]
    for cut in range(0, len(last), 7):
        path.write_bytes(whole + last[:cut])
        assert set(read_history(pack, "Ann").current) == {"001"}
        append(pack, "Ann", "003", Rating(choice="tie"))
        assert set(read_all(pack)[0].current) == {"001", "003"}


def test_a_kill_within_the_first_line(pack: Pack) -> None:
    append(pack, "Ann", "001", Rating(choice="a"))
    path = ratings_path(pack, "Ann")
    path.write_bytes(path.read_bytes()[:20])
    assert read_all(pack) == []
    append(pack, "Ann", "002", Rating(choice="b"))
    assert set(read_all(pack)[0].current) == {"002"}


def test_undo_goes_back_step_by_step(pack: Pack) -> None:
    append(pack, "Ann", "001", Rating(choice="a"))
    append(pack, "Ann", "002", Rating(choice="tie"))
    append(pack, "Ann", "001", Rating(choice="b"))
    assert undo(pack, "Ann")[0] == "001"  # type: ignore[index]
    assert read_history(pack, "Ann").current["001"].choice == "a"
    assert undo(pack, "Ann")[0] == "002"  # type: ignore[index]
    append(pack, "Ann", "003", Rating(choice="a"))
    assert [undo(pack, "Ann")[0] for _ in range(2)] == ["003", "001"]  # type: ignore[index]
    assert read_history(pack, "Ann").current == {}
    assert undo(pack, "Ann") is None
    assert len(ratings_path(pack, "Ann").read_bytes().splitlines()) == 9


def test_several_writers_keep_the_chain_whole(pack: Pack) -> None:
    items = sorted(pack.items)[:40]
    with ThreadPoolExecutor(8) as pool:
        for rater in ("Ann", "Bob"):
            list(pool.map(lambda i, r=rater: append(pack, r, i, Rating(choice="a")), items))  # type: ignore[misc]
    assert [(h.rater, len(h.current)) for h in read_all(pack)] == [("Ann", 40), ("Bob", 40)]


def test_names(pack: Pack) -> None:
    assert rater_name("  Ann   Lee ") == "Ann Lee"
    for bad in ("", "  ", "x" * 41, "a\x00b", "a\u202eb"):
        with pytest.raises(UsageError, match="1 to 40 printable characters"):
            rater_name(bad)
    for name in ("../../etc/passwd", "\u674e\u96f7", ".", "a/b", "CON"):
        path = ratings_path(pack, name)
        assert path.parent == pack.ratings
        assert path.name.isascii()
    assert ratings_path(pack, "\u674e\u96f7") != ratings_path(pack, "\u674e\u4e91")
    append(pack, "ann", "001", Rating(choice="a"))
    append(pack, "Ann", "002", Rating(choice="a"))
    assert len(read_all(pack)) == 1


def test_each_rater_has_an_order_and_all_share_the_first_quarter(pack: Pack) -> None:
    ann, bob = order(pack, "Ann"), order(pack, "Bob")
    assert sorted(ann) == sorted(bob) == sorted(pack.items)
    assert ann == order(pack, "ann")
    first = -(-len(ann) // 4)
    assert ann[:first] != bob[:first]
    assert set(ann[:first]) == set(bob[:first])
    assert ann[first:] != bob[first:]


def test_an_unknown_item_and_a_disk_that_refuses(pack: Pack) -> None:
    with pytest.raises(UsageError, match="no item '999'"):
        append(pack, "Ann", "999", Rating(choice="a"))
    pack.ratings.rmdir()
    pack.ratings.write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="the rating was not saved"):
        append(pack, "Ann", "001", Rating(choice="a"))


def test_an_undo_without_a_step_is_refused(pack: Pack) -> None:
    append(pack, "Ann", "001", Rating(choice="a"))
    undo(pack, "Ann")
    path = ratings_path(pack, "Ann")
    last = path.read_bytes().splitlines(keepends=True)[-1]
    forged = last.replace(last[13:77], hashlib.sha256(last).hexdigest().encode())
    path.write_bytes(path.read_bytes() + forged)
    with pytest.raises(EvaluationError, match="undoes a rating that was never made"):
        read_all(pack)


def test_what_cannot_be_read_is_named(pack: Pack) -> None:
    pack.ratings.mkdir(exist_ok=True)
    (pack.ratings / "ann.jsonl").mkdir()
    with pytest.raises(EvaluationError, match=r"cannot read the ratings .*ann\.jsonl"):
        read_all(pack)
