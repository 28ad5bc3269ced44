"""tool_call: did the answer call the right tools with acceptable arguments, or rightly call none?

The match is BFCL's: a call is right if its name is right and each argument's value is in the gold's
list of acceptable values ("" in the list: the argument may be left out). Order does not matter; a
call made twice is wrong. Apart from the match: the decision to call at all, and whether each call
is valid against the tool's own declaration (known name, required there, none unknown, types).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Outcome, Reply, Value, only, printable
from eval.checks.schema import first_problem, require_schema
from eval.checks.tool_parsing import Call, Calls, find_calls
from eval.metrics.normalise import normalise

# BFCL writes Python's names; JSON Schema wants its own.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "int": "integer",
          "str": "string", "bool": "boolean", "list": "array"}  # fmt: skip
OMITTABLE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One right call: acceptable values by argument."""

    name: str
    arguments: dict[str, list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The declared tools as name to JSON Schema of their arguments, and the right calls."""

    tools: dict[str, dict[str, Any]]
    gold: tuple[Wanted, ...]


def read(row: Mapping[str, Any]) -> Options:
    """`tools`: OpenAI's or BFCL's declarations. `gold`: right calls; [] where none is right."""
    only(row, "tools", "gold")
    tools, gold = row.get("tools"), row.get("gold")
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"expected a non-empty 'tools' (list), found {tools!r}")
    if not isinstance(gold, list):
        raise ValueError(f"expected 'gold' to be a list of calls, [] for none, found {gold!r}")
    pairs = [_declared(tool) for tool in tools]
    declared = dict(pairs)
    if len(declared) < len(pairs):
        raise ValueError("two of the 'tools' have the same name")
    return Options(tools=declared, gold=tuple(_wanted(call, declared) for call in gold))


def _declared(tool: Any) -> tuple[str, dict[str, Any]]:
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError(f"a tool needs a 'name', found {tool!r}")
    schema = _mapped(inner.get("parameters") or {"type": "object", "properties": {}})
    if not isinstance(schema, dict):
        raise ValueError(f"expected 'parameters' of the tool {inner['name']!r} to be an object")
    require_schema(schema)
    # An argument that the tool does not declare is an error, whether its author said so or not.
    return inner["name"], {"additionalProperties": False, **schema}


def _mapped(schema: Any) -> Any:
    """The schema with BFCL's type names as JSON Schema's."""
    if isinstance(schema, list):
        return [_mapped(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    mapped = {key: _mapped(part) for key, part in schema.items()}
    if isinstance(mapped.get("type"), str):
        mapped["type"] = _TYPES.get(mapped["type"], mapped["type"])
    return mapped


def _wanted(call: Any, tools: Mapping[str, dict[str, Any]]) -> Wanted:
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or name not in tools:
        raise ValueError(f"gold calls {name!r}, which is not among the tools {sorted(tools)}")
    if not isinstance(arguments, dict) or not all(
        isinstance(values, list) and values for values in arguments.values()
    ):
        raise ValueError("each argument of a gold call needs a non-empty list of acceptable values")
    properties = tools[name].get("properties", {})
    if unknown := sorted(set(arguments) - set(properties)):
        raise ValueError(
            f"gold gives {name} the argument {unknown[0]!r}, which it does not declare"
        )
    return Wanted(name=name, arguments=arguments)


def score(reply: Reply, options: Options) -> Outcome:
    """tool_call, tool_decision, tool_called or tool_withheld, tool_schema where a call is right."""
    found = find_calls(reply)
    decided = found.meant == bool(options.gold)
    problem = found.problem or _decision(found, options) or _mismatch(found.calls, options.gold)
    values: dict[str, Value] = {
        "tool_call": float(not problem),
        "tool_decision": float(decided),
    }
    if options.gold:
        broken = found.problem or _invalid(found.calls, options.tools)
        values |= {"tool_called": float(decided), "tool_schema": float(not broken)}
        problem = broken or problem
    else:
        values["tool_withheld"] = float(decided)
    calls = [{"name": call.name, "arguments": call.arguments} for call in found.calls]
    return Outcome(values=values, problem=printable(problem), details={"calls": calls})


def _decision(found: Calls, options: Options) -> str:
    if options.gold and not found.calls:
        return "no call where one is needed"
    if found.calls and not options.gold:
        return "a call where none is needed"
    return ""


def _invalid(calls: Sequence[Call], tools: Mapping[str, dict[str, Any]]) -> str:
    """The first call that its tool's declaration does not allow, or ""; no call is not valid."""
    for call in calls:
        if call.name not in tools:
            return f"unknown tool {call.name!r}"
        if broken := first_problem(tools[call.name], call.arguments):
            return f"{call.name}: {broken}"
    return "" if calls else "no call where one is needed"


def _mismatch(calls: Sequence[Call], gold: Sequence[Wanted]) -> str:
    """Why the calls are not the gold ones in any order, or ""."""
    seen = [json.dumps([c.name, c.arguments], sort_keys=True, default=str) for c in calls]
    if len(set(seen)) < len(seen):
        return "the same call twice"
    if len(calls) != len(gold):
        return f"{len(calls)} calls instead of {len(gold)}"
    return "" if _assign(list(calls), list(gold)) else "wrong name or arguments"


def _assign(calls: list[Call], gold: list[Wanted]) -> bool:
    """Whether each gold call can be given a call of its own (backtracking: lists are short)."""
    if not gold:
        return True
    first, rest = gold[0], gold[1:]
    return any(
        _matches(call, first) and _assign(calls[:i] + calls[i + 1 :], rest)
        for i, call in enumerate(calls)
    )


def _matches(call: Call, wanted: Wanted) -> bool:
    if call.name != wanted.name or set(call.arguments) - set(wanted.arguments):
        return False
    return all(
        _accepts(values, call.arguments[name]) if name in call.arguments else OMITTABLE in values
        for name, values in wanted.arguments.items()
    )


def _accepts(acceptable: Sequence[Any], value: Any) -> bool:
    return any(_equal(value, wanted) for wanted in acceptable)


def _equal(value: Any, wanted: Any) -> bool:
    """Equal in normal form and of the same JSON type; containers element by element."""
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    if isinstance(wanted, Mapping) and isinstance(value, Mapping):
        return set(value) == set(wanted) and all(_equal(value[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple) and isinstance(value, list | tuple):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    if isinstance(wanted, str) != isinstance(value, str):
        return False
    if isinstance(wanted, int | float | str) and isinstance(value, int | float | str):
        return normalise(value) == normalise(wanted)
    return value is None and wanted is None
