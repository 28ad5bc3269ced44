"""Request bodies of the HTTP API: what is accepted, what is refused and in which words.

Types are strict (true is not 1, 1.0 is not 1); null means absent. Fields of OpenAI or vLLM that are
known but not supported get a 400 that says so unless their value asks for nothing; unknown fields
get a 400 with the nearest known name. Knows no tokenizer and no engine.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from runtime.server.errors import BadRequest, echo

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 1024
MAX_METADATA = 16  # OpenAI's limit
MAX_BRACKETS = 250_000  # millions of tiny lists cost seconds; no text for a model has as many
DEFAULT_COMPLETION_TOKENS = 16
_INT64 = 2**63

Finite = Annotated[float, Field(allow_inf_nan=False)]
Ids = Annotated[list[int], FailFast()]  # not one error object for each of a million wrong items

# Known fields that are not supported, with the values that ask for nothing (null always does).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none",), "functions": ([],), "function_call": ("none",),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "audio": (),
    "modalities": (["text"],), "prediction": (), "reasoning_effort": (), "web_search_options": (),
    "store": (False,), "service_tier": ("auto", "default"), "verbosity": (), "best_of": (1,),
    "suffix": ("",), "use_beam_search": (False,), "length_penalty": (1, 1.0), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "guided_decoding_backend": (),
    "structured_outputs": (), "bad_words": ([],), "allowed_token_ids": (), "prompt_logprobs": (),
    "truncate_prompt_tokens": (), "documents": ([],), "chat_template": (), "prompt_embeds": (),
    "continue_final_message": (False,), "mm_processor_kwargs": (), "logits_processors": (),
    "kv_transfer_params": (), "return_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
}  # fmt: skip

_WITHOUT_TOOLS = (
    "; describe the functions in the prompt, ask for a call as JSON and parse the answer"
)
_WITHOUT_SCHEMA = (
    ": the server does not constrain what the model writes; ask for the JSON in the prompt and "
    "check the answer against your schema"
)
# What to do without an unsupported field, where there is something that works.
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), _WITHOUT_TOOLS),
    **dict.fromkeys(("response_format", "structured_outputs", "guided_json"), _WITHOUT_SCHEMA),
}


# Fields of their own, and what the call that renders takes itself: no template ever sees these.
_NOT_FOR_TEMPLATES = frozenset({
    "messages", "tools", "tokenize", "chat_template", "add_generation_prompt", "self",
    "conversation", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    """OpenAI's stream_options."""

    include_usage: bool = False


class Sampling(_Body):
    """Fields shared by completions and chat completions. Extra ones have vLLM's meaning."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0, lt=_INT64)
    temperature: Finite = Field(1.0, ge=0.0, le=100.0)
    top_p: Finite = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, lt=_INT64)
    min_p: Finite = Field(0.0, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    presence_penalty: Finite = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: Finite = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: Finite = Field(1.0, gt=0.0, le=100.0)
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, max_length=MAX_LOGIT_BIAS
    )
    stop: Any = ()
    stop_token_ids: Ids = Field(default_factory=list, max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=_INT64)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = Field("", max_length=MAX_SALT_CHARS)
    priority: int = Field(0, ge=-_INT64, lt=_INT64)
    user: str | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream: true", "stream_options")
        check_stop(self.stop)
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def bias(self) -> tuple[tuple[int, float], ...]:
        """logit_bias with its keys as token ids."""
        for key in self.logit_bias:
            if not re.fullmatch(r"-?[0-9]{1,18}", key):
                raise BadRequest(f"logit_bias: {echo(key)} is not a token id", "logit_bias")
        return tuple((int(key), float(value)) for key, value in self.logit_bias.items())


class CompletionBody(Sampling):
    """POST /v1/completions. `max_tokens` defaults to 16, as OpenAI's does."""

    prompt: Any
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True


class ChatBody(Sampling):
    """POST /v1/chat/completions. `max_completion_tokens` supersedes `max_tokens`."""

    messages: Any
    max_completion_tokens: int | None = Field(None, ge=1, lt=_INT64)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _chat_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
        if taken := _NOT_FOR_TEMPLATES & set(self.chat_template_kwargs):
            raise BadRequest(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}",
                "chat_template_kwargs",
            )
        return self


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or messages to be put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give either prompt or messages", "prompt")
        return self


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids


