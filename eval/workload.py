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
from eval.errors import EvaluationError, TargetError
from eval.suites import ExtractionItem, Suite, pick
from eval.targets.base import Prompt
from eval.windows import Window, pick_windows
from runtime.text import TextProcessor

# An answer may be twice as long as the gold one and a little more; a model that rambles past that
# has not answered in the wanted form.
GOLD_FACTOR, GOLD_EXTRA = 2, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What both models are asked. `texts[i]` is the rendered prompt of `items[i]`."""

    windows: tuple[Window, ...]
    items: tuple[ExtractionItem, ...]
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
    items = pick(suite.items, amounts.num_items, amounts.seed)
    texts = [_render(text, item) for item in items]
    used = {window.document for window in windows}
    return Workload(
        windows=tuple(windows),
        items=tuple(items),
        texts=tuple(texts),
        prompts=tuple(_prompt(text, item) for item in items),
        document_texts=tuple(d.text for d in suite.documents if d.id in used),
    )


def _render(text: TextProcessor, item: ExtractionItem) -> str:
    if text.chat_template is None:
        return "\n\n".join(message["content"] for message in item.messages) + "\n\n"
    return text.render_chat(item.messages)


def _prompt(text: TextProcessor, item: ExtractionItem) -> Prompt:
    if text.chat_template is None:
        token_ids = text.encode(_render(text, item))
    else:
        token_ids = text.encode_chat(item.messages)
    gold = text.encode(json.dumps(item.gold, ensure_ascii=False), add_special_tokens=False)
    return Prompt(token_ids=tuple(token_ids), max_tokens=GOLD_FACTOR * len(gold) + GOLD_EXTRA)


def check_same_reading(workload: Workload, text: TextProcessor, base_tokenizer: Any) -> None:
    """TargetError unless the base's tokenizer and chat template read every text alike.

    base_tokenizer: the base's own transformers tokenizer.
    """
    _check_templates(text, base_tokenizer)
    if text.chat_template is not None:
        for item, prompt in zip(workload.items, workload.texts, strict=True):
            rendered = base_tokenizer.apply_chat_template(
                item.messages, tokenize=False, add_generation_prompt=True
            )
            if rendered != prompt:
                raise TargetError(
                    f"the base renders the chat of item {item.id} differently from the artifact; "
                    "evaluate against the model the artifact was made from"
                )
    for sample in (*workload.document_texts, *workload.texts):
        ours = text.encode(sample, add_special_tokens=False)
        theirs = base_tokenizer(sample, add_special_tokens=False)["input_ids"]
        if ours != theirs:
            raise TargetError(_mismatch(sample, ours, theirs))


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
    """sha256 of every text used and of what the artifact's tokenizer makes of it."""
    samples = (*workload.document_texts, *workload.texts)
    rows = [[sample, text.encode(sample, add_special_tokens=False)] for sample in samples]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def template_sha256(template: str | dict[str, str] | None) -> str | None:
    """sha256 of a chat template's text (of the default one), None without one."""
    if isinstance(template, dict):
        template = template.get("default")
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()
