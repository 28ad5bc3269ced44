"""Launches of the sampling kernels: scratch, grids and constants. Imports triton: import it late.

Grids follow from the numbers of rows and of ids alone, and all sizes from those and the features,
so every launch can be captured in a CUDA graph.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from runtime.kernels.backend import target_of
from runtime.kernels.sampling.kernel import NUM_BINS, STATE, draw_kernel
from runtime.kernels.sampling.kernel_adjust import adjust_kernel, count_kernel
from runtime.kernels.sampling.kernel_edge import collect_kernel
from runtime.kernels.sampling.kernel_kept import draw_kept_kernel
from runtime.kernels.sampling.kernel_logprobs import logprobs_kernel, top_kernel
from runtime.kernels.sampling.kernel_narrow import narrow_kernel
from runtime.kernels.sampling.tensors import (
    Drawn,
    RowLogprobs,
    SamplingFeatures,
    SamplingTensors,
)
from runtime.kernels.workspace import Workspace

BLOCK = 2048  # of the vocabulary; part of what a draw means: sums are taken by blocks
NUM_WARPS = 4
CAPACITY = 2048  # tokens among which an edge is looked for at once
FEW = 256  # tokens among which every one is compared with every other
NUM_ROUNDS = 2
LIST = 64  # biased or masked ids looked at at once
MAX_TOP = 32  # alternatives found by repeated maxima; more of them are sorted out by torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What every launch of one call gets: the logits, their adjusted twin, sizes, scratch."""

    logits_RV: Tensor
    adjusted_RV: Tensor | None
    is_adjusted_R: Tensor | None
    partials: Tensor
    counters: Tensor
    grid: tuple[int, int]
    constants: dict[str, Any]

    @property
    def scores(self) -> tuple[Any, ...]:
        return self.logits_RV, self.logits_RV.stride(0), self.adjusted_RV, self.is_adjusted_R

    @property
    def vocab(self) -> int:
        return self.logits_RV.shape[1]

    @property
    def block(self) -> dict[str, Any]:
        return self.constants

    @property
    def adjusting(self) -> dict[str, Any]:
        return {**self.constants, "ADJUSTED": self.adjusted_RV is not None}


def prepare(logits_RV: Tensor, workspace: Workspace, *, is_adjusted: bool) -> Rows:
    num_rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1, "rows of logits are contiguous"
    num_blocks = triton.cdiv(vocab, BLOCK)
    blocks_pow2 = triton.next_power_of_2(num_blocks)
    device = logits_RV.device
    target = target_of(device)
    constants = {
        "BLOCK": BLOCK,
        "NUM_BLOCKS": num_blocks,
        "BLOCKS_POW2": blocks_pow2,
        "PDL": target.has_pdl,
        "num_warps": NUM_WARPS,
    }
    if target.has_pdl:
        constants["launch_pdl"] = True
    adjusted_RV = is_adjusted_R = None
    if is_adjusted:
        adjusted_RV = torch.empty(num_rows, vocab, dtype=torch.float32, device=device)
        is_adjusted_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    return Rows(
        logits_RV=logits_RV,
        adjusted_RV=adjusted_RV,
        is_adjusted_R=is_adjusted_R,
        partials=torch.empty(num_rows, 5, blocks_pow2, dtype=torch.float32, device=device),
        counters=workspace.counters(2 * num_rows),
        grid=(num_blocks, num_rows),
        constants=constants,
    )


