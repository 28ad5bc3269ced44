"""The experts of one layer, quantized: each from the tokens that the router sends it.

Routing is natural: no token is forced through an expert that would not see it, since what it
computes of strangers means little. An expert that saw too few tokens has its statistics *topped
up* to a floor with average tokens of the layer, so that it is quantized like the others, never to
NaN and never to zero (a Hessian of no tokens), and it is named in the report.

Shape legend: N valid tokens, K experts per token, H hidden size, I inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quant.capture import (
    Batch,
    InputStatistics,
    Stream,
    check_finite,
    first_arguments,
    share_statistics,
)
from quant.errors import NonFiniteError
from quant.experts import Expert, Experts
from quant.layer_job import LayerWork, Run, choose_codes, install_all
from quant.outcome import ModuleOutcome, Outcomes, dealt
from quant.plan_rows import PlanRow

# Below one in 200 of all tokens, or one token per 8 inputs, an expert counts as starved.
SHARE_FLOOR, INPUTS_PER_TOKEN = 0.005, 8
# Hessians held at once; more experts than fit are looked at in another pass over the windows.
HESSIAN_BYTES = 4 * 10**9


def quantize_experts(experts: Experts, rows: Sequence[PlanRow], work: LayerWork) -> Outcomes:
    """Quantize one stage of a layer's experts (all gate|up, or all down) and install the result.

    rows: of this stage, any number of experts. Raises NonFiniteError, SchemeError.
    """
    by_expert: dict[int, list[PlanRow]] = {}
    for row in rows:
        if not row.scheme.is_dense:
            by_expert.setdefault(int(row.module.split(".")[-2]), []).append(row)
    stream, outcomes = work.stream, Outcomes()
    if not any(row.statistics != "none" for row in rows):
        outcomes = dealt(
            stream.ranks, list(by_expert),
            lambda expert: choose_codes(by_expert[expert], work, None),
        )  # fmt: skip
        install_all(work.linears, outcomes)
        return outcomes
    columns = max(row.shape[1] for row in rows)
    is_inner = _is_down(rows[0], experts)
    total = stream.num_tokens()
    floor = token_floor(total, columns)
    for chunk in _chunks(list(by_expert), columns):
        found = collect_expert_inputs(
            experts, chunk, stream, work.run, columns, is_inner=is_inner, floor=floor
        )

        def quantize(expert: int) -> Outcomes:
            statistics, seen = found.pop(expert)  # noqa: B023 - called within the iteration
            chosen = choose_codes(by_expert[expert], work, statistics)
            return {name: _count(part, seen, floor, total) for name, part in chosen.items()}

        outcomes.update(dealt(stream.ranks, chunk, quantize))
    install_all(work.linears, outcomes)
    return outcomes


def token_floor(total: int, columns: int) -> int:
    """Tokens below which an expert's own statistics are topped up, of `total` in the layer."""
    return max(1, columns // INPUTS_PER_TOKEN, round(SHARE_FLOOR * total))


def collect_expert_inputs(
    experts: Experts,
    wanted: Sequence[int],
    stream: Stream,
    run: Run,
    columns: int,
    *,
    is_inner: bool,
    floor: int,
) -> dict[int, tuple[InputStatistics, int]]:
    """For each wanted expert what its projection reads, and how many tokens the router sent it.

    is_inner: the down projection's input, else the layer's hidden states. Statistics of fewer than
    `floor` tokens are topped up with what the expert would read of an average token.
    """
    own = {e: _empty(experts[e], columns) for e in wanted}
    for batch, hidden, index in _routed(experts, stream, run):
        for e in wanted:
            sent = hidden[(index == e).any(-1)]
            own[e].add(_read(experts[e], sent, batch, is_inner))
    share_statistics([own[e] for e in wanted], stream.ranks)
    seen = {e: statistics.num_tokens for e, statistics in own.items()}
    starved = [e for e in wanted if seen[e] < floor]
    if starved:
        shared = _of_all_tokens(experts, starved, stream, run, columns, is_inner)
        for e in starved:
            _top_up(own[e], shared[e], floor)
    return {e: (own[e], seen[e]) for e in wanted}


def _of_all_tokens(
    experts: Experts, starved: Sequence[int], stream: Stream, run: Run, columns: int, is_inner: bool
) -> dict[int, InputStatistics]:
    """Statistics of all tokens of the layer as each of these experts would read them."""
    kinds = starved if is_inner else starved[:1]
    found = {e: _empty(experts[e], columns) for e in kinds}
    for batch, hidden, _ in _routed(experts, stream, run):
        for e in kinds:
            found[e].add(_read(experts[e], hidden, batch, is_inner, must_be_finite=False))
    share_statistics([found[e] for e in kinds], stream.ranks)
    return found if is_inner else dict.fromkeys(starved, found[starved[0]])


def _top_up(own: InputStatistics, shared: InputStatistics, floor: int) -> None:
    """Add `floor - n` average tokens, unless strangers overflow this expert."""
    weight = (floor - own.num_tokens) / max(shared.num_tokens, 1)
    if bool(torch.isfinite(shared.hessian).all()):
        own.hessian += weight * shared.hessian
        own.square_sum += weight * shared.square_sum
        own.absmax = torch.maximum(own.absmax, shared.absmax)
        own.num_tokens = floor


def _empty(expert: nn.Module, columns: int) -> InputStatistics:
    device = next(expert.parameters()).device
    return InputStatistics(num_inputs=columns, device=device, needs_hessian=True)


def _routed(experts: Experts, stream: Stream, run: Run) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """Batches with the valid tokens that enter the experts [N, H] and their experts [N, K]."""
    for batch, states in stream:
        hidden, index, _ = first_arguments(experts, partial(run, states, batch.mask))
        valid = batch.mask.flatten().to(hidden.device)
        shaped = hidden.view(*batch.mask.shape, -1)
        check_finite(shaped, batch, "the input of the experts")
        yield batch, hidden[valid], index[valid]


def _read(
    expert: nn.Module, hidden: Tensor, batch: Batch, is_inner: bool, *, must_be_finite: bool = True
) -> Tensor:
    if not is_inner:
        return hidden
    assert isinstance(expert, Expert)
    with torch.no_grad():
        inner = expert.inner(hidden)
    if must_be_finite and not bool(torch.isfinite(inner).all()):
        raise NonFiniteError(
            f"what an expert's down projection reads is NaN or infinite for one of the calibration "
            f"samples {list(batch.samples)}; drop them, or check the checkpoint"
        )
    return inner


def _is_down(row: PlanRow, experts: Experts) -> bool:
    expert = experts[0]
    assert isinstance(expert, Expert)
    return row.module.rpartition(".")[2] == expert.leaves[2]


def _chunks(experts: Sequence[int], columns: int) -> list[Sequence[int]]:
    size = max(1, HESSIAN_BYTES // (4 * columns**2))
    return [experts[start : start + size] for start in range(0, len(experts), size)]


def _count(part: ModuleOutcome, seen: int, floor: int, total: int) -> ModuleOutcome:
    """The outcome with its tokens, and a note where they were too few."""
    note = part.result.note
    if seen < floor:
        few = f"saw {seen} of {total} tokens, fewer than {floor}: topped up with the layer's"
        note = "; ".join(filter(None, (note, few)))
    result = replace(part.result, tokens_seen=seen, is_starved=seen < floor, note=note)
    return replace(part, result=result)
