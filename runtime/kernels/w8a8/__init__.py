"""8-bit weights times 8-bit inputs, int8 and FP8 (e4m3) alike: scales per channel and per token.

int8 sums are exact integers, so every tile gives the same bits. FP8 sums are float32; the tensor
cores of sm_90 add e4m3 products with 14 bits, which is why partial sums leave them regularly.
The weights stay as they lie in the artifact, [out, in] at a byte each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.artifact.layout import FP8, QuantizedWeight
from quant.artifact.scheme import ActivationScheme
from runtime.kernels.backend import KernelTarget, target_of, uses_triton
from runtime.kernels.dense.choose import (
    fixed_tile,
    gemv_tile,
    measured_tile,
    reserve,
    small_tile,
)
from runtime.kernels.dense.product import Product, Tile
from runtime.kernels.gate import Activation
from runtime.kernels.quantize import QuantizedActivations, code_dtype
from runtime.kernels.workspace import KernelOptions

__all__ = ["W8A8Weight", "can_pack_w8a8", "pack_w8a8", "unpack_w8a8", "w8a8_gate_up", "w8a8_linear"]

MANY_ROWS = 512
FEW_ROWS_FP8 = 128
# Columns that the tensor cores may add by themselves, in 14 bits: an error of 1.3e-3 at 4096 (what
# rounding the result to bfloat16 costs too), of 2.8e-3 at 14336. Beyond, the library moves sums to
# float32 on the way, at 10 to 20 % of its speed.
FAST_ACCUMULATION_LIMIT = 8192
# Two programs on a multiprocessor: one stores its tile while the other multiplies.
LARGE = Tile(kernel="tma", block_n=128, block_m=128, block_k=128, num_stages=3, per_sm=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8Weight:
    """codes [out, in] int8 or e4m3, scale [out] float32, how inputs are quantized."""

    codes_NK: Tensor
    scale_N: Tensor
    activations: ActivationScheme
    dtype: torch.dtype
    options: KernelOptions


def can_pack_w8a8(weight: QuantizedWeight, target: KernelTarget) -> bool:
    """True where the kernels serve this weight: 8-bit inputs, and e4m3 only where it exists."""
    activations = weight.scheme.activations
    if activations is None or weight.shape[1] % 16:
        return False
    return activations.kind == "int" or target.has_fp8


def pack_w8a8(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, options: KernelOptions
) -> W8A8Weight:
    """The weight on the device; `dtype` is the compute type, in which outputs come."""
    activations = weight.scheme.activations
    assert activations is not None
    if uses_triton(device):
        target, is_fp8 = target_of(device), activations.kind == "float"
        deterministic = options.deterministic
        reserve(
            options.workspace,
            weight.shape,
            lambda shape: tile_for(shape, is_fp8, dtype, deterministic, target),
        )
    return W8A8Weight(
        codes_NK=weight.codes.to(device=device, copy=True).contiguous(),
        scale_N=weight.scale.flatten().to(device=device, dtype=torch.float32, copy=True),
        activations=activations,
        dtype=dtype,
        options=options,
    )


def unpack_w8a8(weight: W8A8Weight) -> Tensor:
    """The matrix [out, in] float32 that the kernels multiply with."""
    return weight.codes_NK.float() * weight.scale_N[:, None]


def w8a8_linear(
    a: QuantizedActivations, weight: W8A8Weight, bias_N: Tensor | None = None
) -> Tensor:
    """[T, in] codes -> [T, out] in the compute type."""
    target = target_of(a.codes_TK.device)
    product = product_of(a, weight, bias_N)
    tile = choose_tile(product, target)
    if tile.kernel == "torch":
        return scaled_mm(product) if weight.codes_NK.dtype == FP8 else int_mm(product)
    from runtime.kernels.w8a8.launch import launch

    return launch(product, tile, target)


def w8a8_gate_up(
    a: QuantizedActivations, weight: W8A8Weight, act: Activation, activations: ActivationScheme
) -> QuantizedActivations | None:
    """act(gate) * up of a weight gate | up [2 n, in], quantized: [T, in] -> [T, n].

    Bit for bit what the product, `gate` and `quantize` give one after another. None where no tile
    does that.
    """
    target = target_of(a.codes_TK.device)
    product = product_of(a, weight)
    tile = choose_tile(product, target)
    if not can_gate(tile, product.shape):
        return None
    from runtime.kernels.w8a8.launch import launch_gate_up

    shape = (len(a.codes_TK), weight.codes_NK.shape[0] // 2)
    codes_TN = a.codes_TK.new_empty(shape, dtype=code_dtype(activations))
    scale_T = a.scale_T.new_empty(shape[0])
    launch_gate_up(product, act, tile, codes_TN, scale_T, target)
    return QuantizedActivations(codes_TK=codes_TN, scale_T=scale_T, dtype=a.dtype)


def can_gate(tile: Tile, shape: tuple[int, int, int]) -> bool:
    """The tile holds whole sums, and as many channels of gate as of up."""
    num_rows, num_channels, _ = shape
    if tile.kernel == "gemv":
        return num_rows == 1 and num_channels % 2 == 0
    return (
        tile.kernel == "gemm"
        and tile.splits == 1
        and 0 < num_rows <= MANY_ROWS
        and tile.block_n % 16 == 0
        and num_channels % tile.block_n == 0
    )


def product_of(
    a: QuantizedActivations, weight: W8A8Weight, bias_N: Tensor | None = None
) -> Product:
    return Product(
        x_MK=a.codes_TK,
        w_NK=weight.codes_NK,
        dtype=a.dtype,
        options=weight.options,
        row_scale_M=a.scale_T,
        channel_scale_N=weight.scale_N,
        bias_N=bias_N,
    )


def choose_tile(product: Product, target: KernelTarget) -> Tile:
    is_fp8 = product.w_NK.dtype == FP8
    deterministic = product.options.deterministic
    return tile_for(product.shape, is_fp8, product.dtype, deterministic, target)


def tile_for(
    shape: tuple[int, int, int],
    is_fp8: bool,
    dtype: torch.dtype,
    deterministic: bool,
    target: KernelTarget,
) -> Tile:
    """The tile of (M, N, K). int8 sums are exact, so any tile is a deterministic one."""
    num_rows, num_channels, width = shape
    if is_fp8 and deterministic:
        return fixed_tile(1, target)
    has_library = is_fp8 and _has_scaled_mm(shape, dtype, target)
    found = measured_tile("w8a8_fp8" if is_fp8 else "w8a8_int8", shape, target)
    if found is not None and (found.kernel != "torch" or has_library):
        return found
    if num_rows == 1 and (target.has_ptx or not is_fp8):
        return gemv_tile(width, 1)
    if num_rows <= (FEW_ROWS_FP8 if has_library else MANY_ROWS):
        return small_tile(num_rows, num_channels, width, 1, target)
    if has_library:
        return Tile(kernel="torch")
    if not target.has_large_shared:
        return small_tile(num_rows, num_channels, width, 1, target)
    return LARGE


def _has_scaled_mm(shape: tuple[int, int, int], dtype: torch.dtype, target: KernelTarget) -> bool:
    """Where the library multiplies e4m3 with scales per row and column."""
    is_aligned = shape[1] % 16 == 0 and shape[2] % 16 == 0
    return target.arch >= 90 and dtype == torch.bfloat16 and is_aligned


def scaled_mm(product: Product) -> Tensor:
    """The library's FP8 product with scales per row and column; bfloat16 results only."""
    assert product.row_scale_M is not None
    assert product.channel_scale_N is not None
    return torch._scaled_mm(
        product.x_MK,
        product.w_NK.T,
        scale_a=product.row_scale_M[:, None],
        scale_b=product.channel_scale_N[None, :],
        bias=product.bias_N,
        out_dtype=product.dtype,
        use_fast_accum=product.shape[2] <= FAST_ACCUMULATION_LIMIT,
    )


def int_mm(product: Product) -> Tensor:
    """The library's int8 product, scaled afterwards: exact on every GPU, four bytes a sum."""
    assert product.row_scale_M is not None
    assert product.channel_scale_N is not None
    sums = torch._int_mm(product.x_MK, product.w_NK.T).float()
    y = sums.mul_(product.row_scale_M[:, None]).mul_(product.channel_scale_N)
    y = y if product.bias_N is None else y.add_(product.bias_N)
    return y.to(product.dtype)
