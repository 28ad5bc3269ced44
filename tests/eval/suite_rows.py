"""Rows of the suite that the taught fixture model can answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ANSWER = {"ok": True, "sum": 12}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "sum": {"type": "integer"}},
    "required": ["ok", "sum"],
    "additionalProperties": False,
}
SENTENCES = [
    "The supplier shall deliver the goods within thirty days of the order.",
    "The customer may cancel the contract when the delivery is late.",
    "Please send the invoice again to the new address, thank you.",
    "def total(items): return sum(item.price for item in items)",
]
SOURCES = ("contracts", "service", "code")


def item_row(number: int) -> dict[str, Any]:
    return {
        "id": f"item-{number}",
        "source": SOURCES[number % 3],
        "lang": "zh" if number % 5 == 0 else "en",
        "messages": [{"role": "user", "content": f"Case {number * 37 % 100}?"}],
        "schema": SCHEMA,
        "gold": ANSWER,
        "critical": ["sum"],
    }


def document_row(number: int) -> dict[str, Any]:
    order = [SENTENCES[(number + shift) % 4] for shift in range(3)]
    return {
        "id": f"text-{number}",
        "source": SOURCES[number % 3],
        "lang": "zh" if number % 5 == 0 else "en",
        "text": f"{number}. " + " ".join(order),
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
