"""Tool calls: a customer's message, the tools on offer, and the one right call, or none.

The call is written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form that
servers parse. A message that asks for nothing, or for something that no offered tool does, is
answered in words. It does not know files; generate.py writes them.
"""

import json
from dataclasses import dataclass
from random import Random

from calib_data.banks import Half, Lang, between, chance, lines, shuffled
from calib_data.service import INTENTS, TOOLS, opening_message, service_record

Json = dict[str, object]

_DOES = {
    "start_refund": "Pays the money for an order back.",
    "track_order": "Tells where an order is and when it arrives.",
    "change_address": "Sends an order to another address.",
    "open_case": "Files a complaint about an order.",
    "start_diagnosis": "Helps with a product that does not work.",
    "send_invoice": "Sends or corrects the invoice of an order.",
    "cancel_order": "Cancels an order.",
    "book_slot": "Books or moves an appointment about an order.",
}
_ORDER: Json = {"type": "string", "description": "order number"}
_PLACE: Json = {"type": "string", "description": "the new address"}
_FEWEST, _MOST = 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolItem:
    """`calls` is empty where the right answer is words; `answer` is what a model should write."""

    messages: list[dict[str, str]]
    tools: list[Json]
    calls: list[Json]
    answer: str


def tool_item(rng: Random, half: Half, lang: Lang) -> ToolItem:
    """A message with tools: three in four need a call, the others none of those on offer."""
    record = service_record(rng, half, lang)
    name = TOOLS[record.said["intent"]]
    said = opening_message(record, tone=chance(rng, 0.3), greeting=chance(rng, 0.4))
    while record.said["order"] not in said:
        said = opening_message(record, tone=False, greeting=False)
    fits = chance(rng, 0.75)
    offered = [tool for tool in map(TOOLS.__getitem__, INTENTS) if tool != name]
    offered = shuffled(rng, offered)[: between(rng, _FEWEST, _MOST) - fits]
    tools = [describe(tool) for tool in shuffled(rng, [*offered, *[name] * fits])]
    arguments: Json = {"order_id": record.said["order"]}
    if name == "change_address":
        arguments["address"] = record.said["addr"]
    calls: list[Json] = [{"name": name, "arguments": arguments}] if fits else []
    answer = call_text(calls[0]) if fits else lines(f"tools_{lang}", "none", half)[0]
    ask = lines(f"tools_{lang}", "ask", half)[0].replace("{tools}", _listed(tools))
    messages = [{"role": "system", "content": ask}, {"role": "user", "content": said}]
    return ToolItem(messages=messages, tools=tools, calls=calls, answer=answer)


def describe(name: str) -> Json:
    """The tool as a JSON object: name, description, parameters (JSON Schema)."""
    fields = {"order_id": _ORDER} | ({"address": _PLACE} if name == "change_address" else {})
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"name": name, "description": _DOES[name], "parameters": parameters}


def call_text(call: Json) -> str:
    """The call as a model should write it."""
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def _listed(tools: list[Json]) -> str:
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
