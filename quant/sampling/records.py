"""One log record -> one calibration row {"text"}, {"messages"} or {"prompt", "completion"}.

Understands our own rows, OpenAI chat and completion requests with or without their answer, batch
requests ({"body": ...}) and ShareGPT conversations. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quant.calibration_rows import parse_row
from quant.errors import CalibrationError

EXPECTED = (
    'expected {"text"}, {"messages"}, {"prompt", "completion"}, an OpenAI request log '
    '({"messages", "response"}), a batch request ({"body": {"messages"}}) or {"conversations"}; '
    "name another field with --text-field"
)
_ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
_KEPT = ("id", "doc", "lang")


def calibration_row(
    data: Mapping[str, Any],
    where: str,
    source: str,
    *,
    text_field: str | None = None,
    source_field: str | None = None,
) -> dict[str, Any] | None:
    """The row as it will be written, None when it is blank; CalibrationError names `where`.

    source: its tag unless the record, or its `source_field` (dotted), has one.
    """
    row: dict[str, Any] = {k: data[k] for k in _KEPT if isinstance(data.get(k), str | int)}
    if "id" not in row and isinstance(data.get("custom_id"), str):
        row["id"] = data["custom_id"]
    tag = _dig(data, source_field) if source_field else data.get("source")
    row["source"] = str(tag) if isinstance(tag, str | int) and str(tag) else source
    row |= _field(data, text_field, where) if text_field else _content(data, where)
    return None if parse_row(row, where, source) is None else row


def strings(row: Mapping[str, Any]) -> list[str]:
    """What was written in a row, in order, tool calls included; a system prompt only when there is
    nothing else, since it repeats and says little about whether two requests are alike."""
    if "messages" not in row:
        return [str(row[key]) for key in ("text", "prompt", "completion") if key in row]
    spoken = [m for m in row["messages"] if m.get("role") != "system"] or row["messages"]
    return [text for message in spoken for text in _said(message)]


def system_text(row: Mapping[str, Any]) -> str:
    """The system prompt(s) of a chat row, else an empty string."""
    messages = row.get("messages") or ()
    return "\n".join(t for m in messages if m.get("role") == "system" for t in _said(m))


def _said(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    said = [content] if isinstance(content, str) else []
    calls = message.get("tool_calls") or []
    return said + [str(call.get("function", call)) for call in calls if isinstance(call, dict)]


def _field(data: Mapping[str, Any], field: str, where: str) -> dict[str, Any]:
    value = _dig(data, field)
    if isinstance(value, list):
        return {"messages": _messages(value)}
    if not isinstance(value, str):
        raise CalibrationError(f"{where}: no text in the field {field}; found {_keys(data)}")
    return {"text": value}


def _dig(data: Mapping[str, Any], path: str) -> Any:
    value: Any = data
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _content(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    request = _request(data)
    _refuse_functions(data, request, where)
    if isinstance(request.get("messages"), list):
        messages = _messages(request["messages"])
        answer = _answer(data)
        if answer is not None and messages and messages[-1].get("role") != "assistant":
            messages.append(answer)
        return {"messages": messages} | _tools(request)
    if isinstance(data.get("conversations"), list):
        return {"messages": _messages(data["conversations"])}
    if "prompt" in request:
        return _pair(data, request)
    if isinstance(data.get("text"), str):
        return {"text": data["text"]}
    for key in ("text", "messages", "conversations"):
        if data.get(key) is not None:
            kind = "a string" if key == "text" else "a list"
            raise CalibrationError(
                f"{where}: {key} is a {type(data[key]).__name__}, expected {kind}"
            )
    raise CalibrationError(f"{where}: found the fields {_keys(data)}, {EXPECTED}")


def _refuse_functions(data: Mapping[str, Any], request: Mapping[str, Any], where: str) -> None:
    """OpenAI's older form of tools, which no chat template knows: the calls would be left out."""
    said = request.get("messages")
    choices = filter(None, map(_first_choice, _answers(data)))
    messages = [*(said if isinstance(said, list) else ()), *(c.get("message") for c in choices)]
    is_older = any(
        isinstance(m, Mapping) and (m.get("function_call") or m.get("role") == "function")
        for m in messages
    )
    if is_older or request.get("functions"):
        raise CalibrationError(
            f"{where}: functions and function_call are the older form of tools and tool_calls, and "
            "chat templates leave them out; write the row in the newer form"
        )


def _request(data: Mapping[str, Any]) -> Mapping[str, Any]:
    for holder in (data, data.get("body"), data.get("request"), _dig(data, "request.body")):
        if isinstance(holder, Mapping) and ("messages" in holder or "prompt" in holder):
            return holder
    return data


def _pair(data: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = request["prompt"], request.get("completion")
    if completion is None:
        answer = _answer(data)
        completion = answer.get("content") if answer else None
    if completion is None:
        return {"text": prompt}
    return {"prompt": prompt, "completion": completion} | _tools(request)


def _tools(request: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever stands there: `parse_row` refuses what is no list."""
    return {"tools": request["tools"]} if request.get("tools") else {}


def _answer(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The assistant's message of a logged response; None when it failed or was not logged."""
    for holder in _answers(data):
        if isinstance(holder, str) and holder:
            return {"role": "assistant", "content": holder}
        if (choice := _first_choice(holder)) is not None:
            return _choice(choice)
    return None


def _answers(data: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where a logged answer may stand, the likeliest place first."""
    return (*(_dig(data, path) for path in ("response.body", "response", "output")), data)


def _first_choice(holder: Any) -> Mapping[str, Any] | None:
    choices = holder.get("choices") if isinstance(holder, Mapping) else None
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        return choices[0]
    return None


def _choice(choice: Mapping[str, Any]) -> dict[str, Any] | None:
    if isinstance(choice.get("text"), str):
        return {"role": "assistant", "content": choice["text"]}
    message = choice.get("message")
    if not isinstance(message, Mapping) or not (
        message.get("content") or message.get("tool_calls")
    ):
        return None
    return _message(message) | {"role": "assistant"}


def _messages(value: list[Any]) -> list[Any]:
    return [_message(m) if isinstance(m, Mapping) else m for m in value]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if isinstance(content, list):  # parts: only text calibrates a language model
        parts = (p.get("text") for p in content if isinstance(p, Mapping))
        content = "\n".join(part for part in parts if isinstance(part, str))
    kept = {k: message[k] for k in ("tool_calls", "tool_call_id", "name") if message.get(k)}
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": role, "content": content} | kept


def _keys(data: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, data))) or "none"
