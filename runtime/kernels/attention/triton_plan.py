"""What the Triton kernels need to know of a step, and the launches themselves.

A plan holds device tensors of sizes that the host knows (rows, programs), so all of it may be part
of a captured graph; lengths are read by the kernels. Imports triton only when it launches.

Shape legend: T tokens, S spans, B blocks, P programs, H heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.attention.plan import PagedBatch
from runtime.kernels.backend import KernelTarget, target_of
from runtime.kernels.kv_store import kv_kind, raw_pool

# Deterministic mode cuts a sequence into at most so many segments, whatever the batch.
_SPLITS = 16
_SPLIT_TOKENS = 256
# Of a multiprocessor of Hopper, what it keeps to itself of every program included.
_SHARED_BYTES = 228 * 1024
# Rows of one of the two warpgroups of `hopper_kernel`.
_HOPPER_ROWS = 64
_HOPPER_KEYS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """Keys per tile, how programs are built, how many there are, least keys worth a program.

    slack: by how many tiles a program may do more than its fair share, so as to do one part of one
        head and no more.
    """

    keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int
    merge: int = 8
    slack: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile:
    """Rows (queries x heads of a group) and keys of a tile, and how programs are built.

    whole_keys: keys of a tile that all rows see, a multiple of `keys`.
    """

    rows: int
    keys: int
    whole_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPlan:
    """One window's plan of a step.

    shares: each program's part of the decodes (see `plan_kernels`); None where there are no
        decodes or the splits are fixed (deterministic).
    work: tiles of queries of the longer spans, longest first; None where `hopper_kernel` does not
        serve them.
    """

    batch: PagedBatch
    window: int | None
    target: KernelTarget
    decode_tile: DecodeTile
    prefill_tile: PrefillTile
    shares: Tensor | None
    work: Tensor | None = None

    @property
    def num_programs(self) -> int:
        """Of the decode kernel."""
        if self.batch.deterministic:
            return self.batch.num_decodes * self.batch.kv_heads * _SPLITS
        return self.target.num_sms * self.decode_tile.programs_per_sm

    @property
    def num_slots(self) -> int:
        """Partial results: a balanced program shares its first and its last head with others."""
        return self.num_programs * (1 if self.batch.deterministic else 2)


def plan_for_triton(batch: PagedBatch, window: int | None) -> TritonPlan:
    """The plan of a step whose `seq_lens_S` and `query_starts_S1` lie on the device."""
    assert batch.seq_lens_S is not None
    assert batch.pool_dtype is not None
    target = target_of(batch.seq_lens_S.device)
    plan = TritonPlan(
        batch=batch,
        window=window,
        target=target,
        decode_tile=decode_tile(batch, target),
        prefill_tile=prefill_tile(batch, target),
        shares=None,
    )
    if _suits_hopper(plan):
        plan = replace(plan, work=_work(plan))
    if batch.num_decodes == 0 or batch.deterministic:
        return plan
    return replace(plan, shares=_shares(plan))


def decode_tile(batch: PagedBatch, target: KernelTarget) -> DecodeTile:
    """One warp per program, few keys: measured best on an H200 for every number of sequences."""
    few = batch.num_decodes <= 4
    programs = 8 if batch.deterministic else _programs(batch, target)
    return DecodeTile(
        keys=32,
        num_warps=1,
        num_stages=_stages(batch, target, programs, most=4 if few else 7),
        programs_per_sm=programs,
        min_tiles=2 if few else 1,
        slack=4,
    )


def _programs(batch: PagedBatch, target: KernelTarget) -> int:
    """Programs per multiprocessor: the fewest with which each has one head, if there are any; 8 of
    them take all registers.

    More programs hide more latency, but cut heads into more segments, which small steps feel.
    """
    is_narrow = batch.pool_dtype is not None and batch.pool_dtype.itemsize == 1
    heads_per_sm = -(-batch.num_decodes * batch.kv_heads // target.num_sms)
    choices = (4, 8) if is_narrow and batch.num_decodes > 4 else (2, 4, 6, 8)
    return next((n for n in choices if n >= heads_per_sm), 8 if is_narrow else 6)


def _stages(batch: PagedBatch, target: KernelTarget, programs: int, most: int) -> int:
    """So many that shared memory keeps more than `programs` off a multiprocessor: those that start
    early, beside the kernel ahead, would crowd where it has left room."""
    if target.arch != 90 or batch.pool_dtype is None:
        return 3 if batch.head_dim <= 128 else 2
    room = _SHARED_BYTES // programs - 4096
    return max(2, min(most, 1 + room // (2 * 32 * batch.head_dim * batch.pool_dtype.itemsize)))


def prefill_tile(batch: PagedBatch, target: KernelTarget) -> PrefillTile:
    """A tile for wgmma on Hopper; smaller ones where shared memory is."""
    if not target.has_large_shared:
        return PrefillTile(rows=64, keys=32, whole_keys=32, num_warps=4, num_stages=2)
    if batch.head_dim > 128:
        return PrefillTile(rows=128, keys=64, whole_keys=64, num_warps=8, num_stages=2)
    if batch.pool_dtype == torch.int8:
        # Widening and two scales per key take registers: a larger tile would spill.
        return PrefillTile(rows=64, keys=128, whole_keys=128, num_warps=4, num_stages=2)
    return PrefillTile(rows=128, keys=64, whole_keys=128, num_warps=8, num_stages=3)


def _suits_hopper(plan: TritonPlan) -> bool:
    """What `hopper_kernel` is written for; all else is `prefill_kernel`'s."""
    batch = plan.batch
    return (
        plan.target.arch == 90
        and plan.window is None
        and not batch.deterministic
        and batch.num_decodes < batch.block_tables_SB.shape[0]
        and batch.pool_dtype == batch.dtype != torch.float32
        and batch.head_dim in (64, 128)
        and batch.block_size in (8, 16, 32, 64, 128)
        and batch.heads is not None
        and batch.num_tokens is not None
        and batch.heads // batch.kv_heads <= _HOPPER_ROWS
    )


