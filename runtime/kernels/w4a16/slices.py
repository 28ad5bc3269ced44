"""Products of many rows: the weight is dequantized slice by slice for a library's product.

All slices lie in one buffer, one after another. It fits the L2 cache: what dequantizing writes, the
product reads from there, and the next slice takes its place before much of it has gone to memory.
A whole gate | up and its product would also be the largest tensors of a step by far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.backend import target_of
from runtime.kernels.w4a16.pack import W4A16Weight

SLICE_ROWS = 4096
WIDEST = 8192  # weights of wider rows are dequantized whole
BLOCK_N = 64  # weight rows of a program
BLOCK_T, BLOCK_W = 4, 512  # tokens and columns of a program


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """matrix [rows, in]: rows from `first` of a weight, from `turn` on those `jump` further."""

    matrix: Tensor
    first: int
    turn: int
    jump: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gating:
    """pairs [T, 2 n], gate | up, whose act(gate) * up goes to out [T, n] (rows may lie apart)."""

    pairs: Tensor
    out: Tensor


def dequantized(weight: W4A16Weight) -> Tensor:
    """`unpack_w4a16` by one kernel: the matrix [out, in] in the compute type."""
    matrix = torch.empty(weight.shape, dtype=weight.dtype, device=weight.codes.device)
    _launch(weight, _Slice(matrix=matrix, first=0, turn=len(matrix)))
    return matrix


def multiply_in_slices(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, out_TN: Tensor, *, adds: bool = False
) -> None:
    """Fill `out` [T, out] from x [T, in], or add to it (then without a bias).

    Slices of a weight with wide rows that fit the cache would be too thin to give every
    multiprocessor a tile: it is dequantized whole.
    """
    assert not adds or bias is None
    out, width = weight.shape
    rows = min(SLICE_ROWS if width <= WIDEST else out, out)
    buffer = _empty(x_TK, rows, width)
    for first in range(0, out, rows):
        matrix = buffer[: out - first]
        columns = slice(first, first + len(matrix))
        _launch(weight, _Slice(matrix=matrix, first=first, turn=len(matrix)))
        if adds:
            out_TN[:, columns].addmm_(x_TK, matrix.T)
        elif bias is None:
            torch.mm(x_TK, matrix.T, out=out_TN[:, columns])
        else:
            torch.addmm(bias[columns], x_TK, matrix.T, out=out_TN[:, columns])


def gated_in_slices(x_TK: Tensor, weight: W4A16Weight, act: str) -> Tensor:
    """act(gate) * up of a weight gate | up: [T, in] -> [T, out / 2].

    A slice has as many rows of the one as of the other. One launch gates a slice's product and
    dequantizes the next slice.
    """
    num_tokens, width, half = len(x_TK), weight.shape[1], weight.shape[0] // 2
    step = min(SLICE_ROWS // 2, half)
    buffer, products = _empty(x_TK, 2 * step, width), _empty(x_TK, num_tokens * 2 * step)
    out_TN = _empty(x_TK, num_tokens, half)
    gating = None
    for first in range(0, half, step):
        num = min(step, half - first)
        matrix = buffer[: 2 * num]
        rows = _Slice(matrix=matrix, first=first, turn=num, jump=half - num)
        _launch(weight, rows, gating, act)
        pairs = products[: num_tokens * 2 * num].view(num_tokens, 2 * num)
        torch.mm(x_TK, matrix.T, out=pairs)
        gating = _Gating(pairs=pairs, out=out_TN[:, first : first + num])
    _launch(weight, None, gating, act)
    return out_TN


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _launch(
    weight: W4A16Weight,
    rows: _Slice | None,
    gating: _Gating | None = None,
    act: str | None = None,
) -> None:
    from runtime.kernels.w4a16.slice_kernel import slice_kernel

    target = target_of(weight.codes.device)
    num_tokens, width, stride = (0, 0, 0)
    if gating is not None:
        (num_tokens, width), stride = gating.out.shape, gating.out.stride(0)
    num_rows = 0 if rows is None else len(rows.matrix)
    gate_programs = -(-num_tokens // BLOCK_T) * -(-width // BLOCK_W)
    slice_kernel[(gate_programs + -(-num_rows // BLOCK_N) * weight.num_blocks,)](
        *((None, None) if gating is None else (gating.pairs, gating.out)),
        *(num_tokens, width, stride, gate_programs),
        *(weight.codes, weight.scale, weight.zero_point),
        *(
            (None, 0, 0, 0, 0)
            if rows is None
            else (rows.matrix, rows.first, num_rows, rows.turn, rows.jump)
        ),
        *(weight.shape[1], weight.num_blocks),
        ACT=act,
        BLOCK_T=BLOCK_T,
        BLOCK_W=BLOCK_W,
        BLOCK_N=BLOCK_N,
        BLOCK_K=weight.block_k,
        GROUPS=weight.groups_per_block,
        USE_PTX=target.has_ptx,
        PDL=target.has_pdl,
        num_warps=4,
        **({"launch_pdl": True} if target.has_pdl else {}),
    )
