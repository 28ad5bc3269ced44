"""Answers on disk as they come, so that a run that was killed goes on where it stopped.

One JSON line an answer, in a file named by everything that decides what a candidate says: its
bytes, how it computes, the engine's own code. The file is gone once its run has ended, so that a
second evaluation asks again; what a base said is kept for good by `eval.cache`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eval.targets.base import Advance, Answer, Keep, Prompt
from runtime import config

Generate = Callable[[Sequence[Prompt], Advance, Keep], list[Answer]]


class AnswerLog:
    """The answers of one candidate, by prompt. `None` as directory keeps nothing.

    num_resumed: answers that an interrupted run had left and this one used.
    """

    def __init__(self, directory: Path | None, key: Sequence[Any]) -> None:
        self._path = directory and directory / "eval" / "unfinished" / f"{_sha256(key)}.jsonl"
        self._known = {} if self._path is None else _read(self._path)
        self.num_resumed = 0

    def kept(self, what: str, ask: Generate) -> Callable[[Sequence[Prompt], Advance], list[Answer]]:
        """`ask`, but for prompts whose answers are known; what it says is written down at once.

        what: sets apart answers of one candidate to the same prompts under other conditions.
        """

        def ask_missing(prompts: Sequence[Prompt], advance: Advance) -> list[Answer]:
            names = [_sha256([what, asdict(prompt)]) for prompt in prompts]
            missing = [i for i, name in enumerate(names) if name not in self._known]
            self.num_resumed += len(prompts) - len(missing)
            advance(len(prompts) - len(missing))
            if missing:
                self._ask(ask, [prompts[i] for i in missing], [names[i] for i in missing], advance)
            return [self._known[name] for name in names]

        return ask_missing

    def _ask(
        self, ask: Generate, prompts: Sequence[Prompt], names: Sequence[str], advance: Advance
    ) -> None:
        def keep(place: int, answer: Answer) -> None:
            # A failure is worth another try; an answer is not.
            if answer.finish != "error":
                self._append(names[place], answer)

        for name, answer in zip(names, ask(prompts, advance, keep), strict=True):
            self._known[name] = answer

    def _append(self, name: str, answer: Answer) -> None:
        """Best effort: a log that cannot be written costs time, not the evaluation."""
        if self._path is None:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, asdict(answer)]) + "\n")

    def finish(self) -> None:
        """The run has ended: the next one asks anew."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def engine_build() -> str:
    """sha256 over the runtime's own source and torch's version: what a kernel change changes."""
    total = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(config.__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _read(path: Path) -> dict[str, Answer]:
    """The answers of a log. A last line that a kill cut in two is no answer."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    known: dict[str, Answer] = {}
    for line in lines:
        try:
            name, said = json.loads(line)
            known[name] = _answer(said)
        except (ValueError, TypeError):
            continue
    return known


def _answer(said: Any) -> Answer:
    lists = ("token_ids", "tool_calls", "choice_logprobs")
    fields: dict[str, Any] = {
        k: tuple(v) if k in lists and v is not None else v for k, v in said.items()
    }
    return Answer(**fields)
