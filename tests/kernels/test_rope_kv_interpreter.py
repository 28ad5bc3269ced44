"""The rotate-and-store kernel in Triton's interpreter against its reference, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.kernels.kv_store.reference import FP8
from runtime.kernels.rope_kv import rope_kv
from runtime.kernels.rope_kv.reference import rope_kv_reference
from runtime.model.rope import RopeSpec, cos_sin, cos_sin_table

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for the CPU")

NUM_BLOCKS, BLOCK_SIZE = 40, 8


def rope(rotary_dim: int, kind: str = "default") -> RopeSpec:
    return RopeSpec(kind=kind, theta=1e4, rotary_dim=rotary_dim, trained_positions=32, factor=2.0)  # type: ignore[arg-type]


def check(
    *,
    num_tokens: int = 5,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 32,
    rotary_dim: int = 32,
    dtype: torch.dtype = torch.float16,
    pool_dtype: torch.dtype = torch.float16,
    normed: bool = False,
) -> None:
    torch.manual_seed(num_tokens)
    fused = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    fused[-1, heads] = 0
    fused[0, -1] *= 1000
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    slots[num_tokens // 2 :: 7] = -1
    shape = (NUM_BLOCKS, 2, kv_heads, BLOCK_SIZE, head_dim)
    pools = [torch.zeros(shape).to(pool_dtype) for _ in range(2)]
    scales: list[Tensor | None] = [None, None]
    if pool_dtype == torch.int8:
        scales = [torch.full(shape[:-1], torch.nan) for _ in range(2)]
    arguments = {
        "num_heads": heads,
        "eps": 1e-5,
        "positions_T": torch.randint(0, 64, (num_tokens,)),
        "table": cos_sin_table(rope(rotary_dim), 64, "cpu") if rotary_dim else None,
        "q_norm": torch.rand(head_dim) + 0.5 if normed else None,
        "k_norm": torch.rand(head_dim) + 0.5 if normed else None,
        "head_scales_2K": torch.rand(2, kv_heads) * 0.02 + 0.005 if pool_dtype == FP8 else None,
    }
    found = fused.clone()
    rope_kv(found, pools[0], slots, token_scales=scales[0], **arguments)  # type: ignore[arg-type]
    wanted = rope_kv_reference(fused, pools[1], slots, token_scales=scales[1], **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(found[:, :heads], wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(found[:, heads:], fused[:, heads:]), "keys and values stay as they came"
    _check_pools(pools, scales)


def _check_pools(pools: list[Tensor], scales: list[Tensor | None]) -> None:
    """Equal but for codes that rounding in another order moved by one, and those are few."""
    found, wanted = (pool.float() for pool in pools)
    assert float((found != wanted).float().mean()) < 2e-3
    torch.testing.assert_close(
        found, wanted, rtol=0.13, atol=1.0 if pools[0].dtype == torch.int8 else 2e-3
    )
    if scales[0] is not None:
        torch.testing.assert_close(scales[0], scales[1], equal_nan=True)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 12, 0])
@pytest.mark.parametrize("pool_dtype", [torch.float16, FP8, torch.int8])
def test_widths_and_pools(pool_dtype: torch.dtype, rotary_dim: int, normed: bool) -> None:
    check(rotary_dim=rotary_dim, pool_dtype=pool_dtype, normed=normed)


@pytest.mark.parametrize("num_tokens", [1, 2, 300])
def test_numbers_of_tokens(num_tokens: int) -> None:
    check(num_tokens=num_tokens, heads=2, head_dim=16, rotary_dim=16)


def test_group_of_three() -> None:
    check(heads=9, kv_heads=3, head_dim=64, rotary_dim=64, dtype=torch.float32, pool_dtype=FP8)


def test_every_fp8_code_and_everything_between() -> None:
    """Storing what a code stands for gives that code; values between go to the nearest, even."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8).float()
    steps = torch.sort(codes[codes.isfinite()]).values
    x = torch.cat((codes, (steps[1:] + steps[:-1]) / 2, steps * 1.01, torch.tensor([1e9, -1e9])))
    x = torch.cat((x, torch.zeros(-len(x) % 32))).view(-1, 1, 32)
    fused = torch.cat((torch.zeros_like(x), x, x), dim=1)
    pool = torch.zeros(NUM_BLOCKS, 2, 1, BLOCK_SIZE, 32).to(FP8)
    rope_kv(
        fused,
        pool,
        torch.arange(len(x)),
        num_heads=1,
        eps=0.0,
        positions_T=torch.arange(len(x)),
        head_scales_2K=torch.ones(2, 1),
    )
    stored = pool[:, 1, 0].reshape(-1, 32)[: len(x)].float()
    wanted = x[:, 0].clamp(-448, 448).to(FP8).float()
    assert torch.equal(stored.nan_to_num(nan=999.0), wanted.nan_to_num(nan=999.0))


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic"])
def test_the_table_says_what_cos_sin_says(kind: str) -> None:
    table = cos_sin_table(rope(8, kind), 80, "cpu")
    cos, sin = cos_sin(rope(8, kind), torch.arange(80), torch.float32)
    assert torch.equal(table[:, :4], cos[:, 0, :4])
    assert torch.equal(table[:, 4:], sin[:, 0, 4:])
