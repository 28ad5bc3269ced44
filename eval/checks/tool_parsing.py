"""Finding tool calls in an answer: what a server parsed, Hermes tags, bare JSON, or Python calls.

Three outcomes: calls, no call at all (prose), or something meant as a call that does not parse.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Reply
from eval.checks.json_text import parse_strict

_TAG = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_PYTHON_CALL = re.compile(r"\[?\s*[A-Za-z_][\w.]*\s*\(", re.DOTALL)
_ARGUMENT_KEYS = ("arguments", "parameters")
_NOTHING = ("[]", "null", "none", "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: the function's name and its arguments by name."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """All calls of an answer, in order. problem: why something meant as a call could not be read.

    meant: whether the answer tried to call anything.
    """

    calls: tuple[Call, ...] = ()
    problem: str = ""

    @property
    def meant(self) -> bool:
        """A call was made or attempted."""
        return bool(self.calls or self.problem)


def find_calls(reply: Reply) -> Calls:
    """The calls of one answer."""
    if reply.tool_calls is not None:
        return _from_values(reply.tool_calls)
    text = reply.text.strip()
    if tags := _TAG.findall(text):
        return _tagged([(body, closing) for body, closing in tags])
    if not text or text.casefold() in _NOTHING:
        return Calls()
    if text[0] in "{[" and not _PYTHON_CALL.match(text):
        return _from_json(text)
    if _PYTHON_CALL.match(text) and text.endswith((")", "]")):
        return _from_python(text)
    return Calls()


def _tagged(tags: Sequence[tuple[str, str]]) -> Calls:
    if any(not closing for _, closing in tags):
        return Calls(problem="a <tool_call> that is never closed")
    found = [_from_json(body.strip()) for body, _ in tags]
    broken = next((each.problem for each in found if each.problem), "")
    return Calls(calls=tuple(call for each in found for call in each.calls), problem=broken)


def _from_json(text: str) -> Calls:
    parsed = parse_strict(text)
    if parsed.problem:
        return Calls(problem=parsed.problem)
    return _from_values(parsed.value if isinstance(parsed.value, list) else [parsed.value])


def _from_values(values: Sequence[Any]) -> Calls:
    """JSON objects of the shapes {"name", "arguments"} and {"function": {"name", "arguments"}}."""
    calls: list[Call] = []
    for value in values:
        inner = value.get("function", value) if isinstance(value, Mapping) else value
        call = _call(inner)
        if call is None:
            return Calls(calls=tuple(calls), problem="a JSON value that is not a tool call")
        calls.append(call)
    return Calls(calls=tuple(calls))


def _call(value: Any) -> Call | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    key = next((key for key in _ARGUMENT_KEYS if key in value), None)
    arguments = value[key] if key else {}
    if isinstance(arguments, str):  # OpenAI's way: the arguments as JSON text
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(name=value["name"], arguments=arguments)


def _from_python(text: str) -> Calls:
    """`f(a=1)`, `[f(a=1), g(b="x")]`: read as syntax, never run."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Calls(problem=f"not a call: {type(error).__name__}")
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    calls: list[Call] = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
            return Calls(problem="a call must name its arguments")
        try:
            arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        except (ValueError, RecursionError):
            return Calls(problem="an argument that is not a literal")
        calls.append(Call(name=ast.unparse(node.func), arguments=arguments))
    return Calls(calls=tuple(calls))
