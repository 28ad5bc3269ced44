"""Workload: the suite's texts and prompts as token ids, and the proof that both models read alike.

The artifact's own tokenizer and chat template make the ids, because they will serve. The base's
tokenizer must make the same of every text used here; else the two models answer other questions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.amounts import Amounts
from eval.errors import EvaluationError, SuiteError, TargetError
from eval.suites import Suite, TaskItem
from eval.targets.base import Prompt
from eval.windows import Window, pick_windows
from runtime.text import ChatTemplateError, TextProcessor

# An answer may be twice as long as the gold one and a little more; a model that rambles past that
# has not answered in the wanted form.
GOLD_FACTOR, GOLD_EXTRA = 2, 16
# Of items that name no right answer and no limit of their own.
DEFAULT_MAX_TOKENS = 192
# Stands for the answer of a turn that names no right one.
_ANY_ANSWER = "Yes."

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What both models are asked. `texts[i]` is the rendered prompt of `items[i]`.

    Later turns of a dialog are among `items`; what stands before them is each model's own answer.
    Their prompts are those of their own messages alone, their texts hold a right answer in its
    place.
    """

    windows: tuple[Window, ...]
    items: tuple[TaskItem, ...]
    texts: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    document_texts: tuple[str, ...]

    @property
    def num_scored(self) -> int:
        """Tokens scored in all windows."""
        return sum(window.num_scored for window in self.windows)


def prepare(suite: Suite, text: TextProcessor, amounts: Amounts) -> Workload:
    """Pick, render and tokenize. EvaluationError when the suite yields no token to score."""
    windows = pick_windows(
        suite.documents,
        text,
        count=amounts.num_windows,
        width=amounts.window_tokens,
        seed=amounts.seed,
    )
    if not windows:
        raise EvaluationError(f"zero tokens to score: no usable document in {suite.directory}")
    items = suite.pick(amounts.num_items, amounts.seed)
    asked = zip(items, _conversations(items), strict=True)
    used = {window.document for window in windows}
    return Workload(
        windows=tuple(windows),
        items=tuple(items),
        texts=tuple(render(text, item, said) for item, said in asked),
        prompts=tuple(make_prompt(text, item, item.messages) for item in items),
        document_texts=tuple(d.text for d in suite.documents if d.id in used),
    )


def _conversations(items: Sequence[TaskItem]) -> tuple[Messages, ...]:
    """What each item's prompt is made of, with right answers where a model's own will stand: a
    template may treat earlier answers in its own way, and that must show before anyone is asked."""
    found: dict[str, Messages] = {}
    answers = {item.id: item.gold_text or _ANY_ANSWER for item in items}
    for item in items:
        before: Messages = ()
        if item.follows is not None:
            said = {"role": "assistant", "content": answers[item.follows]}
            before = (*found[item.follows], said)
        found[item.id] = (*before, *item.messages)
    return tuple(found[item.id] for item in items)


def render(text: TextProcessor, item: TaskItem, messages: Messages) -> str:
    """The prompt as text. SuiteError: the model's chat template refuses this conversation."""
    if text.chat_template is None:
        return "\n\n".join(message["content"] for message in messages) + "\n\n"
    try:
        return text.render_chat(messages, tools=item.tools)
    except ChatTemplateError as error:
        raise SuiteError(f"item {item.id}: {error}") from error


def make_prompt(text: TextProcessor, item: TaskItem, messages: Messages) -> Prompt:
    """The item's prompt with `messages` as its conversation: template and BOS exactly once."""
    rendered = render(text, item, messages)
    encode = text.encode if text.chat_template is None else text.encode_rendered
    choices = (tuple(text.encode(c, add_special_tokens=False)) for c in item.choices)
    return Prompt(
        token_ids=tuple(encode(rendered)),
        max_tokens=max_tokens(text, item),
        choices=tuple(choices),
        messages=tuple(messages),
        tools=tuple(item.tools or ()),
    )


def max_tokens(text: TextProcessor, item: TaskItem) -> int:
    """How long an answer to this item may be."""
    if item.max_tokens is not None:
        return item.max_tokens
    if item.gold_text is None:
        return DEFAULT_MAX_TOKENS
    gold = text.encode(item.gold_text, add_special_tokens=False)
    return GOLD_FACTOR * len(gold) + GOLD_EXTRA


def check_same_reading(workload: Workload, text: TextProcessor, base_tokenizer: Any) -> None:
    """TargetError unless the base's tokenizer and chat template read every text alike.

    base_tokenizer: the base's own transformers tokenizer.
    """
    _check_templates(text, base_tokenizer)
    if text.chat_template is not None:
        said_of = _conversations(workload.items)
        for item, said, prompt in zip(workload.items, said_of, workload.texts, strict=True):
            rendered = base_tokenizer.apply_chat_template(
                list(said), tools=item.tools, tokenize=False, add_generation_prompt=True
            )
            if rendered != prompt:
                raise TargetError(
                    f"the base renders the chat of item {item.id} differently from the artifact; "
                    "evaluate against the model the artifact was made from"
                )
    choices = (choice for item in workload.items for choice in item.choices)
    for sample in dict.fromkeys((*workload.document_texts, *workload.texts, *choices)):
        ours = text.encode(sample, add_special_tokens=False)
        theirs = base_tokenizer(sample, add_special_tokens=False)["input_ids"]
        if ours != theirs:
            raise TargetError(_mismatch(sample, ours, theirs))


def check_ids(windows: Sequence[Window], prompts: Sequence[Prompt], num_tokens: int) -> None:
    """EvaluationError when the tokenizer knows tokens that the model has no row for."""
    texts = [window.token_ids for window in windows]
    for prompt in prompts:
        texts += [prompt.token_ids, *prompt.choices]
    largest = max((max(ids, default=0) for ids in texts), default=0)
    if largest >= num_tokens:
        raise EvaluationError(
            f"the tokenizer gives the id {largest}, but the model has {num_tokens} tokens "
            f"(ids 0 to {num_tokens - 1}): tokens were added to the one and not to the other"
        )


def _check_templates(text: TextProcessor, base_tokenizer: Any) -> None:
    if (text.chat_template is None) != (base_tokenizer.chat_template is None):
        having = "artifact" if text.chat_template is not None else "base"
        raise TargetError(f"only the {having} has a chat template; their answers cannot be paired")


def _mismatch(sample: str, ours: Sequence[int], theirs: Sequence[int]) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    return (
        "the base and the artifact have different tokenizers: for the text beginning "
        f"{sample[:40]!r} token {at} is {list(ours[at : at + 1])} in the artifact and "
        f"{list(theirs[at : at + 1])} in the base; pass the model the artifact was made from"
    )


def reading_digest(workload: Workload, text: TextProcessor) -> str:
    """sha256 of all that `check_same_reading` compares the base's reading of: every text used, what
    the artifact's tokenizer makes of it, and the conversations, of which its template may leave out
    what the base's shows."""
    choices = (choice for item in workload.items for choice in item.choices)
    samples = (*workload.document_texts, *workload.texts, *choices)
    rows = [[sample, text.encode(sample, add_special_tokens=False)] for sample in samples]
    said_of = zip(_conversations(workload.items), workload.items, strict=True)
    chats = [[list(said), item.tools] for said, item in said_of]
    return hashlib.sha256(json.dumps([rows, chats]).encode()).hexdigest()


def template_sha256(template: str | dict[str, str] | None) -> str | None:
    """sha256 of a chat template's text (of the default one), None without one."""
    if isinstance(template, dict):
        template = template.get("default")
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()
