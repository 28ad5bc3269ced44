"""Requests about code with their answers, and longer code documents.

Builds on code_tasks.py (Python functions) and adds SQL, JavaScript and shell. It does not know
the JSONL shapes.
"""

from dataclasses import dataclass
from random import Random

from calib_data.banks import Half, Lang, between, chance, fill, lines, pick, with_article
from calib_data.code_tasks import (
    Snippet,
    broken,
    code_record,
    description,
    pytest_code,
    python_snippet,
    spaced,
)
from calib_data.records import Record

PYTHON_TASKS = ("write", "explain", "fix", "complete", "test", "rename")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A composed SQL query and the facts that it states."""

    text: str
    described: str
    table: str
    columns: tuple[str, ...]
    limit: int | None


def _lines(record: Record, section: str, lang: Lang | None = None) -> tuple[str, ...]:
    return lines(f"code_{lang or record.lang}", section, record.half)


def system_prompt(record: Record) -> str:
    return record.render(pick(record.rng, _lines(record, "system")))


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```"


def python_task(rng: Random, half: Half, lang: Lang, task: str) -> tuple[Record, str, str]:
    """(record, request, answer) for one of PYTHON_TASKS."""
    record = code_record(rng, half, lang)
    snippet = python_snippet(record)
    record.said |= {
        "fn": snippet.name,
        "params": ", ".join(snippet.params),
        "desc": description(record, snippet.action, snippet.condition),
        "keys": _keys_read(snippet),
        "new": f"{pick(rng, ('find', 'compute', 'collect'))}_{snippet.name}",
    }
    request, answer = _parts(snippet, task)
    return record, request, answer


def _keys_read(snippet: Snippet) -> str:
    said = snippet.record.said
    names = [said[f] for f in ("flag", "num", "key")] + ["id"]
    read = [f"`{name}`" for name in names if f'["{name}"]' in snippet.code]
    comma, last = ("\u3001", "\u548c") if snippet.record.lang == "zh" else (", ", " and ")
    return last.join([comma.join(read[:-1]), read[-1]]) if len(read) > 1 else read[0]


def _ask(record: Record, section: str) -> str:
    text = fill(pick(record.rng, _lines(record, section)), record.value)
    return spaced(text) if record.lang == "zh" else text


def _parts(snippet: Snippet, task: str) -> tuple[str, str]:
    record, code = snippet.record, snippet.code
    ask = _ask(record, f"ask.{task}")
    if task == "write":
        return ask, f"{fenced(code)}\n\n{_ask(record, 'say.write')}"
    if task == "explain":
        return f"{ask}\n\n{fenced(code)}", _ask(record, "say.explain")
    if task == "fix":
        wrong, section = broken(snippet)
        if wrong:
            return f"{ask}\n\n{fenced(wrong)}", f"{_ask(record, section)}\n\n{fenced(code)}"
        return _parts(snippet, "complete")
    if task == "complete":
        head = "\n".join(code.splitlines()[: max(1, len(code.splitlines()) // 2)])
        return f"{ask}\n\n{fenced(head)}", f"{_ask(record, 'say.complete')}\n\n{fenced(code)}"
    if task == "test":
        answer = f"{fenced(pytest_code(snippet))}\n\n{_ask(record, 'say.test')}"
        return f"{ask}\n\n{fenced(code)}", answer
    renamed = code.replace(f"def {snippet.name}(", f"def {record.said['new']}(")
    return f"{ask}\n\n{fenced(code)}", f"{fenced(renamed)}\n\n{_ask(record, 'say.rename')}"


def snippet_task(rng: Random, half: Half, section: str) -> tuple[Record, str, str]:
    """(record, request, answer) of a JavaScript or shell snippet."""
    record = code_record(rng, half, "en")
    request, code, why = settle(record, pick(rng, _lines(record, section))).split(" @@ ")
    language = "sh" if section == "shell" else "javascript"
    return record, request, f"{fenced(code, language)}\n\n{why}"


def settle(record: Record, text: str) -> str:
    """Fill the @name@ gaps of a snippet."""
    for name, value in record.said.items():
        text = text.replace(f"@{name}@", value)
    return with_article(text)


def sql_task(rng: Random, half: Half) -> tuple[Record, str, str]:
    record = code_record(rng, half, "en")
    query = sql_query(record)
    record.said |= {"desc": query.described, "key": f"`{query.columns[0]}`"}
    answer = f"{fenced(query.text, 'sql')}\n\n{_ask(record, 'sql.say')}"
    return record, _ask(record, "sql.ask"), answer


def sql_query(record: Record) -> Query:
    said, rng = record.said, record.rng
    limit = record.parity(between(rng, 2, 40)) if chance(rng, 0.6) else None
    where, which = _sql_filter(record)
    tail = f"\nLIMIT {limit}" if limit else ""
    most = f", at most {limit} rows" if limit else ""
    table, num, key = said["items"], said["num"], said["key"]
    if chance(rng, 0.5):
        columns: tuple[str, ...] = (key, f"total_{num}")
        text = (
            f"SELECT {key}, SUM({num}) AS total_{num}\nFROM {table}\nWHERE {where}\n"
            f"GROUP BY {key}\nORDER BY total_{num} DESC{tail};"
        )
        described = f"the summed {num} of {table} {which} for each {key}, largest first{most}"
    else:
        columns = (key, num, "created_at")[: between(rng, 2, 3)]
        text = (
            f"SELECT {', '.join(columns)}\nFROM {table}\nWHERE {where}\nORDER BY {num} DESC{tail};"
        )
        named = " and ".join((", ".join(columns[:-1]), columns[-1]))
        described = f"{named} of {table} {which}, highest {num} first{most}"
    return Query(text=text, described=described, table=table, columns=columns, limit=limit)


def _sql_filter(record: Record) -> tuple[str, str]:
    date, number = record.date(2024, 2026).iso, record.said["n1"]
    flag, num = record.said["flag"], record.said["num"]
    return pick(
        record.rng,
        (
            (f"created_at >= DATE '{date}'", f"created since {date}"),
            (f"{flag} AND {num} > {number}", f"that are {flag} and have a {num} above {number}"),
            (f"NOT {flag}", f"that are not {flag}"),
            (f"{num} BETWEEN {number} AND {int(number) * 4}", f"with a {num} from {number} up"),
        ),
    )


def document(rng: Random, half: Half, lang: Lang) -> str:
    """A longer code text: a module with its tests, or notes with fenced examples."""
    return _module(rng, half) if lang == "en" and chance(rng, 0.5) else _notes(rng, half, lang)


def _module(rng: Random, half: Half) -> str:
    """One module over one kind of item: functions first, their tests after."""
    snippets = _distinct(rng, half, "en", between(rng, 2, 4))
    said = snippets[0].record.said
    head = f'"""Reports about {said["items"]} by {said["key"]} and {said["num"]}."""'
    tests = [pytest_code(snippet) for snippet in snippets[:2]]
    return "\n\n\n".join([head, *(snippet.code for snippet in snippets), *tests])


def _distinct(rng: Random, half: Half, lang: Lang, count: int) -> list[Snippet]:
    found: dict[str, Snippet] = {}
    record = code_record(rng, half, lang)
    while len(found) < count:
        snippet = python_snippet(record)
        found.setdefault(snippet.name, snippet)
    return list(found.values())


def _notes(rng: Random, half: Half, lang: Lang) -> str:
    tasks = [python_task(rng, half, lang, pick(rng, PYTHON_TASKS))[1:] for _ in range(2)]
    if lang == "en":
        tasks.append(sql_task(rng, half)[1:])
        tasks.append(snippet_task(rng, half, pick(rng, ("javascript", "shell")))[1:])
    return "\n\n---\n\n".join(f"{request}\n\n{answer}" for request, answer in tasks)
