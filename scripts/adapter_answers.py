"""Greedy answers of a model to the gate half's tasks in float32, and what they are worth.

Needs no JSON Schema library, so that it runs where only PyTorch does: the schemas of the gate are
closed objects of six keywords. `evaluate` is the judge that counts; this is a first view.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from calib_data.banks import lines
from calib_data.generate import Row

MOST_TOKENS = 128
NO_TOOL = [lines(f"tools_{lang}", "none", "gate")[0] for lang in ("en", "zh")]
_CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)
_TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "null": type(None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model wrote, without its end mark; `ended` is false where the limit cut it."""

    text: str
    ended: bool


def ask(
    model: nn.Module, tokenizer: Any, prompts: list[list[int]], size: int = 256
) -> list[Answer]:
    """The answers, batches of similar length at a time."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, Answer] = {}
    for first in range(0, len(order), size):
        part = order[first : first + size]
        made = _batch(model, tokenizer, [prompts[i] for i in part])
        answers |= zip(part, made, strict=True)
    return [answers[i] for i in range(len(prompts))]


def _batch(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[Answer]:
    device, ends = next(model.parameters()).device, end_ids(model, tokenizer)
    width, filler = max(map(len, prompts)), ends[0]
    ids = torch.tensor([[filler] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=MOST_TOKENS, do_sample=False,
            eos_token_id=ends, pad_token_id=filler, use_cache=True,
        )  # fmt: skip
    return [until_end(tokenizer, row[width:].tolist(), ends) for row in out]


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends an answer: of the model's settings, then of the tokenizer's.

    Versions of transformers read different ones of them from a GGUF file's tokenizer, so no single
    source will do. ValueError when there is none.
    """
    said = model.config.eos_token_id
    found = [*(said if isinstance(said, list) else [said]), tokenizer.eos_token_id]
    ends = [end for end in dict.fromkeys(found) if end is not None]
    if not ends:
        raise ValueError("neither the model nor its tokenizer says which id ends an answer")
    return ends


def until_end(tokenizer: Any, ids: list[int], ends: list[int]) -> Answer:
    """The text before the first end mark."""
    stop = next((i for i, token in enumerate(ids) if token in ends), None)
    return Answer(text=tokenizer.decode(ids[:stop]), ended=stop is not None)


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """As `evaluate` asks: the model's own template, then the place for the answer."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """Whether `value` satisfies a schema of the gate's kind."""
    if "enum" in schema:
        return value in schema["enum"]
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if kinds == ["object"]:
        fields = schema["properties"]
        return (
            isinstance(value, dict)
            and set(value) == set(fields)
            and all(is_valid(fields[key], value[key]) for key in fields)
        )
    if not any(_is_a(kind, value) for kind in kinds):
        return False
    if "pattern" in schema and re.search(schema["pattern"], value) is None:
        return False
    return not isinstance(value, list) or all(is_valid(schema["items"], v) for v in value)


def _is_a(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def grade(row: Row, text: str) -> dict[str, float]:
    """valid (against the schema), right (all fields) and the share of fields that are right."""
    gold: Any = row["gold"]
    if isinstance(gold, str):
        return _grade_call(gold, text.strip())
    try:
        found = json.loads(text.strip())
    except ValueError:
        return {"valid": 0.0, "right": 0.0, "fields": 0.0}
    fields = found if isinstance(found, dict) else {}
    hits = [key in fields and _equal(fields[key], gold[key]) for key in gold]
    schema: Any = row["schema"]
    return {
        "valid": float(is_valid(schema, found)),
        "right": float(found == gold),
        "fields": sum(hits) / len(hits),
    }


def _grade_call(gold: str, text: str) -> dict[str, float]:
    """A tool call, or the words that say that none fits."""
    found, wanted = (_CALL.fullmatch(said) for said in (text, gold))
    right = text == gold
    if found and wanted:
        try:
            right = json.loads(found[1]) == json.loads(wanted[1])
        except ValueError:
            found = None
    valid = float(bool(found) or text in NO_TOOL)
    return {"valid": valid, "right": float(right), "fields": float(right)}


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def table(rows: list[Row], grades: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Means over all items and by task and language, with the number of items."""
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    for row, one in zip(rows, grades, strict=True):
        for name in ("all", f"lang {row['lang']}", f"{row['task']} {row['lang']}"):
            parts[name].append(one)
    return {
        name: {"n": float(len(ones))}
        | {key: sum(one[key] for one in ones) / len(ones) for key in ones[0]}
        for name, ones in sorted(parts.items(), key=lambda part: (part[0] != "all", part[0]))
    }
