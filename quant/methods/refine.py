"""Refinement of codes and scales: coordinate descent in turn with least-squares scales.

Descent over the codes as in Behdin et al., "QuantEase", arXiv 2309.01885, section 3; the scales of
fixed codes solve a least-squares problem of each row and are kept where that row's error falls.

One tensor is carried along: the gradient E H of the error. Every change of a column or a scale
updates it, so the error of each row is read off it, and a step of the scales is solved for from it.
Rows are independent. Columns of the weight are rows of the tensors here ([I, O]), in the weight's
own order; `order` is that of the visits.

Shape legend: O output rows, I input columns, C columns of a block, G groups, S = I / G.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quant.artifact.layout import round_scale
from quant.methods.columns import KERNEL_COLUMNS, Grid
from quant.methods.scales import within
from quant.methods.sweep import sweep

# Values of the scales' equations in float64 that are solved at once (512 MB).
_SOLVED_AT_ONCE = 1 << 26
# Of a difference of float32 sums that is a smaller share of them, too few digits are right.
LEAST_SHARE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Damped:
    """matrix [I, I] with `added` [I] on its diagonal, without a copy of it."""

    matrix: Tensor
    added: Tensor

    def times(self, columns: Tensor) -> Tensor:
        """The product with [I, O]."""
        return (self.matrix @ columns).addcmul_(self.added[:, None], columns)

    def block(self, own: Tensor) -> Tensor:
        """Rows and columns `own` [C] alone, [C, C]."""
        return self.matrix[own[:, None], own] + torch.diag(self.added[own])

    def spread(self, product: Tensor, own: Tensor, steps: Tensor) -> None:
        """product [I, O] -= columns `own` [C] of the matrix times `steps` [C, O]."""
        product.addmm_(self.matrix[own].T, steps, alpha=-1)
        product[own] -= self.added[own][:, None] * steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """Codes [I, O] float32, their grid and, if known, each row's squared error on the inputs [O]
    (without damping)."""

    codes: Tensor
    grid: Grid
    errors: Tensor | None = None


def refine(
    columns: Tensor,
    rounded: Rounded,
    damped: Damped,
    order: Tensor,
    scale_dtype: torch.dtype,
    *,
    rounds: int,
    block_size: int,
) -> Rounded:
    """`rounded` for the weight `columns` [I, O], bettered by so many rounds."""
    codes, grid = rounded.codes, rounded.grid
    values = grid.values(codes)
    gradient = damped.times(columns - values)
    for _ in range(rounds):
        descend(codes, values, gradient, damped, order, grid, block_size)
        values = grid.values(codes)
        grid, values, gradient = refit_scales(
            columns, codes, values, gradient, damped, grid, scale_dtype
        )
    return Rounded(codes=codes, grid=grid, errors=_row_errors(columns - values, gradient, damped))


def _row_errors(error: Tensor, gradient: Tensor, damped: Damped) -> Tensor | None:
    """Each row's squared error on the inputs [O], read off the gradient; None where hardly anything
    is left without the damping (most inputs dead, say), so that the rest would be noise."""
    added = (error.square() * damped.added[:, None]).sum(0)
    found = (error * gradient).sum(0) - added
    return None if bool(found.sum() < LEAST_SHARE * added.sum()) else found


def blocks(columns: Tensor, block_size: int) -> list[tuple[int, int]]:
    """(start, end) of the lazy updates; on a GPU no longer than its kernel takes."""
    size, total = min(block_size, KERNEL_COLUMNS) if columns.is_cuda else block_size, len(columns)
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def descend(
    codes: Tensor,
    values: Tensor,
    gradient: Tensor,
    damped: Damped,
    order: Tensor,
    grid: Grid,
    block_size: int,
) -> None:
    """One sweep over all columns: each takes its best code given the rest. `codes` and `gradient`
    are changed; `values`, what the codes were worth, is not.

    A column's best real value is its present one plus gradient / diag(H).
    """
    groups = grid.groups(order)
    for start, end in blocks(codes, block_size):
        own = order[start:end]
        found, steps = sweep(gradient[own], damped.block(own), groups[start:end], grid, values[own])
        codes[own] = found
        damped.spread(gradient, own, steps)


def refit_scales(
    columns: Tensor,
    codes: Tensor,
    values: Tensor,
    gradient: Tensor,
    damped: Damped,
    grid: Grid,
    scale_dtype: torch.dtype,
) -> tuple[Grid, Tensor, Tensor]:
    """Grid, values and gradient with least-squares scales in the rows where that lowers the error.

    For fixed codes C (less the zero point) the row error is quadratic in its G scales: the step of
    them solves (C^T H C) step = C^T (E H)^T.
    """
    zero = grid.zero_point
    shifted = codes if zero is None else (grid.grouped(codes) - zero[:, None].float()).flatten(0, 1)
    wanted = grid.scale.float() + _scale_steps(shifted, gradient, damped, grid)
    usable = torch.isfinite(wanted) & (wanted > 0) & ~grid.is_zero
    kept = torch.where(usable, within(wanted, scale_dtype), grid.scale.float())
    trial = replace(grid, scale=round_scale(kept, scale_dtype))
    trial_values = trial.values(codes)
    error = columns - trial_values
    trial_gradient = damped.times(error)
    after = error.mul_(trial_gradient).sum(0)
    better = after < ((columns - values).mul_(gradient)).sum(0)
    return (
        replace(grid, scale=torch.where(better, trial.scale, grid.scale)),
        torch.where(better, trial_values, values),
        torch.where(better, trial_gradient, gradient),
    )


def _scale_steps(shifted: Tensor, gradient: Tensor, damped: Damped, grid: Grid) -> Tensor:
    """Changes of the scales [G, O] that lower the error most; a tiny ridge keeps all-zero groups
    solvable."""
    groups, rows = grid.scale.shape
    normal = _normal_equations(shifted, damped, groups)
    target = (grid.grouped(shifted) * grid.grouped(gradient)).sum(1)
    steps = torch.empty_like(target)
    at_once = max(1, _SOLVED_AT_ONCE // groups**2)
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        upper = normal[:, :, part].permute(2, 0, 1).double()
        whole = upper + upper.triu(1).mT
        ridge = whole.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-30) * 1e-7
        whole.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        solved, _ = torch.linalg.solve_ex(whole, target[:, part].T.double()[..., None])
        steps[:, part] = solved[..., 0].T.float()
    return steps


def _normal_equations(shifted: Tensor, damped: Damped, groups: int) -> Tensor:
    """C^T H C of every row, [G, G, O]; only g <= h of [g, h] is filled, the rest is zero."""
    width, rows = len(shifted) // groups, shifted.shape[1]
    normal = shifted.new_zeros(groups, groups, rows)
    for g in range(groups):
        start, end = g * width, (g + 1) * width
        own = shifted[start:end]
        product = damped.matrix[start:, start:end] @ own
        product[:width].addcmul_(damped.added[start:end, None], own)
        product *= shifted[start:]
        normal[g, g:] = product.view(groups - g, width, rows).sum(1)
    return normal
