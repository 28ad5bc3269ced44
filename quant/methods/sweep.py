"""Which code rounds a block of columns on this device."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from quant.methods.columns import Grid, sweep_halves


def sweep(
    block: Tensor, local: Tensor, groups: Tensor, grid: Grid, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`sweep_reference`, as the device does it best."""
    if block.is_cuda and importlib.util.find_spec("triton") is not None:
        # Not at the top: triton is on no machine without a GPU.
        from quant.methods.columns_kernel import launch_sweep

        return launch_sweep(block, local, groups, grid, present)
    return sweep_halves(block, local, groups, grid, present)
