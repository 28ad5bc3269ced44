"""Measures of how far two models agree, shared by the tests on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.engine.batch import Piece
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem

DEVICE = "cuda"
Window = tuple[int, ...]
Reference = Callable[[Window], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """KL(reference || engine) in nats and top-1 agreement over `num_tokens` predictions."""

    kl_mean: float
    top1: float
    num_tokens: int

    def __str__(self) -> str:
        return f"KL {self.kl_mean:.2e}, top-1 {self.top1:.2%} over {self.num_tokens} tokens"


def agreement(engine: Engine, reference: Reference, windows: Sequence[Window]) -> Agreement:
    """Window by window, so that one window's full log-probabilities exist at a time."""
    kl: list[float] = []
    agrees: list[bool] = []
    for window in windows:
        score = engine.score([ScoreItem(token_ids=window, reference=reference(window))])[0]
        assert score.kl is not None
        assert score.top1_agree is not None
        kl += score.kl
        agrees += score.top1_agree
    return Agreement(kl_mean=sum(kl) / len(kl), top1=sum(agrees) / len(agrees), num_tokens=len(kl))


@torch.inference_mode()
def engine_logprobs(engine: Engine, window: Sequence[int]) -> Tensor:
    """[n - 1, V] float32 log-probabilities of the next token; row i is for position i + 1.

    Takes the first blocks of the pool: the engine must be idle and keep no prefixes.
    """
    num_tokens, runner = len(window) - 1, engine.runner
    blocks = range(-(-num_tokens // runner.block_size))
    piece = Piece(tokens=window[:-1], start=0, block_ids=blocks, wanted=range(num_tokens))
    return runner.logits(runner.forward([piece])).float().log_softmax(-1)


def transformers_logprobs(model: Any) -> Reference:
    """The same of a transformers model."""

    @torch.inference_mode()
    def logprobs(window: Window) -> Tensor:
        ids = torch.tensor([window], device=model.device)
        return model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)

    return logprobs


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
