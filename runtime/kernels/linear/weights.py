"""What a linear kernel holds: a weight repacked once for one device class and compute type."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quant.artifact.scheme import ActivationScheme
from runtime.kernels.w4a16 import W4A16Weight
from runtime.kernels.w8a8 import W8A8Weight
from runtime.kernels.w8a16 import W8A16Weight
from runtime.kernels.workspace import KernelOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeight:
    """A plain matrix in the compute type: [out, in], or [in, out] where `is_transposed`.

    options: what our own kernels need; None where torch's product serves every number of rows.
    """

    matrix: Tensor
    is_transposed: bool
    options: KernelOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInt4Weight:
    """Symmetric 4-bit groups for torch's CPU kernel, and the artifact's words beside them.

    tiles: the kernel's own order. scale_zeros: [in / group_size, out, 2] bfloat16, zeros all 0.
    words: [out, in / 8] int32 as `layout.pack` makes them; scale: [out, in / group_size].
    """

    tiles: Tensor
    scale_zeros: Tensor
    words: Tensor
    scale: Tensor
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicWeight:
    """Channel-wise codes met by inputs that are quantized on the fly, one scale per token.

    codes: [out, in] int8 where `is_integer` (products are summed in int32), else the same numbers
    as a DenseWeight in a floating type. scale: [out] float32.
    """

    codes: Tensor | DenseWeight
    scale: Tensor
    activations: ActivationScheme

    @property
    def is_integer(self) -> bool:
        """The codes meet in an integer matmul."""
        return isinstance(self.codes, Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedInputWeight:
    """A dequantized weight met by inputs rounded to the codes they would have: the meaning of
    w4a8 and fp8-block, at the speed of a dense product. No kernel multiplies its codes."""

    dense: DenseWeight
    activations: ActivationScheme


PackedWeight = (
    DenseWeight
    | PackedInt4Weight
    | DynamicWeight
    | RoundedInputWeight
    | W4A16Weight
    | W8A16Weight
    | W8A8Weight
)
