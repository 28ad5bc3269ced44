"""Scoring extraction answers: strict format, normalised fields, paired measurements."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from eval.metrics.extraction import PairedItem, measure, score_answer
from eval.metrics.normalise import flatten, normalise
from eval.stats import Sampling
from eval.suites import ExtractionItem

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "party": {"type": "string"},
        "amount": {"type": "number"},
        "signed": {"type": "string", "format": "date"},
        "law": {"type": ["string", "null"]},
    },
    "required": ["party", "amount", "signed", "law"],
    "additionalProperties": False,
}
GOLD = {"party": "Acme GmbH", "amount": 1200, "signed": "2024-03-05", "law": None}


def item(source: str = "contracts", **gold: Any) -> ExtractionItem:
    return ExtractionItem(
        id="i",
        source=source,
        lang="en",
        messages=[{"role": "user", "content": "?"}],
        schema=SCHEMA,
        gold={**GOLD, **gold},
        critical=("amount",),
    )


def answer(**changes: Any) -> str:
    return json.dumps({**GOLD, **changes})


def test_right_answer() -> None:
    score = score_answer(item(), "  " + answer() + "\n")
    assert score.json_valid
    assert score.schema_valid
    assert score.critical_right
    assert (score.tp, score.fp, score.fn) == (3, 0, 0)
    assert (score.num_present, score.num_expected) == (3, 3)
    assert score.wrong_fields == ()


@pytest.mark.parametrize(
    ("text", "extractable"),
    [
        ("", False),
        ("```json\n" + answer() + "\n```", True),
        ("Here you are: " + answer(), True),
        (answer() + " Done.", True),
        (answer()[:-1], False),
        ('{"party": NaN}', False),
        ('{"amount": Infinity}', False),
        ("{'party': 'Acme'}", False),
        ("[" * 100_000, False),
    ],
)
def test_only_a_whole_json_answer_is_valid(text: str, extractable: bool) -> None:
    score = score_answer(item(), text)
    assert not score.json_valid
    assert not score.schema_valid
    assert not score.critical_right
    assert score.json_extractable == extractable
    assert score.problem.startswith("not JSON")
    assert score.tp == score.num_present == 0
    assert score.fn == 3


def test_duplicate_keys_are_flagged() -> None:
    text = answer()[:-1] + ', "amount": 1200}'
    score = score_answer(item(), text)
    assert score.json_valid
    assert score.has_duplicate_keys


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"amount": "1200"}, "$.amount: type"),
        ({"signed": "5 March 2024"}, "$.signed: format"),
        ({"extra": 1}, "$: additionalProperties"),
    ],
)
def test_schema_problems_name_path_and_keyword(changes: dict[str, Any], problem: str) -> None:
    score = score_answer(item(), answer(**changes))
    assert score.json_valid
    assert not score.schema_valid
    assert score.problem == problem


def test_the_draft_is_the_schemas_own() -> None:
    tuple_of_two = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"pair": {"items": [{"type": "integer"}, {"type": "string"}]}},
    }
    old = ExtractionItem(
        id="i", source="s", lang="en", messages=[], schema=tuple_of_two, gold={"pair": [1]},
        critical=(),
    )  # fmt: skip
    assert not score_answer(old, '{"pair": ["x", 1]}').schema_valid
    assert score_answer(old, '{"pair": [1, "x"]}').schema_valid


def test_fields_are_compared_in_normal_form_and_inventions_count_against() -> None:
    score = score_answer(item(), answer(party=" ACME  gmbh.", signed="March 5, 2024"))
    assert score.tp == 3
    invented = score_answer(item(), answer(law="France"))
    assert (invented.tp, invented.fp, invented.fn) == (3, 1, 0)
    assert invented.wrong_fields == ("law",)
    empty = score_answer(item(), answer(party=""))
    assert (empty.num_present, empty.tp, empty.fn) == (2, 2, 1)
    wrong = score_answer(item(), answer(amount=1300))
    assert not wrong.critical_right
    assert wrong.num_present == 3


def test_truncation_and_failure_are_told_apart_from_bad_form() -> None:
    assert score_answer(item(), '{"party": "Ac', truncated=True).truncated
    failed = score_answer(item(), "", failed=True)
    assert failed.failed
    assert "failed" in failed.problem


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1,200.50", 1200.5),
        ("2024-03-05", "5 March 2024"),
        ("2024-03-05", "Mar 5, 2024"),
        ("2024-03-05", "2024\u5e743\u67085\u65e5"),
        ("\uff21cme", "acme"),
        ('"Acme"', "Acme"),
        (12, 12.0),
    ],
)
def test_equal_in_normal_form(left: Any, right: Any) -> None:
    assert normalise(left) == normalise(right)


def test_different_in_normal_form() -> None:
    assert normalise("2024-03-05") != normalise("2024-05-03")
    assert normalise("12,00") != normalise(1200)
    assert normalise(True) is True
    assert normalise(None) is None
    assert normalise("12") == Decimal(12)


def test_flatten() -> None:
    assert flatten({"a": {"b": [1, {"c": 2}]}, "d": None}) == {
        "a.b[0]": 1,
        "a.b[1].c": 2,
        "d": None,
    }


def test_measurements_pair_items_and_split_domains() -> None:
    right = score_answer(item(), answer())
    broken = score_answer(item(), "no")
    pairs = [
        *[PairedItem(item=item(), base=right, candidate=right)] * 6,
        *[PairedItem(item=item("code"), base=right, candidate=broken)] * 3,
        PairedItem(item=item("code"), base=broken, candidate=right),
    ]
    measured = {m.name: m for m in measure(pairs, Sampling(draws=1000))}
    schema = measured["schema_valid"]
    assert schema.paired is not None
    assert (schema.paired.lost, schema.paired.gained, schema.num_scored) == (3, 1, 10)
    assert schema.base == pytest.approx(0.9)
    assert schema.estimate == pytest.approx(0.2)
    domains = dict(schema.domains)
    assert domains["source:code"].estimate == pytest.approx(0.5)
    assert domains["source:contracts"].estimate == 0
    completeness = measured["field_completeness"]
    assert completeness.base == pytest.approx(0.9)
    assert completeness.candidate == pytest.approx(0.7)
    assert completeness.lower < completeness.estimate < completeness.upper
    f1 = measured["field_f1"]
    assert f1.base == pytest.approx(2 * 27 / (2 * 27 + 3))


def test_failed_answers_are_counted() -> None:
    right = score_answer(item(), answer())
    failed = score_answer(item(), "", failed=True)
    pairs = [PairedItem(item=item(), base=right, candidate=failed)]
    assert {m.num_nonfinite for m in measure(pairs, Sampling(draws=1000))} == {1}


@pytest.mark.parametrize("depth", [200, 400, 900, 5000])
def test_deep_answers_are_scored_like_any_other(depth: int) -> None:
    score = score_answer(item(), '{"party": ' * depth + "1" + "}" * depth)
    assert not score.schema_valid


def test_half_a_surrogate_pair_in_an_answer_can_be_written_down() -> None:
    score = score_answer(item(), '{"\\ud800": 1}')
    assert score.wrong_fields[-1] == "\\ud800"
    json.dumps([score.problem, *score.wrong_fields], ensure_ascii=False).encode()


def test_rates_of_nothing_are_not_scored() -> None:
    """All gold fields null in one domain, then in all: no NaN, no warning, no score."""
    empty = item("service", party=None, amount=None, signed=None)
    right, nothing = score_answer(item(), answer()), score_answer(empty, "{}")
    pairs = [PairedItem(item=item(), base=right, candidate=right)] * 6
    pairs += [PairedItem(item=empty, base=nothing, candidate=nothing)] * 6
    for chosen, scored, domains in ((pairs, 12, {"source:contracts", "lang:en"}),
                                    (pairs[6:], 0, set())):  # fmt: skip
        found = {m.name: m for m in measure(chosen, Sampling(draws=1000))}
        assert found["field_completeness"].num_scored == scored
        assert {name for name, _ in found["field_completeness"].domains} == domains


@pytest.mark.parametrize(("count", "least"), [(5, 0.45), (58, 0.05), (60, 0.0487)])
def test_flawless_items_prove_only_what_their_number_can(count: int, least: float) -> None:
    """Five equal answers do not show that fields are never lost."""
    right = score_answer(item(), answer())
    pairs = [PairedItem(item=item(), base=right, candidate=right)] * count
    found = {m.name: m for m in measure(pairs, Sampling(draws=1000))}
    for name in ("field_completeness", "field_f1"):
        assert found[name].estimate == 0
        assert found[name].upper == pytest.approx(least, abs=1e-3)
        assert found[name].lower == -found[name].upper