def sample_rows_triton(
    logits_RV: Tensor,
    params: SamplingTensors,
    slots_R: Tensor,
    features: SamplingFeatures,
    workspace: Workspace,
) -> Drawn:
    """See `runtime.kernels.sampling.sample_rows`."""
    num_rows, device = len(logits_RV), logits_RV.device
    ids_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    is_finite_R = torch.empty(num_rows, dtype=torch.bool, device=device)
    rows = prepare(logits_RV, workspace, is_adjusted=features.any_adjusted)
    if features.any_adjusted:
        _adjust(rows, params, slots_R, features)
    _draw(rows, params, slots_R, features, ids_R, is_finite_R)
    if features.any_penalty:
        _count(rows, params, slots_R, ids_R, is_finite_R)
    logprobs = None
    if features.num_logprobs is not None:
        logprobs = _logprobs(rows, ids_R, features.num_logprobs, params, slots_R)
    return Drawn(ids_R=ids_R, is_finite_R=is_finite_R, logprobs=logprobs)


def row_logprobs_triton(
    logits_RV: Tensor, ids_R: Tensor, num_top: int, workspace: Workspace
) -> RowLogprobs:
    """See `runtime.kernels.sampling.row_logprobs`."""
    return _logprobs(prepare(logits_RV, workspace, is_adjusted=False), ids_R, num_top, None, None)


def _views(params: SamplingTensors) -> dict[str, Tensor]:
    """The parameter rows by the types that kernels read them as: the same memory."""
    rows = params.rows_N16
    return {
        "doubles_ptr": rows.view(torch.float64),
        "longs_ptr": rows.view(torch.int64),
        "floats_ptr": rows.view(torch.float32),
        "ints_ptr": rows,
    }


def _adjust(
    rows: Rows, params: SamplingTensors, slots_R: Tensor, features: SamplingFeatures
) -> None:
    history = params.history if features.any_penalty else None
    assert history is not None or not features.any_penalty, "a penalty needs a history"
    views = _views(params)
    constants = {
        name: rows.block[name] for name in rows.block if not name.endswith(("BLOCKS", "POW2"))
    }
    adjust_kernel[rows.grid](
        *rows.scores,
        slots_R,
        views["doubles_ptr"],
        views["floats_ptr"],
        views["ints_ptr"],
        params.bias_ids_NB,
        params.bias_values_NB,
        params.masked_ids_NM,
        None if history is None else history.counts_NV,
        None if history is None else history.prompt_mask_NW,
        rows.vocab,
        0 if history is None else history.prompt_mask_NW.shape[1],
        NUM_BIASED=params.bias_ids_NB.shape[1],
        NUM_MASKED=params.masked_ids_NM.shape[1],
        LIST=LIST,
        PENALIZED=features.any_penalty,
        BIASED=features.any_biased,
        **constants,
    )


def _draw(
    rows: Rows,
    params: SamplingTensors,
    slots_R: Tensor,
    features: SamplingFeatures,
    ids_R: Tensor,
    is_finite_R: Tensor,
) -> None:
    num_rows, device = len(ids_R), ids_R.device
    filtered = features.any_random and features.any_filtered
    views = _views(params)
    state = None
    if filtered:
        state = torch.empty(num_rows, STATE.value, dtype=torch.float64, device=device)
    draw_kernel[rows.grid](
        *rows.scores,
        slots_R,
        *views.values(),
        rows.partials,
        state,
        rows.counters,
        ids_R,
        is_finite_R.view(torch.uint8),
        rows.vocab,
        RANDOM=features.any_random,
        FILTERED=filtered,
        **rows.adjusting,
    )
    if state is not None:
        _search(rows, views, slots_R, state)
        draw_kept_kernel[rows.grid](
            *rows.scores,
            slots_R,
            *views.values(),
            rows.partials,
            state,
            rows.counters,
            ids_R,
            rows.vocab,
            **rows.adjusting,
        )


