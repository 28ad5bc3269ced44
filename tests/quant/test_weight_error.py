"""The error that a report gives for a module has no size of weights at which it fails."""

from __future__ import annotations

import pytest
import torch

from quant.artifact.scheme import preset
from quant.layer_job import weight_error
from quant.methods.rtn import rtn


@pytest.mark.parametrize("size", [2.0**-80, 2.0**-10, 1.0, 2.0**66, 2.0**122])
def test_the_error_does_not_depend_on_the_size_of_the_weights(size: float) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)) / 4
    plain = weight_error(rtn(weight, preset("w8a8"), torch.float32), weight)
    assert 0 < plain < 0.01
    assert weight_error(
        rtn(weight * size, preset("w8a8"), torch.float32), weight * size
    ) == pytest.approx(plain, rel=1e-5)


def test_zeros_have_no_error() -> None:
    weight = torch.zeros(8, 64)
    assert weight_error(rtn(weight, preset("w8a8"), torch.float32), weight) == 0
