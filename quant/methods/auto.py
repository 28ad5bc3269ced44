"""The choice among methods: by the error of the module's outputs on inputs that no method has seen.

Pure: weights and inputs in, an error out. Knows no methods by name.
"""

from __future__ import annotations

from torch import Tensor

from quant.artifact.layout import QuantizedWeight, dequantize, fake_quantize_activations


def output_error(weight: Tensor, stored: QuantizedWeight, inputs: Tensor) -> float:
    """Norm of the outputs' error over that of the outputs, on `inputs` [N, in].

    Inputs are rounded as the runtime will round them, the outputs of `weight` [out, in] are not.
    0 where the outputs are all zero.
    """
    exact = inputs.float()
    act = stored.scheme.activations
    seen = exact if act is None else fake_quantize_activations(exact, act)
    wanted = exact @ weight.float().T
    size = float(wanted.norm())
    return float((seen @ dequantize(stored).float().T - wanted).norm()) / size if size else 0.0
