"""What quantizing a module gives, and how the ranks share that work.

Modules whose method treats each row of the weight by itself are cut along their rows: every rank
has as much to do as the next, whatever the shapes. Other work goes whole to one rank, in turns.
In the end all ranks have all outcomes, alike to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from quant.artifact.layout import QuantizedWeight, allowed_dtypes, tensor_shapes
from quant.outliers import weight_outliers
from quant.parallel import Part, Ranks, rows_of
from quant.plan_rows import PlanRow
from quant.report import ModuleResult

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOutcome:
    """A quantized module: its codes and the row of the report."""

    weight: QuantizedWeight
    result: ModuleResult


Outcomes = dict[str, ModuleOutcome]
# Methods for which a row of codes depends on that row of the weight alone.
BY_ROW = frozenset({"rtn", "gptq", "awq"})


def stored_bytes(weight: QuantizedWeight) -> int:
    """Bytes of the tensors that hold a weight in an artifact, without making them."""
    total = 0
    for leaf, shape in tensor_shapes(weight.scheme, weight.shape).items():
        is_scale = leaf == "weight_scale"
        dtype = weight.scale.dtype if is_scale else allowed_dtypes(weight.scheme, leaf)[0]
        total += math.prod(shape) * dtype.itemsize
    return total


def can_cut(rows: Sequence[PlanRow]) -> bool:
    """Whether these modules may be quantized some rows here, some there."""
    return all(
        row.method in BY_ROW
        and row.scheme.weights is not None
        and row.scheme.weights.strategy in ("group", "channel")
        for row in rows
    )


def dealt(ranks: Ranks, items: Sequence[Item], work: Callable[[Item], Outcomes]) -> Outcomes:
    """The outcomes of `work` on all items, each done by one rank."""
    mine: Outcomes = {}
    for item in items[ranks.rank :: ranks.size]:
        mine.update(work(item))
    return {name: found for part in _exchange(ranks, mine, {}) for name, (found, _) in part.items()}


def cut(
    ranks: Ranks,
    rows: Sequence[PlanRow],
    weights: Mapping[str, Tensor],
    work: Callable[[Sequence[PlanRow], Mapping[str, Tensor]], Outcomes],
    energy: Callable[[Tensor], float],
) -> Outcomes:
    """The outcomes of `work(rows, weights)`, each rank doing its part of each module's rows.

    energy: of rows of a weight, what the squared relative error of their outcome is relative to.
    """
    spans = {row.module: rows_of(row.shape[0], ranks) for row in rows}
    own = [
        replace(row, shape=(span.stop - span.start, row.shape[1]))
        for row in rows
        if (span := spans[row.module]).stop > span.start
    ]
    pieces = {row.module: weights[row.module][spans[row.module]] for row in own}
    mine = work(own, pieces) if own else {}
    heard = _exchange(ranks, mine, {name: energy(piece) for name, piece in pieces.items()})
    return {
        row.module: _join(row, [part[row.module] for part in heard if row.module in part], weights)
        for row in rows
    }


def _join(
    row: PlanRow, pieces: Sequence[tuple[ModuleOutcome, float]], weights: Mapping[str, Tensor]
) -> ModuleOutcome:
    """A module of its pieces, in the order of its rows."""
    codes = [piece.weight for piece, _ in pieces]
    zeros = [weight.zero_point for weight in codes if weight.zero_point is not None]
    whole = QuantizedWeight(
        scheme=row.scheme,
        codes=torch.cat([weight.codes for weight in codes]),
        scale=torch.cat([weight.scale for weight in codes]),
        zero_point=torch.cat(zeros) if zeros else None,
    )
    results = [piece.result for piece, _ in pieces]
    assert row.scheme.weights is not None
    total = sum(energy for _, energy in pieces)
    lost = sum((result.rel_error or 0.0) ** 2 * energy for result, (_, energy) in
               zip(results, pieces, strict=True))  # fmt: skip
    result = replace(
        results[0],
        shape=row.shape,
        bytes=stored_bytes(whole),
        rel_error=math.sqrt(lost / total) if total else 0.0,
        weight_outliers=weight_outliers(weights[row.module], row.scheme.weights),
    )
    return ModuleOutcome(weight=whole, result=result)


def _exchange(
    ranks: Ranks, mine: Outcomes, numbers: Mapping[str, float]
) -> list[dict[str, tuple[ModuleOutcome, float]]]:
    """Every rank's outcomes, each with a number beside it, in the order of the ranks."""
    if ranks.size == 1:
        return [{name: (found, numbers.get(name, 0.0)) for name, found in mine.items()}]
    tensors: dict[str, Tensor] = {}
    said = {}
    for name, found in mine.items():
        weight, zero = found.weight, found.weight.zero_point
        tensors |= {f"{name}/codes": weight.codes, f"{name}/scale": weight.scale}
        tensors |= {} if zero is None else {f"{name}/zero_point": zero}
        said[name] = (weight.scheme, found.result, numbers.get(name, 0.0))
    return [
        {
            name: (ModuleOutcome(weight=_weight(part, name, scheme), result=result), number)
            for name, (scheme, result, number) in part.value.items()
        }
        for part in ranks.gather(Part(tensors=tensors, value=said))
    ]


def _weight(part: Part, name: str, scheme: object) -> QuantizedWeight:
    return QuantizedWeight(
        scheme=scheme,  # type: ignore[arg-type]
        codes=part.tensors[f"{name}/codes"],
        scale=part.tensors[f"{name}/scale"],
        zero_point=part.tensors.get(f"{name}/zero_point"),
    )
