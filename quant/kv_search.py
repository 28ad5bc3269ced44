"""What an FP8 KV cache does to the output of one layer's attention, by scale and KV head.

Attention is asked again, with keys or values rounded, for some of its queries: evenly spread ones
of the longest calibration texts, whose keys reach back the furthest. The exact answer is that of
the keys and values as they are. Knows no rule for scales and no files.

Shape legend: B sequences, T tokens, R queries asked, H heads, K KV heads, D head size,
C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quant.artifact.layout import FP8, FP8_MAX
from quant.capture import Stream, watched_call
from quant.modelling import AttentionCall
from quant.parallel import Ranks

KEY, VALUE = 0, 1
# Tokens of the longest texts that candidates are tried on, and queries of each text.
TRIAL_TOKENS = 8192
TRIAL_QUERIES = 64


def round_to_fp8(states: Tensor, scale: Tensor) -> Tensor:
    """`states` [B, kv heads, T, D] as a cache holds them; scale [1] or [kv heads, 1, 1]."""
    factor = scale.to(states.device, torch.float32)
    codes = (states.float() / factor).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return (codes.float() * factor).to(states.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Queries of some texts: `rows` [R] of each; `exact` [B, R, H, D] is the answer, `counts`
    [B, R, 1, 1] is 1 for real tokens and 0 for padding."""

    call: AttentionCall
    rows: Tensor
    exact: Tensor
    counts: Tensor

    @classmethod
    def of(cls, call: AttentionCall, mask: Tensor) -> Question:
        """`mask` [B, T] is True on real tokens."""
        length = mask.shape[1]
        step = max(1, length // TRIAL_QUERIES)
        rows = torch.arange(length - 1, -1, -step, device=call.query.device)
        return cls(
            call=call, rows=rows, exact=call.answer(rows, call.key, call.value),
            counts=mask.to(call.query.device)[:, rows, None, None].float(),
        )  # fmt: skip

    def error(self, side: int, scale_K: Tensor) -> Tensor:
        """Summed square error of the answer by KV head, [K], with one side rounded."""
        key, value = self.call.key, self.call.value
        scale = scale_K[:, None, None]
        if side == KEY:
            key = round_to_fp8(key, scale)
        else:
            value = round_to_fp8(value, scale)
        off = self.call.answer(self.rows, key, value) - self.exact
        by_head = (off.square() * self.counts).sum((0, 1, 3))
        return by_head.view(len(scale_K), -1).sum(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The questions that all candidates of a layer answer: each rank's own, and all sum the errors.

    square_sum: of the exact answers.
    """

    questions: tuple[Question, ...]
    square_sum: float
    ranks: Ranks

    @classmethod
    def of(
        cls,
        attention: nn.Module,
        reader: nn.Module,
        stream: Stream,
        run: Callable[[Tensor, Tensor], object],
    ) -> Trial:
        """Ask on the longest texts of `stream`; `reader` follows the attention."""
        questions: list[Question] = []
        left = TRIAL_TOKENS // stream.ranks.size
        for batch, hidden in reversed(list(stream)):
            count = max(1, min(len(batch.mask), left // batch.mask.shape[1]))
            mask = batch.mask[-count:]
            call = watched_call(attention, reader, partial(run, hidden[-count:], mask))
            questions.append(Question.of(call, mask))
            left -= mask.numel()
            if left <= 0:
                break
        squares = [float((q.exact.square() * q.counts).sum()) for q in questions]
        total = torch.tensor(sum(squares), dtype=torch.float64)
        stream.ranks.add(total)
        return cls(questions=tuple(questions), square_sum=float(total), ranks=stream.ranks)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that was asked about."""
        return max(question.call.key.shape[2] for question in self.questions)

    def relative(self, square_error: float) -> float:
        """The error beside the exact answers; 0 where all of these are 0, as rounded ones are."""
        return (square_error / self.square_sum) ** 0.5 if self.square_sum else 0.0

    def errors(self, side: int, scales_CK: Tensor) -> Tensor:
        """Summed square error [C, K], on the CPU, of keys or values rounded by each candidate."""
        totals = []
        for scale_K in scales_CK:
            scale = scale_K.to(self.questions[0].exact.device)
            totals.append(torch.stack([q.error(side, scale) for q in self.questions]).sum(0))
        summed = torch.stack(totals).cpu()
        self.ranks.add(summed)
        return summed
