"""Paged attention and the KV store against their references, by example and by property."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.kernels.attention import PagedBatch, attention, plan_attention
from runtime.kernels.attention import plan as plan_module
from runtime.kernels.attention.reference import attention_reference
from runtime.kernels.kv_store import slot_rows, store_kv
from runtime.kernels.kv_store.reference import (
    FP8,
    quantize_kv,
    store_kv_reference,
    stored_kv,
)

KV_HEADS, HEAD_DIM = 2, 12
NUM_BLOCKS = 24


def make_pool(block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """All blocks NaN but the blank one at the end."""
    pool = torch.zeros(NUM_BLOCKS + 1, 2, KV_HEADS, block_size, HEAD_DIM, dtype=dtype)
    if dtype == FP8:
        pool.view(torch.uint8)[:NUM_BLOCKS] = 0x7F
    elif dtype == torch.int8:
        pool[:NUM_BLOCKS] = 77
    else:
        pool[:NUM_BLOCKS] = torch.nan
    return pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """What a quantized pool is stored with; `per_head` gives each head its own fp8 scale."""

    pair: tuple[float, float] = (1.0, 1.0)
    per_head: Tensor | None = None
    per_token: Tensor | None = None

    @property
    def call(self) -> dict[str, Any]:
        return {
            "kv_scales": None if self.per_head is not None else self.pair,
            "head_scales_2K": self.per_head,
            "token_scales": self.per_token,
        }

    @property
    def reference(self) -> dict[str, Any]:
        pair = torch.tensor(self.pair)[:, None].expand(2, KV_HEADS)
        heads = self.per_head if self.per_head is not None else pair
        return {"head_scales_2K": heads, "token_scales": self.per_token}


def scales_for(dtype: torch.dtype, pool: Tensor, kind: str = "pair") -> Scales:
    if dtype == torch.int8:
        per_token = torch.full(pool.shape[:-1], torch.nan)
        per_token[NUM_BLOCKS] = 0.0
        return Scales(per_token=per_token)
    if dtype != FP8:
        return Scales()
    if kind == "pair":
        return Scales(pair=(0.03, 0.02))
    return Scales(per_head=torch.rand(2, KV_HEADS) * 0.03 + 0.01)


def fill(pool: Tensor, seq_lens: list[int], seed: int, scales: Scales) -> Tensor:
    """Write every sequence's KV into scattered blocks; the tables [S, B], padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    block_size = pool.shape[3]
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = []
    for seq_len in seq_lens:
        table = [order.pop() for _ in range(-(-seq_len // block_size))]
        tables.append(table)
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size
                              for p in range(seq_len)])  # fmt: skip
        kv = torch.randn(seq_len, 2 * KV_HEADS, HEAD_DIM, generator=generator)
        store_kv(pool, slot_rows(slots, KV_HEADS, block_size), kv, **scales.call)
    width = max(len(table) for table in tables) + 1
    return torch.tensor([table + [0] * (width - len(table)) for table in tables])


def check(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    window: int | None = None,
    block_size: int = 4,
    groups: int = 3,
    dtype: torch.dtype = torch.float32,
    kind: str = "pair",
    seed: int = 0,
) -> None:
    pool = make_pool(block_size, dtype)
    scales = scales_for(dtype, pool, kind)
    tables = fill(pool, seq_lens, seed, scales)
    q = torch.randn(sum(query_lens), KV_HEADS * groups, HEAD_DIM)
    batch = PagedBatch(
        block_tables_SB=tables,
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=block_size,
        blank_block=NUM_BLOCKS,
        dtype=q.dtype,
    )
    before = pool.view(torch.uint8).clone()
    found = attention(q, pool, plan_attention(batch, window), scale=0.3, **scales.call)
    wanted = attention_reference(
        q, pool, tables, tuple(query_lens), tuple(seq_lens),
        scale=0.3, window=window, **scales.reference,
    )  # fmt: skip
    torch.testing.assert_close(found, wanted.flatten(1), atol=2e-5, rtol=1e-5)
    assert torch.equal(pool.view(torch.uint8), before), "attention wrote into the pool"


@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8, torch.int8])
def test_mixed_spans(window: int | None, dtype: torch.dtype) -> None:
    check([1, 5, 1, 1, 7, 2], [17, 5, 1, 4, 20, 9], window=window, dtype=dtype)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 4, 2]])
def test_fp8_scales_by_head(query_lens: list[int]) -> None:
    check(query_lens, [17, 5, 9], dtype=FP8, kind="per head")


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_head_groupings(groups: int) -> None:
    check([1, 1, 3], [9, 2, 11], groups=groups)


def test_long_spans_are_cut_into_query_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "QUERY_TILE", 4)
    for window in (None, 3, 4, 6, 50):
        check([13, 9], [13, 21], window=window)


