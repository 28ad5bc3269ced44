"""GPTQ: round one column after another, pushing each rounding error onto the columns to come.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv 2210.17323: the update of section 3.1 (eq. 2-3), all rows in one order (step 1), lazy batch
updates (step 2), and the Cholesky form of the inverse (step 3, algorithm 1). Around it:

- *static act-order*: columns are visited by falling diag(H), but groups and scales are fixed
  beforehand on the unpermuted weight, so that the artifact needs no column index;
- scales from the weighted search of `quant.methods.scales`, cast to their stored dtype first;
- a *damping ladder*: 1, 10, 100 times the asked damping (at most 1.0), each tried in float32 and
  float64, then round-to-nearest for this module: never an exception over a bad Hessian;
- inputs that were never active (diag(H) == 0) are rounded to nearest, never zeroed;
- *refinement*: coordinate descent over the codes (Behdin et al., "QuantEase", arXiv 2309.01885,
  section 3) in turn with least-squares scales for fixed codes, kept row by row where it helps.

Pure: weight and statistics in, codes out. Rows are independent, so modules that share an input may
be stacked along `out` and quantized in one call.

Shape legend: O output rows, I input columns, G groups, S = I / G.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quant.artifact.layout import (
    QuantizedWeight,
    dequantize,
    min_max_qparams,
    round_scale,
)
from quant.artifact.scheme import Scheme, WeightScheme
from quant.methods.columns import KERNEL_COLUMNS, Grid, sweep_reference
from quant.methods.rtn import rtn
from quant.methods.scales import grouped, search_scales, store_codes, within


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
    to round-to-nearest, inputs never active, and the relative output error
    tr(E H E^T) / tr(W H W^T) of what is stored."""

    damping: float | None
    fallback: bool
    dead_columns: int
    loss: float


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
    values = weight.float()
    full, dead = revive_dead_columns(hessian.float())
    order = torch.argsort(full.diagonal(), descending=True, stable=True)
    if not settings.act_order:
        order = torch.arange(len(order), device=order.device)
    factor, damping = _inverse_factor(full, order, settings.damping)
    if factor is None:
        fallback = rtn(values, scheme, scale_dtype, importance=_importance(full, settings))
        return fallback, _info(values, fallback, full, None, dead)
    scale, zero = _scales(values, full, scheme.weights, scale_dtype, settings)
    grid = Grid(
        scheme=scheme.weights,
        scale=scale.T.contiguous(),
        zero_point=None if zero is None else zero.T.contiguous(),
        is_zero=~grouped(values, scheme.weights).any(-1).T.contiguous(),
    )
    codes = _propagate(values, factor, order, grid, settings.block_size)
    del factor
    if settings.refine_rounds:
        damped = full.clone()
        damped.diagonal().add_(damping * full.diagonal().mean())
    for _ in range(settings.refine_rounds):
        codes = _descend(values, codes, damped, order, grid, settings.block_size)
        grid = _refit_scales(values, codes, damped, grid, scale_dtype)
    result = QuantizedWeight(
        scheme=scheme,
        codes=store_codes(codes, scheme.weights),
        scale=grid.scale.T.contiguous(),
        zero_point=zero,
    )
    return result, _info(values, result, full, damping, dead)


def revive_dead_columns(hessian: Tensor) -> tuple[Tensor, int]:
    """The matrix with the mean of its other diagonal entries in place of zeros, and how many those
    are. A copy only where there are some.

    The rest of such a row and column is zero, so nothing is propagated into or out of it: the
    column is rounded to nearest.
    """
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    num_dead = int(dead.sum())
    if not num_dead:
        return hessian, 0
    alive = diagonal[~dead]
    revived = hessian.clone()
    revived.diagonal().add_(torch.where(dead, alive.mean() if len(alive) else 1.0, 0.0))
    return revived, num_dead


def _importance(hessian: Tensor, settings: GPTQSettings) -> Tensor | None:
    return hessian.diagonal() if settings.scale_search else None


def _scales(
    weight: Tensor,
    hessian: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    settings: GPTQSettings,
) -> tuple[Tensor, Tensor | None]:
    """Scales fixed before any error is propagated, on the unpermuted weight."""
    if settings.scale_search:
        return search_scales(weight, scheme, scale_dtype, hessian.diagonal())
    return min_max_qparams(weight, scheme, scale_dtype)


def _inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """Upper Cholesky factor of (H + damping * mean(diag) * I)^-1 in float32, and the damping used.

    H and the factor are in visiting order, `hessian` is not. None when no rung of the ladder gives
    a finite factor. At most three matrices of that size are made, as they may be gigabytes.
    """
    mean = float(hessian.diagonal().mean())
    rungs = [damping * 10**step for step in range(6) if damping * 10**step <= 1.0] or [damping]
    backwards = order.flip(0)
    for rung in rungs:
        for dtype in (torch.float32, torch.float64):
            damped = hessian[backwards[:, None], backwards].to(dtype)
            damped.diagonal().add_(rung * mean)
            factor = _try_factor(damped)
            if factor is not None:
                return factor.float(), rung
    return None, rungs[-1]


def _try_factor(reversed_matrix: Tensor) -> Tensor | None:
    """U, upper triangular, with U^T U = H^-1, for the reversal J H J; None unless it is finite.

    With J H J = L L^T, U = J L^-1 J: the inverse itself is never made, one factorization and one
    triangular solve do. The argument is overwritten.
    """
    lower, failed = torch.linalg.cholesky_ex(reversed_matrix)
    inverse = reversed_matrix.zero_()
    inverse.diagonal().fill_(1.0)
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    is_usable = (failed == 0) & torch.isfinite(inverse.sum())
    return inverse.flip(0, 1).contiguous() if bool(is_usable) else None


