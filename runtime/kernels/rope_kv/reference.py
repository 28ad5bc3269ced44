"""Head norms, rotation and the KV write, one step after another in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.kv_store.reference import store_kv_reference
from runtime.kernels.norm.reference import rms_norm_reference
from runtime.kernels.rope.reference import rotate_reference


def rope_kv_reference(
    heads_THD: Tensor,
    pool: Tensor,
    slots_T: Tensor,
    *,
    num_heads: int,
    eps: float,
    positions_T: Tensor,
    table: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    head_scales_2K: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> Tensor:
    """The queries [T, H, D], normed and rotated, in the compute type; keys and values go to `pool`.

    All in float32 with one rounding at the end. Arguments as in `runtime.kernels.rope_kv.rope_kv`.
    """
    kv_heads = pool.shape[2]
    values_THD = heads_THD.float()
    q, k = values_THD[:, :num_heads], values_THD[:, num_heads : num_heads + kv_heads]
    v = values_THD[:, num_heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    if table is not None:
        cos, sin = table[positions_T.long()].unsqueeze(1).chunk(2, dim=-1)
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        q, k = rotate_reference(q, *both), rotate_reference(k, *both)
    store_kv_reference(pool, slots_T, k, v, head_scales_2K, token_scales)
    return q.to(heads_THD.dtype)