def check_stop(stop: Any) -> None:
    """`stop` is a string or up to 16 of them, none empty, each up to 256 characters."""
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise BadRequest(f"stop must be a string or a list of strings, not {echo(stop)}", "stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop: {len(strings)} strings; at most {MAX_STOP_STRINGS}", "stop")
    for text in strings:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise BadRequest(
                f"stop: each string has 1 to {MAX_STOP_CHARS} characters, one has {len(text)}",
                "stop",
            )


Body = TypeVar("Body", bound=_Body)


def parse_body(raw: bytes, model: type[Body]) -> Body:
    """Check a request body against its model. BadRequest says what is wrong with which field."""
    fields = _json_object(raw)
    known = set(model.model_fields)
    present = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in present if name not in known]:
        _refuse_unless_neutral(name, present.pop(name), known)
    try:
        return model.model_validate(present)
    except ValidationError as error:
        raise _first_problem(error) from error


def _json_object(raw: bytes) -> Mapping[str, Any]:
    if raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS:
        raise BadRequest(f"the body has more than {MAX_BRACKETS} opening brackets")
    try:
        # Decoded here, because json itself lets UTF-16 and surrogates in UTF-8 through.
        body = json.loads(
            raw.decode("utf-8-sig"), parse_constant=_no_constant, object_pairs_hook=_no_duplicates
        )
        if re.search(rb"\\u[dD][89a-fA-F]", raw):  # refuse lone surrogates: they are not text
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {echo(str(error))}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One of two values would be ignored in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} comes twice")
    return found


def _refuse_unless_neutral(name: str, value: Any, known: set[str]) -> None:
    if name in UNSUPPORTED:
        if not any(type(value) is type(ok) and value == ok for ok in UNSUPPORTED[name]):
            raise BadRequest(
                f"{name} is not supported yet{_INSTEAD.get(name, '')}", name, "unsupported"
            )
        return
    near = difflib.get_close_matches(name[:100], sorted(known | set(UNSUPPORTED)), n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise BadRequest(f"unknown field {echo(name)}{hint}", name[:100], "unknown_field")


def _first_problem(error: ValidationError) -> BadRequest:
    problem = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in problem["loc"])[:200]
    if problem["type"] == "missing":
        return BadRequest(f"{path} is required", path)
    if problem["type"] == "extra_forbidden":
        return BadRequest(f"unknown field {path}", path, "unknown_field")
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return BadRequest(f"{path}: {message}, found {echo(problem['input'])}", path)


Prompt = str | list[int]


def parse_prompts(prompt: Any) -> list[Prompt]:
    """A string, a list of strings, a list of ids or a list of such lists -> a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists "
            f"of token ids, not {echo(prompt)}",
            "prompt",
        )
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(type(item) is int for item in prompt):
        return [prompt]
    if all(isinstance(item, list) and all(type(i) is int for i in item) for item in prompt):
        return list(prompt)
    raise BadRequest("prompt mixes strings, ids, lists or other types; use one kind", "prompt")


# Empty they say nothing, and templates are not to see them: some take an empty list for calls.
_NEUTRAL_KEYS = {
    "refusal", "audio", "function_call", "annotations", "reasoning_content", "tool_calls",
}  # fmt: skip
_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}


def parse_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as the chat template wants them: text content, tool arguments as objects."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages must be a non-empty list, not {echo(messages)}", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object, not {echo(message)}", where)
    fields = {key: value for key, value in message.items() if value is not None}
    for key in [key for key in fields if key in _NEUTRAL_KEYS and not fields[key]]:
        del fields[key]
    for key in fields:
        if key not in _MESSAGE_KEYS:
            raise BadRequest(f"{where}: field {echo(key)} is not supported", where, "unsupported")
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role must be a string, not {echo(role)}", f"{where}.role")
    parsed = {**fields, "role": "system" if role == "developer" else role}
    parsed["content"] = _content(fields, role, f"{where}.content")
    if "tool_calls" in fields:
        parsed["tool_calls"] = _tool_calls(fields["tool_calls"], f"{where}.tool_calls")
    return parsed


def _content(fields: Mapping[str, Any], role: str, where: str) -> str | None:
    content = fields.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant" and fields.get("tool_calls"):
            return None
        raise BadRequest(f"{where} is required", where)
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where} must be text or a non-empty list of parts", where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise BadRequest(f"{where}: parts of type {echo(kind)} are not supported; only text", where)
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text must be a string", where)
    return str(part["text"])


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRequest(f"{where} must be a list of objects", where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.function needs a name", where)
    try:
        text = function.get("arguments", "{}")
        arguments = json.loads(text, parse_constant=_no_constant) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.function.arguments must be a JSON object as a string", where)
    return {**call, "function": {**function, "arguments": arguments}}
