"""The probe: a few prompts whose next-token log-probabilities every load must reproduce.

It catches what checksums cannot: a kernel, a rope table or a fused weight that is wrong on this
machine. This module compares numbers; it does not know how they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quant.artifact.errors import IntegrityError
from quant.artifact.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

TOP_K = 8
_GRID = 1.0


class ProbePrompt(BaseModel):
    """A prompt and, for the token that follows it, the likeliest ids with their log-probs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    token_ids: tuple[int, ...] = Field(min_length=1)
    top_ids: tuple[int, ...] = Field(min_length=1)
    top_logprobs: tuple[float, ...]

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if len(self.top_ids) != len(self.top_logprobs):
            raise ValueError("top_ids and top_logprobs differ in length")
        return self


class ProbeRecord(BaseModel):
    """What artifact.json keeps. Tolerances are mean absolute log-prob differences (nats)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prompts: tuple[ProbePrompt, ...] = Field(min_length=1)
    tolerance: float = Field(gt=0)  # when computing in float32
    tolerance_reduced: float = Field(gt=0)  # when computing in bfloat16 or float16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The outcome of a comparison; `difference` is NaN when the model's output was."""

    passed: bool
    difference: float  # mean absolute log-prob difference over all prompts and their top ids
    worst: float  # largest single difference
    tolerance: float
    top1_agreement: float  # share of prompts whose likeliest listed id is the expected one

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"probe {verdict}: mean log-prob difference {self.difference:.2g} "
            f"(allowed {self.tolerance:.2g}, worst {self.worst:.2g}, "
            f"top-1 agreement {self.top1_agreement:.0%})"
        )


def tolerances(schemes: Iterable[Scheme], *, has_fp8_kv: bool = False) -> tuple[float, float]:
    """(float32, reduced precision) tolerances for a model made of `schemes`.

    Dense and weight-only models are continuous in their inputs: two float32 implementations agree
    to 1e-5, a bf16 one to its rounding noise. Dynamic 8-bit activations and an fp8 KV cache round
    to a grid: a last-bit difference moves one code by a whole step, which moves others, until two
    sound float32 runs differ by as much as the quantization itself costs. Set from measurements on
    a 135M model (docs/artifact-format.md), where noise is largest, with a factor of 2 to 4; a
    wrong rope table, scale or fused weight costs several nats.
    """
    rounds = has_fp8_kv or any(scheme.activations is not None for scheme in schemes)
    return (_GRID, _GRID) if rounds else (1e-3, 0.25)


def make_probe(
    prompts: Sequence[Sequence[int]],
    logits_PV: Tensor,
    schemes: Iterable[Scheme],
    *,
    has_fp8_kv: bool = False,
    top_k: int = TOP_K,
) -> ProbeRecord:
    """The record for `prompts`, given the artifact's own logits [P, V] after their last tokens."""
    top_k = min(top_k, logits_PV.shape[1])
    values_PK, ids_PK = logits_PV.float().log_softmax(-1).topk(top_k)
    float32, reduced = tolerances(schemes, has_fp8_kv=has_fp8_kv)
    rows = zip(prompts, ids_PK.tolist(), values_PK.tolist(), strict=True)
    return ProbeRecord(
        prompts=tuple(
            ProbePrompt(token_ids=tuple(p), top_ids=tuple(i), top_logprobs=tuple(v))
            for p, i, v in rows
        ),
        tolerance=float32,
        tolerance_reduced=reduced,
    )


def expected_entries(record: ProbeRecord, logits_PV: Tensor) -> list[list[float]]:
    """Log-probs of each prompt's expected ids, from logits [P, V]: the input of `compare`."""
    logprobs = logits_PV.float().log_softmax(-1)
    return [
        [float(value) for value in row[list(prompt.top_ids)]]
        for row, prompt in zip(logprobs, record.prompts, strict=True)
    ]


def compare(
    expected: ProbeRecord,
    actual: Sequence[Sequence[float]],
    *,
    is_float32: bool = True,
    has_fp8_kv: bool = False,
) -> ProbeResult:
    """Compare log-probs `actual[i][j]` of `expected.prompts[i].top_ids[j]` with the record.

    `is_float32` says whether the model computed in float32, `has_fp8_kv` whether its KV cache was
    fp8, by the artifact's wish or the user's. NaN never passes. IntegrityError when the numbers of
    prompts or of entries differ.
    """
    if [len(row) for row in actual] != [len(p.top_ids) for p in expected.prompts]:
        raise IntegrityError("the probe was run with other prompts than artifact.json lists")
    pairs = list(zip(expected.prompts, actual, strict=True))
    gaps = [abs(e - a) for p, row in pairs for e, a in zip(p.top_logprobs, row, strict=True)]
    has_nan = any(math.isnan(gap) for gap in gaps)
    difference = math.nan if has_nan else sum(gaps) / len(gaps)
    tolerance = expected.tolerance if is_float32 else expected.tolerance_reduced
    if has_fp8_kv:
        tolerance = max(tolerance, _GRID)
    agreeing = sum(not has_nan and max(row) == row[_argmax(p.top_logprobs)] for p, row in pairs)
    return ProbeResult(
        passed=not has_nan and difference <= tolerance,
        difference=difference,
        worst=math.nan if has_nan else max(gaps),
        tolerance=tolerance,
        top1_agreement=agreeing / len(pairs),
    )


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
