"""Every kind of check on answers that are right, wrong, or wrong in ways that get overlooked."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.checks.base import Reply
from eval.checks.catalogue import TASK_METRICS
from eval.checks.instructions import INSTRUCTIONS
from eval.checks.loops import distinct_share, repeated_unit
from eval.checks.registry import KINDS, Scored, read_checks, score_reply

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "dict",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
                           "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
}  # fmt: skip
ORDER = {"name": "track_order", "parameters": {"properties": {"id": {"type": "string"}}}}
ONE = [{"name": "get_weather", "arguments": {"city": ["Paris"], "days": [3, ""]}}]


def scored(text: str, *checks: dict[str, Any], finish: Any = "stop", **reply: Any) -> Scored:
    settings = {"raw": text, "tokens": tuple(text.split()), **reply}
    return score_reply(Reply(text=text, finish=finish, **settings), read_checks(list(checks)))


def tool(text: str, gold: Any = ONE, **reply: Any) -> Scored:
    return scored(text, {"kind": "tool_call", "tools": [WEATHER, ORDER], "gold": gold}, **reply)


def call(name: str = "get_weather", **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    "text",
    [
        call(city="Paris", days=3),
        call(city=" paris"),
        f"<tool_call>\n{call(city='Paris')}\n</tool_call>",
        'get_weather(city="Paris", days=3)',
        "[get_weather(city='Paris')]",
        json.dumps([{"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]),
        json.dumps({"name": "get_weather", "parameters": {"city": "Paris"}}),
    ],
)
def test_right_calls_in_every_spelling(text: str) -> None:
    found = tool(text).values
    assert found["tool_call"] == found["tool_decision"] == found["tool_schema"] == 1


@pytest.mark.parametrize(
    ("text", "values", "problem"),
    [
        (call(city="Rome"), (0, 1, 1), "wrong name or arguments"),
        (call(days=3), (0, 1, 0), "$: required"),
        (call(city="Paris", days="3"), (0, 1, 0), "$.days: type"),
        (call(city="Paris", unit="K"), (0, 1, 0), "$.unit: enum"),
        (call(city="Paris", when="now"), (0, 1, 0), "$: additionalProperties"),
        (call("get_wether", city="Paris"), (0, 1, 0), "unknown tool 'get_wether'"),
        (f"[{call(city='Paris')}, {call(city='Paris')}]", (0, 1, 1), "the same call twice"),
        (call(city="Paris")[:-1], (0, 1, 0), "not JSON"),
        (f"<tool_call>{call(city='Paris')}", (0, 1, 0), "never closed"),
        ("It is sunny in Paris (as always).", (0, 0, 0), "no call where one is needed"),
        ("get_weather(__import__('os'))", (0, 1, 0), "must name its arguments"),
        ("get_weather(city=open('x'))", (0, 1, 0), "not a literal"),
    ],
)
def test_wrong_calls(text: str, values: tuple[int, int, int], problem: str) -> None:
    found = tool(text)
    names = ("tool_call", "tool_decision", "tool_schema")
    assert tuple(found.values[name] for name in names) == values
    assert problem in found.problem


def test_no_call_where_none_is_right() -> None:
    prose = tool("Paris is lovely.", gold=[])
    assert prose.values["tool_call"] == prose.values["tool_withheld"] == 1
    assert "tool_called" not in prose.values
    called = tool(call(city="Paris"), gold=[])
    assert called.values["tool_call"] == called.values["tool_withheld"] == 0


def test_parallel_calls_in_any_order_and_calls_a_server_parsed() -> None:
    gold = [*ONE, {"name": "track_order", "arguments": {"id": ["A1", "a-1"]}}]
    both = f"[{call('track_order', id='a-1')}, {call(city='Paris')}]"
    assert tool(both, gold).values["tool_call"] == 1
    assert tool(call(city="Paris"), gold).values["tool_call"] == 0
    parsed = ({"name": "get_weather", "arguments": {"city": "Paris"}},)
    assert tool("", tool_calls=parsed).values["tool_call"] == 1


def test_acceptable_values_are_assigned_not_taken_greedily() -> None:
    gold = [{"name": "track_order", "arguments": {"id": ["A", "B"]}},
            {"name": "track_order", "arguments": {"id": ["A"]}}]  # fmt: skip
    assert tool(f"[{call('track_order', id='A')}, {call('track_order', id='B')}]",
                gold).values["tool_call"] == 1  # fmt: skip


def code(text: str, **options: Any) -> Scored:
    return scored(text, {"kind": "code", "language": "python", **options})


@pytest.mark.parametrize(
    ("text", "parses", "fenced"),
    [
        ("```python\ndef f(a):\n    return a\n```", 1, 1),
        ("Sure:\n\n```py\nx = 1\n```\nDone.", 1, 1),
        ("```python\ndef f(a):\nreturn a\n```", 0, 1),
        ("```python\nx = 1", 1, 0),
        ("x = 1", 1, 0),
        ("```js\nx = 1\n```", 1, 0),
        ("```python\r\nx = 1\r\n```\r\n", 1, 1),
        ("```python\n```", 0, 1),
        ("```python\nx = (1\n```", 0, 1),
        ("", 0, 0),
        ("```python\nx = '\\d'\n```", 1, 1),
        ("```python\n" + "(" * 5000 + "\n```", 0, 1),
    ],
)
def test_code_in_a_fence(text: str, parses: int, fenced: int) -> None:
    found = code(text).values
    assert (found["code_parses"], found["code_fenced"]) == (parses, fenced)


@pytest.mark.parametrize(
    "body", ["    return a + b\n", "return a + b\n", "def add(a, b):\n    return 1"]
)
def test_completions_stand_behind_their_head(body: str) -> None:
    found = code(body, fenced=False, prefix="def add(a, b):", defines="add", parameters=["a", "b"])
    assert found.values["code_parses"] == found.values["code_defines"] == 1
    assert "code_fenced" not in found.values


def test_json_in_a_fence_is_json_as_elsewhere() -> None:
    for body, parses in (('{"a": 1}', 1), ('{"a": NaN}', 0), ("-Infinity", 0), ('{"a": }', 0)):
        assert code(f"```json\n{body}\n```", language="json").values["code_parses"] == parses, body


def test_the_wrong_function_is_no_definition() -> None:
    text = "```python\ndef g(a): return a\n```"
    assert code(text, defines="g").values["code_defines"] == 1
    assert code(text, defines="g", parameters=["b"]).values["code_defines"] == 0
    assert code(text, defines="f").problem == "no function f"


FOLLOWED: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["apple", "Pear"]}, "Apples and pears.", "An apple."),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "A category.", "The Cat."),
    "keywords:frequency": ({"keyword": "go", "frequency": 2}, "go, Go!", "go"),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 2, "let_relation": "less than"}, "beam", "seem"),
    "length_constraints:number_words": ({"num_words": 3}, "one two three", "one two-three"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "less than"}, "One.", "One. Two!"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"}, "A.\n\n'Then b.",
        "A.\n\nThe b."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2}, "*a* and **b c**", "*a* and b"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2}, "Section 1 x\nSection 2 y", "Section 1"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "No."),
    "detectable_format:title": ({}, "<<Song>>\nla", "<< >> la"),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', '{"a": 1'),
    "detectable_content:number_placeholders": ({"num_placeholders": 1}, "Dear [name]", "Dear []"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Hi.\nP. S. bye", "No PS"),
    "combination:two_responses": ({}, "a ****** b", "a ****** a"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi."}, "say hi. hi", "hi"),
    "startend:end_checker": ({"end_phrase": "The end."}, 'so it is. the end. ', "The end. No."),
    "startend:quotation": ({}, '"hi"', '"hi'),
    "change_case:capital_word_frequency": ({"capital_frequency": 2}, "NO WAY out", "NO way"),
    "change_case:english_capital": ({}, "ALL 1", "All"),
    "change_case:english_lowercase": ({}, "all", "All"),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
    "language:response_language": ({"language": "zh"}, "你好", "hello"),
}  # fmt: skip


def constraints(text: str, *instructions: dict[str, Any]) -> Scored:
    return scored(text, {"kind": "constraints", "instructions": list(instructions)})


def test_every_instruction_is_told_apart() -> None:
    assert FOLLOWED.keys() == INSTRUCTIONS.keys()
    for name, (kwargs, good, bad) in FOLLOWED.items():
        asked = {"id": name, **kwargs}
        assert constraints(good, asked).values["constraints"] == 1, name
        assert constraints(bad, asked).values["constraints"] == 0, name
        assert constraints(" ", asked).values["constraints_loose"] == 0, name


def test_strict_and_loose_by_prompt_and_by_instruction() -> None:
    lower = {"id": "change_case:english_lowercase"}
    bare = {"id": "punctuation:no_comma"}
    found = constraints("Sure, here:\nall *lower* case", lower, bare)
    assert (found.values["constraints"], found.values["constraints_loose"]) == (0, 1)
    assert found.values["instructions"] == (0, 2)
    assert found.values["instructions_loose"] == (2, 2)
    assert found.details["missed"] == ["change_case:english_lowercase", "punctuation:no_comma"]


def no_loop(tokens: list[Any], finish: str = "stop", text: str = "a") -> float:
    return scored(text, {"kind": "json_valid"}, finish=finish, tokens=tuple(tokens)).values[
        "no_loop"
    ]  # type: ignore[return-value]


def test_loops_by_each_definition() -> None:
    varied = list(range(200))
    assert no_loop(varied) == 1
    assert no_loop([*varied, 7, 7, 7]) == 1
    assert no_loop([*varied, 7, 7, 7, 7]) == 0
    assert no_loop(list(range(64)) * 4) == 0
    assert no_loop(list(range(65)) * 4) == 1
    assert no_loop([*varied, *([1, 2, 3] * 40), 9]) == 0  # (b): the unit is broken at the very end
    rng = random.Random(0)
    text = " ".join(f"{w}" for w in ["same", "line"] * 300)
    assert no_loop(varied, "length", text) == 0
    assert no_loop(varied, "stop", text) == 1
    noise = "".join(rng.choice(string.ascii_letters) for _ in range(600))
    assert no_loop(varied, "length", noise) == 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40))
def test_repeated_unit_agrees_with_brute_force(tokens: list[int]) -> None:
    expected = [u for u in range(1, 65) if 4 * u <= len(tokens)
                and tokens[-4 * u :] == tokens[len(tokens) - u :] * 4]  # fmt: skip
    assert repeated_unit(tokens) == (expected or [0])[0]
    assert 0 < distinct_share(tokens * 4) <= 1


@pytest.mark.parametrize(
    ("text", "raw", "kept"),
    [
        ("fine", "fine", 1),
        ("done<|im_end|>", "done<|im_end|>", 0),
        ("next", "next<|im_start|>", 0),
        ("</s>", "</s>", 0),
        ("if a <| b |> c", "if a <| b |> c", 1),
        ("<end_of_turn>x", "<end_of_turn>x", 0),
        ("plain", " plain", 1),
    ],
)
def test_leaked_tokens(text: str, raw: str, kept: int) -> None:
    found = scored(text, {"kind": "json_valid"}, raw=raw)
    assert found.values["no_leaked_tokens"] == kept


def signals(text: str, **reply: Any) -> dict[str, Any]:
    return scored(text, {"kind": "json_valid"}, **reply).signals


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("The order is on its way.", "LATIN"),
        ("您的订单已经发出。", "CJK"),
        ("Заказ отправлен.", "CYRILLIC"),
        ("结果：`print('only latin letters here')` 完成", "CJK"),
        ('他说 "this is a long English quotation" 完', "CJK"),
        ('{"name": "value"}', "LATIN"),
        ("12 + 3", None),
    ],
)
def test_the_main_script(text: str, script: str | None) -> None:
    assert signals(text)["language_kept"] == script


def test_the_language_asked_for() -> None:
    ask = {"kind": "language", "expect": "zh"}
    assert scored("好的，Acme 公司的订单已经发出", ask).values["language_right"] == 1
    assert scored("Sure, the order left.", ask).values["language_right"] == 0
    japanese = {"kind": "language", "expect": "ja"}
    assert scored("注文は発送済みです", japanese).values["language_right"] == 1
    assert scored("订单已经发出", japanese).values["language_right"] == 0
    asked = {"id": "language:response_language", "language": "ja"}
    assert constraints("東京都庁は新宿区西新宿に所在する。", asked).values["constraints"] == 1
    assert constraints("订单已经发出", asked).values["constraints"] == 0


def test_stray_characters_but_not_a_cut_one_at_the_end() -> None:
    plain = {"kind": "json_valid"}
    assert scored("a\ufffdb", plain).values["no_stray_characters"] == 0
    assert scored("\ue000", plain).values["no_stray_characters"] == 0
    assert scored("ab\ufffd", plain, finish="length").values["no_stray_characters"] == 1
    assert scored("ab\ufffd", plain).values["no_stray_characters"] == 0


def test_refusals_and_silence() -> None:
    curly = ("I\u2019m sorry, but no.", "I can\u2019t assist.", "I can't fulfill this.")
    for text in ("I'm sorry, but I can't help with that.", "抱歉，我无法提供。", "  ", *curly):
        assert signals(text)["refusal_kept"] is True
    for text in ("The invoice is due.", "x" * 300 + " I cannot help"):
        assert signals(text)["refusal_kept"] is False


def test_length_drifts_both_ways() -> None:
    kept = TASK_METRICS["length_kept"].kept
    assert kept is not None
    assert kept(20, 41) == kept(41, 20) is False
    assert kept(20, 40)
    assert kept(1, 9)
    assert not kept(1, 10)


def choose(logprobs: Any, per: str = "choice") -> float:
    ask = {"kind": "choice", "choices": [" yes", " not at all"], "gold": 1, "per": per}
    return scored("", ask, choice_logprobs=logprobs).values["choice_accuracy"]  # type: ignore[return-value]


def test_choices_by_likelihood() -> None:
    assert choose((-3.0, -2.0)) == 1
    assert choose((-2.0, -3.0)) == 0
    assert choose((-2.0, -3.0), "byte") == 1
    assert choose((-2.0, float("nan"))) == choose(None) == 0


def test_matches_to_the_letter_and_in_normal_form() -> None:
    ask = {"kind": "match", "gold": ["12 March 2025", "n/a"]}
    assert scored(" 12 March 2025\n", ask).values["exact_match"] == 1
    close = scored("2025-03-12", ask).values
    assert (close["exact_match"], close["normalised_match"]) == (0, 1)
    assert scored("2025-12-03", ask).values["normalised_match"] == 0


def test_dialog_state_needs_every_slot() -> None:
    ask = {"kind": "state", "gold": {"city": "Bonn", "people": 4, "time": None}}
    assert scored('{"city": "bonn", "people": "4"}', ask).values["dialog_state"] == 1
    assert scored('{"city": "Bonn"}', ask).problem == "wrong slots: people"
    assert scored('{"city": "Bonn", "people": 4, "time": "18:00"}', ask).values["dialog_state"] == 0
    assert scored('{"city": "Bonn", "people": true}', ask).values["dialog_state"] == 0
    assert scored("[]", ask).problem == "not a JSON object"


def test_a_failed_answer_passes_nothing() -> None:
    found = scored("", {"kind": "json_valid"}, finish="error")
    assert set(found.values.values()) == {0.0}
    assert found.problem == "no answer: the model failed"


# Read as they stand, these would be followed by any answer, by another one, or end the run.
NOT_MEANT: list[tuple[str, dict[str, Any], str]] = [
    ("length_constraints:number_words", {"num_words": 9, "relaton": "less than"},
     "unknown argument 'relaton'; known: num_words, relation"),
    ("length_constraints:number_words", {"num_words": 9, "let_relation": "less than"},
     "unknown argument 'let_relation'"),
    ("punctuation:no_comma", {"num_commas": 0}, "unknown argument 'num_commas'; known: none"),
    ("keywords:existence", {"keywords": []}, "'keywords' (a list of texts"),
    ("keywords:existence", {"keywords": [7]}, "'keywords' (a list of texts"),
    ("keywords:forbidden_words", {"forbidden_words": [""]}, "'forbidden_words' (a list of texts"),
    ("keywords:frequency", {"keyword": "", "frequency": 3}, "'keyword' (a text"),
    ("keywords:letter_frequency", {"letter": "", "let_frequency": 3}, "'letter' (a text"),
    ("detectable_format:constrained_response", {"options": "yes"}, "'options' (a list of texts"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "jsn_valid"}, "unknown kind of check 'jsn_valid'; did you mean 'json_valid'"),
        ({"kind": "no_loop"}, "unknown kind of check 'no_loop'"),
        ({"kind": "json_valid", "strict": True}, "unknown key 'strict'"),
        ({"kind": "schema_valid"}, "non-empty 'schema'"),
        ({"kind": "schema_valid", "schema": {"type": 3}}, "the JSON Schema is not valid"),
        ({"kind": "fields", "gold": {"a": 1}, "critical": ["b"]}, "['b'] are not in gold"),
        ({"kind": "tool_call", "tools": [WEATHER], "gold": [{"name": "x"}]}, "gold calls 'x'"),
        ({"kind": "tool_call", "tools": [WEATHER],
          "gold": [{"name": "get_weather", "arguments": {"city": "Paris"}}]}, "acceptable values"),
        ({"kind": "tool_call", "tools": [WEATHER],
          "gold": [{"name": "get_weather", "arguments": {"town": ["x"]}}]}, "'town', which it"),
        ({"kind": "choice", "choices": ["a"], "gold": 0}, "two different texts"),
        ({"kind": "choice", "choices": ["a", "b"], "gold": 2}, "an index"),
        ({"kind": "choice", "choices": ["a", "b", "a"], "gold": 0}, "alike"),
        ({"kind": "code", "language": "cobol"}, "'language' to be one of"),
        ({"kind": "constraints", "instructions": [{"id": "nope"}]}, "unknown instruction"),
        ({"kind": "constraints", "instructions": [{"id": "startend:end_checker"}]}, "'end_phrase'"),
        ({"kind": "constraints", "instructions": [
            {"id": "length_constraints:number_words", "num_words": 3, "relation": "about"}]},
         "relation must be one of"),
        ({"kind": "constraints", "instructions": [
            {"id": "language:response_language", "language": "fr"}]}, "told by its script"),
        *(({"kind": "constraints", "instructions": [{"id": name, **said}]}, message)
          for name, said, message in NOT_MEANT),
        ({"kind": "constraints", "instructions": [{"id": ["x"]}]}, "unknown instruction"),
        ({"kind": "language", "expect": "fr"}, "'expect'"),
        ({"kind": "language", "expect": ["en"]}, "'expect'"),
        ({"kind": "code", "language": ["python"]}, "'language' to be one of"),
        ({"kind": "code", "language": "python", "defines": ""}, "'defines' names a Python"),
        ({"kind": "code", "language": "python", "defines": "f", "parameters": [1]}, "of names"),
        ({"kind": "choice", "choices": ["a", "b"], "gold": 0, "per": ["byte"]}, "'per'"),
        ({"kind": "tool_call", "tools": [{"name": "f", "parameters": True}], "gold": []},
         "'parameters' of the tool 'f'"),
        ({"kind": "tool_call", "tools": [ORDER, ORDER], "gold": []}, "the same name"),
        ({"kind": "match", "gold": []}, "a text or a list of texts"),
        ({"kind": "state", "gold": {}}, "non-empty 'gold'"),
        ("json_valid", "unknown kind"),
    ],
)  # fmt: skip
def test_checks_that_cannot_be_meant_are_refused(check: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_checks([check])
    assert message in str(caught.value)


def test_checks_that_do_not_go_together() -> None:
    choice = {"kind": "choice", "choices": ["a", "b"], "gold": 0}
    with pytest.raises(ValueError, match="takes no other check"):
        read_checks([choice, {"kind": "json_valid"}])
    with pytest.raises(ValueError, match="twice in one row"):
        read_checks([{"kind": "json_valid"}] * 2)
    with pytest.raises(ValueError, match="non-empty 'checks'"):
        read_checks([])


ASKS: dict[str, dict[str, Any]] = {
    "json_valid": {},
    "schema_valid": {"schema": {"type": "object"}},
    "fields": {"gold": {"a": 1}, "critical": ["a"]},
    "tool_call": {"tools": [WEATHER], "gold": ONE},
    "match": {"gold": "x"},
    "code": {"language": "python", "defines": "f"},
    "constraints": {"instructions": [{"id": "punctuation:no_comma"}]},
    "state": {"gold": {"a": 1}},
    "language": {"expect": "en"},
}
ANSWERS = st.one_of(
    st.text(alphabet=st.characters(codec=None), max_size=60),
    st.text(alphabet='{}[]":,`~python \n\\<>|tool_call()=1', max_size=80),
)


@settings(deadline=None)
@given(ANSWERS, st.sampled_from(["stop", "length", "error"]))
def test_no_answer_breaks_a_check_and_every_value_is_a_share(text: str, finish: str) -> None:
    assert ASKS.keys() | {"choice"} == KINDS.keys()
    checks = [{"kind": kind, **options} for kind, options in ASKS.items()]
    found = scored(text, *checks, finish=finish)
    assert set(found.values) | set(found.signals) <= set(TASK_METRICS)
    for name, value in found.values.items():
        assert isinstance(value, tuple) == (TASK_METRICS[name].shape == "rate"), name
        assert all(v >= 0 for v in value) if isinstance(value, tuple) else value in (0.0, 1.0)
    json.dumps([found.problem, found.details], ensure_ascii=False).encode()
