"""Does a model that claims to be the original look quantized already?

A checkpoint that was quantized once and written back as floats (a dequantized GGUF, say) has few
distinct values in every group of columns, which weights as trained never have.
Nothing is wrong with quantizing it, but every figure is then measured against rounded weights. A
few small linears are looked at, so it costs next to nothing.
"""

from __future__ import annotations

from torch import Tensor

from quant.artifact.scheme import GROUP_SIZES
from quant.checkpoint import Source

FEW = 16  # distinct values that 4 bits can tell apart
SAMPLED_ROWS = 64
_SHARE = 0.9


def few_values_group(weight: Tensor) -> int | None:
    """The largest group size whose groups hold at most 16 distinct values nearly everywhere.

    weight [out, in]. None for weights as they come from training: in bfloat16, the coarsest type
    they are stored in, 32 of them hold about 30 distinct values.
    """
    rows = weight[:: max(1, weight.shape[0] // SAMPLED_ROWS)].float()
    for size in GROUP_SIZES:
        if rows.shape[1] % size:
            continue
        ordered = rows.reshape(-1, size).sort(-1).values
        distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(-1)
        varied = distinct > 2  # zeros and constants tell nothing
        if bool(varied.any()) and float((distinct[varied] <= FEW).float().mean()) >= _SHARE:
            return size
    return None


def rounded_weights_warning(source: Source) -> str | None:
    """What to tell the user when most of the sampled linears look quantized already."""
    modules = _sampled(source)
    sizes = [few_values_group(source.raw_tensor(f"{module}.weight")) for module in modules]
    found = [size for size in sizes if size is not None]
    if not found or 2 * len(found) < len(modules):
        return None
    return (
        f"the model looks quantized already: {len(found)} of {len(modules)} sampled linears have "
        f"at most {FEW} distinct values in groups of {max(found)} (4-bit weights written as "
        "floats?). Errors, KL and the verdict will be against these rounded weights, not against "
        "the model as it was trained; start from the original checkpoint if you have it"
    )


def _sampled(source: Source) -> list[str]:
    """The two smallest linears of the first, middle and last layer."""
    chosen = []
    shapes = source.module_shapes
    for index in sorted({0, source.num_layers // 2, source.num_layers - 1}):
        prefix = source.layer_prefix(index)
        inside = [n for n in shapes if n.startswith(prefix) and f"{n}.weight" in source.names]
        chosen += sorted(inside, key=lambda name: shapes[name][0] * shapes[name][1])[:2]
    return chosen
