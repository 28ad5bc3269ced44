"""GPTQ: round one column after another, pushing each rounding error onto the columns to come.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv 2210.17323: the update of section 3.1 (eq. 2-3), all rows in one order (step 1), lazy batch
updates (step 2), and the Cholesky form of the inverse (step 3, algorithm 1). Around it:

- *static act-order*: columns are visited by falling diag(H), but groups and scales are fixed
  beforehand on the unpermuted weight, so that the artifact needs no column index;
- scales from the weighted search of `quant.methods.scales`, cast to their stored dtype first;
- a *damping ladder*: 1, 10, 100 times the asked damping (at most 1.0), each tried in float32 and
  float64, then round-to-nearest for this module: never an exception over a bad Hessian;
- blocks (fp8-block) take min-max scales, which all of a block's rows share, and no refinement,
  which would move them row by row;
- inputs that were never active (diag(H) == 0) are rounded to nearest, never zeroed;
- *refinement* of codes and scales (`quant.methods.refine`).

Pure: weight and statistics in, codes out. Rows are independent, so modules that share an input may
be stacked along `out` and quantized in one call; inside, as many rows are taken at once as memory
is given for. The matrix is the only large thing that is held throughout, beside its factor.

Shape legend: O output rows, I input columns, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quant.artifact.layout import QuantizedWeight, dequantize, min_max_qparams, scale_by_row
from quant.artifact.scheme import Scheme, WeightScheme
from quant.methods.columns import Grid
from quant.methods.refine import Damped, Rounded, blocks, refine
from quant.methods.rtn import rtn
from quant.methods.scales import grouped, search_scales, store_codes
from quant.methods.sweep import sweep

# Values of the weight in work at once: 256 MB a tensor on a GPU, 64 on a CPU.
GPU_VALUES, CPU_VALUES = 1 << 26, 1 << 24
_INVERTED_AT_ONCE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQSettings:
    """damping: fraction of mean(diag H) added to the diagonal; block_size: columns per lazy update;
    refine_rounds: rounds of (coordinate descent, scale refit) after the GPTQ pass, 0 for none."""

    damping: float = 0.1
    act_order: bool = True
    block_size: int = 128
    scale_search: bool = True
    refine_rounds: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQInfo:
    """What happened: the damping that worked (None after a fallback), whether the module fell back
    to round-to-nearest, inputs never active, and for each output row [O] its squared error
    (E H E^T)_oo of what is stored and that of losing the row, (W H W^T)_oo."""

    damping: float | None
    fallback: bool
    dead_columns: int
    row_errors: Tensor
    row_totals: Tensor

    @property
    def loss(self) -> float:
        """The relative squared output error."""
        return relative_error(self.row_errors, self.row_totals)

    def split(self, sizes: Sequence[int]) -> list[GPTQInfo]:
        """The same of each module of a stack."""
        parts = zip(
            torch.split(self.row_errors, list(sizes)),
            torch.split(self.row_totals, list(sizes)),
            strict=True,
        )
        return [replace(self, row_errors=errors, row_totals=totals) for errors, totals in parts]


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    settings: GPTQSettings,
) -> tuple[QuantizedWeight, GPTQInfo]:
    """Quantize `weight` [O, I] so that the output on the calibration inputs changes least.

    hessian [I, I] float32: X^T X over valid tokens, any constant factor. Neither is changed.
    Raises SchemeError when a scale does not fit `scale_dtype`.
    """
    assert scheme.weights is not None
    matrix, revived = hessian.float(), _revived(hessian)
    order = torch.argsort(matrix.diagonal() + revived, descending=True, stable=True)
    if not settings.act_order:
        order = torch.arange(len(order), device=order.device)
    factor, damping = _inverse_factor(matrix, revived, order, settings.damping)
    mean = (matrix.diagonal() + revived).mean()
    damped = Damped(matrix=matrix, added=revived + (damping or 0.0) * mean)
    importance = matrix.diagonal() + revived if settings.scale_search else None
    work = _Work(
        scheme=scheme, scale_dtype=scale_dtype, settings=settings, damped=damped, factor=factor,
        order=order, importance=importance,
    )  # fmt: skip
    parts = [
        _quantize_rows(rows.float(), work)
        for rows in torch.split(weight, _rows_at_once(weight, scheme.weights.scale_rows))
    ]
    info = GPTQInfo(
        damping=damping,
        fallback=factor is None,
        dead_columns=int((revived > 0).sum()),
        row_errors=torch.cat([errors for _, errors, _ in parts]),
        row_totals=torch.cat([totals for _, _, totals in parts]),
    )
    return _joined([part for part, _, _ in parts]), info


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What all rows of a weight share. factor: None after a fallback; importance: of the inputs,
    for the search of scales."""

    scheme: Scheme
    scale_dtype: torch.dtype
    settings: GPTQSettings
    damped: Damped
    factor: Tensor | None
    order: Tensor
    importance: Tensor | None


