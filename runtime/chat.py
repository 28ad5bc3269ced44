"""A conversation in the terminal: the turns so far, and slash commands. Knows no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.api import LLM
from runtime.text import ChatTemplateError

HELP = "/help this text   /reset forget the conversation   /exit leave (so does Ctrl-D)"


class Conversation:
    """Turns with one model. `sampling` are SamplingParams' fields."""

    def __init__(self, llm: LLM, system: str | None, sampling: Mapping[str, Any]) -> None:
        self._llm = llm
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []
        self._sampling = dict(sampling)

    def over(self, line: str) -> bool:
        return line.strip() in ("/exit", "/quit")

    def answer(self, line: str) -> Iterator[str]:
        """Pieces of the answer to a line, which may be a slash command."""
        command = line.strip()
        if command == "/reset":
            self._turns.clear()
            yield "(forgotten)"
        elif command.startswith("/"):
            yield HELP if command == "/help" else f"unknown command {command}; {HELP}"
        else:
            yield from self._reply(line)

    def _reply(self, line: str) -> Iterator[str]:
        asked = [*self._turns, {"role": "user", "content": line}]
        try:
            ids = self._llm.text.encode_chat([*self._opening, *asked])
        except ChatTemplateError as error:
            yield f"({error})"
            return
        room = self._llm.engine.resolved.max_model_len - len(ids)
        if room < 1:
            yield "(the conversation no longer fits the context; /reset starts over)"
            return
        pieces = []
        limit = min(room, self._sampling["max_tokens"])
        for piece in self._llm.stream(ids, **{**self._sampling, "max_tokens": limit}):
            pieces.append(piece)
            yield piece
        self._turns = [*asked, {"role": "assistant", "content": "".join(pieces)}]
