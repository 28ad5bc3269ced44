"""The gated activation between gate|up and down: act(gate) * up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional

from quant.artifact.scheme import ActivationScheme
from runtime.kernels.backend import target_of, uses_triton
from runtime.kernels.quantize import QuantizedActivations, code_dtype, quantize

Activation = Literal["silu", "gelu_tanh", "gelu"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}


@overload
def gate(gate_up: Tensor, act: Activation, activations: None = None) -> Tensor: ...
@overload
def gate(
    gate_up: Tensor, act: Activation, activations: ActivationScheme | None
) -> Tensor | QuantizedActivations: ...
def gate(
    gate_up: Tensor, act: Activation, activations: ActivationScheme | None = None
) -> Tensor | QuantizedActivations:
    """act(first half) * second half of the last dimension: [T, 2 n] -> [T, n].

    With `activations` the result, rounded to the input's type, comes quantized per token.
    """
    if uses_triton(gate_up.device):
        return _triton_gate(gate_up, act, activations)
    first, second = torch.chunk(gate_up, 2, dim=-1)
    product = _ACTIVATIONS[act](first).mul_(second)
    return product if activations is None else quantize(product, activations)


def _triton_gate(
    gate_up: Tensor, act: Activation, activations: ActivationScheme | None
) -> Tensor | QuantizedActivations:
    from runtime.kernels.gate.kernel import launch_gate

    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    dtype = gate_up.dtype if activations is None else code_dtype(activations)
    out = torch.empty(shape, dtype=dtype, device=gate_up.device)
    scale_T = None if activations is None else out.new_empty(shape[0], dtype=torch.float32)
    launch_gate(gate_up.contiguous(), act, out, scale_T, target_of(gate_up.device))
    if scale_T is None:
        return out
    return QuantizedActivations(codes_TK=out, scale_T=scale_T, dtype=gate_up.dtype)
