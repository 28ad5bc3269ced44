"""Fitting: which precision the base is computed in, so that it and the candidate fit one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eval.errors import EvaluationError
from runtime.engine.memory import available_host_bytes

# Of a card's memory, for the weights of both and the candidate's KV. The rest is for the base's
# answers, whose cache may take an eighth of it (`eval.targets.batching`).
CARD_SHARE = 0.70
# The least that the candidate's KV pool and its worst step are given on a card.
_CARD_LEAST = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the base is computed in, and why it is not float32 ("" where it is)."""

    dtype: torch.dtype
    why: str


def fit(num_weights: int, stored_bytes: int, device: str) -> Fit:
    """float32 where that fits, else bfloat16; EvaluationError where neither does.

    num_weights: of the base, and so of the candidate, which takes `stored_bytes` on a card and is
    computed in float32 on a CPU.
    """
    is_card = torch.device(device).type == "cuda"
    beside = stored_bytes + _CARD_LEAST if is_card else 4 * num_weights
    free = _card_bytes(device) if is_card else available_host_bytes()
    return choose(num_weights, beside, free, device)


def choose(num_weights: int, beside: int, free: int, device: str) -> Fit:
    """`fit` with `beside` bytes for the candidate and `free` bytes for both."""
    wide, narrow = 4 * num_weights, 2 * num_weights
    if wide + beside <= free:
        return Fit(dtype=torch.float32, why="")
    if narrow + beside <= free:
        why = f"float32 would take {_size(wide)} of the {_size(free - beside)} that are free for it"
        return Fit(dtype=torch.bfloat16, why=why)
    advice = "with more memory" if device == "cpu" else "with more memory, or pass --device cpu"
    raise EvaluationError(
        f"the base takes {_size(narrow)} in bfloat16 and the candidate {_size(beside)}, but "
        f"{_size(free)} are free for both on {device}; judge on a machine {advice}"
    )


def _card_bytes(device: str) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int((1 - CARD_SHARE) * total))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
