"""What the business adapter is tuned on: chats without end, the same for the same seed and index.

Mostly extraction tasks in the gate's shape, with tool calls, code edits and dialogs between them.
All of it comes from the train half and from wording and names that are marked for tuning; nothing
from the gate half. It does not know how a model is trained.
"""

from random import Random

from calib_data.banks import Lang, chance, pick
from calib_data.code_dialogs import PYTHON_TASKS, python_task, system_prompt
from calib_data.extraction import answer_text, extraction_item, tasks
from calib_data.generate import SOURCES, service_chat
from calib_data.records import seeded
from calib_data.tools import tool_item

Message = dict[str, str]

# Share of each kind of chat; what is left are extraction tasks.
TOOL_SHARE, CODE_SHARE, DIALOG_SHARE = 0.06, 0.03, 0.02
_CHINESE = 0.2


def tuning_chat(seed: int, index: int) -> list[Message]:
    """Chat number `index`: system, user, assistant, perhaps more turns; the last is assistant's."""
    rng = seeded(seed, "tuning", index)
    lang: Lang = "zh" if chance(rng, _CHINESE) else "en"
    kind = rng.random()
    if kind < TOOL_SHARE:
        item = tool_item(rng, "tune", lang)
        return [*item.messages, _answer(item.answer)]
    if kind < TOOL_SHARE + CODE_SHARE:
        return _code(rng)
    if kind < TOOL_SHARE + CODE_SHARE + DIALOG_SHARE:
        return service_chat(rng, lang, "tune")
    return _extraction(rng, lang)


def _extraction(rng: Random, lang: Lang) -> list[Message]:
    source = pick(rng, SOURCES)
    lang = lang if tasks(source, lang) else "en"
    item = extraction_item(rng, "tune", pick(rng, tasks(source, lang)), lang)
    return [*item.messages, _answer(answer_text(item.gold))]


def _code(rng: Random) -> list[Message]:
    record, request, answer = python_task(rng, "tune", "en", pick(rng, PYTHON_TASKS))
    return [
        {"role": "system", "content": system_prompt(record)},
        {"role": "user", "content": request},
        _answer(answer),
    ]


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}
