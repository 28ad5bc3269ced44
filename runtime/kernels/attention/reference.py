"""Paged attention written out: one sequence, one head, one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.kv_store.reference import stored_kv


def attention_reference(
    q_THD: Tensor,
    pool: Tensor,
    block_tables_SB: Tensor,
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
    head_scales_2K: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v of every query over the stored, causal, windowed keys: [T, H, D].

    `pool` [N, 2, K, block_size, D]; query i of a span of n is at position seq_len - n + i and sees
    the last `window` positions up to its own. Only slots below `seq_len` are read; a sequence of
    length 0 (padding of a captured step) gives zeros. Scales as in `stored_kv`.
    """
    heads_per_kv = q_THD.shape[1] // pool.shape[2]
    values = stored_kv(pool, head_scales_2K, token_scales)
    out, row = torch.zeros_like(q_THD), 0
    for s, (num_new, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if seq_len == 0:
            row += num_new
            continue
        k_LKD, v_LKD = _of_sequence(values, block_tables_SB[s], seq_len)
        for position in range(seq_len - num_new, seq_len):
            first = 0 if window is None else max(0, position + 1 - window)
            for head in range(q_THD.shape[1]):
                kv_head = head // heads_per_kv
                scores = k_LKD[first : position + 1, kv_head] @ q_THD[row, head].float() * scale
                weights = torch.softmax(scores, dim=0)
                out[row, head] = (weights @ v_LKD[first : position + 1, kv_head]).to(out.dtype)
            row += 1
    return out


def _of_sequence(values: Tensor, table_B: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """The first `seq_len` keys and values of a sequence, float32 [L, K, D] each."""
    block_size = values.shape[3]
    slots = [(int(table_B[p // block_size]), p % block_size) for p in range(seq_len)]
    k = torch.stack([values[block, 0, :, offset] for block, offset in slots])
    v = torch.stack([values[block, 1, :, offset] for block, offset in slots])
    return k, v
