"""Code tasks: small functions composed of a condition and an action, and tasks about them.

Python functions are put together from parts (condition x action x loop or comprehension x
guard x docstring x type hints) over a half's own nouns and fields, with results that the
generator knows, so that tests in the answers are true. JavaScript and shell snippets come from
banks/code_en.txt; SQL is composed. It does not know the JSONL shapes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from calib_data.banks import Half, Lang, between, chance, fill, lines, pick
from calib_data.records import Record, new_record

Row = dict[str, object]

# name -> (expression over the loop variable, extra parameters)
_CONDITIONS = {
    "flag": ('{item}["{flag}"]', ()),
    "not_flag": ('not {item}["{flag}"]', ()),
    "above": ('{item}["{num}"] > {limit}', ("limit",)),
    "equal": ('{item}["{key}"] == {wanted}', ("wanted",)),
    "range": ('{low} <= {item}["{num}"] <= {high}', ("low", "high")),
    "allowed": ('{item}["{key}"] in {allowed}', ("allowed",)),
}
_INVERTED = {
    "flag": 'not {item}["{flag}"]',
    "not_flag": '{item}["{flag}"]',
    "above": '{item}["{num}"] < {limit}',
    "equal": '{item}["{key}"] != {wanted}',
    "range": '{high} <= {item}["{num}"] <= {low}',
    "allowed": '{item}["{key}"] not in {allowed}',
}
_HINTS = {"limit": "float", "wanted": "str", "low": "float", "high": "float", "allowed": "set[str]"}


@dataclass(frozen=True, slots=True)
class Action:
    """Loop form: start value, body lines, result. Short form: one expression."""

    verb: str
    start: str
    body: tuple[str, ...]
    result: str
    short: str
    hint: str


_ACTIONS = {
    "total": Action(
        "total_{num}_of", "total = 0", ('total += {item}["{num}"]',), "total",
        'sum({item}["{num}"] for {item} in {items} if {cond})', "float",
    ),
    "count": Action(
        "count", "count = 0", ("count += 1",), "count",
        "sum(1 for {item} in {items} if {cond})", "int",
    ),
    "ids": Action(
        "ids_of", "ids = []", ('ids.append({item}["id"])',), "ids",
        '[{item}["id"] for {item} in {items} if {cond}]', "list[int]",
    ),
    "ranked": Action(
        "rank", "kept = []", ("kept.append({item})",),
        'sorted(kept, key=lambda {item}: {item}["{num}"], reverse=True)',
        'sorted(({item} for {item} in {items} if {cond}), '
        'key=lambda {item}: {item}["{num}"], reverse=True)', "list[dict]",
    ),
    "grouped": Action(
        "{num}_by_{key}_of", "sums = {{}}",
        ('key = {item}["{key}"]', 'sums[key] = sums.get(key, 0) + {item}["{num}"]'), "sums", "",
        "dict[str, float]",
    ),
    "largest": Action(
        "largest", "best = None",
        ('if best is None or {item}["{num}"] > best["{num}"]:', "    best = {item}"), "best",
        'max(({item} for {item} in {items} if {cond}), '
        'key=lambda {item}: {item}["{num}"], default=None)', "dict | None",
    ),
    "mean": Action(
        "average_{num}_of", "total, count = 0, 0", ('total += {item}["{num}"]', "count += 1"),
        "total / count if count else 0.0", "", "float",
    ),
    "index": Action(
        "index", "found = {{}}", ('found[{item}["id"]] = {item}',), "found",
        '{{{item}["id"]: {item} for {item} in {items} if {cond}}}', "dict[int, dict]",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One function with what can be asked about it."""

    record: Record
    code: str
    name: str
    params: tuple[str, ...]
    raises: str | None
    action: str
    condition: str
    is_loop: bool


def code_record(rng: Random, half: Half, lang: Lang) -> Record:
    record = new_record(rng, half, lang)
    noun = record.draw("py.noun")
    said = {"item": noun, "items": f"{noun}s", "Item": noun.title(), "Items": f"{noun.title()}s"}
    fields = ("flag", "num", "key", *_HINTS)
    said |= {name: record.draw(f"py.{name}") for name in fields}
    said |= {"n1": str(record.parity(between(rng, 20, 400))), "n2": str(record.parity(3))}
    record.said |= said
    return record


def _format(text: str, record: Record, **more: str) -> str:
    return text.format(**record.said, **more)


