"""Writes the calibration text (train half) and the held-out text and tasks (gate half).

    python calib_data/generate.py [--n N] [--gate-n N] [--seed S] [--out DIR] [--split both]

Standard library only. The same arguments give the same bytes on every platform and Python.
What is calibrated on is the train half; what judges is the gate half: they share no document,
no party, no number and no sentence other than common boilerplate. This module knows the JSONL
shapes and the files; contracts.py, service.py, code_tasks.py and extraction.py make the text.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Literal

if __package__ in {None, ""}:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from calib_data import code_dialogs, contracts, service
from calib_data.banks import Half, Lang, between, pick
from calib_data.extraction import Item, answer_text, extraction_item, tasks
from calib_data.records import document_id, seeded
from calib_data.tasks import task_rows

Split = Literal["train", "gate", "both"]
Row = dict[str, object]
Message = dict[str, str]

SEED = 20260101
TRAIN_ROWS = 144
GATE_ITEMS = 240
SOURCES = ("contracts", "service", "code")
# Rows of a train file take these shapes in turn.
_SHAPES: dict[str, tuple[str, ...]] = {
    "contracts": ("long", "prompt", "medium", "chat", "long", "extract", "medium", "short"),
    "service": ("chat", "prompt", "chat", "extract", "text", "chat", "chat", "extract"),
    "code": ("chat", "prompt", "chat", "text", "chat", "extract", "chat", "prompt"),
}
_EXTRACTED = {"prompt", "extract"}
# Held-out texts per source; sizes make about 60,000 to 100,000 characters each.
_GATE_TEXTS = {"contracts": 16, "service": 34, "code": 36}
_ZH_EVERY = {"contracts": 5, "service": 5, "code": 7}


def language(source: str, index: int) -> Lang:
    """About one in five is Chinese (one in seven for code). The stride is coprime to 8."""
    every = _ZH_EVERY[source]
    return "zh" if index % every == every - 1 else "en"


def _language(source: str, index: int, shape: str) -> Lang:
    """Extraction from code exists in English only."""
    lang = language(source, index)
    return lang if shape not in _EXTRACTED or tasks(source, lang) else "en"


def train_rows(source: str, n: int, seed: int = SEED) -> Iterator[Row]:
    """Rows of one train file, no two alike. Row i does not depend on n."""
    seen: set[str] = set()
    for index in range(n):
        shapes = _SHAPES[source]
        shape = shapes[index % len(shapes)]
        lang = _language(source, index, shape)
        parts = (seed, "train", source, index)
        body = _new_body(parts, source, lang, shape, seen)
        yield _identity("train", source, lang, seed, index) | body


def _new_body(
    parts: tuple[object, ...], source: str, lang: Lang, shape: str, seen: set[str]
) -> Row:
    """The first draw that has not been seen; short code tasks do repeat."""
    draws = (_train_body(seeded(*parts, i), source, lang, shape) for i in count())
    return next(body for body in draws if _is_new(body, seen))


def _is_new(row: object, seen: set[str]) -> bool:
    key = json.dumps(row, ensure_ascii=False)
    is_new = key not in seen
    seen.add(key)
    return is_new


def _identity(half: Half, source: str, lang: Lang, seed: int, index: int) -> Row:
    return {
        "id": f"{half}-{source}-{index:05d}",
        "doc": document_id(half, source, seed, index),
        "source": source,
        "lang": lang,
    }


def _train_body(rng: Random, source: str, lang: Lang, shape: str) -> Row:
    if shape in _EXTRACTED:
        item = extraction_item(rng, "train", pick(rng, tasks(source, lang)), lang)
        return prompt_row(item) if shape == "prompt" else chat_row(item)
    if shape == "chat":
        return {"messages": _CHATS[source](rng, lang)}
    return {"text": _text(rng, "train", source, lang, shape)}


def prompt_row(item: Item) -> Row:
    """An extraction item as plain prompt and completion, without chat roles."""
    ask, shown, answer, text = (message["content"] for message in item.messages)
    prompt = f"{ask}\n\n{shown}\n{answer}\n\n{text}\n"
    return {"prompt": prompt, "completion": answer_text(item.gold)}


def chat_row(item: Item) -> Row:
    """An extraction item as a chat that ends with the gold answer."""
    return {"messages": [*item.messages, _message("assistant", answer_text(item.gold))]}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _contract_chat(rng: Random, lang: Lang) -> list[Message]:
    record = contracts.contract_record(rng, "train", lang)
    text = contracts.contract_text(record, pick(rng, ("short", "medium")))
    question, answer = contracts.question_and_answer(record)
    return [
        _message("system", contracts.system_prompt(record)),
        _message("user", f"{text}\n\n{question}"),
        _message("assistant", answer),
    ]


def service_chat(rng: Random, lang: Lang, half: Half = "train") -> list[Message]:
    """A whole dialog between customer and agent, with the agent's instructions."""
    record = service.service_record(rng, half, lang)
    turns = [_message(role, text) for role, text in service.dialog(record)]
    return [_message("system", service.system_prompt(record)), *turns]


