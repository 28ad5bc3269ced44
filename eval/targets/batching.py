"""Which prompts the reference answers together.

A batch runs until its last row has ended, and reads every prompt at the width of the longest: rows
of like answers belong together (`max_tokens` follows the right answer's length), and rows of like
prompts. Its KV cache bounds it by memory as well as by rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.targets.base import Prompt

_CPU_ROWS, _CPU_BYTES = 16, 2 << 30
_CARD_ROWS, _CARD_SHARE = 256, 8
# Batches whose prompts are of about one length; within them the answers' length decides. Of 2 to 6
# it is 6 that costs least on the shipped suite.
_ALIKE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """rows: prompts of one batch. tokens: places of its KV cache, padding counted."""

    rows: int
    tokens: int


def limits_of(config: Any, device: str, dtype: torch.dtype = torch.float32) -> BatchLimits:
    """What a batch of this model may be. config: a transformers one. dtype: of the cache.

    A card gives an eighth of all its memory, so that the limit is the same in every run on it.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * dtype.itemsize * config.num_hidden_layers * heads * width
    if torch.device(device).type != "cuda":
        return BatchLimits(rows=_CPU_ROWS, tokens=_CPU_BYTES // token_bytes)
    memory = torch.cuda.get_device_properties(device).total_memory
    return BatchLimits(rows=_CARD_ROWS, tokens=memory // _CARD_SHARE // token_bytes)


def batches(prompts: Sequence[Prompt], limits: BatchLimits) -> Iterator[list[int]]:
    """Indices of `prompts`, batch by batch, each once; a prompt beyond the limits comes alone."""
    batch: list[int] = []
    longest = width = 0
    for index in _in_order(prompts, limits.rows * _ALIKE):
        longest = max(longest, prompts[index].max_tokens)
        width = max(width, len(prompts[index].token_ids))
        places = (len(batch) + 1) * (width + longest)
        if batch and (len(batch) == limits.rows or places > limits.tokens):
            yield batch
            batch, longest, width = [], prompts[index].max_tokens, len(prompts[index].token_ids)
        batch.append(index)
    if batch:
        yield batch


def _in_order(prompts: Sequence[Prompt], num_alike: int) -> list[int]:
    """All indices: by the prompt's length in parts of `num_alike`, each by the answer's."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    parts = (by_length[at : at + num_alike] for at in range(0, len(prompts), num_alike))
    return [i for part in parts for i in sorted(part, key=lambda i: prompts[i].max_tokens)]
