"""Tasks beyond extraction: tool calls, choices, code, replies under instructions, dialogs.

Rows of gate/tasks.jsonl, in the shape that `evaluate` checks (`messages` or `turns` with `checks`).
The right answer of each is known by construction. It does not know files; generate.py writes them.
"""

import ast
import re
from collections.abc import Callable, Iterator
from random import Random

from calib_data.banks import Half, Lang, between, pick, shuffled
from calib_data.code_dialogs import python_task, system_prompt
from calib_data.extraction import answer_text, tasks
from calib_data.records import document_id, seeded
from calib_data.service import INTENTS, opening_message, service_record
from calib_data.tools import tool_item

Row = dict[str, object]
Json = dict[str, object]
Make = Callable[[Random, Half, Lang], Row]

NUM_CHOICES = 4
_FIRST_NUMBER = 200_000
_CODE_TASKS = ("write", "fix", "complete", "rename")
_FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)


def task_rows(n: int, seed: int, half: Half = "gate") -> Iterator[Row]:
    """Rows in turn of each kind; every sixth turn of a kind that knows Chinese is Chinese."""
    kinds = tuple(_KINDS)
    for index in range(n):
        kind, turn = kinds[index % len(kinds)], index // len(kinds)
        source, knows_chinese, make = _KINDS[kind]
        lang: Lang = "zh" if knows_chinese and turn % 6 == 5 else "en"
        yield {
            "id": f"{half}-tasks-{_FIRST_NUMBER + index}",
            "doc": document_id(half, f"tasks-{source}", seed, index),
            "source": source,
            "lang": lang,
            "task": kind,
        } | make(seeded(seed, half, "tasks", index), half, lang)


def _tool(rng: Random, half: Half, lang: Lang) -> Row:
    item = tool_item(rng, half, lang)
    gold = [
        {"name": call["name"], "arguments": {k: [v] for k, v in call["arguments"].items()}}
        for call in item.calls
    ]
    check: Json = {"kind": "tool_call", "tools": item.tools, "gold": gold}
    return {"messages": item.messages, "checks": [check], "gold": item.answer}


def _choice(rng: Random, half: Half, lang: Lang) -> Row:
    """A customer's matter, of four; the answer is weighed, not written."""
    record = service_record(rng, half, lang)
    said = opening_message(record, tone=False, greeting=False)
    right = record.said["intent"]
    others = shuffled(rng, [name for name in INTENTS if name != right])[: NUM_CHOICES - 1]
    choices = shuffled(rng, [right, *others])
    ask = _CHOICE_ASK[lang].format(choices=", ".join(choices))
    messages = [_message("system", ask), _message("user", said)]
    check: Json = {"kind": "choice", "choices": choices, "gold": choices.index(right)}
    return {"messages": messages, "checks": [check]}


_CHOICE_ASK = {
    "en": "Which of these is the customer's matter: {choices}? Answer with the word alone.",
    "zh": "\u5ba2\u6237\u7684\u8bc9\u6c42\u662f\u4ee5\u4e0b\u54ea\u4e00\u9879\uff1a{choices}\uff1f"
    "\u53ea\u56de\u7b54\u8be5\u8bcd\u3002",
}


def _code(rng: Random, half: Half, lang: Lang) -> Row:
    while True:
        record, request, answer = python_task(rng, half, "en", pick(rng, _CODE_TASKS))
        if found := _FENCED.search(answer):
            break
    check: Json = {"kind": "code", "language": "python", "defines": _first_function(found[1])}
    messages = [_message("system", system_prompt(record)), _message("user", request)]
    return {"messages": messages, "checks": [check], "gold": answer}