def _rows_at_once(weight: Tensor, multiple: int) -> int:
    """Rows for which memory is given, whole blocks of them."""
    most = (GPU_VALUES if weight.is_cuda else CPU_VALUES) // weight.shape[1]
    return max(1, most // multiple) * multiple


def _quantize_rows(weight: Tensor, work: _Work) -> tuple[QuantizedWeight, Tensor, Tensor]:
    """Some rows: their codes, and their squared errors and totals [rows]."""
    totals = row_energy(weight, work.damped.matrix)
    if work.factor is None:
        result = rtn(weight, work.scheme, work.scale_dtype, importance=work.importance)
        error = weight - dequantize(result).float()
        return result, row_energy(error, work.damped.matrix), totals
    scheme, settings = work.scheme.weights, work.settings
    assert scheme is not None
    scale, zero = _scales(weight, scheme, work.scale_dtype, work.importance)
    grid = Grid(
        scheme=scheme,
        scale=scale_by_row(scale, scheme, len(weight)).T.contiguous(),
        zero_point=None if zero is None else zero.T.contiguous(),
        is_zero=~grouped(weight, scheme).any(-1).T.contiguous(),
    )
    columns = weight.T.contiguous()
    codes = _propagate(columns, work.factor, work.order, grid, settings.block_size)
    rounded = Rounded(codes=codes, grid=grid)
    shares_rows = scheme.scale_rows > 1
    if settings.refine_rounds and not shares_rows:
        rounded = refine(
            columns, rounded, work.damped, work.order, work.scale_dtype,
            rounds=settings.refine_rounds, block_size=settings.block_size,
        )  # fmt: skip
    result = QuantizedWeight(
        scheme=work.scheme,
        codes=store_codes(rounded.codes, scheme).T.contiguous(),
        scale=scale if shares_rows else rounded.grid.scale.T.contiguous(),
        zero_point=zero,
    )
    errors = rounded.errors
    if errors is None:
        errors = row_energy(weight - dequantize(result).float(), work.damped.matrix)
    return result, errors, totals


def _joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    return QuantizedWeight(
        scheme=parts[0].scheme,
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        zero_point=torch.cat(zeros) if zeros else None,
    )


def _revived(hessian: Tensor) -> Tensor:
    """What takes the place of zeros on the diagonal, [I] float32: the mean of the other entries; 0
    elsewhere.

    The rest of such a row and column is zero, so nothing is propagated into or out of it: the
    column is rounded to nearest.
    """
    diagonal = hessian.diagonal().float()
    alive = diagonal > 0
    mean = diagonal[alive].mean() if bool(alive.any()) else torch.ones((), device=hessian.device)
    return torch.where(alive, 0.0, mean - diagonal)


def revive_dead_columns(hessian: Tensor) -> tuple[Tensor, int]:
    """`hessian` [I, I] with dead inputs' zeros on the diagonal replaced, and how many those are.
    A copy only where there are some."""
    revived = _revived(hessian)
    num_dead = int((revived > 0).sum())
    return (hessian + torch.diag(revived) if num_dead else hessian), num_dead


def _scales(
    weight: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype, importance: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scales fixed before any error is propagated, on the unpermuted weight."""
    if importance is None or scheme.scale_rows > 1:
        return min_max_qparams(weight, scheme, scale_dtype)
    return search_scales(weight, scheme, scale_dtype, importance)


def _inverse_factor(
    hessian: Tensor, revived: Tensor, order: Tensor, damping: float
) -> tuple[Tensor | None, float | None]:
    """Upper Cholesky factor of (H + damping * mean(diag) * I)^-1 in float32, and the damping used,
    H being `hessian` with `revived` on its diagonal.

    The factor is in visiting order, `hessian` is not. Twice None when no rung of the ladder gives a
    finite factor. At most three matrices of that size are made, as they may be gigabytes.
    """
    mean = float((hessian.diagonal() + revived).mean())
    rungs = [damping * 10**step for step in range(6) if damping * 10**step <= 1.0] or [damping]
    for rung in rungs:
        for dtype in (torch.float32, torch.float64):
            factor = _try_factor(hessian, revived + rung * mean, order.flip(0), dtype)
            if factor is not None:
                return factor.float(), rung
    return None, None


def _try_factor(
    hessian: Tensor, added: Tensor, backwards: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """U, upper triangular, with U^T U = (H + diag(added))^-1; None unless it is finite.

    `backwards` is the visiting order reversed, U is in visiting order. With J the reversal and
    J H J = L L^T, U = J L^-1 J: the inverse itself is never made.
    """
    # By rows, then by columns: of two indices that meet, a GPU makes whole matrices of int64.
    damped = hessian.index_select(0, backwards).index_select(1, backwards).to(dtype)
    damped.diagonal().add_(added[backwards])
    lower, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if bool(failed):
        return None
    _invert_lower(lower)
    is_usable = bool(torch.isfinite(lower.sum()))
    factor = lower.flip(0, 1)
    del lower  # Cholesky's result lies transposed in memory, so that one more is made
    return factor.contiguous() if is_usable else None


def _invert_lower(lower: Tensor) -> None:
    """Invert a lower triangular matrix in its own memory, by halves: nearly all of it is matrix
    products, and a quarter of a matrix is all that is taken beside it."""
    if len(lower) <= _INVERTED_AT_ONCE:
        eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, eye, upper=False))
        return
    half = len(lower) // 2
    first, corner, second = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    _invert_lower(first)
    _invert_lower(second)
    corner.copy_((second @ corner).neg_() @ first)


def _propagate(
    columns: Tensor, factor: Tensor, order: Tensor, grid: Grid, block_size: int
) -> Tensor:
    """The GPTQ pass (algorithm 1) over `columns` [I, O], visited in `order`. Codes [I, O], float32.

    `factor` is in visiting order. Inside a block errors go to the block's own columns at once and
    to all later ones by one matrix product at its end.
    """
    remaining = columns[order]
    codes, groups = torch.empty_like(remaining), grid.groups(order)
    for start, end in blocks(remaining, block_size):
        block, local = remaining[start:end], factor[start:end, start:end]
        found, errors = sweep(block, local, groups[start:end], grid, None)
        codes[order[start:end]] = found
        remaining[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return codes


def row_energy(rows: Tensor, hessian: Tensor) -> Tensor:
    """diag(R H R^T) [O] of `rows` [O, I], by the upper blocks of the symmetric matrix."""
    total, width = rows.new_zeros(len(rows)), rows.shape[1]
    step = max(1, -(-width // 8))
    for start in range(0, width, step):
        own, end = rows[:, start : start + step], start + step
        product = own @ hessian[start:end, start:end]
        if end < width:
            product.addmm_(rows[:, end:], hessian[end:, start:end], alpha=2)
        total += (product * own).sum(1)
    return total


def relative_error(errors: Tensor, totals: Tensor) -> float:
    """Sum of squared errors over that of what there is to lose; 0 where there is nothing, and where
    rounding left less than nothing."""
    total = float(totals.sum())
    return max(0.0, float(errors.sum())) / total if total > 0 else 0.0


def relative_output_error(weight: Tensor, result: QuantizedWeight, hessian: Tensor) -> float:
    """tr(E H E^T) / tr(W H W^T) with E = W - what is stored; 0 for an all-zero weight."""
    error = weight.float() - dequantize(result).float()
    return relative_error(row_energy(error, hessian), row_energy(weight.float(), hessian))
