"""The paged KV pools: one tensor per layer, blocks of `block_size` tokens.

Who owns which block is the engine's business; here are only bytes. One extra block of zeros at the
end pads short sequences in a batch; its id is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.model.spec import ModelSpec

KV_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


class KVCache:
    """Keys and values of every layer.

    Attributes:
        pools: per layer [num_blocks + 1, 2, kv_heads, block_size, head_dim]: keys, then values.
        scales: per layer (k, v); an fp8 pool holds value / scale, saturated at +-448. The others
            hold plain values and ignore them.
        num_blocks: blocks that may be handed out: ids 0 .. num_blocks - 1.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        scales: Sequence[tuple[float, float] | None] | None = None,
    ) -> None:
        """Allocate the pools; only the blank block is written, so that a pool on the CPU takes
        memory as its blocks are first used. `scales` come from the artifact (None: 1.0).

        Raises ValueError for an unknown dtype or scales that are not one positive pair per layer.
        """
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.scales = _checked_scales(scales, spec.num_layers)
        shape = (num_blocks + 1, 2, spec.kv_heads, block_size, spec.head_dim)
        torch_dtype = _torch_dtype(dtype)
        self.pools: list[Tensor] = [
            torch.empty(shape, dtype=torch_dtype, device=device) for _ in range(spec.num_layers)
        ]
        for pool in self.pools:
            pool.view(torch.uint8)[self.blank_block].zero_()

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, dtype: str) -> int:
        """Bytes that one block takes over all layers."""
        per_token = 2 * spec.kv_heads * spec.head_dim * _torch_dtype(dtype).itemsize
        return spec.num_layers * block_size * per_token

    @property
    def blank_block(self) -> int:
        """Id of the block of zeros."""
        return self.num_blocks

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, all layers: ids [n] -> ids [n] (for copy-on-write and swaps)."""
        for pool in self.pools:
            data = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
            data[targets] = data[sources]


def _torch_dtype(dtype: str) -> torch.dtype:
    if dtype not in KV_DTYPES:
        raise ValueError(f"KV cache dtype {dtype!r} is not one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[dtype]


def _checked_scales(
    scales: Sequence[tuple[float, float] | None] | None, num_layers: int
) -> tuple[tuple[float, float], ...]:
    if scales is None:
        return ((1.0, 1.0),) * num_layers
    if len(scales) != num_layers:
        raise ValueError(f"{len(scales)} pairs of KV scales for {num_layers} layers")
    pairs = tuple(pair or (1.0, 1.0) for pair in scales)
    bad = [i for i, pair in enumerate(pairs) if not all(0 < scale < float("inf") for scale in pair)]
    if bad:
        raise ValueError(f"KV scales of layer {bad[0]} are {pairs[bad[0]]}; they must be positive")
    return pairs
