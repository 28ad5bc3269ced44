"""Between projection and attention: head norms, rotation, and the write into the paged pool.

One kernel on devices with Triton. The CPU composes `norm`, `rope` and `kv_store` instead, whose
rounding to the compute type after each step is what models were trained with on such devices.

Shape legend: T tokens, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from torch import Tensor

from runtime.kernels.backend import target_of
from runtime.kernels.kv_store import kv_kind, raw_pool

# Tokens of one program by tokens of the step: many tiny programs take longer than fewer larger.
_TOKENS_PER_PROGRAM = ((256, 16), (24, 4), (0, 1))


def rope_kv(
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
) -> None:
    """Norm and rotate queries in place; write normed, rotated keys and plain values to `pool`.

    `heads_THD` [T, H + 2 K, D], contiguous: query, key, value heads as the fused projection gives
    them; its key part is left as it was. `pool` [N, 2, K, block_size, D]; a slot of -1 writes
    nothing. `table` float32 [positions, rotary_dim], cos then sin (`cos_sin_table`), None for no
    rotation; NeoX halves (RoFormer, arXiv 2104.09864), the dimensions behind `rotary_dim` pass.
    `q_norm`, `k_norm` float32 [D]: RMSNorm of each head before the rotation. An fp8 pool stores
    value / `head_scales_2K`, saturated at +-448; an int8 pool rounds value / (largest / 127) and
    keeps that scale per token and head in `token_scales` [N, 2, K, block_size].

    `slots_T` and `positions_T` are read before the launch ahead has ended: some launch since they
    were written must have waited for all before it (the embedding lookup does).
    """
    from runtime.kernels.quantize.kernel import launch_options
    from runtime.kernels.rope_kv.kernel import rope_kv_kernel

    assert heads_THD.is_contiguous()
    num_tokens, all_heads, head_dim = heads_THD.shape
    target = target_of(heads_THD.device)
    width = head_dim if table is None else table.shape[1]
    block_t = next(size for least, size in _TOKENS_PER_PROGRAM if num_tokens >= least)
    rope_kv_kernel[(-(-num_tokens // block_t), all_heads)](
        heads_THD,
        raw_pool(pool),
        head_scales_2K,
        token_scales,
        slots_T,
        positions_T,
        table,
        q_norm,
        k_norm,
        num_tokens,
        eps,
        HEADS=num_heads,
        KV_HEADS=pool.shape[2],
        HEAD_DIM=head_dim,
        WIDTH=width,
        ROTATES=table is not None,
        NORMS=q_norm is not None,
        BLOCK_SIZE=pool.shape[3],
        KV=kv_kind(pool.dtype, target),
        BLOCK_T=block_t,
        BLOCK_F=_power_of_two(width // 2),
        BLOCK_R=_power_of_two(head_dim - width),
        PDL=target.has_pdl,
        num_warps=4 if block_t > 4 else 1,
        **launch_options(target),
    )


def _power_of_two(n: int) -> int:
    """The smallest power of two >= n; 0 for 0."""
    return 0 if n == 0 else 1 << (n - 1).bit_length()
