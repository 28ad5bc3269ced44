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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """Keys per tile, how programs are built, how many there are, least keys worth a program."""

    keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    min_tiles: int
    merge: int = 8


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

    shares: each program's part of the decodes (see `plan_decode_kernel`); None where there are no
        decodes or the splits are fixed (deterministic).
    """

    batch: PagedBatch
    window: int | None
    target: KernelTarget
    decode_tile: DecodeTile
    prefill_tile: PrefillTile
    shares: Tensor | None

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
    if batch.num_decodes == 0 or batch.deterministic:
        return plan
    return _with_shares(plan)


def decode_tile(batch: PagedBatch, target: KernelTarget) -> DecodeTile:
    """One warp per program, few keys: measured best on an H200 for every number of sequences.

    More programs hide more latency but cut heads into more segments, which small steps feel.
    """
    is_narrow = batch.pool_dtype is not None and batch.pool_dtype.itemsize == 1
    return DecodeTile(
        keys=32,
        num_warps=1,
        num_stages=3 if batch.head_dim <= 128 else 2,
        programs_per_sm=8 if batch.deterministic else _programs(batch.num_decodes, is_narrow),
        min_tiles=1,
    )


def _programs(num_decodes: int, is_narrow: bool) -> int:
    """Programs per multiprocessor; 8 of them take all registers."""
    if num_decodes <= 4:
        return 1 if num_decodes == 1 else 2
    if num_decodes <= 64:
        return 4 if is_narrow else 2
    return 8 if is_narrow else 6


def prefill_tile(batch: PagedBatch, target: KernelTarget) -> PrefillTile:
    """A tile for wgmma on Hopper; smaller ones where shared memory is."""
    if target.arch < 90:
        return PrefillTile(rows=64, keys=32, whole_keys=32, num_warps=4, num_stages=2)
    if batch.head_dim > 128:
        return PrefillTile(rows=128, keys=64, whole_keys=64, num_warps=8, num_stages=2)
    if batch.pool_dtype == torch.int8:
        # Widening and two scales per key take registers: a larger tile would spill.
        return PrefillTile(rows=64, keys=128, whole_keys=128, num_warps=4, num_stages=2)
    return PrefillTile(rows=128, keys=64, whole_keys=128, num_warps=8, num_stages=3)


def _with_shares(plan: TritonPlan) -> TritonPlan:
    from runtime.kernels.attention.decode_kernel import plan_decode_kernel

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
        BLOCK_S=block_s,
        BLOCK_P=1 << (num_programs - 1).bit_length(),
        SEARCH_STEPS=block_s.bit_length() - 1,
        PDL=plan.target.has_pdl,
        num_warps=4,
        **_launch_options(plan.target),
    )
    return replace(plan, shares=shares)


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
        ROWS=8 if group <= 8 else 16,
        GROUP_ROWS=1 << (group - 1).bit_length(),
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
    constants = _common(q_THD, pool, plan)
    first_span = batch.num_decodes
    num_spans = batch.block_tables_SB.shape[0] - first_span
    # Each span wastes less than one tile (see `_span_of`).
    num_tiles = (q_THD.shape[0] - first_span) // (tile.rows // constants["GROUP"]) + num_spans
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
        ROWS=tile.rows,
        TILE=tile.keys,
        WHOLE_TILE=tile.whole_keys,
        UNIFORM=batch.deterministic,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_options(target: KernelTarget) -> dict[str, Any]:
    return {"launch_pdl": True} if target.has_pdl else {}
