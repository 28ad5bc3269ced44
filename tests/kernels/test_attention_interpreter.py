"""The attention kernels in Triton's interpreter against the reference.

Pools are NaN wherever no token was stored, outputs are checked in full, and every test also looks
at the counters, which the kernels have to leave at zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention import triton_plan
from runtime.kernels.attention.plan import PagedBatch
from runtime.kernels.attention.reference import attention_reference
from runtime.kernels.attention.triton_plan import (
    DecodeTile,
    PrefillTile,
    TritonPlan,
    attend,
    plan_for_triton,
)
from runtime.kernels.kv_store import slot_rows, store_kv
from runtime.kernels.kv_store.reference import FP8
from runtime.kernels.workspace import Workspace

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for the CPU")

DECODE = DecodeTile(keys=16, num_warps=2, num_stages=2, programs_per_sm=2, min_tiles=1, merge=2)
PREFILL = PrefillTile(rows=16, keys=16, whole_keys=32, num_warps=4, num_stages=2)
SCALE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's queries, pool and spans, with everything that nobody stored poisoned."""

    q_THD: Tensor
    pool: Tensor
    tables_SB: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_decodes: int
    head_scales_2K: Tensor | None = None
    token_scales: Tensor | None = None

    def plan(
        self, window: int | None = None, *, deterministic: bool = False, workspace: Workspace
    ) -> TritonPlan:
        batch = PagedBatch(
            block_tables_SB=self.tables_SB,
            query_lens=(),
            seq_lens=(),
            kv_heads=self.pool.shape[2],
            head_dim=self.pool.shape[4],
            block_size=self.pool.shape[3],
            blank_block=len(self.pool) - 1,
            dtype=self.q_THD.dtype,
            query_starts_S1=torch.tensor([0, *accumulate(self.query_lens)], dtype=torch.int32),
            seq_lens_S=torch.tensor(self.seq_lens, dtype=torch.int32),
            num_decodes=self.num_decodes,
            pool_dtype=self.pool.dtype,
            deterministic=deterministic,
            workspace=workspace,
        )
        return plan_for_triton(batch, window)

    def answer(self, window: int | None = None, *, deterministic: bool = False) -> Tensor:
        workspace = Workspace("cpu")
        workspace.partials(50_000).fill_(torch.nan)
        plan = self.plan(window, deterministic=deterministic, workspace=workspace)
        out = attend(
            self.q_THD,
            self.pool,
            plan,
            scale=SCALE,
            head_scales_2K=self.head_scales_2K,
            token_scales=self.token_scales,
        )
        assert int(workspace.counters(64).abs().sum()) == 0
        return out

    def reference(self, window: int | None = None) -> Tensor:
        return attention_reference(
            self.q_THD.float(),
            self.pool,
            self.tables_SB,
            self.query_lens,
            self.seq_lens,
            scale=SCALE,
            window=window,
            head_scales_2K=self.head_scales_2K,
            token_scales=self.token_scales,
        ).flatten(1)

    def check(self, window: int | None = None, *, deterministic: bool = False) -> None:
        found = self.answer(window, deterministic=deterministic).float()
        wanted = self.reference(window)
        assert bool(torch.isfinite(found).all())
        assert float((found - wanted).norm()) <= 2e-3 * float(wanted.norm())
        for row, seq_len in enumerate(self.seq_lens[: self.num_decodes]):
            assert seq_len or not found[row].any()


