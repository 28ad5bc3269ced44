"""Which prompts the reference answers together.

A batch runs until its last row has ended, so rows whose answers may be equally long belong
together: `max_tokens` follows the right answer's length. Its KV cache holds every row at the width
of the longest, which bounds the batch by memory as well as by rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.targets.base import Prompt

_CPU_ROWS, _CPU_BYTES = 32, 2 << 30
_CARD_ROWS, _CARD_SHARE = 256, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """rows: prompts of one batch. tokens: places of its KV cache, padding counted."""

    rows: int
    tokens: int


def limits_of(config: Any, device: str) -> BatchLimits:
    """What a batch of this model may be. config: a transformers one; the cache is float32.

    A card gives an eighth of all its memory, so that the limit is the same in every run on it.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * 4 * config.num_hidden_layers * heads * width
    if torch.device(device).type != "cuda":
        return BatchLimits(rows=_CPU_ROWS, tokens=_CPU_BYTES // token_bytes)
    memory = torch.cuda.get_device_properties(device).total_memory
    return BatchLimits(rows=_CARD_ROWS, tokens=memory // _CARD_SHARE // token_bytes)


def batches(prompts: Sequence[Prompt], limits: BatchLimits) -> Iterator[list[int]]:
    """Indices of `prompts`, batch by batch, each once; a prompt beyond the limits comes alone."""

    def cost(index: int) -> tuple[int, int]:
        return prompts[index].max_tokens, len(prompts[index].token_ids)

    batch: list[int] = []
    longest = width = 0
    for index in sorted(range(len(prompts)), key=cost):
        longest = max(longest, prompts[index].max_tokens)
        width = max(width, len(prompts[index].token_ids))
        places = (len(batch) + 1) * (width + longest)
        if batch and (len(batch) == limits.rows or places > limits.tokens):
            yield batch
            batch, longest, width = [], prompts[index].max_tokens, len(prompts[index].token_ids)
        batch.append(index)
    if batch:
        yield batch
