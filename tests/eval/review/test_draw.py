"""What a pack is drawn from: strata, weights, longest inputs, controls; and the file's faults."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from review_rows import sample_row, write_samples

from eval.errors import SuiteError, UsageError
from eval.review.controls import DEFECTS, plant
from eval.review.draw import allocate, draw
from eval.review.samples import PARTED, Sample, read_samples


def samples(rows: list[dict[str, Any]]) -> list[Sample]:
    return [Sample.model_validate(row) for row in rows]


ROWS = samples([sample_row(n) for n in range(400)])


def test_a_later_turn_brings_what_was_said_before(tmp_path: Path) -> None:
    same = {"base": {"text": "Which one?"}, "candidate": {"text": "Which one?"}}
    differ = {"base": {"text": "The old."}, "candidate": {"text": "The new."}}
    turns = [
        sample_row(1, **same),
        sample_row(2, **differ, follows="row-0001", messages=[{"role": "user", "content": "B"}]),
        sample_row(3, **differ, follows="row-0002", messages=[{"role": "user", "content": "C"}]),
    ]
    found, _ = read_samples(write_samples(tmp_path / "e", turns) / "samples.jsonl")
    said = [m.text for m in found[2].messages]
    assert said[0] == "Answer briefly."
    assert said[2:] == ["Which one?", "B", PARTED, "C"]
    assert not {"The old.", "The new."} & set(said)
    with pytest.raises(SuiteError, match=r"samples.jsonl:1: it follows 'row-0001', but no earlier"):
        read_samples(write_samples(tmp_path / "f", turns[1:]) / "samples.jsonl")


def test_only_differing_requests_are_asked_about_and_weights_restore_their_number() -> None:
    found = draw(ROWS, 100, seed=3)
    assert len(found.drawn) == 100
    assert all(drawn.sample.differs for drawn in found.drawn)
    assert (found.num_requests, found.num_differing) == (400, 320)
    assert sum(drawn.weight for drawn in found.drawn) == pytest.approx(320)


def test_every_stratum_has_its_share() -> None:
    found = draw(ROWS, 100, seed=3)
    drawn = Counter(d.sample.domain for d in found.drawn if not d.is_longest)
    there = Counter(s.domain for s in ROWS if s.differs)
    assert set(drawn) == set(there)
    for domain, count in drawn.items():
        assert count / 95 == pytest.approx(there[domain] / 320, abs=0.02)


def test_a_lone_row_of_a_rare_language_is_drawn() -> None:
    rare = samples([sample_row(9001, lang="de")])
    found = draw([*ROWS, *rare], 50, seed=0)
    assert [d.weight for d in found.drawn if d.sample.lang == "de"] == [1.0]


def test_more_strata_than_places_and_fewer_requests_than_asked_for() -> None:
    many = samples([sample_row(5 * n + 1, source=f"source-{n}") for n in range(60)])
    found = draw(many, 20, seed=0)
    assert len(found.drawn) == 20
    assert sum(d.weight for d in found.drawn) == pytest.approx(60)
    all_of_them = draw(ROWS[:30], 150, seed=0)
    assert len(all_of_them.drawn) == all_of_them.num_differing == 24
    assert {d.weight for d in all_of_them.drawn} == {1.0}


def test_the_longest_inputs_are_always_there() -> None:
    longest = [sample_row(n, messages=[{"role": "user", "content": "x" * (5000 + n)}])
               for n in (9001, 9002, 9003)]  # fmt: skip
    for seed in range(5):
        found = draw([*ROWS, *samples(longest)], 60, seed)
        certain = {d.sample.id for d in found.drawn if d.is_longest}
        assert certain >= {"row-9001", "row-9002", "row-9003"}
        assert {d.weight for d in found.drawn if d.is_longest} == {1.0}


def test_the_draw_depends_on_the_seed_and_not_on_the_order_of_lines() -> None:
    def ids(rows: list[Sample], seed: int) -> list[str]:
        return [d.sample.id for d in draw(rows, 50, seed).drawn]

    assert ids(ROWS, 1) == ids(ROWS[::-1], 1)
    assert ids(ROWS, 1) != ids(ROWS, 2)


def test_controls_are_five_to_ten_percent_and_no_request_is_asked_twice() -> None:
    for count in (100, 150, 200):
        found = draw(ROWS, count, seed=0)
        controls = [*found.identical, *found.planted]
        assert 0.05 <= len(controls) / (count + len(controls)) <= 0.10
        ids = [s.id for s in controls] + [d.sample.id for d in found.drawn]
        assert len(ids) == len(set(ids))
        assert not any(sample.differs for sample in controls)


def test_the_weighted_mean_is_unbiased() -> None:
    """The share of Chinese rows among differing ones, over many seeds."""
    truth = sum(s.lang == "zh" for s in ROWS if s.differs) / 320
    longest = draw(ROWS, 40, 0)
    assert longest.num_differing == 320
    estimates = []
    for seed in range(60):
        drawn = draw(ROWS, 40, seed).drawn
        estimates.append(sum(d.weight for d in drawn if d.sample.lang == "zh") / 320)
    assert sum(estimates) / 60 == pytest.approx(truth, abs=0.01)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 200))
def test_allocation_gives_out_exactly_what_is_there(sizes: list[int], count: int) -> None:
    strata = {(f"t{n:02d}", "s", "l"): size for n, size in enumerate(sizes)}
    shares = allocate(strata, count)
    assert sum(shares.values()) == min(count, sum(sizes))
    assert all(0 <= shares[d] <= strata[d] for d in shares)
    if count >= len(sizes):
        assert all(shares[d] >= 1 for d in strata)


def test_allocation_by_hand() -> None:
    strata = {("", "a", "en"): 50, ("", "b", "en"): 30, ("", "c", "en"): 20}
    assert list(allocate(strata, 10).values()) == [5, 3, 2]


def test_nothing_differs_or_too_few_rows() -> None:
    with pytest.raises(UsageError, match="same answer to all 20 requests"):
        draw([s for s in ROWS if not s.differs][:20], 10, 0)
    with pytest.raises(UsageError, match="5 requests are too few for a review"):
        draw(ROWS[:5], 10, 0)


@pytest.mark.parametrize("text", [
    "The supplier delivers the goods within ten days and the customer pays on receipt of them.",
    "\u7532\u65b9\u5e94\u5f53\u5728\u5341\u65e5\u5185\u4ea4\u4ed8\u8d27\u7269\uff0c\u4e59\u65b9"
    "\u6536\u5230\u8d27\u7269\u540e\u4ed8\u6b3e\u3002" * 3,
    '{"party": "Acme", "amount": 1200, "currency": "EUR", "governing_law": "France"}',
])  # fmt: skip
def test_a_planted_defect_is_nothing_a_reader_could_miss(text: str) -> None:
    kinds = set()
    for turn in range(len(DEFECTS)):
        damaged, kind = plant(text, turn)
        kinds.add(kind)
        assert damaged != text
        assert damaged.strip()
        assert text not in damaged
    assert kinds == set(DEFECTS)
    assert plant("yes", 0)[1] == "refused"


@pytest.mark.parametrize(("change", "message"), [
    ({"id": ""}, "id: String should have at least 1 character"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"base": {"text": None}}, "base.text: Input should be a valid string"),
    ({"candidate": {}}, "candidate.text: Field required"),
    ({"lang": 3}, "lang: Input should be a valid string"),
    ({"messages": [{"content": "no role"}]}, "messages.0.role: Field required"),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_samples(tmp_path, [sample_row(0), sample_row(1, **change)])
    with pytest.raises(SuiteError) as error:
        read_samples(folder / "samples.jsonl")
    assert "samples.jsonl:2: " + message in str(error.value)


@pytest.mark.parametrize(("data", "message"), [
    (b"", "holds no samples"),
    (b"{not json\n", "samples.jsonl:1: the line: Invalid JSON"),
    (b"[1]\n", "samples.jsonl:1: the line: Input should be an object"),
    (b'{"id": "\\ud800"}\n', "samples.jsonl:1"),
    (b'\xff\xfe{"id": 1}\n', "samples.jsonl:1"),
])  # fmt: skip
def test_what_is_no_jsonl_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "samples.jsonl").write_bytes(data)
    with pytest.raises(SuiteError, match=message):
        read_samples(tmp_path / "samples.jsonl")


def test_missing_file_and_repeated_id(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="the folder that `evaluate` wrote its report to"):
        read_samples(tmp_path / "samples.jsonl")
    write_samples(tmp_path, [sample_row(0), sample_row(0)])
    with pytest.raises(SuiteError, match="samples.jsonl:2: the id 'row-0000'"):
        read_samples(tmp_path / "samples.jsonl")


def test_tool_calls_are_shown_as_json(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "pay", "arguments": "{}"}}
    row = sample_row(1, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    found, _ = read_samples(write_samples(tmp_path, [row]) / "samples.jsonl")
    assert json.loads(found[0].messages[0].text) == call
