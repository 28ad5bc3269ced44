"""Turns what pydantic found wrong with a recipe into lines a person can act on.

Each finding is a path into the YAML and a message: what was found, what was expected, the nearest
known key. Knows the shape of pydantic's errors, not what recipes mean.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from quant.located_yaml import LocatedYaml

KeyPath = tuple[str | int, ...]
Finding = tuple[KeyPath, str]

_EXPECTED = {
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "float_type": "a number",
    "float_parsing": "a number",
    "tuple_type": "a list, as in [a, b]",
    "model_type": "a section of `key: value` pairs",
    "model_attributes_type": "a section of `key: value` pairs",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain_validation(
    error: ValidationError, model: type[BaseModel], data: Mapping[str, Any]
) -> list[Finding]:
    """One finding per fault; paths are cut to what exists in `data`."""
    findings = {_existing(tuple(e["loc"]), data): e for e in error.errors(include_url=False)}
    return [(path, _message(dict(e), path, model)) for path, e in findings.items()]


def render_findings(
    findings: Sequence[Finding], located: LocatedYaml, changed: Mapping[str, Any]
) -> str:
    """The findings as lines `file:line: key: message` (`--flag` for what the caller changed)."""
    return "\n".join(_line(path, message, located, changed) for path, message in findings)


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` for a close word among `known`, else nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def place(path: KeyPath, located: LocatedYaml, changed: Mapping[str, Any]) -> str:
    """Where a value comes from: `file:line`, or `--flag` for what the caller changed."""
    key = _plain(path)
    if key in changed:
        return f"--{key.rpartition('.')[2].replace('_', '-')} (over {located.name})"
    return located.where(path)


def _line(path: KeyPath, message: str, located: LocatedYaml, changed: Mapping[str, Any]) -> str:
    dotted = "" if _plain(path) in changed else _dotted(path)
    return f"{place(path, located, changed)}: {dotted}{message}"


def _plain(path: KeyPath) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def _dotted(path: KeyPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"{text[1:]}: " if text else ""


def _existing(loc: KeyPath, data: Any) -> KeyPath:
    """`loc` without the union tags pydantic adds; a missing or unknown key stays on it."""
    path: list[str | int] = []
    for part in loc:
        inside = isinstance(data, dict) and part in data
        inside = inside or (isinstance(data, list) and isinstance(part, int) and part < len(data))
        if not inside:
            return (*path, part) if isinstance(data, dict) else tuple(path)
        path.append(part)
        data = data[part]
    return tuple(path)


def _message(e: dict[str, Any], path: KeyPath, model: type[BaseModel]) -> str:
    kind, context = e["type"], e.get("ctx", {})
    if kind == "extra_forbidden":
        known = _known_keys(path[:-1], model)
        return f"unknown key{nearest(str(path[-1]), known)} (known here: {', '.join(known)})"
    if kind == "missing":
        return "missing; this key is required"
    found = f"found {_show(e['input'])}, expected "
    if kind == "literal_error":
        options = _options(context["expected"])
        is_quoted = e["input"] in options
        hint = "; without quotes" if is_quoted else nearest(str(e["input"]), options)
        return found + " or ".join(options) + hint
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return found + f"{words} {context[key]:g}"
    return found + _EXPECTED.get(kind, str(e["msg"]))


def _options(expected: str) -> list[str]:
    return [option.strip("'") for option in re.split(r", | or ", expected)]


def _show(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_keys(path: KeyPath, model: type[BaseModel]) -> list[str]:
    """The keys of the section at `path`, found by walking the models' annotations."""
    for part in path:
        if isinstance(part, str):
            model = _section(model.model_fields[part].annotation)
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (arg for arg in get_args(annotation) if arg is not type(None) and arg is not Ellipsis)
    return _section(next(inner))