def python_snippet(record: Record) -> Snippet:
    rng = record.rng
    action_name, condition = pick(rng, tuple(_ACTIONS)), pick(rng, tuple(_CONDITIONS))
    action = _ACTIONS[action_name]
    extra = _CONDITIONS[condition][1]
    is_loop = not action.short or chance(rng, 0.6)
    raises = pick(rng, ("ValueError", "TypeError")) if chance(rng, 0.4) else None
    name = _function_name(record, action, condition)
    head = _head(record, name, extra, action.hint)
    body = _docstring(record, action_name, condition) + _guard(record, raises, extra)
    body += _loop(record, action, condition) if is_loop else _short(record, action, condition)
    code = "\n".join([head, *(f"    {line}" if line else "" for line in body)])
    return Snippet(
        record=record, code=code, name=name,
        params=(record.said["items"], *(record.said[p] for p in extra)),
        raises=raises, action=action_name, condition=condition, is_loop=is_loop,
    )  # fmt: skip


def _function_name(record: Record, action: Action, condition: str) -> str:
    adjective = {"flag": "{flag}_", "not_flag": "not_{flag}_", "above": "large_", "range": "mid_"}
    shape = action.verb + "_" + adjective.get(condition, "selected_") + "{items}"
    return _format(shape, record)


def _head(record: Record, name: str, extra: tuple[str, ...], hint: str) -> str:
    items = record.said["items"]
    if chance(record.rng, 0.5):
        return f"def {name}({', '.join((items, *(record.said[p] for p in extra)))}):"
    typed = [f"{items}: list[dict]", *(f"{record.said[p]}: {_HINTS[p]}" for p in extra)]
    return f"def {name}({', '.join(typed)}) -> {hint}:"


def _docstring(record: Record, action: str, condition: str) -> list[str]:
    if chance(record.rng, 0.35):
        return []
    text = description(record, action, condition, "en")
    words, rows = f'"""Return {text}."""'.split(), [""]
    for word in words:
        if len(rows[-1]) + len(word) > 88:
            rows.append("")
        rows[-1] += f" {word}" if rows[-1] else word
    return rows


def _guard(record: Record, raises: str | None, extra: tuple[str, ...]) -> list[str]:
    items = record.said["items"]
    if raises is None:
        return []
    if raises == "TypeError":
        test, text = f"not isinstance({items}, list)", f"{items} must be a list"
    elif "low" in extra:
        test, text = "{low} > {high}", "{low} must not exceed {high}"
    elif "limit" in extra:
        test, text = "{limit} < 0", "{limit} must not be negative"
    else:
        test, text = f"{items} is None", f"{items} must be given"
    return [_format(f"if {test}:", record), _format(f'    raise {raises}("{text}")', record)]


def _loop(record: Record, action: Action, condition: str, inverted: bool = False) -> list[str]:
    test = _INVERTED[condition] if inverted else _CONDITIONS[condition][0]
    rows = [action.start, "for {item} in {items}:", f"    if {test}:"]
    rows += [f"        {line}" for line in action.body] + [f"return {action.result}"]
    return [_format(row, record) for row in rows]


def _short(record: Record, action: Action, condition: str) -> list[str]:
    cond = _format(_CONDITIONS[condition][0], record)
    whole = _format(f"return {action.short}", record, cond=cond)
    if len(whole) <= 90:
        return [whole]
    kept = _format("kept = [{item} for {item} in {items} if {cond}]", record, cond=cond)
    if action.short.startswith(("sorted(", "max(")):
        function, rest = action.short.split("(", 1)[0], action.short.split("), ", 1)[1]
        return [kept, _format(f"return {function}(kept, {rest}", record)]
    short = action.short.replace(" if {cond}", "").replace("in {items}", "in kept")
    return [kept, _format(f"return {short}", record)]


def description(record: Record, action: str, condition: str, lang: Lang | None = None) -> str:
    """What the function returns, as a noun phrase in the record's language."""
    bank = f"code_{lang or record.lang}"
    said = lines(bank, f"act.{action}", record.half)[0]
    cond = lines(bank, f"cond.{condition}", record.half)[0]
    if bank == "code_zh":
        said = said.replace("{cond}", cond)
    elif "{items}, " in said:
        said = said.replace("{items}, ", "{items} " + cond + ", ")
    else:
        said = f"{said} {cond}"
    text = fill(said, record.value).rstrip(",")
    return spaced(text) if bank == "code_zh" else text


def spaced(text: str) -> str:
    """A space between a Chinese character and a Latin word or code that follows it."""
    return re.sub(r"([\u4e00-\u9fff])([A-Za-z`])", r"\1 \2", text)


