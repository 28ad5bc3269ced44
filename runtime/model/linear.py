"""One linear layer of the decoder: several checkpoint modules fused along their output rows.

Stacking rows is exact: a scale belongs to rows (channel) or to parts of rows (group). Where it
belongs to blocks of rows, whose last may not be full, what they stand for is stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.artifact.errors import SchemeError
from quant.artifact.layout import QuantizedWeight, dequantize
from quant.artifact.scheme import ActivationScheme
from runtime.kernels.gate import Activation
from runtime.kernels.linear import (
    PackedWeight,
    add_linear_,
    can_add,
    expected_activations,
    gated_linear,
    is_served_rounded,
    linear,
    linear_in_float32,
    pack_dense,
    pack_quantized,
    pack_rounded,
    reconstruct,
    share_dense,
)
from runtime.kernels.quantize import QuantizedActivations
from runtime.kernels.workspace import KernelOptions

Shard = QuantizedWeight | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """y = x W^T + b; the weight is packed for one compute type and device.

    label: the scheme's short name (`w4a16-g64`, `dense`). rows: output rows of each shard.
    """

    weight: PackedWeight
    bias: Tensor | None
    label: str
    rows: tuple[int, ...]

    @staticmethod
    def from_shards(
        shards: Sequence[Shard],
        biases: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        options: KernelOptions | None = None,
    ) -> Linear:
        """Fuse weights [out_i, in] (and biases [out_i]) into one linear of sum(out_i) rows.

        `options` are what our own kernels need on a device that Triton serves.
        Raises SchemeError when the shards do not share one scheme.
        """
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(shards)), "all shards have a bias or none has"
        weight, label = _pack(shards, dtype, device, options)
        bias = torch.cat(given).to(device=device, dtype=dtype) if given else None
        rows = tuple(shard.shape[0] for shard in shards)
        return Linear(weight=weight, bias=bias, label=label, rows=rows)

    @staticmethod
    def shared(matrix: Tensor, options: KernelOptions) -> Linear:
        """A linear over a matrix [out, in] that something else holds too: a tied embedding."""
        weight = share_dense(matrix, options)
        return Linear(weight=weight, bias=None, label="dense", rows=(matrix.shape[0],))

    @property
    def activations(self) -> ActivationScheme | None:
        """How the op before should quantize this linear's input; None: not at all."""
        return expected_activations(self.weight)

    def __call__(self, x: Tensor | QuantizedActivations) -> Tensor:
        """`x` [T, in], or its codes where `activations` asks for them -> [T, sum of rows]."""
        return linear(x, self.weight, self.bias)

    def gated(
        self,
        x: Tensor | QuantizedActivations,
        act: Activation,
        activations: ActivationScheme | None,
    ) -> Tensor | QuantizedActivations:
        """act(gate) * up of a gate | up linear, quantized by `activations` where the next asks."""
        return gated_linear(x, self.weight, self.bias, act, activations)

    def can_add(self, x: Tensor | QuantizedActivations) -> bool:
        """Whether the product with `x` can be added to a sum where it is made: `add_`."""
        return can_add(x, self.weight, self.bias)

    def add_(self, sum_TN: Tensor, x: Tensor) -> None:
        """sum_TN [T, sum of rows] += the product with `x` [T, in]."""
        add_linear_(sum_TN, x, self.weight)

    def in_float32(self, x: Tensor) -> Tensor:
        """`x` [T, in] -> [T, sum of rows] float32, without a bias."""
        assert self.bias is None
        return linear_in_float32(x, self.weight)

    def reconstruct(self) -> Tensor:
        """The matrix [sum of rows, in] float32 that the kernel really multiplies with."""
        return reconstruct(self.weight)


def _pack(
    shards: Sequence[Shard],
    dtype: torch.dtype,
    device: torch.device,
    options: KernelOptions | None,
) -> tuple[PackedWeight, str]:
    dense = [shard for shard in shards if isinstance(shard, Tensor)]
    quantized = [shard for shard in shards if isinstance(shard, QuantizedWeight)]
    labels = sorted({"dense"} if dense else set()) + sorted({q.scheme.label for q in quantized})
    if len(set(labels)) != 1:
        raise SchemeError(
            f"modules that run as one matmul have different schemes: {', '.join(labels)}; "
            "quantize q|k|v (and gate|up) alike"
        )
    if dense:
        matrix = dense[0] if len(dense) == 1 else torch.cat([shard.to(dtype) for shard in dense])
        return pack_dense(matrix, dtype, device, options), labels[0]
    if is_served_rounded(quantized[0].scheme):
        matrix = torch.cat([dequantize(shard) for shard in quantized])
        return pack_rounded(matrix, quantized[0].scheme, dtype, device, options), labels[0]
    return pack_quantized(_stack(quantized), dtype, device, options), labels[0]


def _stack(shards: Sequence[QuantizedWeight]) -> QuantizedWeight:
    if len(shards) == 1:
        return shards[0]
    zero_points = [shard.zero_point for shard in shards if shard.zero_point is not None]
    return QuantizedWeight(
        scheme=shards[0].scheme,
        codes=torch.cat([shard.codes for shard in shards]),
        scale=torch.cat([shard.scale for shard in shards]),
        zero_point=torch.cat(zero_points) if zero_points else None,
    )
