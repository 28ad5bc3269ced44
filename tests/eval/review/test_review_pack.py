"""The seal: what raters hold says nothing about sides, and nothing can be changed unnoticed."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest
from review_rows import opened, packed, rate_all, sample_row, write_samples

from eval.errors import EvaluationError, UsageError
from eval.review.commands import make_pack, score_pack
from eval.review.pack import key_path, open_pack


def test_the_pack_holds_no_ids_no_models_and_no_key(tmp_path: Path) -> None:
    made = packed(tmp_path)
    text = "".join(p.read_text() for p in made.path.rglob("*") if p.is_file())
    for word in ("candidate", "base", "planted", "identical", "row-0", "doc-0", "weight", "seed"):
        assert word not in text, word
    assert sorted(p.name for p in made.path.iterdir()) == ["items.jsonl", "pack.json", "ratings"]
    assert made.key == tmp_path / "blind.key.json"
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600


def test_the_answers_lie_on_the_sides_that_the_key_says(tmp_path: Path) -> None:
    pack, key = opened(packed(tmp_path))
    rows = {f"row-{n:04d}": sample_row(n) for n in range(120)}
    kinds = {"request": 0, "identical": 0, "planted": 0}
    for entry in key.entries:
        item, row = pack.items[entry.id], rows[entry.sample]
        kinds[entry.kind] += 1
        sides = {"a": item.a, "b": item.b}
        if entry.kind == "request":
            assert entry.candidate is not None
            assert sides.pop(entry.candidate) == row["candidate"]["text"]
            assert list(sides.values()) == [row["base"]["text"]]
        elif entry.kind == "identical":
            assert item.a == item.b == row["base"]["text"]
        else:
            assert entry.sound is not None
            assert sides.pop(entry.sound) == row["base"]["text"]
            assert list(sides.values()) != [row["base"]["text"]]
    assert kinds == {"request": 40, "identical": 2, "planted": 2}


def test_the_order_says_nothing(tmp_path: Path) -> None:
    """Controls stand anywhere, and in other places in another pack of the same draw."""
    places = []
    for name in ("one", "two", "three"):
        _, key = opened(packed(tmp_path / name))
        places.append([n for n, e in enumerate(key.entries) if e.kind != "request"])
    assert len({tuple(place) for place in places}) == 3
    assert any(place != [40, 41, 42, 43] for place in places)


def test_sides_are_balanced_and_do_not_follow_from_the_seed(tmp_path: Path) -> None:
    sides = []
    for name in ("one", "two"):
        _, key = opened(packed(tmp_path / name))
        by_sample = {e.sample: e.candidate for e in key.entries if e.kind == "request"}
        assert list(by_sample.values()).count("a") == 20
        sides.append(by_sample)
    assert sides[0].keys() == sides[1].keys()
    assert sides[0] != sides[1]


def test_redaction_keeps_what_differs_apart(tmp_path: Path) -> None:
    rows = [sample_row(n) for n in range(60)]
    rows[1] |= {
        "messages": [{"role": "user", "content": "Write to ann@example.com, 13912345678."}],
        "base": {"text": "Mail ann@example.com. Tel. +44 20 7946 0958, card 4111 1111 1111 1111"},
        "candidate": {"text": "Mail bob@example.com. ID 11010519491231002X"},
    }
    made = make_pack(
        write_samples(tmp_path / "e", rows), tmp_path / "blind", count=47, seed=0, redact=True,
    )  # fmt: skip
    pack, key = opened(made)
    assert pack.info.redacted
    entry = next(e for e in key.entries if e.sample == "row-0001")
    item = pack.items[entry.id]
    candidate, base = (item.a, item.b) if entry.candidate == "a" else (item.b, item.a)
    assert item.messages[0].content == "Write to [EMAIL_1], [PHONE_1]."
    text = (made.path / "items.jsonl").read_text()
    for private in ("example.com", "13912345678", "7946", "4111", "11010519491231002X"):
        assert private not in text
    assert "[EMAIL_1]" in base
    assert "[CARD_1]" in base
    assert "Mail [EMAIL_" in candidate
    assert "[EMAIL_1]" not in candidate
    assert "[ID_1]" in candidate


def test_a_pack_is_never_overwritten_and_fails_whole(tmp_path: Path) -> None:
    made = packed(tmp_path)
    before = made.key.read_bytes()
    with pytest.raises(UsageError, match="blind exists already"):
        packed(tmp_path)
    assert made.key.read_bytes() == before
    with pytest.raises(UsageError, match="cannot write the pack"):
        make_pack(tmp_path / "evaluation", Path("/proc/nowhere/x"), count=20, seed=0,
                  redact=False)  # fmt: skip
    assert not list(tmp_path.glob(".blind*"))


def test_the_judged_artifact_is_named_in_the_key(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "evaluation", [sample_row(n) for n in range(60)])
    (folder / "report.json").write_text(json.dumps({"artifact": {"digest": "d" * 64}}))
    made = packed(tmp_path)
    _, key = opened(made)
    assert key.artifact_digest is None or key.artifact_digest == "d" * 64
    assert json.loads(made.key.read_text())["artifact_digest"] == "d" * 64
    redacted = {"artifact": {"digest": "d" * 64}, "is_redacted": True}
    (folder / "report.json").write_text(json.dumps(redacted))
    with pytest.raises(UsageError, match="written with --redact and holds no answers"):
        make_pack(folder, tmp_path / "other", count=20, seed=0, redact=False)
    (folder / "report.json").write_text("{}")
    with pytest.raises(UsageError, match="does not name the artifact"):
        make_pack(folder, tmp_path / "other", count=20, seed=0, redact=False)


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _swap(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2], lines[3] = lines[3], lines[2]
    path.write_bytes(b"".join(lines))


def _drop(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))


TAMPERINGS = {
    "an answer": lambda p, k, r: _change(p / "items.jsonl", "EUR", "XXX"),
    "the rules": lambda p, k, r: _change(p / "pack.json", "0.15", "0.85"),
    "the commitment": lambda p, k, r: _change(p / "pack.json", '_sha256": "', '_sha256": "0'),
    "a side in the key": lambda p, k, r: _change(k, '"candidate": "a"', '"candidate": "b"'),
    "a weight": lambda p, k, r: _change(k, '"weight": 2', '"weight": 9'),
    "a rating": lambda p, k, r: _change(r, '"choice":"tie"', '"choice":"a"'),
    "the order of ratings": lambda p, k, r: _swap(r),
    "a rating less": lambda p, k, r: _drop(r),
    "the rater": lambda p, k, r: _change(r, '"rater":"Ann"', '"rater":"Bob"'),
    "another pack's ratings": lambda p, k, r: r.write_bytes(
        r.read_bytes().replace(r.read_bytes()[29:93], b"0" * 64, 1)
    ),
    "no JSON": lambda p, k, r: r.write_text("nothing\n"),
    "a copy under another name": lambda p, k, r: (p / "ratings" / "copy.jsonl").write_bytes(
        r.read_bytes()
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(TAMPERINGS))
def test_what_was_changed_is_refused(tmp_path: Path, what: str) -> None:
    made = packed(tmp_path)
    pack, key = opened(made)
    rate_all(pack, key, "Ann")
    score_pack(made.path, key=None, out=None)
    (ratings,) = pack.ratings.iterdir()
    TAMPERINGS[what](made.path, made.key, ratings)
    with pytest.raises(EvaluationError) as error:
        score_pack(made.path, key=None, out=tmp_path / "out")
    assert error.value.exit_code == 4
    assert not (tmp_path / "out").exists()


def test_a_new_commitment_to_another_key_does_not_fit_the_ratings(tmp_path: Path) -> None:
    """Who turns all sides around and seals anew still has ratings of another pack."""
    made = packed(tmp_path)
    pack, key = opened(made)
    rate_all(pack, key, "Ann")
    _change(made.key, '"candidate": "a"', '"candidate": "b"')
    digest = hashlib.sha256(made.key.read_bytes()).hexdigest()
    _change(made.path / "pack.json", pack.info.key_sha256, digest)
    with pytest.raises(EvaluationError, match="rates another pack"):
        score_pack(made.path, key=None, out=None)


def test_a_missing_or_wrong_key(tmp_path: Path) -> None:
    made, other = packed(tmp_path), packed(tmp_path / "other")
    with pytest.raises(EvaluationError, match="not the key that"):
        score_pack(made.path, key=other.key, out=None)
    key_path(made.path).rename(tmp_path / "away.json")
    with pytest.raises(UsageError, match="pass --key"):
        score_pack(made.path, key=None, out=None)
    score_pack(made.path, key=tmp_path / "away.json", out=None)
    with pytest.raises(UsageError, match="is not a review pack"):
        open_pack(tmp_path / "evaluation")


@pytest.mark.parametrize("renamed", [1, 2])
def test_an_interrupted_seal_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    rename, calls = Path.rename, []

    def interrupt(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == renamed:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        packed(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"evaluation"}


@pytest.mark.parametrize("has_key", [True, False])
def test_what_a_killed_seal_left_is_cleared_away(tmp_path: Path, has_key: bool) -> None:
    made = packed(tmp_path)
    made.path.rename(tmp_path / ".blind.999999")
    if not has_key:
        made.key.rename(tmp_path / ".blind.key.json.999999")
    again = packed(tmp_path)
    assert opened(again)
    assert {path.name for path in tmp_path.iterdir()} == {"evaluation", "blind", "blind.key.json"}


def test_a_key_whose_pack_was_moved_away_is_kept(tmp_path: Path) -> None:
    made = packed(tmp_path)
    made.path.rename(tmp_path / "sent-to-raters")
    with pytest.raises(UsageError, match="exists already"):
        packed(tmp_path)
    assert made.key.is_file()
