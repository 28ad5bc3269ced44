"""The shapes of OpenAI's answers: chat completions and completions, whole and streamed.

Pure: deltas of `runtime.server.generation` in, JSON-able dicts out. Knows no sockets.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.request import TokenLogprobs
from runtime.server.generation import Delta, Entry, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every answer and chunk of one HTTP request carries."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


class Writer(Protocol):
    """How one endpoint speaks. `prelude` are chunks sent before any token, one per choice."""

    def prelude(self) -> list[dict[str, Any]]: ...
    def chunk(self, delta: Delta) -> dict[str, Any] | None: ...
    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...
    def body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]: ...


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def token_text(data: bytes) -> str:
    """A token as a JSON string; one that is not text by itself as OpenAI's `bytes:\\x..`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWriter:
    """POST /v1/chat/completions."""

    envelope: Envelope
    num_choices: int
    logprobs: bool
    usage_in_stream: bool
    token_bytes: TokenBytes

    def prelude(self) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return [self._chunk(index, first, None, None) for index in range(self.num_choices)]

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.text and not delta.entries and delta.finish_reason is None:
            return None
        content = {"content": delta.text} if delta.text or delta.entries else {}
        return self._chunk(delta.index, content, self._logprobs(delta.entries), delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        chunk = self.envelope.wrap("chat.completion.chunk", [])
        return {**chunk, "usage": usage_body(usage)}

    def body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": whole.index,
                "message": {"role": "assistant", "content": whole.text, "refusal": None},
                "logprobs": self._logprobs(whole.entries, always=True),
                "finish_reason": whole.finish_reason,
            }
            for whole in join(deltas, self.num_choices)
        ]
        return {**self.envelope.wrap("chat.completion", choices), "usage": usage_body(usage)}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = self.envelope.wrap("chat.completion.chunk", [choice])
        return {**chunk, "usage": None} if self.usage_in_stream else chunk

    def _logprobs(self, entries: Sequence[Entry], *, always: bool = False) -> Any:
        if not self.logprobs or not (entries or always):
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: Entry) -> dict[str, Any]:
        tops = zip(entry.logprobs.top_ids, entry.logprobs.top_values, strict=True)
        return {
            **_token(entry.data, entry.logprobs.value),
            "top_logprobs": [_token(self.token_bytes(i), value) for i, value in tops],
        }


def _token(data: bytes, value: float) -> dict[str, Any]:
    return {"token": token_text(data), "logprob": value, "bytes": list(data)}


@dataclass(slots=True, kw_only=True)
class CompletionWriter:
    """POST /v1/completions. `prompts` are the texts and ids to echo, one per choice, or empty.

    Keeps, per choice, whether its prompt was echoed and where its next token begins.
    """

    envelope: Envelope
    num_choices: int
    logprobs: bool
    usage_in_stream: bool
    token_bytes: TokenBytes
    prompts: Sequence[EchoedPrompt] = ()
    cursors: dict[int, _Cursor] = field(default_factory=dict)
    echoed: set[int] = field(default_factory=set)

    def prelude(self) -> list[dict[str, Any]]:
        if self.logprobs:  # then the prompt travels with its log-probs, once they are known
            return []
        empty = [Delta(index=i) for i in range(self.num_choices)] if self.prompts else []
        return [chunk for delta in empty if (chunk := self.chunk(delta)) is not None]

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        choice = self._choice(delta)
        if not choice["text"] and choice["logprobs"] is None and delta.finish_reason is None:
            return None
        chunk = self.envelope.wrap("text_completion", [choice])
        return {**chunk, "usage": None} if self.usage_in_stream else chunk

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self.envelope.wrap("text_completion", []), "usage": usage_body(usage)}

    def body(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(whole, always=True) for whole in join(deltas, self.num_choices)]
        return {**self.envelope.wrap("text_completion", choices), "usage": usage_body(usage)}

    def _choice(self, delta: Delta, *, always: bool = False) -> dict[str, Any]:
        logprobs = _Columns(self.token_bytes, self.cursors.setdefault(delta.index, _Cursor()))
        text = delta.text
        if self.prompts and delta.index not in self.echoed:
            self.echoed.add(delta.index)
            prompt = self.prompts[delta.index]
            text = prompt.text + text
            logprobs.add_prompt(prompt, delta.prompt_logprobs or [])
        for entry in delta.entries:
            piece = entry.data or self.token_bytes(entry.logprobs.token_id)
            logprobs.add(piece, entry.logprobs, sent=entry.data)
        shows = self.logprobs and (always or logprobs.tokens)
        return {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs.body() if shows else None,
            "finish_reason": delta.finish_reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt as `echo` returns it."""

    text: str
    ids: tuple[int, ...]


class _Cursor:
    """Where the next token begins, in characters of a text that comes byte by byte.

    A token that goes on with an unfinished character begins where that does.
    """

    def __init__(self) -> None:
        self.offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def jump(self, offset: int) -> None:
        self.offset = offset
        self._decoder.reset()

    def advance(self, data: bytes) -> None:
        self.offset += len(self._decoder.decode(data))


class _Columns:
    """The legacy log-probs object: parallel lists, offsets in characters of the answer's text.

    `top_logprobs` always holds the chosen token with its own unrounded value, as scoring clients
    compare the two; of two tokens with the same text the likelier one stays.
    """

    def __init__(self, token_bytes: TokenBytes, cursor: _Cursor) -> None:
        self.tokens: list[str] = []
        self._token_bytes = token_bytes
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._cursor = cursor

    def add(self, data: bytes, logprobs: TokenLogprobs | None, *, sent: bytes) -> None:
        """A token that stands for `data`, of which `sent` is part of the text."""
        self.tokens.append(token_text(data))
        self._offsets.append(max(0, self._cursor.offset))
        self._cursor.advance(sent)
        self._values.append(None if logprobs is None else logprobs.value)
        self._tops.append(None if logprobs is None else self._top(token_text(data), logprobs))

    def add_prompt(self, prompt: EchoedPrompt, logprobs: Sequence[TokenLogprobs | None]) -> None:
        pieces = [self._token_bytes(token_id) for token_id in prompt.ids]
        # Tokens the tokenizer added by itself (BOS) are not in the text: they begin before it.
        whole = b"".join(pieces).decode("utf-8", "replace")
        self._cursor.jump(len(prompt.text) - len(whole))
        for piece, entry in zip(pieces, logprobs, strict=False):
            self.add(piece, entry, sent=piece)
        self._cursor.jump(len(prompt.text))

    def body(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def _top(self, chosen: str, logprobs: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, value in zip(logprobs.top_ids, logprobs.top_values, strict=True):
            top.setdefault(token_text(self._token_bytes(token_id)), value)
        top[chosen] = max(logprobs.value, top.get(chosen, logprobs.value))
        return top


def join(deltas: Sequence[Delta], num_choices: int) -> list[Delta]:
    """One Delta per choice: all its text and entries, and how it ended."""
    parts: list[list[Delta]] = [[] for _ in range(num_choices)]
    for delta in deltas:
        parts[delta.index].append(delta)
    return [
        Delta(
            index=index,
            text="".join(d.text for d in mine),
            entries=[entry for d in mine for entry in d.entries],
            finish_reason=mine[-1].finish_reason if mine else None,
            prompt_logprobs=next((d.prompt_logprobs for d in mine if d.prompt_logprobs), None),
        )
        for index, mine in enumerate(parts)
    ]