def _work(plan: TritonPlan) -> Tensor:
    from runtime.kernels.attention.plan_kernels import plan_prefill_kernel

    batch, queries = plan.batch, _hopper_queries(plan.batch)
    assert batch.query_starts_S1 is not None
    assert batch.seq_lens_S is not None
    assert batch.num_tokens is not None
    num_spans = batch.block_tables_SB.shape[0] - batch.num_decodes
    num_tiles = _num_tiles(batch.num_tokens, batch.num_decodes, num_spans, queries)
    work = torch.empty(num_tiles, 5, dtype=torch.int32, device=batch.seq_lens_S.device)
    block = 64
    plan_prefill_kernel[(-(-num_tiles // block),)](
        batch.query_starts_S1,
        batch.seq_lens_S,
        work,
        batch.num_decodes,
        num_spans,
        num_tiles,
        (num_spans - 1).bit_length(),
        BLOCK_Q=queries,
        TILE=_HOPPER_KEYS,
        BLOCK=block,
        num_warps=4,
    )
    return work


def _hopper_queries(batch: PagedBatch) -> int:
    """Queries of a tile: whole ones in each warpgroup's rows."""
    assert batch.heads is not None
    return 2 * (_HOPPER_ROWS // (batch.heads // batch.kv_heads))


def _shares(plan: TritonPlan) -> Tensor:
    from runtime.kernels.attention.plan_kernels import plan_decode_kernel

    batch, num_programs = plan.batch, plan.num_programs
    assert batch.seq_lens_S is not None
    device = batch.seq_lens_S.device
    starts = torch.empty(batch.num_decodes, dtype=torch.int32, device=device)
    shares = torch.empty(num_programs + 1, 4, dtype=torch.int32, device=device)
    # Few distinct sizes, so that few kernels are compiled.
    block_s = next(n for n in (16, 64, 256, 1024, 4096, 16384) if n >= batch.num_decodes)
    plan_decode_kernel[(1,)](
        batch.seq_lens_S,
        starts,
        shares,
        batch.num_decodes,
        num_programs,
        plan.window or 0,
        KV_HEADS=batch.kv_heads,
        TILE=plan.decode_tile.keys,
        WINDOWED=plan.window is not None,
        MIN_UNITS=plan.decode_tile.min_tiles,
        SLACK=plan.decode_tile.slack,
        BLOCK_S=block_s,
        BLOCK_P=1 << (num_programs - 1).bit_length(),
        SEARCH_STEPS=block_s.bit_length() - 1,
        PDL=plan.target.has_pdl,
        num_warps=4,
        **_launch_options(plan.target),
    )
    return shares


def attend(
    q_THD: Tensor,
    pool: Tensor,
    plan: TritonPlan,
    *,
    scale: float,
    head_scales_2K: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> Tensor:
    """[T, H * D]: decodes by one launch, all other spans by another."""
    num_tokens, heads, head_dim = q_THD.shape
    assert q_THD.stride(1) == head_dim
    assert q_THD.stride(2) == 1
    out = torch.empty(num_tokens, heads * head_dim, dtype=q_THD.dtype, device=q_THD.device)
    num_spans = plan.batch.block_tables_SB.shape[0]
    if plan.batch.num_decodes:
        _decode(q_THD, pool, plan, out, scale, head_scales_2K, token_scales)
    if plan.batch.num_decodes < num_spans:
        _prefill(q_THD, pool, plan, out, scale, head_scales_2K, token_scales)
    return out


def _common(q_THD: Tensor, pool: Tensor, plan: TritonPlan) -> dict[str, Any]:
    """The constants that both kernels share."""
    import triton.language as tl

    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    kind = kv_kind(pool.dtype, plan.target)
    return {
        # float16 holds every 8-bit code, and more of a weight's digits than bfloat16.
        "DTYPE": types[q_THD.dtype] if kind == "plain" else tl.float16,
        "GROUP": q_THD.shape[1] // pool.shape[2],
        "KV_HEADS": pool.shape[2],
        "HEAD_DIM": pool.shape[4],
        "BLOCK_SIZE": pool.shape[3],
        "KV": kind,
        "WINDOWED": plan.window is not None,
        "USE_PTX": plan.target.has_ptx,
    }


def _decode(
    q_THD: Tensor,
    pool: Tensor,
    plan: TritonPlan,
    out: Tensor,
    scale: float,
    head_scales_2K: Tensor | None,
    token_scales: Tensor | None,
) -> None:
    from runtime.kernels.attention.decode_kernel import decode_kernel

    batch, tile = plan.batch, plan.decode_tile
    constants = _common(q_THD, pool, plan)
    group, head_dim = constants["GROUP"], constants["HEAD_DIM"]
    values, sums, counters = _scratch(plan, group, head_dim)
    decode_kernel[(plan.num_programs,)](
        q_THD,
        pool.view(torch.int16) if pool.itemsize == 1 else pool,
        head_scales_2K,
        token_scales,
        batch.block_tables_SB,
        batch.seq_lens_S,
        plan.shares,
        values,
        sums,
        counters,
        out,
        batch.num_decodes,
        q_THD.stride(0),
        batch.block_tables_SB.stride(0),
        plan.window or 0,
        scale,
        **constants,
        ROWS=max(8, _power(group)),
        GROUP_ROWS=_power(group),
        TILE=tile.keys,
        SPLITS=_SPLITS if batch.deterministic else 0,
        MIN_TILES=_SPLIT_TOKENS // tile.keys,
        MERGE=tile.merge,
        WARPS=tile.num_warps,
        PDL=plan.target.has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_launch_options(plan.target),
    )


def _scratch(plan: TritonPlan, group: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for segments (weighted values; maxima and sums) and a counter per head."""
    workspace = plan.batch.workspace
    assert workspace is not None
    num_values = plan.num_slots * group * head_dim
    room = workspace.partials(num_values + plan.num_slots * group * 2)
    counters = workspace.counters(plan.batch.num_decodes * plan.batch.kv_heads)
    return room[:num_values], room[num_values:], counters


def _prefill_on_hopper(
    q_THD: Tensor, pool: Tensor, plan: TritonPlan, work: Tensor, out: Tensor, scale: float
) -> None:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from runtime.kernels.attention.hopper_kernel import hopper_prefill_kernel

    tables_SB = plan.batch.block_tables_SB
    kv_heads, block_size, head_dim = pool.shape[2:]
    rows = pool.view(-1, head_dim)
    num_items = len(work) * kv_heads
    hopper_prefill_kernel[(min(num_items, plan.target.num_sms),)](
        q_THD,
        TensorDescriptor(
            rows, list(rows.shape), [head_dim, 1], [block_size, head_dim],
            NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
        ),
        tables_SB,
        work,
        out,
        num_items,
        q_THD.stride(0),
        tables_SB.stride(0),
        scale,
        GROUP=q_THD.shape[1] // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=_HOPPER_KEYS,
        STAGES=2,
        num_warps=4,
    )  # fmt: skip


def _num_tiles(num_tokens: int, first_span: int, num_spans: int, queries: int) -> int:
    """Room for every span's tiles: each wastes less than one (see `prefill_kernel._span_of`)."""
    return (num_tokens - first_span) // queries + num_spans


def _prefill(
    q_THD: Tensor,
    pool: Tensor,
    plan: TritonPlan,
    out: Tensor,
    scale: float,
    head_scales_2K: Tensor | None,
    token_scales: Tensor | None,
) -> None:
    from runtime.kernels.attention.prefill_kernel import prefill_kernel

    batch, tile = plan.batch, plan.prefill_tile
    assert batch.query_starts_S1 is not None
    if plan.work is not None:
        return _prefill_on_hopper(q_THD, pool, plan, plan.work, out, scale)
    constants = _common(q_THD, pool, plan)
    first_span = batch.num_decodes
    num_spans = batch.block_tables_SB.shape[0] - first_span
    # A tile has a query with all heads that share its keys.
    rows = max(tile.rows, _power(constants["GROUP"]))
    num_tiles = _num_tiles(len(q_THD), first_span, num_spans, rows // constants["GROUP"])
    prefill_kernel[(num_tiles * batch.kv_heads,)](
        q_THD,
        raw_pool(pool),
        head_scales_2K,
        token_scales,
        batch.block_tables_SB,
        batch.query_starts_S1,
        batch.seq_lens_S,
        out,
        first_span,
        num_spans,
        q_THD.stride(0),
        batch.block_tables_SB.stride(0),
        plan.window or 0,
        scale,
        **constants,
        ROWS=rows,
        TILE=tile.keys,
        WHOLE_TILE=tile.whole_keys,
        UNIFORM=batch.deterministic,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _power(count: int) -> int:
    """The power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def _launch_options(target: KernelTarget) -> dict[str, Any]:
    return {"launch_pdl": True} if target.has_pdl else {}
