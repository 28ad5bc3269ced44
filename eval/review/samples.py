"""samples.jsonl of an evaluation as checked values: one request a line, with both models' answers.

Knows the file's shape and nothing of how it was made. What else a line holds is ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eval.errors import SuiteError

SAMPLES_NAME = "samples.jsonl"
PARTED = "(The two assistants answered this turn differently; each goes on from its own answer.)"
_MAX_ERRORS = 2

Name = Annotated[str, Field(min_length=1)]


class Message(BaseModel):
    """One message of a conversation, in OpenAI's shape; `content` is null beside tool calls."""

    model_config = ConfigDict(strict=True, frozen=True)
    role: Name
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """What a reader sees of it: the content, then the tool calls as JSON."""
        calls = [json.dumps(call, ensure_ascii=False) for call in self.tool_calls or ()]
        return "\n".join([*([self.content] if self.content else []), *calls])


class Side(BaseModel):
    """One model's answer."""

    model_config = ConfigDict(strict=True, frozen=True)
    text: str


class Sample(BaseModel):
    """One request with both answers. `checks` are the kinds it is scored by: its task. follows: the
    id of the turn before it in its dialog, whose conversation comes before `messages`.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    id: Name
    doc: Name
    source: Name
    lang: Name
    checks: list[str] = []
    tools: list[dict[str, Any]] | None = None
    follows: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    base: Side
    candidate: Side

    @property
    def domain(self) -> tuple[str, str, str]:
        """What strata are made of."""
        return (self.task, self.source, self.lang)

    @property
    def task(self) -> str:
        """Requests with the same checks are the same kind of task."""
        return "+".join(sorted(self.checks))

    @property
    def differs(self) -> bool:
        """Whether there is anything to prefer: white space around an answer is nothing."""
        return self.base.text.strip() != self.candidate.text.strip()

    @property
    def input_length(self) -> int:
        """Characters that the models read."""
        return sum(len(message.text) for message in self.messages)


def read_samples(path: Path) -> tuple[tuple[Sample, ...], str]:
    """The samples and the sha256 of the file.

    Raises SuiteError, which names file, line, field and what was expected; a repeated id too.
    """
    data = _bytes(path)
    samples: dict[str, Sample] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        sample = _sample(line, f"{path}:{number}")
        if sample.id in samples:
            raise SuiteError(f"{path}:{number}: the id {sample.id!r} stands in an earlier line too")
        samples[sample.id] = _with_history(sample, samples, f"{path}:{number}")
    if not samples:
        raise SuiteError(f"{path} holds no samples")
    return tuple(samples.values()), hashlib.sha256(data).hexdigest()


def _with_history(sample: Sample, earlier: Mapping[str, Sample], where: str) -> Sample:
    """A later turn of a dialog with what was said before it: nobody can rate half a dialog.

    Where the models' own earlier answers differ, neither is shown: the sides stay sealed.
    """
    if sample.follows is None:
        return sample
    if sample.follows not in earlier:
        raise SuiteError(f"{where}: it follows {sample.follows!r}, but no earlier line has this id")
    before = earlier[sample.follows]
    said = Message(role="assistant", content=PARTED if before.differs else before.base.text)
    return sample.model_copy(update={"messages": [*before.messages, said, *sample.messages]})


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SuiteError(
            f"no {path.name} in {path.parent}: expected the folder that `evaluate` wrote its "
            f"report to (--out), with both models' answers in {SAMPLES_NAME}"
        ) from None
    except OSError as error:
        raise SuiteError(f"cannot read {path}: {error.strerror}") from error


def _sample(line: bytes, where: str) -> Sample:
    try:
        return Sample.model_validate_json(line)
    except ValidationError as error:
        raise SuiteError(f"{where}: {explain(error)}") from error


def explain(error: ValidationError) -> str:
    """The first errors in one line, each with the place it is at."""
    found = [
        f"{'.'.join(map(str, e['loc'])) or 'the line'}: {e['msg']}"
        for e in error.errors(include_url=False, include_input=False)
    ]
    more = f" (and {len(found) - _MAX_ERRORS} more)" if len(found) > _MAX_ERRORS else ""
    return "; ".join(found[:_MAX_ERRORS]) + more
