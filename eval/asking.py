"""Asking: every item of a workload put to one model, dialogs turn by turn, and its answers read.

A later turn stands on the model's own earlier answers, so a slip is carried over as it is for a
user. Knows no base and no candidate, only something that answers prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from eval.amounts import SampledPasses
from eval.checks.base import Reply
from eval.suites import TaskItem
from eval.targets.base import Advance, Answer, Draw, Prompt
from eval.workload import Workload, make_prompt
from runtime.text import TextProcessor

Ask = Callable[[Sequence[Prompt], Advance], list[Answer]]
# How an item's answer is drawn; None for the greedy one.
DrawOf = Callable[[TaskItem], Draw | None]


def greedy(item: TaskItem) -> None:
    """A DrawOf: nothing is drawn."""


def drawn(passes: SampledPasses, seed: int) -> DrawOf:
    """The DrawOf of one pass: each item has a random stream of its own."""

    def draw(item: TaskItem) -> Draw:
        own = hashlib.sha256(f"{seed}:{item.id}".encode()).digest()
        return Draw(
            temperature=passes.temperature,
            top_p=passes.top_p,
            seed=int.from_bytes(own[:4], "big") >> 1,
        )

    return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One item as one model got it, and what it said."""

    prompt: Prompt
    answer: Answer


def ask_all(
    workload: Workload,
    text: TextProcessor,
    generate: Ask,
    choose: Ask,
    advance: Advance,
    draw_of: DrawOf = greedy,
) -> list[Asked]:
    """The answers to all items, in their order. Turns that come n-th are asked together."""
    asked: dict[str, Asked] = {}
    for turn in _rounds(workload.items):
        prompts = {
            item.id: replace(_prompt(item, text, asked), draw=draw_of(item)) for item in turn
        }
        chosen = [item.id for item in turn if prompts[item.id].choices]
        written = [item.id for item in turn if not prompts[item.id].choices]
        for ids, ask in ((written, generate), (chosen, choose)):
            if not ids:
                continue
            answers = ask([prompts[name] for name in ids], advance)
            for name, answer in zip(ids, answers, strict=True):
                asked[name] = Asked(prompt=prompts[name], answer=answer)
    return [asked[item.id] for item in workload.items]


def _rounds(items: Sequence[TaskItem]) -> list[list[TaskItem]]:
    """The items by their turn's number in its dialog."""
    depth: dict[str, int] = {}
    rounds: list[list[TaskItem]] = []
    for item in items:
        at = depth[item.id] = 0 if item.follows is None else depth[item.follows] + 1
        if at == len(rounds):
            rounds.append([])
        rounds[at].append(item)
    return rounds


def _prompt(item: TaskItem, text: TextProcessor, asked: Mapping[str, Asked]) -> Prompt:
    if item.follows is None:
        return make_prompt(text, item, item.messages)
    before = asked[item.follows]
    said = {"role": "assistant", "content": read_reply(before.answer, text).text}
    return make_prompt(text, item, [*before.prompt.messages, said, *item.messages])


def read_reply(answer: Answer, text: TextProcessor) -> Reply:
    """An answer as the checks read it."""
    shown = text.decode(answer.token_ids) if answer.text is None else answer.text
    raw = shown if answer.text is not None else text.decode(
        answer.token_ids, skip_special_tokens=False
    )  # fmt: skip
    return Reply(
        text=shown,
        raw=raw,
        finish=answer.finish,
        tokens=answer.token_ids,
        tool_calls=answer.tool_calls,
        choice_logprobs=answer.choice_logprobs,
    )
