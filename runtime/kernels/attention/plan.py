"""What attention needs to know of a step, worked out once and used by every layer.

This is the plan of the path that gathers (devices without Triton); `triton_plan` is the other.

Spans of one token (decodes) are grouped: sequences of similar length are gathered into one padded
batch and answered by one call. Longer spans (prompt chunks) are answered one by one. A sliding
window trims what is gathered, so each distinct window of a model has its own plan.

Shape legend: S spans, B blocks, L keys of the longest sequence of a group, K key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from runtime.kernels.workspace import Workspace

# Queries answered by one call of a long span: bounds the mask to this many rows.
QUERY_TILE = 512
# Keys and values gathered at once for a group: bounds the copy, and larger ones are slower (each
# call then pays for fresh pages).
GATHER_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """S single-token spans over L = B * block_size gathered keys each.

    tokens: the spans' rows in T, or None where they are all of T in order.
    tiles: rows of `pool.view(-1, block_size * D)`, K's then V's: [2 * S * K * B].
    blanks: rows of the gathered [2 * S * K * L, D] that hold no key of the sequence; they are
        zeroed, since 0 * NaN of a stale slot would be NaN.
    mask: [S, 1, 1, L] additive, or None where every gathered key is visible.
    """

    tokens: Tensor | None
    num_spans: int
    tiles: Tensor
    blanks: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTile:
    """Rows [start, stop) of T over the gathered keys [first_key, last_key).

    mask: [queries, keys] bool, True where visible; None means plainly causal.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongSpan:
    """One span of several tokens: the tiles to gather ([2 * K * B]) and its query tiles."""

    tiles: Tensor
    query_tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """All spans of a step, for one window."""

    groups: tuple[DecodeGroup, ...]
    spans: tuple[LongSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """The spans of a step (see StepInputs) and the pool they read.

    `blank_block` is a block of zeros that pads short sequences of a group. The optional fields say
    the same to the Triton kernels, whose lengths stay on the device; with them the host's
    `query_lens` and `seq_lens` are not read. `heads` (of queries) and `num_tokens` (of the step)
    are needed by the fastest prefill alone. `deterministic`: a row's bits depend neither on the
    rows beside it nor on where its prompt was cut.
    """

    block_tables_SB: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    kv_heads: int
    head_dim: int
    block_size: int
    blank_block: int
    dtype: torch.dtype
    query_starts_S1: Tensor | None = None
    seq_lens_S: Tensor | None = None
    num_decodes: int = 0
    heads: int | None = None
    num_tokens: int | None = None
    pool_dtype: torch.dtype | None = None
    deterministic: bool = False
    workspace: Workspace | None = None

    @property
    def blocks_per_group(self) -> int:
        """The most blocks a group may gather."""
        block_bytes = 2 * self.kv_heads * self.block_size * self.head_dim * self.dtype.itemsize
        return GATHER_BYTES // block_bytes

    def first_block(self, s: int, window: int | None) -> int:
        """The first block that some query of span s sees."""
        if window is None:
            return 0
        first_query = self.seq_lens[s] - self.query_lens[s]
        return max(0, first_query + 1 - window) // self.block_size

    def num_blocks(self, s: int, window: int | None) -> int:
        """Blocks that hold the keys span s sees."""
        return -(-self.seq_lens[s] // self.block_size) - self.first_block(s, window)


def plan_gathers(batch: PagedBatch, window: int | None) -> AttentionPlan:
    """What to gather for layers that see `window` tokens (None: all)."""
    starts = [0, *accumulate(batch.query_lens)]
    decodes = [s for s, num_new in enumerate(batch.query_lens) if num_new == 1]
    return AttentionPlan(
        groups=tuple(
            _decode_group(batch, spans, [starts[s] for s in spans], window)
            for spans in _similar(
                decodes, [batch.num_blocks(s, window) for s in decodes], batch.blocks_per_group
            )
        ),
        spans=tuple(
            _long_span(batch, s, starts[s], window)
            for s, num_new in enumerate(batch.query_lens)
            if num_new > 1
        ),
    )


def _similar(spans: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Split spans into groups in which no one is padded to more than twice its size.

    A group of several is padded to at most `limit` in all.
    """
    groups: list[list[int]] = []
    largest = 0
    for size, s in sorted(zip(sizes, spans, strict=True), reverse=True):
        if not groups or 2 * size < largest or largest * (len(groups[-1]) + 1) > limit:
            groups.append([])
            largest = size
        groups[-1].append(s)
    return [sorted(group) for group in groups]


def _decode_group(
    batch: PagedBatch, spans: list[int], rows: list[int], window: int | None
) -> DecodeGroup:
    device = batch.block_tables_SB.device
    firsts = [batch.first_block(s, window) for s in spans]
    counts = [batch.num_blocks(s, window) for s in spans]
    num_blocks = max(counts)
    # Keys below are counted from the first gathered block; visible are [lows, ends).
    ends = [batch.seq_lens[s] - f * batch.block_size for s, f in zip(spans, firsts, strict=True)]
    lows = [0 if window is None else max(0, end - window) for end in ends]
    is_whole_step = rows == list(range(sum(batch.query_lens)))
    table_SB = _padded_tables(batch, spans, firsts, counts)
    return DecodeGroup(
        tokens=None if is_whole_step else torch.tensor(rows, device=device),
        num_spans=len(spans),
        tiles=_tiles(table_SB, batch.kv_heads),
        blanks=_blank_rows(batch, ends, counts, device),
        mask=_decode_mask(lows, ends, num_blocks * batch.block_size, batch.dtype, device),
    )


def _padded_tables(
    batch: PagedBatch, spans: list[int], firsts: list[int], counts: list[int]
) -> Tensor:
    """Physical blocks [S, B] from each span's first one on, padded with the blank block."""
    tables_SB = batch.block_tables_SB
    device = tables_SB.device
    columns = torch.arange(max(counts), device=device)
    first = torch.tensor(firsts, device=device)[:, None]
    count = torch.tensor(counts, device=device)[:, None]
    index = (first + columns).clamp(max=tables_SB.shape[1] - 1)
    table = tables_SB[torch.tensor(spans, device=device)].gather(1, index)
    return torch.where(columns < count, table, batch.blank_block)


def _tiles(table_SB: Tensor, kv_heads: int) -> Tensor:
    """Rows of `pool.view(-1, block_size * D)`, in the order [2, S, K, B]."""
    heads = torch.arange(2 * kv_heads, device=table_SB.device).view(2, 1, kv_heads, 1)
    return (table_SB[None, :, None, :] * (2 * kv_heads) + heads).flatten()


def _blank_rows(
    batch: PagedBatch, ends: list[int], counts: list[int], device: torch.device
) -> Tensor | None:
    """Rows of the gathered [2 * S * K * L, D] behind each sequence's last key in its last block."""
    length = max(counts) * batch.block_size
    num_spans, kv_heads = len(ends), batch.kv_heads
    keys = [
        s * kv_heads * length + key
        for s, (end, count) in enumerate(zip(ends, counts, strict=True))
        for key in range(end, count * batch.block_size)
    ]
    if not keys:
        return None
    sides = torch.arange(2, device=device)[:, None, None] * (num_spans * kv_heads * length)
    heads = torch.arange(kv_heads, device=device)[:, None] * length
    return (torch.tensor(keys, device=device) + heads + sides).flatten()


def _decode_mask(
    lows: list[int], ends: list[int], length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if not any(lows) and min(ends) == length:
        return None
    keys = torch.arange(length, device=device)
    low, end = (torch.tensor(values, device=device)[:, None] for values in (lows, ends))
    mask = torch.zeros(len(ends), length, dtype=dtype, device=device)
    return mask.masked_fill_((keys < low) | (keys >= end), float("-inf"))[:, None, None, :]


def _long_span(batch: PagedBatch, s: int, row: int, window: int | None) -> LongSpan:
    first, count = batch.first_block(s, window), batch.num_blocks(s, window)
    base = first * batch.block_size
    num_new = batch.query_lens[s]
    position = batch.seq_lens[s] - num_new - base
    table_1B = batch.block_tables_SB[s : s + 1, first : first + count]
    tiles = [
        _query_tile(row + i, min(QUERY_TILE, num_new - i), position + i, window, table_1B.device)
        for i in range(0, num_new, QUERY_TILE)
    ]
    return LongSpan(tiles=_tiles(table_1B, batch.kv_heads), query_tiles=tuple(tiles))


def _query_tile(
    row: int, num_queries: int, position: int, window: int | None, device: torch.device
) -> QueryTile:
    """`num_queries` from T row `row` on; the first is at gathered key `position`."""
    first_key = 0 if window is None else max(0, position + 1 - window)
    last_key = position + num_queries
    is_causal = position == first_key and (window is None or num_queries <= window)
    mask = None
    if not is_causal:
        queries = torch.arange(position, last_key, device=device)[:, None]
        keys = torch.arange(first_key, last_key, device=device)
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
    return QueryTile(
        start=row, stop=row + num_queries, first_key=first_key, last_key=last_key, mask=mask
    )