def make_step(
    query_lens: list[int],
    seq_lens: list[int],
    num_decodes: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 8,
    dtype: torch.dtype = torch.float16,
    pool_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Step:
    generator = torch.Generator().manual_seed(seed)
    pool_dtype = pool_dtype or dtype
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 3
    shape = (num_blocks + 1, 2, kv_heads, block_size, head_dim)
    pool = torch.zeros(shape).to(pool_dtype)
    if pool_dtype != torch.int8:
        pool.view(torch.uint8).fill_(0x7F)
        pool = pool if pool_dtype == FP8 else pool.fill_(torch.nan)
    head_scales = torch.rand(2, kv_heads, generator=generator) * 0.02 + 0.01
    token_scales = torch.full(shape[:-1], torch.nan)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.zeros(len(seq_lens), max(seq_lens) // block_size + 2, dtype=torch.int32)
    for s, seq_len in enumerate(seq_lens):
        blocks = [order.pop() for _ in range(-(-seq_len // block_size))]
        tables[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots = torch.tensor(
            [blocks[p // block_size] * block_size + p % block_size for p in range(seq_len)],
            dtype=torch.int64,
        )
        kv = torch.randn(seq_len, 2 * kv_heads, head_dim, generator=generator)
        store_kv(pool, slot_rows(slots, kv_heads, block_size), kv, None, head_scales, token_scales)
    fused = torch.randn(sum(query_lens), heads + 2 * kv_heads, head_dim, generator=generator)
    return Step(
        q_THD=fused.to(dtype)[:, :heads],
        pool=pool,
        tables_SB=tables,
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_decodes=num_decodes,
        head_scales_2K=head_scales if pool_dtype == FP8 else None,
        token_scales=token_scales if pool_dtype == torch.int8 else None,
    )


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plan, "decode_tile", lambda batch, target: DECODE)
    monkeypatch.setattr(triton_plan, "prefill_tile", lambda batch, target: PREFILL)


MIXED = [1, 1, 1, 9, 21, 1], [37, 0, 5, 9, 30, 14]


@pytest.mark.parametrize("window", [None, 1, 10])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_mixed_spans(heads: int, kv_heads: int, window: int | None) -> None:
    """Decodes first, padding among them, then chunks with and without context, one of length 1."""
    make_step(*MIXED, 3, heads=heads, kv_heads=kv_heads).check(window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(17, 1), (32, 1), (48, 2)])
def test_more_heads_share_a_key_than_a_tile_has_rows(heads: int, kv_heads: int) -> None:
    make_step([1, 1, 6], [9, 40, 12], 2, heads=heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize("pool_dtype", [FP8, torch.int8, torch.float32])
def test_pool_types(pool_dtype: torch.dtype) -> None:
    for window in (None, 10):
        make_step(*MIXED, 3, pool_dtype=pool_dtype).check(window)


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_block_sizes_around_the_tile(block_size: int) -> None:
    make_step([1, 1, 20], [33, 16, 25], 2, block_size=block_size, dtype=torch.float32).check()


@pytest.mark.parametrize(
    "seq_lens",
    [[1], [0], [16], [17], [300], [0, 0, 0], [0, 40, 0], [200, 1, 1, 1], [1, 1, 1, 200, 0]],
    ids=str,
)
def test_lengths_however_they_are_spread(seq_lens: list[int]) -> None:
    """From units fewer than programs to one head spread over many of them."""
    step = make_step([1] * len(seq_lens), seq_lens, len(seq_lens))
    step.check()
    step.check(50)
    step.check(deterministic=True)


@pytest.mark.parametrize("min_tiles", [1, 3])
@pytest.mark.parametrize("slack", [0, 6])
@pytest.mark.parametrize("programs_per_sm", [1, 5])
def test_shares(
    programs_per_sm: int, slack: int, min_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = replace(DECODE, programs_per_sm=programs_per_sm, min_tiles=min_tiles, slack=slack)
    monkeypatch.setattr(triton_plan, "decode_tile", lambda batch, target: tile)
    make_step([1] * 5, [70, 3, 0, 129, 20], 5).check()


def test_many_segments_of_one_head_in_deterministic_mode() -> None:
    """17 segments' worth of keys: the splits grow instead of their number."""
    make_step([1, 1], [16 * 256 + 300, 700], 2, kv_heads=1, heads=2, dtype=torch.float32).check(
        deterministic=True
    )


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    crowd = make_step([1] * 5, [70, 600, 0, 129, 20], 5)
    together = crowd.answer(deterministic=True)
    for s in (0, 1, 3, 4):
        alone = replace(
            crowd,
            q_THD=crowd.q_THD[s : s + 1],
            tables_SB=crowd.tables_SB[s : s + 1],
            query_lens=(1,),
            seq_lens=crowd.seq_lens[s : s + 1],
            num_decodes=1,
        )
        assert torch.equal(alone.answer(deterministic=True)[0], together[s])


@pytest.mark.parametrize("window", [None, 13])
def test_a_row_does_not_depend_on_where_its_prompt_was_cut(window: int | None) -> None:
    whole = make_step([61], [61], 0)
    wanted = whole.answer(window, deterministic=True)
    for first in (1, 7, 16, 40):
        parts = [
            replace(whole, q_THD=q, query_lens=(len(q),), seq_lens=(end,)).answer(
                window, deterministic=True
            )
            for q, end in ((whole.q_THD[:first], first), (whole.q_THD[first:], 61))
        ]
        assert torch.equal(torch.cat(parts), wanted)


def test_same_inputs_same_bits() -> None:
    step = make_step(*MIXED, 3)
    assert torch.equal(step.answer(), step.answer())


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_decodes"),
    [
        ([40], [40], 0),
        ([1, 1, 5, 70, 8, 9], [30, 9, 5, 120, 64, 9], 2),
        ([1, 33, 1, 1, 16], [1, 33, 50, 1, 500], 0),
    ],
    ids=str,
)
def test_tiles_of_queries_come_longest_first(
    query_lens: list[int], seq_lens: list[int], num_decodes: int
) -> None:
    """Every tile of every longer span once, with what its program has to know; the rest is void."""
    from runtime.kernels.attention.plan_kernels import plan_prefill_kernel

    queries, keys = 8, 16
    starts = [0, *accumulate(query_lens)]
    num_spans = len(query_lens) - num_decodes
    num_tiles = (starts[-1] - num_decodes) // queries + num_spans
    work = torch.full((num_tiles, 5), -7, dtype=torch.int32)
    plan_prefill_kernel[(-(-num_tiles // 4),)](
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        work,
        num_decodes,
        num_spans,
        num_tiles,
        (num_spans - 1).bit_length(),
        BLOCK_Q=queries,
        TILE=keys,
        BLOCK=4,
    )
    wanted = [
        (
            starts[s] + i,
            n - i,
            seq_lens[s] - n + i,
            s,
            -(-(seq_lens[s] - n + min(i + 8, n)) // keys),
        )
        for s, n in enumerate(query_lens)
        for i in range(0, n, queries)
        if s >= num_decodes
    ]
    found = [tuple(row) for row in work.tolist()]
    assert sorted(row for row in found if row[4]) == sorted(wanted)
    lengths = [row[4] for row in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] >= 0