def _propagate(
    weight: Tensor, factor: Tensor, order: Tensor, grid: Grid, block_size: int
) -> Tensor:
    """The GPTQ pass (algorithm 1); columns are visited in `order`. Returns codes [O, I], float32.

    `factor` is in visiting order. Inside a block errors go to the block's own columns at once and
    to all later ones by one matrix product at its end. Columns of the weight are rows here (a
    column is then one piece of memory).
    """
    remaining = weight.T[order].contiguous()
    codes, groups = torch.empty_like(remaining), grid.groups(order)
    for start, end in _blocks(remaining, block_size):
        block, local = remaining[start:end], factor[start:end, start:end]
        codes[start:end], errors = sweep(block, local, groups[start:end], grid, None)
        remaining[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return codes[torch.argsort(order)].T.contiguous()


def sweep(
    block: Tensor, local: Tensor, groups: Tensor, grid: Grid, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`sweep_reference`, by the kernel where there is a GPU and triton."""
    if block.is_cuda and importlib.util.find_spec("triton") is not None:
        # Not at the top: triton is on no machine without a GPU.
        from quant.methods.columns_kernel import launch_sweep

        return launch_sweep(block, local, groups, grid, present)
    return sweep_reference(block, local, groups, grid, present)


def _blocks(columns: Tensor, block_size: int) -> list[tuple[int, int]]:
    """(start, end) of the lazy updates; on a GPU no longer than its kernel takes."""
    size, total = min(block_size, KERNEL_COLUMNS) if columns.is_cuda else block_size, len(columns)
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def _descend(
    weight: Tensor, codes: Tensor, hessian: Tensor, order: Tensor, grid: Grid, block_size: int
) -> Tensor:
    """One sweep of coordinate descent on E H E^T: each column takes its best code given the rest.

    `gradient` is (E H)^T in visiting order; a column's best real value is its present one plus
    gradient / diag(H). Columns of the weight are rows here, as in `_propagate`.
    """
    permuted = hessian[order[:, None], order].contiguous()
    values = grid.values(codes).T[order].contiguous()
    gradient = permuted @ (weight.T[order] - values)
    result, groups = torch.empty_like(values), grid.groups(order)
    for start, end in _blocks(values, block_size):
        slope, local = gradient[start:end], permuted[start:end, start:end]
        present = values[start:end]
        result[start:end], steps = sweep(slope, local, groups[start:end], grid, present)
        gradient[end:].addmm_(permuted[start:end, end:].T, steps, alpha=-1)
    return result[torch.argsort(order)].T.contiguous()


def _refit_scales(
    weight: Tensor, codes: Tensor, hessian: Tensor, grid: Grid, scale_dtype: torch.dtype
) -> Grid:
    """The grid with least-squares scales for these codes, row by row where that lowers the error.

    For fixed codes C the row error is quadratic in its G scales: (C^T H C) s = C^T H w.
    """
    shifted = codes
    if grid.zero_point is not None:
        width = codes.shape[1] // len(grid.zero_point)
        shifted = codes - grid.zero_point.T.float().repeat_interleave(width, 1)
    solution = _solve_scales(weight, shifted, hessian, len(grid.scale)).T.contiguous()
    usable = torch.isfinite(solution) & (solution > 0) & ~grid.is_zero
    wanted = torch.where(usable, within(solution, scale_dtype), grid.scale.float())
    trial = replace(grid, scale=round_scale(wanted, scale_dtype))
    before = _row_error(weight - grid.values(codes), hessian)
    better = _row_error(weight - trial.values(codes), hessian) < before
    return replace(grid, scale=torch.where(better, trial.scale, grid.scale))


def _solve_scales(weight: Tensor, shifted: Tensor, hessian: Tensor, groups: int) -> Tensor:
    """Scales [O, G] of least error; a tiny ridge keeps all-zero groups solvable."""
    rows, columns = shifted.shape
    width = columns // groups
    normal = torch.empty(rows, groups, groups, device=shifted.device)
    for g in range(groups):
        part = slice(g * width, (g + 1) * width)
        spread = shifted[:, part] @ hessian[part]
        normal[:, g] = (spread * shifted).reshape(rows, groups, width).sum(-1)
    target = ((weight @ hessian) * shifted).reshape(rows, groups, width).sum(-1)
    ridge = normal.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-30) * 1e-7
    normal = normal.double() + torch.diag_embed(ridge[:, None].expand(rows, groups).double())
    solution, _ = torch.linalg.solve_ex(normal, target.double()[..., None])
    scales: Tensor = solution[..., 0].float()
    return scales


def _row_error(error: Tensor, hessian: Tensor) -> Tensor:
    """diag(E H E^T), [O]."""
    return ((error @ hessian) * error).sum(-1)


def _info(
    weight: Tensor, result: QuantizedWeight, hessian: Tensor, damping: float | None, dead: int
) -> GPTQInfo:
    return GPTQInfo(
        damping=damping,
        fallback=damping is None,
        dead_columns=dead,
        loss=relative_output_error(weight, result, hessian),
    )


def relative_output_error(weight: Tensor, result: QuantizedWeight, hessian: Tensor) -> float:
    """tr(E H E^T) / tr(W H W^T) with E = W - what is stored; 0 for an all-zero weight."""
    error = weight.float() - dequantize(result).float()
    total = _row_error(weight.float(), hessian).sum()
    return float(_row_error(error, hessian).sum() / total) if total > 0 else 0.0
