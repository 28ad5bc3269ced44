"""Customer-service dialogs: one request from greeting to closing, in eight intents.

It does not know the JSONL shapes. A turn is (role, text) with role "user" or "assistant".
"""

from random import Random

from calib_data.banks import Half, Lang, chance, lines, pick
from calib_data.records import Record, new_record

INTENTS = (
    "refund", "order_status", "address_change", "complaint",
    "technical_help", "invoice", "cancellation", "booking",
)  # fmt: skip
TOOLS = {
    "refund": "start_refund",
    "order_status": "track_order",
    "address_change": "change_address",
    "complaint": "open_case",
    "technical_help": "start_diagnosis",
    "invoice": "send_invoice",
    "cancellation": "cancel_order",
    "booking": "book_slot",
}
SENTIMENTS = {"angry": "negative", "neutral": "neutral", "happy": "positive"}

Turn = tuple[str, str]


def service_record(rng: Random, half: Half, lang: Lang, intent: str | None = None) -> Record:
    record = new_record(rng, half, lang)
    record.spell_numbers = False
    tone = pick(rng, tuple(SENTIMENTS))
    record.said |= {"intent": intent or pick(rng, INTENTS), "tone": tone}
    record.said |= {"A": record.company(), "B": record.company(), "order": record.order()}
    record.said |= {"product": record.draw("product"), "addr": record.address()}
    record.said |= {"money": record.price(), "mail": record.mail("orders")}
    record.said |= {"ticket": f"T{record.serial(5)}", "err": record.serial(3)}
    record.said["ver"] = f"{1 + int(rng.random() * 4)}.{record.serial(2)}"
    record.set_dates(record.date(2024, 2027))
    record.gold |= {
        "intent": record.said["intent"],
        "tool": TOOLS[record.said["intent"]],
        "order_id": record.said["order"],
        "product": record.said["product"],
        "sentiment": SENTIMENTS[tone],
    }
    return record


def _lines(record: Record, section: str) -> tuple[str, ...]:
    return lines(f"service_{record.lang}", section, record.half)


def _say(record: Record, section: str) -> str:
    return record.render(pick(record.rng, _lines(record, section)))


def join(record: Record, *parts: str) -> str:
    return ("" if record.lang == "zh" else " ").join(part for part in parts if part)


def opening_message(record: Record, *, tone: bool = True, greeting: bool = True) -> str:
    """The customer's first message. Only `tone` and the intent's own line carry gold facts."""
    hello = _say(record, "greet") if greeting else ""
    said = _say(record, f"{record.said['intent']}.open")
    mood = _say(record, f"tone.{record.said['tone']}") if tone else ""
    return join(record, hello, said, mood)


def system_prompt(record: Record) -> str:
    return _say(record, "system")


def dialog(record: Record) -> list[Turn]:
    """Customer and agent in turn, beginning with the customer and ending with the agent."""
    turns = [("user", opening_message(record)), *_middle(record)]
    if chance(record.rng, 0.5):
        turns += _paired(record, "follow", ("q", "a"), ("user", "assistant"))
    turns.append(("user", _say(record, "close.customer")))
    turns.append(("assistant", _say(record, "close.agent")))
    return turns


def _middle(record: Record) -> list[Turn]:
    steps = ("check", "reply", "resolve")
    return _paired(record, record.said["intent"], steps, ("assistant", "user", "assistant"))


def _paired(
    record: Record, topic: str, steps: tuple[str, ...], roles: tuple[str, ...]
) -> list[Turn]:
    """Lines of the same rank in their sections answer each other."""
    sections = [_lines(record, f"{topic}.{step}") for step in steps]
    rank = int(record.rng.random() * min(map(len, sections)))
    said = [record.render(section[rank]) for section in sections]
    return list(zip(roles, said, strict=True))


def transcript(record: Record) -> str:
    """One dialog as plain text, as support systems export it."""
    names = ("\u987e\u5ba2\uff1a", "\u5ba2\u670d\uff1a")
    names = names if record.lang == "zh" else ("Customer: ", "Agent: ")
    head = f"{record.said['A']} | {record.said['ticket']} | {record.said['date']}"
    said = [f"{names[role == 'assistant']}{text}" for role, text in dialog(record)]
    return "\n".join([head, "", *said])


def export(rng: Random, half: Half, lang: Lang, count: int) -> str:
    """Several dialogs with the customers of one company, long enough to fill a window."""
    records = [service_record(rng, half, lang) for _ in range(count)]
    for record in records[1:]:
        record.said["A"] = records[0].said["A"]
    return "\n\n\n".join(map(transcript, records))
