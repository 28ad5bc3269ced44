"""GPTQ: better than rounding, robust to bad Hessians, deterministic, and honest about itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quant.methods.gptq as gptq_module
import quant.methods.refine as refine_module
from quant.artifact.layout import dequantize
from quant.artifact.scheme import Scheme, WeightScheme, preset, with_group_size
from quant.methods.columns import Grid
from quant.methods.gptq import GPTQSettings, gptq, relative_output_error
from quant.methods.rtn import rtn

SYM = with_group_size(preset("w4a16"), 32)
ASYM = Scheme(
    layout="pack-quantized",
    weights=WeightScheme(num_bits=4, kind="int", symmetric=False, strategy="group", group_size=32),
)
CHANNEL = with_group_size(preset("w4a16"), None)
PLAIN = GPTQSettings(act_order=False, scale_search=False, refine_rounds=0)


def problem(rows: int = 48, columns: int = 128, tokens: int = 600) -> tuple[torch.Tensor, ...]:
    """A weight, correlated inputs [N, I] with a few large channels, and their Hessian."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(tokens, columns, generator=generator) @ mix
    inputs = inputs * (1 + 4 * torch.rand(columns, generator=generator) ** 4)
    return weight, inputs, inputs.T @ inputs


@pytest.mark.parametrize("scheme", [SYM, ASYM, CHANNEL, preset("w8a8")], ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_part_lowers_the_output_error(scheme: Scheme, dtype: torch.dtype) -> None:
    weight, inputs, hessian = problem()
    original = weight.clone(), hessian.clone()
    errors = [relative_output_error(weight, rtn(weight, scheme, dtype), hessian)]
    for settings in (PLAIN, GPTQSettings(refine_rounds=0), GPTQSettings()):
        result, info = gptq(weight, hessian, scheme, dtype, settings)
        output, exact = inputs @ dequantize(result).float().T, inputs @ weight.T
        measured = float((output - exact).square().sum() / exact.square().sum())
        assert info.loss == pytest.approx(measured, rel=1e-2)
        assert (info.damping, info.fallback, info.dead_columns) == (settings.damping, False, 0)
        errors.append(measured)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.6 * errors[0]
    assert torch.equal(weight, original[0])
    assert torch.equal(hessian, original[1])


def test_first_column_is_rounded_and_its_error_pushed_on() -> None:
    """Algorithm 1 by hand: two columns, no act-order, one group."""
    weight = torch.tensor([[0.45, 1.0]])
    hessian = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    settings = GPTQSettings(damping=1e-9, act_order=False, scale_search=False, refine_rounds=0)
    result, _ = gptq(weight, hessian, CHANNEL, torch.float32, settings)
    scale = float(result.scale)
    first = round(0.45 / scale)
    moved = 1.0 + (0.45 - first * scale) * (1.0 / 2.0)
    assert result.codes.tolist() == [[first, min(7, round(moved / scale))]]


def test_lazy_blocks_change_nothing_but_rounding() -> None:
    weight, _, hessian = problem()
    small, large = (
        gptq(weight, hessian, SYM, torch.float32, GPTQSettings(block_size=size))[1].loss
        for size in (8, 4096)
    )
    assert small == pytest.approx(large, rel=0.02)


@pytest.mark.parametrize("scheme", [SYM, ASYM], ids=lambda s: s.label)
def test_blocks_lie_in_memory_as_the_kernel_reads_them(
    monkeypatch: pytest.MonkeyPatch, scheme: Scheme
) -> None:
    """A row of a block, of scales and of zero points is one piece: no stride is passed for them."""
    plain, seen = gptq_module.sweep, list[bool]()

    def checked(
        block: Tensor, local: Tensor, groups: Tensor, grid: Grid, present: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        read = [block, groups, grid.scale, grid.zero_point, grid.is_zero, present]
        assert all(tensor.is_contiguous() for tensor in read if tensor is not None)
        assert local.stride(1) == 1
        seen.append(present is None)
        return plain(block, local, groups, grid, present)

    monkeypatch.setattr(gptq_module, "sweep", checked)
    monkeypatch.setattr(refine_module, "sweep", checked)
    weight, _, hessian = problem()
    gptq(weight, hessian, scheme, torch.bfloat16, GPTQSettings(block_size=32))
    assert seen == [True] * 4 + [False] * 8


def test_rows_are_independent() -> None:
    """Modules that share an input may be stacked: q|k|v in one call."""
    weight, _, hessian = problem()
    together, _ = gptq(weight, hessian, SYM, torch.float32, GPTQSettings())
    apart = [gptq(w, hessian, SYM, torch.float32, GPTQSettings())[0] for w in weight.split(16)]
    same = (together.codes == torch.cat([part.codes for part in apart])).float().mean()
    assert float(same) > 0.995  # a tie may fall differently in another matrix shape


def test_same_bits_every_time() -> None:
    weight, _, hessian = problem()
    first, second = (gptq(weight, hessian, SYM, torch.float32, GPTQSettings())[0] for _ in "ab")
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale, second.scale)


@pytest.mark.parametrize("act_order", [False, True])
def test_dead_columns_are_rounded_not_zeroed(act_order: bool) -> None:
    weight, inputs, _ = problem()
    inputs[:, [3, 40, 77]] = 0
    settings = GPTQSettings(act_order=act_order, scale_search=False, refine_rounds=0)
    result, info = gptq(weight, inputs.T @ inputs, SYM, torch.float32, settings)
    assert info.dead_columns == 3
    nearest = rtn(weight, SYM, torch.float32)
    assert torch.equal(result.codes[:, [3, 40, 77]], nearest.codes[:, [3, 40, 77]])


def test_an_input_that_was_never_seen_is_rounded_to_nearest() -> None:
    weight, _, hessian = problem()
    settings = GPTQSettings(scale_search=False, refine_rounds=0)
    result, info = gptq(weight, torch.zeros_like(hessian), SYM, torch.float32, settings)
    assert info.dead_columns == 128
    assert torch.equal(result.codes, rtn(weight, SYM, torch.float32).codes)


@pytest.mark.parametrize("tokens", [1, 8])
def test_rank_deficient_hessians_need_no_help(tokens: int) -> None:
    """One short sample, or the same one 64 times: fewer tokens than inputs."""
    weight, inputs, _ = problem()
    few = inputs[:tokens].repeat(64, 1)
    result, info = gptq(weight, few.T @ few, SYM, torch.float32, GPTQSettings())
    assert not info.fallback
    assert bool(torch.isfinite(dequantize(result)).all())


def test_damping_climbs_and_then_falls_back() -> None:
    weight, _, hessian = problem()
    eye, mean = torch.eye(128), hessian.diagonal().mean()
    lowest = torch.linalg.eigvalsh(hessian)[0]
    indefinite = hessian - (lowest + 0.03 * mean) * eye  # .01 is too little, .1 is enough
    result, info = gptq(weight, indefinite, SYM, torch.float32, GPTQSettings(damping=0.01))
    assert (info.fallback, info.damping) == (False, pytest.approx(0.1))
    hopeless = eye + 100 * (torch.ones(128, 128) - eye)
    result, info = gptq(weight, hopeless, SYM, torch.float32, GPTQSettings(scale_search=False))
    assert (info.fallback, info.damping) == (True, None)
    assert torch.equal(result.codes, rtn(weight, SYM, torch.float32).codes)


def test_scale_is_in_its_stored_dtype_before_codes_are_chosen() -> None:
    """Rounding the reconstruction again with the stored scales gives the same codes back."""
    weight, _, hessian = problem()
    result, _ = gptq(weight, hessian, SYM, torch.bfloat16, GPTQSettings())
    values = dequantize(result).float()
    scale = result.scale.float().repeat_interleave(32, 1)
    assert torch.equal((values / scale).round().to(torch.int8), result.codes)