def broken(snippet: Snippet) -> tuple[str, str]:
    """The code with one bug put in, and the bank section that explains it."""
    code, record = snippet.code, snippet.record
    wrong: list[tuple[str, str]] = []
    good = _format(_CONDITIONS[snippet.condition][0], record)
    bad = _format(_INVERTED[snippet.condition], record)
    if snippet.condition != "range":
        wrong.append((code.replace(f"if {good}", f"if {bad}"), "bug.compare"))
    if ", reverse=True" in code:
        wrong.append((code.replace(", reverse=True", ""), "bug.order"))
    if "total += " in code:
        wrong.append((code.replace("total += ", "total = "), "bug.default"))
    if snippet.is_loop:
        last = code.splitlines()[-1]
        wrong.append((f"{code[: -len(last)]}    {last}", "bug.return"))
    return pick(record.rng, wrong) if wrong else ("", "")


def sample_rows(record: Record) -> list[Row]:
    """Three rows that differ in each field."""
    keys = ("upper", "lower", "upper") if record.half == "gate" else ("north", "south", "north")
    numbers = [record.parity(between(record.rng, 10 * i, 10 * i + 7)) for i in (3, 1, 6)]
    said = record.said
    return [
        {"id": i + 1, said["flag"]: i != 1, said["num"]: numbers[i], said["key"]: keys[i]}
        for i in range(3)
    ]


def keeps(record: Record, condition: str, row: Row, args: tuple[object, ...]) -> bool:
    """The meaning of a condition, independent of its code."""
    flag, num = bool(row[record.said["flag"]]), int(str(row[record.said["num"]]))
    key = str(row[record.said["key"]])
    tests: dict[str, Callable[[], bool]] = {
        "flag": lambda: flag,
        "not_flag": lambda: not flag,
        "above": lambda: num > int(str(args[0])),
        "equal": lambda: key == args[0],
        "range": lambda: int(str(args[0])) <= num <= int(str(args[1])),
        "allowed": lambda: key in str(args[0]),
    }
    return tests[condition]()


def expected(record: Record, action: str, rows: list[Row]) -> object:
    """The meaning of an action over the rows that were kept."""
    num, key = record.said["num"], record.said["key"]
    numbers = [int(str(row[num])) for row in rows]
    if action == "grouped":
        return {row[key]: sum(int(str(r[num])) for r in rows if r[key] == row[key]) for row in rows}
    ranked = sorted(rows, key=lambda row: -int(str(row[num])))
    results: dict[str, object] = {
        "total": sum(numbers),
        "count": len(rows),
        "ids": [row["id"] for row in rows],
        "ranked": ranked,
        "largest": ranked[0] if ranked else None,
        "mean": sum(numbers) / len(numbers) if numbers else 0.0,
        "index": {row["id"]: row for row in rows},
    }
    return results[action]


def pytest_code(snippet: Snippet) -> str:
    """A pytest function whose assertions hold for the snippet."""
    record, rows = snippet.record, sample_rows(snippet.record)
    args = _arguments(record, snippet.condition, rows)
    kept = [row for row in rows if keeps(record, snippet.condition, row, args)]
    call = ", ".join([record.said["items"], *(map(_literal, args))])
    empty = ", ".join(["[]", *(map(_literal, args))])
    wanted, nothing = (expected(record, snippet.action, r) for r in (kept, []))
    listed = "".join(f"        {_literal(row)},\n" for row in rows)
    return (
        f"def test_{snippet.name}():\n    {record.said['items']} = [\n{listed}    ]\n"
        f"    {_assertion(f'{snippet.name}({call})', wanted)}\n"
        f"    {_assertion(f'{snippet.name}({empty})', nothing)}"
    )


def _assertion(call: str, wanted: object) -> str:
    return f"assert {call} {'is' if wanted is None else '=='} {_literal(wanted)}"


def _arguments(record: Record, condition: str, rows: list[Row]) -> tuple[object, ...]:
    first, key = int(str(rows[0][record.said["num"]])), rows[0][record.said["key"]]
    choices: dict[str, tuple[object, ...]] = {
        "above": (first - 1,), "equal": (key,), "range": (first - 2, first + 2),
        "allowed": ("{" + _literal(key) + "}",),
    }  # fmt: skip
    return choices.get(condition, ())


def _literal(value: object) -> str:
    """Python source with double quotes; a string that begins with a brace is source already."""
    if isinstance(value, str):
        return value if value.startswith("{") else f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
