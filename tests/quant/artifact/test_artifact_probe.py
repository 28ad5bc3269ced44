"""The probe: equal numbers pass, wrong or missing ones never do."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from quant.artifact.errors import IntegrityError
from quant.artifact.probe import (
    ProbePrompt,
    compare,
    expected_entries,
    make_probe,
    tolerances,
)
from quant.artifact.scheme import DENSE, PRESETS

PROMPTS = [[1, 2], [3, 4, 5]]
LOGITS = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)) * 3
PROBE = make_probe(PROMPTS, LOGITS, [PRESETS["w4a16"]])


def test_the_same_logits_pass_whatever_their_offset() -> None:
    result = compare(PROBE, expected_entries(PROBE, LOGITS + 7))
    assert result.passed
    assert result.difference < 1e-5
    assert result.top1_agreement == 1
    assert "probe passed" in str(result)


def test_tolerance_follows_scheme_and_precision() -> None:
    shifted = expected_entries(PROBE, LOGITS)
    shifted = [[value + 0.1 for value in row] for row in shifted]
    assert not compare(PROBE, shifted).passed
    assert compare(PROBE, shifted, is_float32=False).passed
    assert compare(PROBE, shifted, has_fp8_kv=True).passed
    dynamic = make_probe(PROMPTS, LOGITS, [DENSE, PRESETS["w8a8"]])
    assert compare(dynamic, shifted).passed
    assert tolerances([DENSE]) == tolerances([PRESETS["w8a16"]]) < tolerances([PRESETS["fp8"]])
    assert tolerances([DENSE], has_fp8_kv=True) == tolerances([PRESETS["fp8"]])


def test_another_model_fails_even_loosely() -> None:
    other = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)) * 3
    for scheme in (PRESETS["w4a16"], PRESETS["w8a8"]):
        probe = make_probe(PROMPTS, LOGITS, [scheme])
        result = compare(probe, expected_entries(probe, other), is_float32=False)
        assert not result.passed
        assert result.worst > 1
        assert "probe FAILED" in str(result)


def test_nan_never_passes() -> None:
    """B13: one NaN among the logits stops the start."""
    broken = LOGITS.clone()
    broken[1, 7] = math.nan
    result = compare(PROBE, expected_entries(PROBE, broken))
    assert not result.passed
    assert math.isnan(result.difference)
    broken[1, 7] = math.inf
    assert not compare(PROBE, expected_entries(PROBE, broken)).passed


def test_records_that_make_no_sense() -> None:
    with pytest.raises(IntegrityError, match="other prompts"):
        compare(PROBE, [[0.0]])
    with pytest.raises(ValidationError):
        ProbePrompt(token_ids=(1,), top_ids=(1, 2), top_logprobs=(0.0,))
    with pytest.raises(ValidationError):
        make_probe(PROMPTS, LOGITS * math.nan, [DENSE])
