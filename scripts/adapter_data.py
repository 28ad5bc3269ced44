"""Tuning chats as padded batches of token ids, made by worker processes while the model trains.

Chunk i holds chats i * n to (i + 1) * n of the seed, sorted by length and cut into batches, so the
order of batches depends on the seed alone. It does not know the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from calib_data.tuning import Message, tuning_chat

CHATS_A_CHUNK = 1024
LONGEST = 768
_PADDING = 2  # any id will do: nothing attends to it
_STEP = 32  # lengths are padded to a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """ids [B, T] padded on the right; rows [K] flat positions whose next token is targets [K].

    Arrays, which travel between processes through a pipe and need no shared memory.
    """

    ids: np.ndarray
    rows: np.ndarray
    targets: np.ndarray

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, rows, targets = (
            torch.from_numpy(a.astype(np.int64)) for a in (self.ids, self.rows, self.targets)
        )
        return ids.to(device), rows.to(device), targets.to(device)


def pieces(messages: list[Message]) -> list[tuple[str, bool]]:
    """The chat in ChatML as (text, whether the model writes it); the end mark is its to write.

    What is written follows "assistant\\n" in a piece of its own, as it does when a model answers.
    """
    found: list[tuple[str, bool]] = []
    waiting = ""
    for message in messages:
        waiting += f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant":
            found += [(waiting, False), (f"{message['content']}<|im_end|>", True)]
            waiting = "\n"
        else:
            waiting += f"{message['content']}<|im_end|>\n"
    return found


def encode(tokenizer: Any, chats: list[list[Message]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids of each chat and which of them the model writes."""
    split = [pieces(chat) for chat in chats]
    flat = [text for chat in split for text, _ in chat]
    made = iter(tokenizer.backend_tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    encoded = []
    for chat in split:
        parts = [(next(made).ids, written) for _, written in chat]
        ids = np.array([i for part, _ in parts for i in part], dtype=np.int32)
        marks = np.array([w for part, w in parts for _ in part], dtype=bool)
        encoded.append((ids, marks))
    return encoded


class Chunks(Dataset[list[Batch]]):
    """chunk index -> its batches. tokens: size of a batch, padding included."""

    def __init__(self, tokenizer: Any, *, seed: int, tokens: int, chats: int = CHATS_A_CHUNK):
        self.tokenizer, self.seed, self.tokens, self.chats = tokenizer, seed, tokens, chats

    def __getitem__(self, index: int) -> list[Batch]:
        first = index * self.chats
        chats = [tuning_chat(self.seed, i) for i in range(first, first + self.chats)]
        encoded = [e for e in encode(self.tokenizer, chats) if len(e[0]) <= LONGEST]
        encoded.sort(key=lambda e: len(e[0]))
        batches = [pad(group) for group in groups(encoded, self.tokens)]
        Random(f"{self.seed}/order/{index}").shuffle(batches)
        return batches


def groups(
    encoded: list[tuple[np.ndarray, np.ndarray]], tokens: int
) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Neighbours in length, as many as fit `tokens` when padded."""
    group: list[tuple[np.ndarray, np.ndarray]] = []
    for one in encoded:
        if group and (len(group) + 1) * _padded(len(one[0])) > tokens:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _padded(length: int) -> int:
    return -(-length // _STEP) * _STEP


def pad(group: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    width = _padded(max(len(ids) for ids, _ in group))
    table = np.full((len(group), width), _PADDING, dtype=np.int32)
    rows, targets = [], []
    for index, (ids, marks) in enumerate(group):
        table[index, : len(ids)] = ids
        at = np.flatnonzero(marks[1:])
        rows.append(index * width + at)
        targets.append(ids[1:][at])
    return Batch(
        ids=table,
        rows=np.concatenate(rows).astype(np.int32),
        targets=np.concatenate(targets),
    )


def batches(chunks: Chunks, workers: int) -> Iterator[Batch]:
    """All batches without end, in the order of the chunks."""
    loader: Any = DataLoader(
        chunks, batch_size=None, sampler=_Endless(), num_workers=workers,
        prefetch_factor=2 if workers else None, collate_fn=_as_it_is,
    )  # fmt: skip
    for chunk in loader:
        yield from chunk


def _as_it_is(chunk: list[Batch]) -> list[Batch]:
    return chunk


class _Endless:
    def __iter__(self) -> Iterator[int]:
        index = 0
        while True:
            yield index
            index += 1
