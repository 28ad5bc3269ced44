"""Products of prompts: by a kernel of our own on Hopper, else slice by slice by a library's.

Our own never writes a dequantized weight, and gates a product where it is; the library's is the
quicker product, which of very many rows makes up for dequantizing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.backend import KernelTarget, target_of
from runtime.kernels.w4a16.pack import ROWS, W4A16Weight
from runtime.kernels.w4a16.slices import gated_in_slices, multiply_in_slices

BLOCK_M, BLOCK_K = 128, 128
TILE_ROWS = 256  # rows of a weight in one tile; of gate | up half of them are up's
STAGES = 4
MOST_ROWS = 4096  # of inputs, but for gate | up
# Tiles of inputs that go through all weights together, so that they stay in the L2 meanwhile.
TILES_TOGETHER = {False: 16, True: 8}
WIDE = 8192


def multiply_many(
    x_TK: Tensor, weight: W4A16Weight, bias: Tensor | None, out_TN: Tensor, *, adds: bool = False
) -> None:
    """Fill `out` [T, out] from x [T, in], or add to it (then without a bias)."""
    if len(x_TK) <= MOST_ROWS and _serves(weight, target_of(x_TK.device)):
        launch_many(x_TK, weight, bias, out_TN, adds=adds)
    else:
        multiply_in_slices(x_TK, weight, bias, out_TN, adds=adds)


def gated_many(x_TK: Tensor, weight: W4A16Weight, act: str) -> Tensor:
    """act(gate) * up of a weight gate | up: [T, in] -> [T, out / 2]."""
    if not _serves_gated(weight, target_of(x_TK.device), act):
        return gated_in_slices(x_TK, weight, act)
    shape = (len(x_TK), weight.shape[0] // 2)
    out_TN = torch.empty(shape, dtype=x_TK.dtype, device=x_TK.device)
    launch_many(x_TK, weight, None, out_TN, act=act)
    return out_TN


def _serves(weight: W4A16Weight, target: KernelTarget) -> bool:
    """Whether the kernel can multiply by this weight on this card."""
    return (
        target.arch == 90
        and weight.group_size == BLOCK_K
        and weight.num_blocks % 2 == 0
        and weight.zero_point is None
        and weight.scale.dtype == weight.dtype
    )


def _serves_gated(weight: W4A16Weight, target: KernelTarget, act: str) -> bool:
    """Whether it can also gate: halves of whole sixteens, one activation."""
    return act == "silu" and weight.shape[0] % (2 * ROWS) == 0 and _serves(weight, target)


def launch_many(
    x_TK: Tensor,
    weight: W4A16Weight,
    bias: Tensor | None,
    out_TN: Tensor,
    *,
    act: str | None = None,
    adds: bool = False,
) -> None:
    """Fill `out` [T, out], or with `act` [T, out / 2], from x [T, in]; add to it if `adds`."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from runtime.kernels.w4a16.many_kernel import many_kernel

    (rows, width), target = weight.shape, target_of(x_TK.device)
    num_kb, sixteens = weight.num_blocks, TILE_ROWS // 2 // ROWS
    codes = weight.codes.view(weight.codes.shape[0], num_kb * ROWS, BLOCK_K // 4)
    m_tiles, n_tiles = -(-len(x_TK) // BLOCK_M), -(-rows // TILE_ROWS)
    many_kernel[(min(target.num_sms, m_tiles * n_tiles),)](
        TensorDescriptor.from_tensor(x_TK, [BLOCK_M, 64], NVMMASharedLayout(128, 16, rank=2)),
        TensorDescriptor.from_tensor(
            codes, [sixteens, ROWS, BLOCK_K // 4], NVMMASharedLayout(64, 16, rank=3)
        ),
        TensorDescriptor.from_tensor(
            weight.scale, [sixteens, 1, ROWS], NVMMASharedLayout(0, 16, rank=3)
        ),
        *(bias, out_TN, len(x_TK), out_TN.shape[1], num_kb, m_tiles, n_tiles),
        *(TILES_TOGETHER[width > WIDE], sixteens if act is None else rows // 2 // ROWS),
        STAGES=STAGES,
        ACT=act,
        ONTO=adds,
        PDL=target.has_pdl,
        num_warps=4,
        **({"launch_pdl": True} if target.has_pdl else {}),
    )
