"""One block of columns, rounded one after another: what GPTQ and coordinate descent have in common.

`sweep_reference` is the definition, in torch. `quant.methods.sweep` picks what computes it: on a
GPU with triton the one launch of `quant.methods.columns_kernel`, where the loop here makes ten per
column; on a CPU `sweep_halves`. Columns of the weight are rows of the tensors here, so that a
column is one piece of memory.

Shape legend: O output rows, I input columns, C columns of the block, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.artifact.scheme import WeightScheme
from quant.methods.scales import decode, encode

# The kernel holds a block's columns in registers.
KERNEL_COLUMNS = 128
# So many columns go one by one on a CPU; longer blocks are halved.
_FEW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values a weight may take. scale, zero_point, is_zero: [G, O], a group's rows adjacent.

    is_zero marks groups of nothing but zeros. They stay zero: a padded or pruned channel must not
    be put to use.
    """

    scheme: WeightScheme
    scale: Tensor
    zero_point: Tensor | None
    is_zero: Tensor

    def groups(self, columns: Tensor) -> Tensor:
        """The group each of `columns` belongs to, int32."""
        size = self.scheme.group_size
        found = torch.zeros_like(columns) if size is None else columns // size
        return found.to(torch.int32)

    def nearest(
        self, values: Tensor, group: int, *, has_zeros: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Codes of `values` [O] in that group, and what they reconstruct to; float32. has_zeros:
        False where the caller knows that no group is_zero."""
        scale, zero = self.scale[group], None
        if self.zero_point is not None:
            zero = self.zero_point[group]
        codes = encode(values, scale, zero, self.scheme)
        if has_zeros:
            codes = torch.where(self.is_zero[group], 0.0 if zero is None else zero.float(), codes)
        return codes, decode(codes, scale, zero)

    def values(self, codes: Tensor) -> Tensor:
        """What `codes` [I, O] reconstruct to, float32 [I, O]."""
        zero = None if self.zero_point is None else self.zero_point[:, None]
        return decode(self.grouped(codes), self.scale[:, None], zero).flatten(0, 1)

    def grouped(self, columns: Tensor) -> Tensor:
        """[I, O] seen as [G, I / G, O]."""
        return columns.view(len(self.scale), -1, columns.shape[1])


def sweep_halves(
    block: Tensor, local: Tensor, groups: Tensor, grid: Grid, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`sweep_reference` but for rounding: the second half sees the first by one matrix product, so
    that few columns at a time are in use and stay in the processor's caches."""
    codes, pushed = torch.empty_like(block), torch.empty_like(block)
    _sweep_into(codes, pushed, block, local, groups, grid, present)
    return codes, pushed


def _sweep_into(
    codes: Tensor,
    pushed: Tensor,
    block: Tensor,
    local: Tensor,
    groups: Tensor,
    grid: Grid,
    present: Tensor | None,
) -> None:
    """`sweep_halves` with its results in `codes` and `pushed`."""
    if len(block) <= _FEW:
        _sweep_few(codes, pushed, block, local, groups, grid, present)
        return
    half = (len(block) + 1) // 2
    one, two = slice(half), slice(half, None)
    first, second = (None, None) if present is None else (present[one], present[two])
    _sweep_into(codes[one], pushed[one], block[one], local[one, one], groups[one], grid, first)
    block[two].addmm_(local[one, two].T, pushed[one], alpha=-1)
    _sweep_into(codes[two], pushed[two], block[two], local[two, two], groups[two], grid, second)


def _sweep_few(
    codes: Tensor,
    pushed: Tensor,
    block: Tensor,
    local: Tensor,
    groups: Tensor,
    grid: Grid,
    present: Tensor | None,
) -> None:
    """`sweep_reference`, the same arithmetic in fewer passes and no new memory but the values'."""
    has_zeros = bool(grid.is_zero.any())
    for i, group in enumerate(groups.tolist()):
        code, change, left, own = codes[i], pushed[i], block[i], local[i, i]
        if present is None:
            found, value = grid.nearest(left, group, has_zeros=has_zeros)
            torch.sub(left, value, out=change).div_(own)
        else:
            target = (left / own).add_(present[i])
            found, value = grid.nearest(target, group, has_zeros=has_zeros)
            torch.sub(value, present[i], out=change)
        code.copy_(found)
        if i + 1 < len(block):
            block[i + 1 :].addr_(local[i, i + 1 :], change, alpha=-1)


def sweep_reference(
    block: Tensor, local: Tensor, groups: Tensor, grid: Grid, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes of a block of columns, and what each column pushes on: both [C, O] float32.

    Column i takes the code nearest to its target and changes the columns after it by
    -local[i, j] * pushed[i]. `block` [C, O] is used up. groups [C] int32.

    GPTQ (`present` is None): the target is block[i], the remaining weight, and the error over
    local[i, i] is pushed, `local` [C, C] being the Cholesky factor of the inverse Hessian.
    Coordinate descent: the target is present[i] + block[i] / local[i, i], `block` being the
    gradient and `local` the Hessian, and the change of the column is pushed.
    """
    codes, pushed = torch.empty_like(block), torch.empty_like(block)
    for i, group in enumerate(groups.tolist()):
        if present is None:
            codes[i], value = grid.nearest(block[i], group)
            pushed[i] = (block[i] - value) / local[i, i]
        else:
            codes[i], value = grid.nearest(present[i] + block[i] / local[i, i], group)
            pushed[i] = value - present[i]
        block[i + 1 :].addr_(local[i, i + 1 :], pushed[i], alpha=-1)
    return codes, pushed
