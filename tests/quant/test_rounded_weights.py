"""The warning for a reference model that is itself quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quant.api import prepare
from quant.artifact.layout import dequantize, min_max_qparams, quantize
from quant.artifact.scheme import preset, with_group_size
from quant.rounded_weights import few_values_group, rounded_weights_warning
from quant.source import open_source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_trained_weights_are_not_suspected(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    assert few_values_group(weight.to(dtype)) is None
    assert few_values_group(torch.zeros(64, 512)) is None


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bit_weights_are_found_with_their_group(group: int) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    scheme = with_group_size(preset("w4a16"), group)
    assert scheme.weights is not None
    scale, zero = min_max_qparams(weight, scheme.weights, torch.float32)
    assert few_values_group(dequantize(quantize(weight, scale, zero, scheme))) == group


def test_the_plan_warns(tiny_model: Callable[..., Path], rounded_model: Path) -> None:
    assert rounded_weights_warning(open_source(str(tiny_model()))) is None
    model = rounded_model
    plan = prepare(str(model), "w8a16.yaml", overrides={"method": "rtn"}).plan
    assert any("looks quantized already: 4 of 4" in warning for warning in plan.warnings)
    dense = prepare(str(model), "none.yaml", overrides={}).plan
    assert not dense.warnings


def test_the_real_gguf_is_such_a_model(smollm2_gguf: Path) -> None:
    warning = rounded_weights_warning(open_source(str(smollm2_gguf)))
    assert warning is not None
    assert "groups of 32" in warning