def _code_chat(rng: Random, lang: Lang) -> list[Message]:
    task = pick(rng, (*code_dialogs.PYTHON_TASKS, "fix", "sql", "javascript", "shell"))
    if task in code_dialogs.PYTHON_TASKS or lang == "zh":
        task = task if task in code_dialogs.PYTHON_TASKS else "write"
        record, request, answer = code_dialogs.python_task(rng, "train", lang, task)
    elif task == "sql":
        record, request, answer = code_dialogs.sql_task(rng, "train")
    else:
        record, request, answer = code_dialogs.snippet_task(rng, "train", task)
    return [
        _message("system", code_dialogs.system_prompt(record)),
        _message("user", request),
        _message("assistant", answer),
    ]


_CHATS = {"contracts": _contract_chat, "service": service_chat, "code": _code_chat}


def _text(rng: Random, half: Half, source: str, lang: Lang, size: str) -> str:
    if source == "contracts":
        record = contracts.contract_record(rng, half, lang)
        return contracts.contract_text(record, _SIZES[size])
    if source == "service":
        return service.export(rng, half, lang, between(rng, 2, 5) if lang == "en" else 2)
    return code_dialogs.document(rng, half, lang)


_SIZES: dict[str, contracts.Size] = {"short": "short", "medium": "medium", "long": "long"}


def gate_texts(seed: int = SEED) -> Iterator[Row]:
    """Held-out documents for perplexity and divergence, the sources in turn."""
    sizes = ("long", "medium")
    for index in range(max(_GATE_TEXTS.values())):
        for source in SOURCES:
            if index >= _GATE_TEXTS[source]:
                continue
            lang = language(source, index)
            rng = seeded(seed, "gate", "text", source, index)
            text = _text(rng, "gate", source, lang, sizes[index % 2])
            yield _identity("gate", source, lang, seed, index) | {"text": text}


def extraction_items(n: int, seed: int = SEED, half: Half = "gate") -> Iterator[Row]:
    """Extraction tasks in the gate's shape, stratified: each prefix holds all sources and tasks.

    half="train" gives as many as wanted from the train half; half="tune" the same tasks with more
    wording and far more names and numbers, to tune a model on. Neither holds anything of the gate.
    """
    for index in range(n):
        source, turn = SOURCES[index % len(SOURCES)], index // len(SOURCES)
        lang: Lang = "zh" if turn % 6 == 5 and tasks(source, "zh") else "en"
        found = tasks(source, lang)
        task = found[(turn // 6 if lang == "zh" else turn) % len(found)]
        item = extraction_item(seeded(seed, half, "extraction", index), half, task, lang)
        number = 100_000 + index
        yield _identity(half, source, lang, seed, number) | {
            "task": item.task,
            "messages": item.messages,
            "schema": item.schema,
            "gold": item.gold,
            "critical": item.critical,
        }


def gate_tasks(gate_n: int) -> int:
    """Rows of gate/tasks.jsonl beside so many extraction tasks: its answers are longer."""
    return max(gate_n // 2, 1)


def build(
    split: Split = "both", n: int = TRAIN_ROWS, gate_n: int = GATE_ITEMS, seed: int = SEED
) -> dict[str, Iterator[Row]]:
    """File name -> its rows."""
    files: dict[str, Iterator[Row]] = {}
    if split in {"train", "both"}:
        files |= {f"{source}.jsonl": train_rows(source, n, seed) for source in SOURCES}
    if split in {"gate", "both"}:
        files["gate/text.jsonl"] = gate_texts(seed)
        files["gate/extraction.jsonl"] = extraction_items(gate_n, seed)
        files["gate/tasks.jsonl"] = task_rows(gate_tasks(gate_n), seed)
    return files


def write(out: Path, files: dict[str, Iterator[Row]]) -> dict[str, int]:
    """Write each file whole, then put it in place; returns the sizes in bytes."""
    sizes = {}
    for name, rows in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(data)
        partial.replace(path)
        sizes[name] = len(data)
    return sizes


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="generate.py", description="Generate calibration text and held-out gate tasks."
    )
    parser.add_argument("--n", type=_count, default=TRAIN_ROWS, help="rows of each train file")
    parser.add_argument(
        "--gate-n", type=_count, default=GATE_ITEMS, help="extraction tasks; half as many others"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, metavar="DIR")
    parser.add_argument("--split", choices=("train", "gate", "both"), default="both")
    said = parser.parse_args(arguments)
    sizes = write(said.out, build(said.split, said.n, said.gate_n, said.seed))
    for name, size in sizes.items():
        print(f"{said.out / name}  {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
