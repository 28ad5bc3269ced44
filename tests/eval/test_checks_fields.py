"""JSON answers: strict format, schemas of any draft, normalised fields, paired measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from eval.checks.base import Reply
from eval.checks.registry import Scored, read_checks, score_reply
from eval.gate import judge
from eval.gate_spec import GateSpec
from eval.metrics.answers import PairedItem, length_bucket, measure
from eval.metrics.normalise import flatten, normalise
from eval.stats import Sampling
from eval.suites import TaskItem

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


def item(source: str = "contracts", *, schema: Any = None, doc: str = "d", **gold: Any) -> TaskItem:
    right = {**GOLD, **gold}
    return TaskItem(
        id="i",
        doc=doc,
        source=source,
        lang="en",
        messages=[{"role": "user", "content": "?"}],
        checks=read_checks(
            [
                {"kind": "json_valid"},
                {"kind": "schema_valid", "schema": schema or SCHEMA},
                {"kind": "fields", "gold": right, "critical": ["amount"]},
            ]
        ),
        gold=right,
    )


def score(item: TaskItem, text: str, finish: str = "stop") -> Scored:
    reply = Reply(text=text, raw=text, finish=finish, tokens=tuple(text.split()))
    return score_reply(reply, item.checks)


def pairs_of(count: int, item: TaskItem, base: Scored, candidate: Scored) -> list[PairedItem]:
    """`count` items, each of a document of its own."""
    return [
        PairedItem(
            item=replace(item, doc=f"{item.source}-{base.problem}-{n}"), base=base,
            candidate=candidate,
        )
        for n in range(count)
    ]  # fmt: skip


def answer(**changes: Any) -> str:
    return json.dumps({**GOLD, **changes})


def test_right_answer() -> None:
    found = score(item(), "  " + answer() + "\n")
    assert found.values["json_valid"]
    assert found.values["schema_valid"]
    assert found.values["critical_fields"]
    assert found.values["field_f1"] == (3, 0, 0)
    assert found.values["field_completeness"] == (3, 3)
    assert found.details["wrong_fields"] == []


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
    found = score(item(), text)
    assert not found.values["json_valid"]
    assert not found.values["schema_valid"]
    assert not found.values["critical_fields"]
    assert found.values["json_extractable"] == extractable
    assert found.problem.startswith("not JSON")
    assert found.values["field_f1"] == (0, 0, 3)
    assert found.values["field_completeness"] == (0, 3)


def test_duplicate_keys_are_flagged() -> None:
    text = answer()[:-1] + ', "amount": 1200}'
    found = score(item(), text)
    assert found.values["json_valid"]
    assert found.values["json_unique_keys"] == 0
    assert found.details["duplicate_keys"] == ["amount"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"amount": "1200"}, "$.amount: type"),
        ({"signed": "5 March 2024"}, "$.signed: format"),
        ({"extra": 1}, "$: additionalProperties"),
    ],
)
def test_schema_problems_name_path_and_keyword(changes: dict[str, Any], problem: str) -> None:
    found = score(item(), answer(**changes))
    assert found.values["json_valid"]
    assert not found.values["schema_valid"]
    assert found.problem == problem


def test_the_draft_is_the_schemas_own() -> None:
    tuple_of_two = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"pair": {"items": [{"type": "integer"}, {"type": "string"}]}},
    }
    old = item(schema=tuple_of_two)
    assert not score(old, '{"pair": ["x", 1]}').values["schema_valid"]
    assert score(old, '{"pair": [1, "x"]}').values["schema_valid"]


def test_fields_are_compared_in_normal_form_and_inventions_count_against() -> None:
    found = score(item(), answer(party=" ACME  gmbh.", signed="March 5, 2024"))
    assert found.values["field_f1"] == (3, 0, 0)
    assert found.values["field_accuracy"] == (3, 3)
    invented = score(item(), answer(law="France"))
    assert invented.values["field_f1"] == (3, 1, 0)
    assert invented.details["wrong_fields"] == ["law"]
    empty = score(item(), answer(party=""))
    assert empty.values["field_completeness"] == (2, 3)
    assert empty.values["field_f1"] == (2, 0, 1)
    wrong = score(item(), answer(amount=1300))
    assert not wrong.values["critical_fields"]
    assert wrong.values["field_completeness"] == (3, 3)
    assert wrong.values["field_accuracy"] == (2, 3)


def test_truncation_and_failure_are_told_apart_from_bad_form() -> None:
    assert score(item(), '{"party": "Ac', "length").truncated
    failed = score(item(), "", "error")
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
    right = score(item(), answer())
    broken = score(item(), "no")
    pairs = [
        *pairs_of(6, item(), right, right),
        *pairs_of(3, item("code"), right, broken),
        *pairs_of(1, item("code"), broken, right),
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
    right = score(item(), answer())
    failed = score(item(), "", "error")
    pairs = pairs_of(1, item(), right, failed)
    assert {m.num_nonfinite for m in measure(pairs, Sampling(draws=1000))} == {1}


@pytest.mark.parametrize("depth", [200, 400, 900, 5000])
def test_deep_answers_are_scored_like_any_other(depth: int) -> None:
    found = score(item(), '{"party": ' * depth + "1" + "}" * depth)
    assert not found.values["schema_valid"]


def test_half_a_surrogate_pair_in_an_answer_can_be_written_down() -> None:
    found = score(item(), '{"\\ud800": 1}')
    assert found.details["wrong_fields"][-1] == "\\ud800"
    json.dumps([found.problem, *found.details["wrong_fields"]], ensure_ascii=False).encode()


def test_rates_of_nothing_are_not_scored() -> None:
    """All gold fields null in one domain, then in all: no NaN, no warning, no score."""
    empty = item("service", party=None, amount=None, signed=None)
    right, nothing = score(item(), answer()), score(empty, "{}")
    pairs = pairs_of(6, item(), right, right) + pairs_of(6, empty, nothing, nothing)
    for chosen, scored, domains in ((pairs, 12, {"source:contracts", "lang:en", "length:0-1k"}),
                                    (pairs[6:], 0, set())):  # fmt: skip
        found = {m.name: m for m in measure(chosen, Sampling(draws=1000))}
        assert found["field_completeness"].num_scored == scored
        assert {name for name, _ in found["field_completeness"].domains} == domains


def test_items_of_one_document_are_not_independent() -> None:
    """Lost together, twelve items of six documents are six pieces of evidence."""
    right, broken = score(item(), answer()), score(item(), "no")
    apart = [*pairs_of(8, item(), right, right), *pairs_of(4, item("code"), right, broken)]
    shared = [
        replace(p, item=replace(p.item, doc=f"{p.item.source}-{n // 2}"))
        for n, p in enumerate(apart)
    ]
    single, paired = (
        {m.name: m for m in measure(pairs, Sampling(draws=1000))} for pairs in (apart, shared)
    )
    assert (single["schema_valid"].num_clusters, paired["schema_valid"].num_clusters) == (12, 6)
    assert single["schema_valid"].design_effect == 1
    for name in ("schema_valid", "field_f1"):
        assert paired[name].estimate == single[name].estimate > 0
        assert paired[name].upper > single[name].upper
    assert paired["schema_valid"].p_value > single["schema_valid"].p_value


def test_types_and_enums_have_near_misses() -> None:
    schema = {"type": "object", "properties": {"level": {"enum": ["high", "low"]}, "n": {}}}
    asked = item(schema=schema, level="high", n=3)
    close = score(asked, '{"level": "High", "n": "3"}')
    assert close.values["enum_adherence"] == (0, 1)
    assert close.values["enum_lenient"] == (1, 1)
    assert close.values["type_fidelity"] == (1, 2)
    assert close.values["field_accuracy"] == (2, 5)
    exact = score(asked, '{"level": "high", "n": 3.0}')
    assert exact.values["enum_adherence"] == (1, 1)
    assert exact.values["type_fidelity"] == (2, 2)
    assert score(asked, '{"level": "medium"}').values["enum_lenient"] == (0, 1)
    assert score(asked, "{").values["enum_lenient"] == (0, 1)


def test_lengths_fall_into_buckets() -> None:
    assert [length_bucket(n) for n in (0, 1023, 1024, 4095, 8191, 8192)] == [
        "0-1k", "0-1k", "1-2k", "2-4k", "4-8k", "8k+",
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "least"), [(5, 0.45), (58, 0.05), (60, 0.0487)])
def test_flawless_items_prove_only_what_their_number_can(count: int, least: float) -> None:
    """Five equal answers do not show that fields are never lost."""
    right = score(item(), answer())
    pairs = pairs_of(count, item(), right, right)
    found = {m.name: m for m in measure(pairs, Sampling(draws=1000))}
    for name in ("field_completeness", "field_f1"):
        assert found[name].estimate == 0
        assert found[name].upper == pytest.approx(least, abs=1e-3)
        assert found[name].lower == -found[name].upper


def test_a_source_in_which_no_field_is_left_is_not_left_out() -> None:
    """Of no field the types are kept: 0 / 0 for the candidate is a loss, not nothing to judge."""
    limit = {"max_drop": 0.05}
    rules = {"type_fidelity": {**limit, "strata": {"source:*": limit}}}
    spec = GateSpec.model_validate({"version": 1, "metrics": rules})
    pairs = []
    for source, said in (("contracts", json.dumps(GOLD)), ("service", "{}")):
        asked = item(source)
        both = score(asked, json.dumps(GOLD)), score(asked, said)
        pairs += pairs_of(100, asked, *both)
    found = {m.name: m for m in measure(pairs, Sampling(draws=1000))}
    verdict = judge(spec, found)
    assert verdict.result == "rejected"
    outcomes = {f.stratum: f.outcome for f in verdict.findings}
    assert outcomes == {"": "pass", "source:contracts": "pass", "source:service": "fail"}
    alone = {m.name: m for m in measure(pairs[100:], Sampling(draws=1000))}
    assert alone["type_fidelity"].candidate == 0
    assert judge(spec, alone).result == "rejected"


def test_a_key_with_a_dot_is_one_key() -> None:
    checks = read_checks(
        [{"kind": "fields", "gold": {"party.name": "Acme", "n": 1}, "critical": ["party.name"]}]
    )

    def values(said: Any) -> dict[str, Any]:
        text = json.dumps(said)
        return score_reply(Reply(text=text, raw=text, finish="stop"), checks).values

    assert values({"party.name": "Acme", "n": 1})["critical_fields"] == 1
    assert values({"party.name": "Other", "n": 1})["critical_fields"] == 0
    nested = values({"party": {"name": "Acme"}, "n": 1})
    assert (nested["critical_fields"], nested["field_f1"]) == (0, (1, 1, 1))
    assert flatten({"": {"a": 1}, "a": 2, "b[0]": 3, "b": [4]}) == {
        '"".a': 1, "a": 2, '"b[0]"': 3, "b[0]": 4,
    }  # fmt: skip


@pytest.mark.parametrize("nothing", ["", "  ", '""'])
def test_a_field_that_is_rightly_empty_can_be_right(nothing: str) -> None:
    row = {"kind": "fields", "gold": {"party": "Acme", "note": nothing}, "critical": ["note"]}
    asked = replace(item(), checks=read_checks([row]))
    for note in (nothing, "", None):
        found = score(asked, json.dumps({"party": "Acme", "note": note})).values
        assert found["critical_fields"] == 1
        assert found["field_accuracy"] == found["field_completeness"] == (1, 1)
    invented = score(asked, json.dumps({"party": "Acme", "note": "paid"})).values
    assert invented["critical_fields"] == 0
    assert invented["field_f1"] == (1, 1, 0)


@pytest.mark.parametrize(
    ("gold", "answer"), [("00123", "123"), ("00123", 123), ("-07", "-7"), ("0049,123", "49,123")]
)
def test_a_number_that_lost_its_leading_zeros_is_another(gold: str, answer: Any) -> None:
    row = {"kind": "fields", "gold": {"account": gold}, "critical": ["account"]}
    asked = replace(item(), checks=read_checks([row]))
    for text, right in ((json.dumps({"account": gold}), 1), (json.dumps({"account": answer}), 0)):
        assert score(asked, text).values["critical_fields"] == right
    assert normalise("0") == normalise("0.0") == 0
    assert normalise("0.50") == normalise(0.5)
    assert normalise("2024-03-05") == normalise("2024-3-5") == normalise("05 March 2024")


@pytest.mark.parametrize("as_number", [True, False])
def test_long_numbers_are_compared_to_their_last_digit(as_number: bool) -> None:
    """44 digits, as an electronic invoice has them; a float's usual spellings stay equal."""
    right, wrong = (int("3519081" + "0" * 30 + end) for end in ("1200017", "1200018"))
    said = (lambda n: n) if as_number else str
    assert normalise(said(right)) == normalise(f"{right:,}")
    assert normalise(said(right)) != normalise(said(wrong))
    assert normalise(1e5) == normalise("100,000.00")


@pytest.mark.parametrize("space", ["\u00a0", "\u3000", "\x0b", "\x1c", "\u2028"])
def test_white_space_that_json_does_not_know_is_no_json(space: str) -> None:
    """What a program downstream would not read is not valid, however empty it looks."""
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(space + answer())
    found = score(item(), space + answer()).values
    assert (found["json_valid"], found["schema_valid"], found["json_extractable"]) == (0, 0, 1)