def _first_function(code: str) -> str:
    nodes = ast.walk(ast.parse(code))
    return next(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def _constraints(rng: Random, half: Half, lang: Lang) -> Row:
    """A reply to a customer, with two or three instructions that a program can check."""
    record = service_record(rng, half, lang)
    said = opening_message(record, tone=False, greeting=False)
    if record.said["order"] not in said:
        return _constraints(rng, half, lang)
    pool = _ZH_RULES if lang == "zh" else _EN_RULES
    closing = _CLOSINGS[lang]["gate" if half == "gate" else "train"]
    picked = shuffled(rng, list(pool))[: between(rng, 2, 3)]
    fills = {"order": record.said["order"], "closing": closing, "count": 2 + int(rng.random() * 2)}
    wanted = " ".join(words.format(**fills) for words, _ in picked)
    check: Json = {"kind": "constraints", "instructions": [rule(fills) for _, rule in picked]}
    ask = _REPLY_ASK[lang].format(rules=wanted)
    return {
        "messages": [_message("system", ask), _message("user", said)],
        "checks": [check],
        "max_tokens": 96,
    }


_REPLY_ASK = {
    "en": "Write a short reply to the customer. {rules}",
    "zh": "\u8bf7\u7ed9\u5ba2\u6237\u5199\u4e00\u6bb5\u7b80\u77ed\u7684\u56de\u590d\u3002{rules}",
}
_CLOSINGS = {
    "en": {"train": "Kind regards", "gate": "With best wishes"},
    "zh": {"train": "\u795d\u60a8\u987a\u5229", "gate": "\u656c\u8bf7\u7559\u610f"},
}
_Rule = Callable[[dict[str, object]], Json]
_EN_RULES: tuple[tuple[str, _Rule], ...] = (
    ("Name the order number.", lambda f: {"id": "keywords:existence", "keywords": [f["order"]]}),
    ("Use fewer than 60 words.", lambda f: {"id": "length_constraints:number_words",
     "num_words": 60, "relation": "less than"}),
    ("Use at least {count} sentences.", lambda f: {"id": "length_constraints:number_sentences",
     "num_sentences": f["count"], "relation": "at least"}),
    ("Do not use any comma.", lambda f: {"id": "punctuation:no_comma"}),
    ("End with the words: {closing}", lambda f: {"id": "startend:end_checker",
     "end_phrase": f["closing"]}),
    ("Write in lower case only.", lambda f: {"id": "change_case:english_lowercase"}),
    ("Write exactly {count} bullet points that begin with *.", lambda f: {
     "id": "detectable_format:number_bullet_lists", "num_bullets": f["count"]}),
)  # fmt: skip
_ZH_RULES: tuple[tuple[str, _Rule], ...] = (
    ("\u5199\u51fa\u8ba2\u5355\u53f7\u3002",
     lambda f: {"id": "keywords:existence", "keywords": [f["order"]]}),
    ("\u53ea\u7528\u4e2d\u6587\u56de\u7b54\u3002",
     lambda f: {"id": "language:response_language", "language": "zh"}),
    ("\u6700\u540e\u4ee5\u201c{closing}\u201d\u7ed3\u5c3e\u3002",
     lambda f: {"id": "startend:end_checker", "end_phrase": f["closing"]}),
)  # fmt: skip


def _dialog(rng: Random, half: Half, lang: Lang) -> Row:
    """An order that changes over three turns; after each the whole state is asked for."""
    record = service_record(rng, half, lang)
    words = _DIALOG[lang]["gate" if half == "gate" else "train"]
    first, last = between(rng, 2, 9), between(rng, 10, 30)
    product, city = record.said["product"], record.draw("city")
    other = service_record(rng, half, lang)
    shown: Json = {"product": other.said["product"], "quantity": last + 1, "city": None}
    example = words[0].format(n=last + 1, product=other.said["product"])
    state: Json = {"product": product, "quantity": first, "city": None}
    says = (
        (words[0].format(n=first, product=product), dict(state)),
        (words[1].format(city=city), state | {"city": city}),
        (words[2].format(n=last), state | {"city": city, "quantity": last}),
    )
    opening = [
        _message("system", _STATE_ASK[lang]),
        _message("user", example),
        _message("assistant", answer_text(shown)),
    ]
    turns = [
        {
            "messages": [*(opening if not number else []), _message("user", said)],
            "checks": [{"kind": "state", "gold": gold}],
        }
        for number, (said, gold) in enumerate(says)
    ]
    return {"turns": turns}


_STATE_ASK = {
    "en": "Keep the order as JSON: product, quantity, city (null until it is said). Answer each "
    "message with the whole order as JSON only.",
    "zh": "\u7528 JSON \u8bb0\u5f55\u8ba2\u5355\uff1aproduct\u3001quantity\u3001city"
    "\uff08\u672a\u8bf4\u65f6\u4e3a null\uff09\u3002"
    "\u6bcf\u6b21\u53ea\u56de\u7b54\u5b8c\u6574\u7684 JSON\u3002",
}
_DIALOG: dict[str, dict[str, tuple[str, str, str]]] = {
    "en": {
        "train": ("I would like {n} of the {product}.", "Send it to {city}.", "Make it {n}."),
        "gate": ("Put me down for {n} x {product}.", "It goes to {city}.", "No, I need {n}."),
    },
    "zh": {
        "train": ("\u6211\u8981{n}\u4e2a{product}\u3002", "\u8bf7\u5bc4\u5230{city}\u3002",
                  "\u6539\u4e3a{n}\u4e2a\u3002"),
        "gate": ("\u8bf7\u4e0b\u5355{n}\u4e2a{product}\u3002",
                 "\u6536\u8d27\u57ce\u5e02\u662f{city}\u3002",
                 "\u6570\u91cf\u8981\u6362\u6210{n}\u3002"),
    },
}  # fmt: skip


def _contract_choice(rng: Random, half: Half, lang: Lang) -> Row:
    """The kind of a contract, of four."""
    summary = next(task for task in tasks("contracts", "en") if task.name == "summary")
    text, gold = summary.passage(rng, half, "en")
    kinds: list[str] = list(summary.fields["contract_type"]["enum"])  # type: ignore[arg-type]
    right = str(gold["contract_type"])
    others = shuffled(rng, [kind for kind in kinds if kind != right])[: NUM_CHOICES - 1]
    choices = shuffled(rng, [right, *others])
    ask = f"What kind of contract is this: {', '.join(choices)}? Answer with the word alone."
    messages = [_message("system", ask), _message("user", text)]
    check: Json = {"kind": "choice", "choices": choices, "gold": choices.index(right)}
    return {"messages": messages, "checks": [check]}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# Kind -> (source, whether it comes in Chinese too, what makes it).
_KINDS: dict[str, tuple[str, bool, Make]] = {
    "tool": ("service", True, _tool),
    "matter": ("service", True, _choice),
    "code": ("code", False, _code),
    "reply": ("service", True, _constraints),
    "dialog": ("service", True, _dialog),
    "kind": ("contracts", False, _contract_choice),
}
