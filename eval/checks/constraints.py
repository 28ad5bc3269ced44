"""constraints: verifiable instructions, read strictly and loosely as IFEval does.

Loosely, a text also follows an instruction if it does without its first line, its last line, both,
or its asterisks: openings such as "Sure, here it is:" are forgiven. Strict is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.checks.base import Outcome, Reply, only
from eval.checks.instructions import INSTRUCTIONS, OPTIONAL, RELATION_KEYS, RELATIONS
from eval.checks.language import SCRIPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction: IFEval's id and its arguments."""

    id: str
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All instructions of one prompt."""

    instructions: tuple[Instruction, ...]


def read(row: Mapping[str, Any]) -> Options:
    """`instructions`: a list of {"id", ...its arguments under IFEval's names}."""
    only(row, "instructions")
    listed = row.get("instructions")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"expected a non-empty 'instructions' (list), found {listed!r}")
    return Options(instructions=tuple(_instruction(each) for each in listed))


def _instruction(value: Any) -> Instruction:
    name = value.get("id") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        raise ValueError(f"unknown instruction {name!r}; known: {', '.join(sorted(INSTRUCTIONS))}")
    kwargs = {key: v for key, v in value.items() if key != "id" and v is not None}
    needed, optional = INSTRUCTIONS[name][1], OPTIONAL.get(name, {})
    if unknown := sorted(set(kwargs) - set(needed) - set(optional)):
        known = ", ".join((*needed, *optional)) or "none"
        raise ValueError(f"instruction {name}: unknown argument {unknown[0]!r}; known: {known}")
    for key, kind in (needed | {k: kind for k, kind in optional.items() if k in kwargs}).items():
        if not _is_said(kwargs.get(key), kind):
            raise ValueError(
                f"instruction {name}: expected {key!r} ({_SAID[kind]}), found {kwargs.get(key)!r}"
            )
    for key in RELATION_KEYS:
        if kwargs.get(key, RELATIONS[0]) not in RELATIONS:
            raise ValueError(f"instruction {name}: {key} must be one of {', '.join(RELATIONS)}")
    if name == "language:response_language" and kwargs["language"] not in SCRIPTS:
        raise ValueError(
            f"instruction {name}: {kwargs['language']!r} cannot be told by its script; "
            f"known: {', '.join(sorted(SCRIPTS))}"
        )
    return Instruction(id=name, kwargs=kwargs)


_SAID = {int: "int", str: "a text that is not empty", list: "a list of texts that are not empty"}


def _is_said(value: Any, kind: type) -> bool:
    """An empty text, or a list without one, would be followed by any answer."""
    if kind is list:
        return isinstance(value, list) and bool(value) and all(_is_said(v, str) for v in value)
    if kind is str:
        return isinstance(value, str) and bool(value.strip())
    return isinstance(value, int) and not isinstance(value, bool)


def score(reply: Reply, options: Options) -> Outcome:
    """constraints (all followed, strict), constraints_loose, and both by instruction."""
    strict = [_follows(i, reply.text) for i in options.instructions]
    loose = [_follows_loosely(i, reply.text) for i in options.instructions]
    pairs = zip(options.instructions, strict, strict=True)
    missed = [i.id for i, followed in pairs if not followed]
    total = float(len(strict))
    return Outcome(
        values={
            "constraints": float(all(strict)),
            "constraints_loose": float(all(loose)),
            "instructions": (float(sum(strict)), total),
            "instructions_loose": (float(sum(loose)), total),
        },
        problem=f"not followed: {', '.join(missed)}" if missed else "",
        details={"missed": missed} if missed else {},
    )


def _follows(instruction: Instruction, text: str) -> bool:
    """An empty answer follows nothing."""
    predicate = INSTRUCTIONS[instruction.id][0]
    return bool(text.strip()) and predicate(text, instruction.kwargs)


def _follows_loosely(instruction: Instruction, text: str) -> bool:
    lines = text.split("\n")
    cuts = (lines, lines[1:], lines[:-1], lines[1:-1])
    texts = ["\n".join(cut).strip() for cut in cuts]
    texts += [text.replace("*", "") for text in texts]
    return any(_follows(instruction, variant) for variant in texts)
