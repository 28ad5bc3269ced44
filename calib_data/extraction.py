"""Extraction tasks: a short passage, a closed JSON Schema and the exact gold answer.

Each task has one worked example from the same half in front of it, so that a small model can
see the form of the answer. It does not know files; generate.py writes them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from calib_data.banks import Half, Lang, between, chance, lines, pick, shuffled
from calib_data.code_dialogs import fenced, settle, sql_query
from calib_data.code_tasks import code_record, python_snippet
from calib_data.contracts import contract_record
from calib_data.records import Record, new_record
from calib_data.service import INTENTS, SENTIMENTS, TOOLS, join, opening_message, service_record

Json = dict[str, object]
Passage = tuple[str, Json]

_TEXT: Json = {"type": "string"}
_WHOLE: Json = {"type": "integer"}
_TRUTH: Json = {"type": "boolean"}
_TEXTS: Json = {"type": "array", "items": _TEXT}
_DATE: Json = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}
_VEXING = {"refund", "complaint", "technical_help", "cancellation"}
_CURRENCY: Json = {"enum": ["EUR", "USD", "GBP", "CHF", "SGD"]}
_INTENT: Json = {"enum": list(INTENTS)}
# Two functions of this length (example and task) leave the prompt near 220 tokens.
_MOST_LINES = 7
_VERBS: dict[Half, tuple[str, ...]] = {
    "train": ("load", "save", "merge"),
    "gate": ("send", "check", "fetch"),
    "tune": ("load", "save", "merge", "print", "list", "open", "render", "count", "update", "find"),
}
_STATUSES = {"INFO": (200, 204, 302), "WARNING": (404, 429, 409), "ERROR": (500, 502, 504)}
_LOG_LAYOUTS = (
    "{d} {c} {level} {service} request={number} status={status} took={ms}ms",
    "{d}T{c}Z [{level}] {service}: request {number} ended with status {status}",
)
_PAID_KINDS = ("services", "supply", "licence", "lease", "consulting", "loan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of extraction: where it is taken from and what an answer looks like."""

    source: str
    name: str
    fields: dict[str, Json]
    critical: tuple[str, ...]
    passage: Callable[[Random, Half, Lang], Passage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One filled task. `messages` ends with the user's passage; the answer is `gold`."""

    source: str
    task: str
    lang: Lang
    messages: list[dict[str, str]]
    schema: Json
    gold: Json
    critical: list[str]


def answer_text(gold: Json) -> str:
    """The answer as a model should write it: one line, keys in the order of the schema."""
    return json.dumps(gold, ensure_ascii=False)


def _say(rng: Random, half: Half, lang: Lang, section: str) -> str:
    return pick(rng, lines(f"extraction_{lang}", section, half))


def _from_contract(section: str, gold: tuple[str, ...]) -> Callable[[Random, Half, Lang], Passage]:
    def passage(rng: Random, half: Half, lang: Lang) -> Passage:
        kind = None if lang == "zh" else pick(rng, _PAID_KINDS)
        record = contract_record(rng, half, lang, kind)
        record.spell_numbers = False
        name = section
        if section == "term":
            name = "term.yes" if record.gold["auto_renew"] else "term.no"
        text = record.render(_say(rng, half, lang, name))
        return text, {key: record.gold[key] for key in gold if _wanted(key, lang)}

    return passage


def _wanted(key: str, lang: Lang) -> bool:
    return lang == "en" or key not in {"governing_law", "currency"}


def _message(gold: tuple[str, ...]) -> Callable[[Random, Half, Lang], Passage]:
    def passage(rng: Random, half: Half, lang: Lang) -> Passage:
        record = service_record(rng, half, lang)
        said = opening_message(record, tone="sentiment" in gold, greeting=chance(rng, 0.4))
        if "urgency" in gold:
            urgent = chance(rng, 0.5)
            record.gold["urgency"] = "high" if urgent else "low"
            mood = record.render(_say(rng, half, lang, "urgent" if urgent else "relaxed"))
            said = join(record, said, mood)
        if not _usable(record, said, gold):
            return passage(rng, half, lang)
        return said, {key: record.gold[key] for key in gold}

    return passage


def _usable(record: Record, said: str, gold: tuple[str, ...]) -> bool:
    """The product is named, and the matter itself does not contradict the tone."""
    if "product" in gold and record.said["product"] not in said:
        return False
    calm = record.said["tone"] != "angry"
    return not ("sentiment" in gold and calm and record.said["intent"] in _VEXING)


def _python(rng: Random, half: Half, lang: Lang) -> Passage:
    snippet = python_snippet(code_record(rng, half, lang))
    lean = [line for line in snippet.code.splitlines() if not _is_prose(line)]
    if len(lean) > _MOST_LINES:
        return _python(rng, half, lang)
    gold: Json = {
        "function": snippet.name,
        "parameters": list(snippet.params),
        "raises": snippet.raises,
    }
    return fenced("\n".join(lean)), gold


def _is_prose(line: str) -> bool:
    text = line.strip()
    return text.startswith('"""') or text.endswith('"""')


def _javascript(rng: Random, half: Half, lang: Lang) -> Passage:
    record = code_record(rng, half, lang)
    is_async, fields = chance(rng, 0.5), list(_shuffled_fields(record))
    verb = pick(rng, _VERBS[half])
    name = f"{verb}{record.said['Items']}"
    wait = "await " if is_async else ""
    call = settle(record, f"{wait}store.@num@For(@items@, @n1@)")
    head = "async function" if is_async else "function"
    body = f"{head} {name}({', '.join(fields)}) {{\n  return {call};\n}}"
    return fenced(body, "javascript"), {
        "function": name,
        "parameters": fields,
        "is_async": is_async,
    }


def _shuffled_fields(record: Record) -> tuple[str, ...]:
    said = record.said
    return (said["items"], said["num"], said["key"])[: between(record.rng, 1, 3)]


def _sql(rng: Random, half: Half, lang: Lang) -> Passage:
    query = sql_query(code_record(rng, half, lang))
    gold: Json = {"table": query.table, "columns": list(query.columns), "limit": query.limit}
    return fenced(query.text, "sql"), gold


def _log(rng: Random, half: Half, lang: Lang) -> Passage:
    record = new_record(rng, half, lang)
    level = pick(rng, tuple(_STATUSES))
    status, number = pick(rng, _STATUSES[level]), record.serial(6)
    service = code_record(rng, half, lang).said["item"] + "-api"
    if half == "tune":
        status = between(rng, 100, 599)
        service = service.removesuffix("api") + pick(rng, ("api", "worker", "service", "gateway"))
    clock = ":".join(f"{between(rng, 0, top):02d}" for top in (23, 59, 59))
    text = _log_layout(rng, half).format(
        d=record.date().iso, c=clock, level=level, service=service, number=number,
        status=status, ms=record.parity(between(rng, 4, 900)),
    )  # fmt: skip
    return text, {"level": level, "service": service, "request_id": number, "status": status}


def _log_layout(rng: Random, half: Half) -> str:
    if half == "gate":
        return "{d} {c} | {service} | {level} | status {status} | request {number} | {ms} ms"
    if half == "train" or chance(rng, 0.2):
        return pick(rng, _LOG_LAYOUTS)
    number = pick(rng, ("request={number}", "req {number}", "id:{number}", "[{number}]"))
    status = pick(rng, ("status={status}", "-> {status}", "HTTP {status}", "code: {status}"))
    level = pick(rng, ("{level}", "[{level}]", "<{level}>", "level={level}"))
    service = pick(rng, ("{service}", "({service})", "svc={service}", "from {service}"))
    parts = shuffled(rng, (number, status, level, service, pick(rng, ("{ms}ms", "t={ms}"))))
    return "{d}" + pick(rng, (" ", "T")) + "{c} " + pick(rng, (" ", ", ", "; ", " - ")).join(parts)


def _enum(*names: str) -> Json:
    return {"enum": list(names)}


_CONTRACT = {
    "parties": {"party_a": _TEXT, "party_b": _TEXT, "effective_date": _DATE,
                "governing_law": _TEXT},
    "payment": {"amount": _WHOLE, "currency": _CURRENCY, "due_days": _WHOLE},
    "term": {"term_months": _WHOLE, "notice_days": _WHOLE, "auto_renew": _TRUTH},
    "summary": {"contract_type": _enum(*_PAID_KINDS), "party_a": _TEXT, "amount": _WHOLE,
                "currency": _CURRENCY},
}  # fmt: skip
_SERVICE = {
    "intent": {"intent": _INTENT, "order_id": _TEXT},
    "ticket": {"intent": _INTENT, "order_id": _TEXT, "product": _TEXT,
               "urgency": _enum("low", "high")},
    "mood": {"sentiment": _enum(*SENTIMENTS.values()), "product": _TEXT, "order_id": _TEXT},
    "tool": {"tool": _enum(*TOOLS.values()), "order_id": _TEXT},
}  # fmt: skip
_CODE: dict[str, tuple[dict[str, Json], Callable[..., Passage]]] = {
    "python": ({"function": _TEXT, "parameters": _TEXTS,
                "raises": {"type": ["string", "null"]}}, _python),
    "javascript": ({"function": _TEXT, "parameters": _TEXTS, "is_async": _TRUTH}, _javascript),
    "sql": ({"table": _TEXT, "columns": _TEXTS, "limit": {"type": ["integer", "null"]}}, _sql),
    "log": ({"level": _enum("INFO", "WARNING", "ERROR"), "service": _TEXT, "request_id": _TEXT,
             "status": _WHOLE}, _log),
}  # fmt: skip
_CRITICAL = {
    "party_a", "party_b", "effective_date", "governing_law", "amount", "currency",
    "intent", "tool", "order_id", "function", "table", "request_id", "status",
}  # fmt: skip


def _task(source: str, name: str, fields: dict[str, Json], passage: Callable[..., Passage]) -> Task:
    critical = tuple(key for key in fields if key in _CRITICAL) or tuple(fields)
    return Task(source=source, name=name, fields=fields, critical=critical, passage=passage)


TASKS: dict[str, tuple[Task, ...]] = {
    "contracts": tuple(
        _task("contracts", name, fields, _from_contract(name, tuple(fields)))
        for name, fields in _CONTRACT.items()
    ),
    "service": tuple(
        _task("service", name, fields, _message(tuple(fields))) for name, fields in _SERVICE.items()
    ),
    "code": tuple(_task("code", name, fields, make) for name, (fields, make) in _CODE.items()),
}


def tasks(source: str, lang: Lang) -> list[Task]:
    """The tasks of a source that exist in a language (fewer in Chinese; code in English only)."""
    return [t for t in TASKS[source] if lines(f"extraction_{lang}", f"{t.name}.ask", "train")]


def extraction_item(rng: Random, half: Half, task: Task, lang: Lang) -> Item:
    """A filled task with its schema, gold answer and worked example."""
    ask = lines(f"extraction_{lang}", f"{task.name}.ask", half)[0]
    text, gold = task.passage(rng, half, lang)
    shown, shown_gold = _example(rng, half, lang, task, gold)
    messages = [
        {"role": "system", "content": ask},
        {"role": "user", "content": shown},
        {"role": "assistant", "content": answer_text(shown_gold)},
        {"role": "user", "content": text},
    ]
    return Item(
        source=task.source, task=task.name, lang=lang, messages=messages,
        schema=_closed({key: task.fields[key] for key in gold}), gold=gold,
        critical=[key for key in task.critical if key in gold],
    )  # fmt: skip


def _example(rng: Random, half: Half, lang: Lang, task: Task, gold: Json) -> Passage:
    """Another passage whose first field differs, so that copying the example is no answer."""
    first = next(iter(gold))
    while True:
        shown, shown_gold = task.passage(rng, half, lang)
        if shown_gold[first] != gold[first]:
            return shown, shown_gold


def _closed(properties: dict[str, Json]) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
