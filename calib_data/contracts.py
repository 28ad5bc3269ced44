"""Contracts: the record of one contract, its full text, and questions about it.

Eight kinds in English, four in Chinese (banks/contracts_*.txt). It does not know the JSONL
shapes; generate.py and extraction.py do.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from calib_data.banks import Half, Lang, between, chance, lines, pick, shuffled, values
from calib_data.records import Record, new_record

Size = Literal["short", "medium", "long"]

# Boilerplate topics that make sense for a kind, in the order in which they stand.
_ALL = (
    "termination", "confidentiality", "ip", "data", "warranty", "liability", "indemnity",
    "insurance", "compliance", "force_majeure", "assignment", "notices", "law", "general",
)  # fmt: skip
_LACKS = {
    "nda": {"ip", "warranty", "liability", "indemnity", "insurance"},
    "lease": {"ip", "indemnity", "warranty"},
    "employment": {"warranty", "liability", "indemnity", "insurance", "compliance",
                   "force_majeure", "assignment"},
    "loan": {"termination", "ip", "warranty", "liability", "indemnity", "insurance"},
}  # fmt: skip
# Kinds with a Payment clause, about which money questions may be asked.
_PAID = {"services", "supply", "licence", "consulting"}
_SCHEDULED = _PAID - {"licence"}
_COMMERCIAL = ('"Price"', '"Good Industry', '"Change Request"', '"Authorised User"')
_ALWAYS = {"termination", "law"}
_TOPIC_SHARE = {"short": 0.15, "medium": 0.6, "long": 1.0}
_SLOTS = 3
_SUMS = {"employment": (38_000, 120_000), "consulting": (9_000, 90_000)}


@dataclass(frozen=True, slots=True)
class Clause:
    heading: str
    paragraphs: tuple[str, ...]


def kinds(lang: Lang) -> list[str]:
    return [row[0] for row in _types(lang)]


def contract_record(rng: Random, half: Half, lang: Lang, kind: str | None = None) -> Record:
    """A filled contract: everything the text states, and `gold` with the exact values."""
    record = new_record(rng, half, lang)
    rows = _types(lang)
    name, titles, party, counterparty = next(
        (row for row in rows if row[0] == kind), pick(rng, rows)
    )
    record.said |= {"kind": name, "title": pick(rng, titles.split(" ; "))}
    record.said |= {"P": party, "C": counterparty}
    record.said |= {"A": record.company(), "addr_a": record.address()}
    record.said["B"] = record.person() if name == "employment" else record.company()
    record.said |= {"addr_b": record.address(), "premises": record.address()}
    record.said |= {"mail_a": record.mail("contracts"), "mail_b": record.mail("legal")}
    record.said |= {"person_a": record.person(), "person_b": record.person()}
    for pool in ("pay_days", "notice_days", "term", "law", "goods", "product", "job", "subject"):
        record.said[pool] = _thing(record, pool, name)
    _fill_money(record, name)
    _fill_gold(record, name)
    return record


def _types(lang: Lang) -> list[list[str]]:
    return [row.split(" | ") for row in lines(f"contracts_{lang}", "types", "train")]


def _thing(record: Record, pool: str, kind: str) -> str:
    if pool == "product":
        return record.draw("software")
    if pool == "job" and record.lang == "zh":
        return ""
    return record.draw("premises" if pool == "subject" and kind == "lease" else pool)


def _fill_money(record: Record, kind: str) -> None:
    amount = record.amount(*_SUMS.get(kind, (12_000, 900_000)))
    record.said["money"] = record.money(amount, record.said["currency"])
    record.gold["amount"] = amount


def _fill_gold(record: Record, kind: str) -> None:
    said = record.said
    renews = chance(record.rng, 0.5)
    said["renewal"] = record.render(
        pick(record.rng, _lines(record, "renewal.yes" if renews else "renewal.no"))
    )
    record.gold |= {
        "contract_type": kind,
        "party_a": said["A"],
        "party_b": said["B"],
        "effective_date": record.gold["date"],
        "governing_law": said["law"],
        "currency": said["currency"],
        "due_days": int(said["pay_days"]),
        "term_months": int(said["term"]),
        "notice_days": int(said["notice_days"]),
        "auto_renew": renews,
    }


def contract_text(record: Record, size: Size) -> str:
    """The whole agreement: title, opening, recitals, clauses, schedule, signatures."""
    if record.lang == "zh":
        return _chinese_text(record, size)
    parts = [record.said["title"].upper(), _opening(record)]
    if size != "short":
        parts.append(_recitals(record))
    parts.append(_numbered(record, _clauses(record, size)))
    if size == "long" and record.said["kind"] in _SCHEDULED:
        parts.append(_schedule(record))
    parts.append(_signatures(record))
    return "\n\n".join(parts)


def _lines(record: Record, section: str) -> tuple[str, ...]:
    return lines(f"contracts_{record.lang}", section, record.half)


def _say(record: Record, section: str) -> str:
    return record.render(pick(record.rng, _lines(record, section)))


def _opening(record: Record) -> str:
    return _say(record, "opening")


def _recitals(record: Record) -> str:
    said = [record.render(line) for line in _lines(record, f"recital.{record.said['kind']}")]
    if chance(record.rng, 0.5):
        return "RECITALS\n\n" + "\n".join(f"({'AB'[i]}) {text}" for i, text in enumerate(said))
    return "\n\n".join(f"WHEREAS {_lowered(text)}" for text in said)


def _lowered(text: str) -> str:
    return text[0].lower() + text[1:]


def _clauses(record: Record, size: Size) -> list[Clause]:
    clauses = _definitions(record, size) + _core(record, size)
    if record.said["kind"] not in {"nda", "loan"}:
        clauses.append(_clause_line(record, _money_section(record)))
    if record.said["kind"] != "loan":
        clauses.append(_clause_line(record, "term"))
    return clauses + _boilerplate(record, size)


def _money_section(record: Record) -> str:
    special = f"fees.{record.said['kind']}"
    return special if _lines(record, special) else "fees"


def _clause_line(record: Record, section: str) -> Clause:
    return _parse_clause(record, pick(record.rng, _lines(record, section)))


def _parse_clause(record: Record, line: str) -> Clause:
    heading, body = line.split(" | ", 1)
    return Clause(heading, tuple(record.render(part) for part in body.split(" || ")))


def _definitions(record: Record, size: Size) -> list[Clause]:
    if size == "short" or record.lang == "zh":
        return []
    count = between(record.rng, 3, 5) if size == "medium" else between(record.rng, 6, 9)
    usable = [line for line in _lines(record, "definition") if _fits(record, line)]
    chosen = shuffled(record.rng, usable)[:count]
    texts = tuple(record.render(line) for line in sorted(chosen))
    return [Clause("Definitions", texts)]


def _fits(record: Record, definition: str) -> bool:
    """Commercial terms are defined only where goods or services are paid for."""
    return record.said["kind"] in _PAID or not definition.startswith(_COMMERCIAL)


def _core(record: Record, size: Size) -> list[Clause]:
    found = _lines(record, f"core.{record.said['kind']}")
    kept = found[:2] if size == "short" else found
    return [_parse_clause(record, line) for line in kept]


def _boilerplate(record: Record, size: Size) -> list[Clause]:
    headings = dict(row.split(" | ") for row in _lines(record, "headings"))
    lacking = _LACKS.get(record.said["kind"], set())
    clauses = []
    for topic in _ALL:
        wanted = topic in _ALWAYS or chance(record.rng, _TOPIC_SHARE[size])
        if topic in lacking or topic not in headings or not wanted:
            continue
        sections = ["law", "disputes"] if topic == "law" else _slots(topic, size)
        said = tuple(_say(record, name) for name in sections if _lines(record, name))
        clauses.append(Clause(headings[topic], said))
    return clauses


def _slots(topic: str, size: Size) -> list[str]:
    count = 2 if size == "short" else _SLOTS
    return [f"{topic}.{i}" for i in range(1, count + 1)]


def _numbered(record: Record, clauses: list[Clause]) -> str:
    style = pick(record.rng, ("decimal", "article", "section"))
    return "\n\n".join(_one_clause(style, i, clause) for i, clause in enumerate(clauses, 1))


def _one_clause(style: str, number: int, clause: Clause) -> str:
    if style == "article":
        head, mark = f"ARTICLE {number}. {clause.heading.upper()}", f"Section {number}."
    elif style == "section":
        head, mark = f"Section {number}  {clause.heading}", ""
    else:
        head, mark = f"{number}. {clause.heading}", f"{number}."
    body = [
        f"{mark}{i} {text}" if mark else f"({chr(96 + i)}) {text}"
        for i, text in enumerate(clause.paragraphs, 1)
    ]
    return "\n".join([head, *body])


def _schedule(record: Record) -> str:
    """A priced list, milestones and contacts, as most real agreements end with."""
    parts = [_price_list(record), _milestones(record), _contacts(record)]
    kept = parts[: between(record.rng, 1, 3)]
    return "\n\n".join(f"SCHEDULE {i}: {part}" for i, part in enumerate(kept, 1))


def _items(record: Record) -> list[str]:
    pool = "en.goods" if record.said["kind"] in {"supply", "loan"} else "en.subject"
    found = shuffled(record.rng, values(pool, record.half))
    return found[: between(record.rng, 3, len(found))]


def _price_list(record: Record) -> str:
    rows = ["SCOPE AND PRICES", "", "Item | Quantity | Unit price | Due"]
    for item in _items(record):
        price = record.money(record.amount(40, 9_000), record.said["currency"])
        quantity = record.parity(between(record.rng, 1, 400))
        due = record.date(2026, 2028).text(record.date_style)
        rows.append(f"{item} | {quantity} | {price} | {due}")
    return "\n".join(rows)


def _milestones(record: Record) -> str:
    rows = ["MILESTONES", ""]
    items = _items(record)
    dates = [record.date(2026, 2028) for _ in range(between(record.rng, 3, 21))]
    for i, date in enumerate(sorted(dates, key=lambda date: date.iso), 1):
        item = items[i % len(items)]
        record.said["when"] = date.text(record.date_style)
        record.said |= {"item": item, "part": _part(record), "city": record.draw("city")}
        text = _say(record, "milestone")
        rows.append(f"{i}. {text[0].upper()}{text[1:]}")
    return "\n".join(rows)


def _part(record: Record) -> str:
    """A stage payment, small against the price."""
    total = int(str(record.gold["amount"]))
    return record.money(record.amount(total // 80, total // 24), record.said["currency"])


def _contacts(record: Record) -> str:
    rows = ["CONTACTS", ""]
    roles = ("Contract manager", "Accounts payable", "Technical lead", "Data protection officer")
    for role in roles[: between(record.rng, 2, len(roles))]:
        mail = record.mail(role.split()[0].lower())
        rows.append(f"{role}: {record.person()}, {mail}, {record.phone()}")
    return "\n".join(rows)


def _signatures(record: Record) -> str:
    said = record.said
    lead = _say(record, "signature.lead")
    second = said["B"] if said["kind"] == "employment" else said["person_b"]
    return (
        f"{lead}\n\n"
        f"For the {said['P']}: {said['A']}\nName: {said['person_a']}\nTitle: "
        f"{_office(record)}\nSignature: ____________________\n\n"
        f"For the {said['C']}: {said['B']}\nName: {second}\nSignature: ____________________"
    )


def _office(record: Record) -> str:
    offices = ("Managing Director", "Authorised Signatory", "Chief Operating Officer")
    return pick(record.rng, offices)


def _chinese_text(record: Record, size: Size) -> str:
    ordinals = "\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341"
    parts = [_opening(record)]
    for i, clause in enumerate(_clauses(record, size)):
        number = ordinals[i] if i < 10 else f"\u5341{ordinals[i - 10]}"
        head = f"\u7b2c{number}\u6761 {clause.heading}"
        body = [f"{i + 1}.{k} {text}" for k, text in enumerate(clause.paragraphs, 1)]
        parts.append("\n".join([head, *body]))
    return "\n\n".join([*parts, _say(record, "signature.lead")])


def question_and_answer(record: Record) -> tuple[str, str]:
    """A question that the text of this record answers, and the answer."""
    usable = _lines(record, "question")
    if record.said["kind"] not in _PAID:
        usable = tuple(line for line in usable if "{money}" not in line and "{pay" not in line)
    if record.said["kind"] == "loan":
        usable = tuple(line for line in usable if "{notice_days}" not in line)
    record.said |= {"renewal_short": _renewal_short(record), "pay_note": ""}
    question, answer = pick(record.rng, usable).split(" | ", 1)
    return record.render(question), record.render(answer)


def _renewal_short(record: Record) -> str:
    if record.lang == "zh" or not record.gold["auto_renew"]:
        return ""
    return ", and it renews automatically unless notice is given"


def system_prompt(record: Record) -> str:
    return _say(record, "system")