def test_a_long_sequence_does_not_pad_the_short_ones() -> None:
    """The group of the long one is its own; the others gather what they need."""
    seq_lens = (64, 3, 4, 2)
    batch = PagedBatch(
        block_tables_SB=torch.arange(64).view(4, 16) % NUM_BLOCKS,
        query_lens=(1, 1, 1, 1),
        seq_lens=seq_lens,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=4,
        blank_block=NUM_BLOCKS,
        dtype=torch.float32,
    )
    plan = plan_attention(batch, None)
    assert [group.num_spans for group in plan.groups] == [1, 3]
    assert sum(len(group.tiles) for group in plan.groups) == 2 * KV_HEADS * (16 + 3)


def test_large_groups_are_split_by_what_they_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "GATHER_BYTES", 5 * 2 * KV_HEADS * 4 * HEAD_DIM * 4)
    check([1] * 6, [8, 7, 9, 8, 12, 5])
    check([1] * 2, [30, 29])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch_equals_the_reference(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([2, 4, 8]), label="block_size")
    room = NUM_BLOCKS * block_size // 5
    seq_lens = data.draw(st.lists(st.integers(1, room), min_size=1, max_size=5), label="seq_lens")
    query_lens = [data.draw(st.one_of(st.just(1), st.integers(1, n))) for n in seq_lens]
    window = data.draw(st.one_of(st.none(), st.integers(1, room)), label="window")
    check(query_lens, seq_lens, window=window, block_size=block_size, seed=len(seq_lens))


@pytest.mark.parametrize("kind", ["pair", "per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8, torch.int8])
def test_store_equals_the_reference(dtype: torch.dtype, kind: str) -> None:
    ours, theirs = make_pool(4, dtype), make_pool(4, dtype)
    scales = scales_for(dtype, ours, kind)
    wanted = scales.reference
    if scales.per_token is not None:
        wanted["token_scales"] = scales.per_token.clone()
    slots = torch.tensor([0, 5, 6, 95, 40])
    kv = torch.randn(5, 2 * KV_HEADS, HEAD_DIM) * 3
    kv[2, 1] = 0.0
    store_kv(ours, slot_rows(slots, KV_HEADS, 4), kv, **scales.call)
    store_kv_reference(theirs, slots, kv[:, :KV_HEADS], kv[:, KV_HEADS:], **wanted)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    if scales.per_token is not None:
        torch.testing.assert_close(
            scales.per_token, wanted["token_scales"], rtol=0, atol=0, equal_nan=True
        )
        assert int((~torch.isnan(scales.per_token[:NUM_BLOCKS])).sum()) == 5 * 2 * KV_HEADS
    else:
        written = ~torch.isnan(ours[:NUM_BLOCKS].float())
        assert int(written.sum()) == kv.numel(), "only the given slots were written"


def test_int8_keeps_every_value_within_half_a_step() -> None:
    pool = make_pool(4, torch.int8)
    scales = scales_for(torch.int8, pool)
    kv = torch.randn(6, 2 * KV_HEADS, HEAD_DIM) * torch.logspace(-6, 3, 6)[:, None, None]
    store_kv(pool, slot_rows(torch.arange(6), KV_HEADS, 4), kv, **scales.call)
    read = stored_kv(pool, token_scales=scales.per_token)[:2].permute(0, 3, 1, 2, 4)
    read = read.reshape(8, 2 * KV_HEADS, HEAD_DIM)[:6]
    step = kv.abs().amax(-1, keepdim=True) / 127
    assert bool(((read - kv).abs() <= step * 0.501).all())


def test_fp8_saturates_instead_of_overflowing() -> None:
    values = quantize_kv(torch.tensor([1e9, -1e9, 448.0, 500.0, 0.0]), 1.0).float()
    assert values.tolist() == [448.0, -448.0, 448.0, 448.0, 0.0]
    pool = make_pool(4, FP8)
    kv = torch.full((1, 2 * KV_HEADS, HEAD_DIM), 1e6)
    store_kv(pool, slot_rows(torch.tensor([3]), KV_HEADS, 4), kv, (1.0, 1.0))
    assert bool((pool[0, :, :, 3].float() == 448.0).all())


def test_every_fp8_code_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)
    keep = ~torch.isnan(codes.float())
    pool = torch.zeros(3, 2, 1, 16, 8, dtype=FP8)
    pool.view(torch.uint8)[:2] = codes.view(torch.uint8).view(2, 1, 1, 16, 8)
    from runtime.kernels.attention import _gather, _Stored

    read = _gather(_Stored(pool), torch.tensor([0, 2]), torch.float32).flatten() * 256
    assert torch.equal(read[keep], codes.float()[keep])
    assert int(keep.sum()) == 254