def _search(rows: Rows, views: dict[str, Tensor], slots_R: Tensor, state: Tensor) -> None:
    num_blocks, num_rows = rows.grid
    device = state.device
    params = [views[name] for name in ("doubles_ptr", "floats_ptr", "ints_ptr")]
    if rows.vocab > CAPACITY:
        histograms = torch.empty(
            num_rows, num_blocks, NUM_BINS.value, dtype=torch.int32, device=device
        )
        for _ in range(NUM_ROUNDS):
            narrow_kernel[rows.grid](
                *rows.scores,
                slots_R,
                *params,
                rows.partials,
                histograms,
                state,
                rows.counters,
                rows.vocab,
                CAPACITY=CAPACITY,
                **rows.adjusting,
            )
    collect_kernel[rows.grid](
        *rows.scores,
        slots_R,
        *params,
        rows.partials,
        torch.empty(num_rows, CAPACITY, dtype=torch.float32, device=device),
        state,
        rows.counters,
        rows.vocab,
        num_rows,
        CAPACITY=CAPACITY,
        FEW=FEW,
        **rows.adjusting,
    )


def _count(
    rows: Rows, params: SamplingTensors, slots_R: Tensor, ids_R: Tensor, is_finite_R: Tensor
) -> None:
    assert params.history is not None, "a penalty needs a history"
    options = {name: rows.block[name] for name in rows.block if name in ("PDL", "launch_pdl")}
    count_kernel[(len(ids_R),)](
        ids_R,
        is_finite_R.view(torch.uint8),
        slots_R,
        params.history.counts_NV,
        rows.vocab,
        num_warps=1,
        **options,
    )


def _logprobs(
    rows: Rows,
    ids_R: Tensor,
    num_top: int,
    params: SamplingTensors | None,
    slots_R: Tensor | None,
) -> RowLogprobs:
    num_rows, device = len(ids_R), ids_R.device
    result = RowLogprobs(
        chosen_R=torch.empty(num_rows, dtype=torch.float32, device=device),
        rank_R=torch.empty(num_rows, dtype=torch.int32, device=device),
        top_ids_RK=torch.empty(num_rows, num_top, dtype=torch.int32, device=device),
        top_values_RK=torch.empty(num_rows, num_top, dtype=torch.float32, device=device),
    )
    bounds = torch.empty(num_rows, 2, dtype=torch.float32, device=device)
    asked = (slots_R, None if params is None else params.rows_N16)
    logprobs_kernel[rows.grid](
        rows.logits_RV,
        rows.logits_RV.stride(0),
        *asked,
        ids_R,
        rows.partials,
        bounds,
        rows.counters,
        result.chosen_R,
        result.rank_R,
        rows.vocab,
        num_top,
        BY_SLOT=slots_R is not None,
        **rows.block,
    )
    if num_top > MAX_TOP:
        _sort_out(rows.logits_RV, result)
    elif num_top > 0:
        _find_top(rows, asked, bounds, result)
    return result


def _find_top(
    rows: Rows, asked: tuple[Tensor | None, Tensor | None], bounds: Tensor, result: RowLogprobs
) -> None:
    num_blocks, num_rows = rows.grid
    num_top = result.top_ids_RK.shape[1]
    top_pow2 = triton.next_power_of_2(num_top)
    top_kernel[rows.grid](
        rows.logits_RV,
        rows.logits_RV.stride(0),
        *asked,
        rows.partials,
        bounds,
        torch.empty(num_rows, num_blocks, top_pow2, dtype=torch.int64, device=bounds.device),
        rows.counters,
        result.top_ids_RK,
        result.top_values_RK,
        rows.vocab,
        num_top,
        TOP_POW2=top_pow2,
        BY_SLOT=asked[0] is not None,
        **rows.block,
    )


def _sort_out(logits_RV: Tensor, result: RowLogprobs) -> None:
    """The most likely ids by sorting all: no limit on their number, slow."""
    values_RV = logits_RV.float().log_softmax(-1).clamp_(min=-9999.0)
    order_RV = logits_RV.float().sort(dim=-1, descending=True, stable=True).indices
    top_ids_RK = order_RV[:, : result.top_ids_RK.shape[1]]
    result.top_ids_RK.copy_(top_ids_RK)
    result.top_values_RK.copy_(values_RV.gather(1, top_ids_RK))
