"""Paged attention and the rotate-and-store kernel on a GPU: real types, real sizes, any shape.

Every case is a kernel to compile: they are few, and compiled side by side before the first test.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.kernels.attention import PagedBatch, attention, plan_attention
from runtime.kernels.compile_ahead import compiling_ahead
from runtime.kernels.kv_store.reference import FP8, stored_kv
from runtime.kernels.rope_kv import rope_kv
from runtime.kernels.rope_kv.reference import rope_kv_reference
from runtime.kernels.workspace import Workspace
from runtime.model.rope import RopeSpec, cos_sin_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POOL_TYPES = [torch.bfloat16, torch.float16, FP8, torch.int8]
TOLERANCE = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


SHAPES = [
    Shape(),
    Shape(heads=9, kv_heads=3, head_dim=64, block_size=8),
    Shape(heads=16, kv_heads=16, head_dim=64),
    Shape(heads=32, kv_heads=2, head_dim=128, block_size=32),
    Shape(heads=8, kv_heads=4, head_dim=256),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    q_THD: Tensor
    pool: Tensor
    tables_SB: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_decodes: int
    head_scales_2K: Tensor | None
    token_scales: Tensor | None

    def batch(self, workspace: Workspace, *, deterministic: bool = False) -> PagedBatch:
        return PagedBatch(
            block_tables_SB=self.tables_SB,
            query_lens=(),
            seq_lens=(),
            kv_heads=self.pool.shape[2],
            head_dim=self.pool.shape[4],
            block_size=self.pool.shape[3],
            blank_block=len(self.pool) - 1,
            dtype=self.q_THD.dtype,
            query_starts_S1=_ints([0, *accumulate(self.query_lens)]),
            seq_lens_S=_ints(self.seq_lens),
            num_decodes=self.num_decodes,
            heads=self.q_THD.shape[1],
            num_tokens=len(self.q_THD),
            pool_dtype=self.pool.dtype,
            deterministic=deterministic,
            workspace=workspace,
        )

    def answer(self, window: int | None = None, *, deterministic: bool = False) -> Tensor:
        """The result, after checking that a second run gives the same bits."""
        workspace = Workspace("cuda")
        workspace.partials(1 << 20).fill_(torch.nan)
        batch = self.batch(workspace, deterministic=deterministic)
        results = [
            attention(
                self.q_THD,
                self.pool,
                plan_attention(batch, window),
                scale=0.1,
                head_scales_2K=self.head_scales_2K,
                token_scales=self.token_scales,
            )
            for _ in range(3)
        ]
        assert not workspace.counters(len(self.seq_lens) * self.pool.shape[2]).any()
        assert all(torch.equal(results[0], result) for result in results[1:])
        return results[0]

    def check(self, window: int | None = None, *, deterministic: bool = False) -> None:
        found = self.answer(window, deterministic=deterministic).float()
        wanted = reference(self, window)
        assert bool(torch.isfinite(found).all())
        assert float((found - wanted).norm()) <= TOLERANCE * float(wanted.norm())


def reference(step: Step, window: int | None) -> Tensor:
    """float32, a sequence at a time."""
    heads, kv_heads = step.q_THD.shape[1], step.pool.shape[2]
    out, row = torch.zeros(step.q_THD.shape, device="cuda"), 0
    for s, (num_new, seq_len) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
        blocks = step.tables_SB[s, : -(-seq_len // step.pool.shape[3])].long()
        scales = None if step.token_scales is None else step.token_scales[blocks]
        kv = stored_kv(step.pool[blocks], step.head_scales_2K, scales).permute(1, 2, 0, 3, 4)
        kv = kv.reshape(2, kv_heads, -1, kv.shape[-1])[:, :, :seq_len]
        k, v = kv.repeat_interleave(heads // kv_heads, 1)
        q = step.q_THD[row : row + num_new].float().transpose(0, 1)
        position = torch.arange(seq_len - num_new, seq_len, device="cuda")[:, None]
        key = torch.arange(seq_len, device="cuda")
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        weights = (q @ k.transpose(1, 2) * 0.1).masked_fill(hidden, -torch.inf).softmax(-1)
        out[row : row + num_new] = (weights @ v).transpose(0, 1) if seq_len else 0.0
        row += num_new
    return out.flatten(1)


def _ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def make_step(
    query_lens: list[int],
    seq_lens: list[int],
    num_decodes: int,
    shape: Shape,
    pool_dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Step:
    """Blocks in random order; NaN (int8: NaN scales) in every slot that no token has."""
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = [-(-n // shape.block_size) for n in seq_lens]
    num_blocks = sum(counts) + 2
    size = (num_blocks + 1, 2, shape.kv_heads, shape.block_size, shape.head_dim)
    values = torch.randn(size, device="cuda", generator=generator)
    is_stored = torch.zeros(num_blocks + 1, shape.block_size, dtype=torch.bool)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(seq_lens), max(counts) + 1, dtype=torch.int32)
    for s, (count, seq_len) in enumerate(zip(counts, seq_lens, strict=True)):
        blocks, order = order[:count], order[count:]
        tables[s, :count] = blocks
        rows = torch.arange(count * shape.block_size).view(count, shape.block_size) < seq_len
        is_stored[blocks] = rows
    unused = ~is_stored.cuda()[:, None, None, :].expand(size[:-1])
    head_scales = token_scales = None
    if pool_dtype == torch.int8:
        token_scales = torch.rand(size[:-1], device="cuda", generator=generator) * 0.02 + 0.01
        token_scales[unused] = torch.nan
        pool = (values * 40).clamp(-127, 127).to(torch.int8)
    else:
        if pool_dtype == FP8:
            head_scales = torch.rand(2, shape.kv_heads, device="cuda") * 0.02 + 0.02
            values = (values * 40).clamp(-448, 448)
        values[unused] = torch.nan
        pool = values.to(pool_dtype)
    num_heads = shape.heads + 2 * shape.kv_heads
    fused = torch.randn(
        sum(query_lens), num_heads, shape.head_dim, device="cuda", generator=generator
    )
    dtype = torch.float16 if pool_dtype == torch.float16 else torch.bfloat16
    return Step(
        q_THD=fused.to(dtype)[:, : shape.heads],
        pool=pool,
        tables_SB=tables.cuda(),
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_decodes=num_decodes,
        head_scales_2K=head_scales,
        token_scales=token_scales,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: Shape
    pool_dtype: torch.dtype
    windowed: bool
    deterministic: bool


CASES = [
    Case(shape=Shape(), pool_dtype=dtype, windowed=windowed, deterministic=deterministic)
    for dtype in POOL_TYPES for windowed in (False, True) for deterministic in (False, True)
] + [
    Case(shape=shape, pool_dtype=dtype, windowed=windowed, deterministic=False)
    for shape in SHAPES[1:] for dtype in (torch.bfloat16, FP8) for windowed in (False, True)
]  # fmt: skip
MIXED = [1, 1, 1, 1, 1, 200, 700, 1, 33], [1, 1153, 0, 4000, 64, 200, 1500, 90, 500]
# Numbers of decodes that take other tiles than MIXED's five.
COUNTS = [1, 40, 70]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    def launch(step: Step, window: int | None, *, deterministic: bool) -> None:
        workspace = Workspace("cuda")
        plan = plan_attention(step.batch(workspace, deterministic=deterministic), window)
        attention(
            step.q_THD, step.pool, plan,
            scale=0.1, head_scales_2K=step.head_scales_2K, token_scales=step.token_scales,
        )  # fmt: skip

    with compiling_ahead(os.cpu_count() or 1):
        for case in CASES:
            step = make_step(*MIXED, 5, case.shape, case.pool_dtype)
            launch(step, 100 if case.windowed else None, deterministic=case.deterministic)
        for count in COUNTS:
            for dtype in (torch.bfloat16, FP8):
                launch(make_step([1] * count, [9] * count, count, Shape(), dtype), None,
                       deterministic=False)  # fmt: skip
        for rope in ROPES:
            rotate(*rope, "cuda")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixed_steps(case: Case) -> None:
    step = make_step(*MIXED, 5, case.shape, case.pool_dtype)
    step.check(100 if case.windowed else None, deterministic=case.deterministic)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_decodes(count: int, pool_dtype: torch.dtype) -> None:
    """Alike lengths, which programs share out by heads, and lengths far apart."""
    for seq_lens in (
        [1200 - i % 40 for i in range(count)],
        [(i * 997) % 3000 for i in range(count)],
    ):
        make_step([1] * count, seq_lens, count, Shape(), pool_dtype).check()


lengths = st.one_of(st.integers(0, 70), st.integers(0, 3000), st.sampled_from([16, 64, 128, 1024]))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    some = st.lists(lengths, min_size=5, max_size=32)
    decodes = data.draw(st.one_of(st.just([]), some), label="decodes")
    chunks = data.draw(
        st.lists(st.tuples(st.integers(1, 600), st.integers(0, 1500)), max_size=4), label="chunks"
    )
    if not decodes and not chunks:
        return
    case = data.draw(st.sampled_from(CASES), label="case")
    step = make_step(
        [1] * len(decodes) + [n for n, _ in chunks],
        decodes + [n + context for n, context in chunks],
        len(decodes),
        case.shape,
        case.pool_dtype,
        data.draw(st.integers(0, 99), label="seed"),
    )
    window = data.draw(st.sampled_from([1, 64, 1000]), label="window") if case.windowed else None
    step.check(window, deterministic=case.deterministic)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_prompts(dtype: torch.dtype) -> None:
    """Many tiles of queries and of keys a program, with and without context."""
    make_step([2048, 3, 1024, 1000], [2048, 5000, 1024, 1777], 0, Shape(), dtype).check()


def test_a_row_depends_on_itself_alone() -> None:
    """Deterministic mode: neither the rows beside it nor the cuts of its prompt show."""
    crowd = make_step([1] * 64, [(37 * i) % 2000 for i in range(64)], 64, Shape(), FP8)
    together = crowd.answer(deterministic=True)
    for s in (1, 17, 63):
        alone = Step(
            q_THD=crowd.q_THD[s : s + 1],
            pool=crowd.pool,
            tables_SB=crowd.tables_SB[s : s + 1],
            query_lens=(1,),
            seq_lens=crowd.seq_lens[s : s + 1],
            num_decodes=1,
            head_scales_2K=crowd.head_scales_2K,
            token_scales=None,
        )
        assert torch.equal(alone.answer(deterministic=True)[0], together[s])
    whole = make_step([1000], [1000], 0, Shape())
    wanted = whole.answer(deterministic=True)
    for cut in (1, 100, 513):
        parts = [
            Step(
                q_THD=q_THD,
                pool=whole.pool,
                tables_SB=whole.tables_SB,
                query_lens=(len(q_THD),),
                seq_lens=(end,),
                num_decodes=0,
                head_scales_2K=None,
                token_scales=None,
            ).answer(deterministic=True)
            for q_THD, end in ((whole.q_THD[:cut], cut), (whole.q_THD[cut:], 1000))
        ]
        assert torch.equal(torch.cat(parts), wanted)


def test_a_captured_step_follows_lengths_that_change() -> None:
    step = make_step([1] * 8, [500] * 8, 8, Shape())
    workspace = Workspace("cuda")
    batch = step.batch(workspace)
    assert batch.seq_lens_S is not None

    def run() -> Tensor:
        return attention(step.q_THD, step.pool, plan_attention(batch, None), scale=0.1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seq_lens in ([500] * 8, [0, 1, 499, 17, 64, 65, 0, 300]):
        batch.seq_lens_S.copy_(_ints(seq_lens))
        out.fill_(torch.nan)
        graph.replay()
        changed = Step(
            q_THD=step.q_THD,
            pool=step.pool,
            tables_SB=step.tables_SB,
            query_lens=step.query_lens,
            seq_lens=tuple(seq_lens),
            num_decodes=8,
            head_scales_2K=None,
            token_scales=None,
        )
        wanted = reference(changed, None)
        assert float((out.float() - wanted).norm()) <= TOLERANCE * float(wanted.norm())


# tokens, type of the pool, rotated dimensions, with head norms
ROPES = [(n, dtype, 128, False) for n in (1, 37, 500) for dtype in POOL_TYPES]
ROPES += [(37, dtype, 32, True) for dtype in POOL_TYPES]


def rotate(
    num_tokens: int, pool_dtype: torch.dtype, rotary_dim: int, normed: bool, device: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, pool and token scales, by the kernel on a GPU and by the reference on the CPU."""
    torch.manual_seed(0)
    rope = RopeSpec(kind="default", theta=5e5, rotary_dim=rotary_dim, trained_positions=8192)
    heads_THD = torch.randn(num_tokens, 48, 128).bfloat16()
    slots = torch.randperm(800)[:num_tokens].int()
    slots[num_tokens // 2] = -1
    arguments: dict[str, Any] = {
        "slots_T": slots,
        "positions_T": torch.randint(0, 8192, (num_tokens,)).int(),
        "table": cos_sin_table(rope, 8192, "cpu"),
        "q_norm": torch.rand(128) if normed else None,
        "k_norm": torch.rand(128) if normed else None,
        "head_scales_2K": torch.rand(2, 8) * 0.01 + 0.01 if pool_dtype == FP8 else None,
        "token_scales": torch.zeros(50, 2, 8, 16) if pool_dtype == torch.int8 else None,
    }
    arguments = {key: None if x is None else x.to(device) for key, x in arguments.items()}
    heads_THD = heads_THD.to(device)
    pool = torch.zeros(50, 2, 8, 16, 128).to(pool_dtype).to(device)
    if device == "cpu":
        q_THD = rope_kv_reference(heads_THD, pool, num_heads=32, eps=1e-5, **arguments)
    else:
        rope_kv(heads_THD, pool, num_heads=32, eps=1e-5, **arguments)
        q_THD = heads_THD[:, :32]
    return q_THD, pool, arguments["token_scales"]


@pytest.mark.parametrize(("num_tokens", "pool_dtype", "rotary_dim", "normed"), ROPES, ids=str)
def test_rope_kv(num_tokens: int, pool_dtype: torch.dtype, rotary_dim: int, normed: bool) -> None:
    """Codes equal the float32 reference's but where a sum in another order tips a rounding."""
    found, found_pool, found_scales = rotate(num_tokens, pool_dtype, rotary_dim, normed, "cuda")
    wanted, pool, scales = rotate(num_tokens, pool_dtype, rotary_dim, normed, "cpu")
    torch.testing.assert_close(found.cpu(), wanted, rtol=8e-3, atol=1e-3)
    differ = found_pool.cpu().view(torch.uint8) != pool.view(torch.uint8)
    assert float(differ.float().mean()) < 1e-3
    if found_scales is not None:
        torch.testing.assert_close(found_scales.cpu(), scales)
