"""The paged KV pools: one tensor per layer, blocks of `block_size` tokens.

All layers have one element type, but for those that an artifact keeps out of a quantized cache.

Who owns which block is the engine's business; here are only bytes. One extra block of zeros at the
end pads short sequences in a batch; its id is never handed out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.model.spec import ModelSpec

KV_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_SCALE_BYTES = 4

KVScales = tuple[float, float] | Tensor


class KVCache:
    """Keys and values of every layer.

    Attributes:
        pools: per layer [num_blocks + 1, 2, kv_heads, block_size, head_dim]: keys, then values.
        scales: per layer (k, v); an fp8 pool holds value / scale, saturated at +-448. None where
            the layer has a scale per head. Pools that are not fp8 ignore them.
        head_scales: the same scales on the device, per layer float32 [2, kv_heads]; None for pools
            that are not fp8.
        token_scales: per layer of an int8 pool float32 [num_blocks + 1, 2, kv_heads, block_size],
            written with the codes: value = code * scale. None for the others.
        num_blocks: blocks that may be handed out: ids 0 .. num_blocks - 1.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: str | Sequence[str] = "float32",
        device: torch.device | str = "cpu",
        scales: Sequence[KVScales | None] | None = None,
    ) -> None:
        """Allocate the pools; only the blank block is written, so that a pool on the CPU takes
        memory as its blocks are first used. `dtype` is one name, or one for each layer. `scales`
        come from the artifact: per layer a pair, a tensor [2, kv_heads], or None (1.0).

        Raises ValueError for an unknown dtype or scales that are not one positive pair, or one
        positive value per side and head, per layer.
        """
        self.num_blocks, self.block_size = num_blocks, block_size
        dtypes = _per_layer(dtype, spec)
        per_layer = _checked_scales(scales, spec)
        self.scales = tuple(None if isinstance(s, Tensor) else s for s in per_layer)
        self.head_scales: tuple[Tensor | None, ...] = tuple(
            _per_head(scale, spec.kv_heads, device) if name == "fp8" else None
            for name, scale in zip(dtypes, per_layer, strict=True)
        )
        shape = (num_blocks + 1, 2, spec.kv_heads, block_size, spec.head_dim)
        self.pools: list[Tensor] = [
            torch.empty(shape, dtype=KV_DTYPES[name], device=device) for name in dtypes
        ]
        self.token_scales: list[Tensor | None] = [
            torch.empty(shape[:-1], dtype=torch.float32, device=device) if name == "int8" else None
            for name in dtypes
        ]
        for tensor in self._tensors():
            tensor.view(torch.uint8)[self.blank_block].zero_()

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, dtype: str | Sequence[str]) -> int:
        """Bytes that one block takes over all layers, its scales included."""
        per_head = sum(
            spec.head_dim * KV_DTYPES[name].itemsize + (_SCALE_BYTES if name == "int8" else 0)
            for name in _per_layer(dtype, spec)
        )
        return block_size * 2 * spec.kv_heads * per_head

    @property
    def blank_block(self) -> int:
        """Id of the block of zeros."""
        return self.num_blocks

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, all layers: ids [n] -> ids [n] (for copy-on-write and swaps)."""
        for tensor in self._tensors():
            data = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            data[targets] = data[sources]

    def of_layers(self, layers: Sequence[int]) -> KVCache:
        """The same memory, seen as the cache of these layers of the model in this order."""
        part = copy.copy(self)
        part.pools = [self.pools[i] for i in layers]
        part.scales = tuple(self.scales[i] for i in layers)
        part.head_scales = tuple(self.head_scales[i] for i in layers)
        part.token_scales = [self.token_scales[i] for i in layers]
        return part

    def _tensors(self) -> list[Tensor]:
        """Everything that belongs to blocks."""
        return self.pools + [scales for scales in self.token_scales if scales is not None]


def _per_layer(dtype: str | Sequence[str], spec: ModelSpec) -> tuple[str, ...]:
    names = (dtype,) * spec.num_layers if isinstance(dtype, str) else tuple(dtype)
    for name in names:
        if name not in KV_DTYPES:
            raise ValueError(f"KV cache dtype {name!r} is not one of {', '.join(KV_DTYPES)}")
    if len(names) != spec.num_layers:
        raise ValueError(f"{len(names)} KV cache dtypes for {spec.num_layers} layers")
    return names


def _per_head(scales: KVScales, kv_heads: int, device: torch.device | str) -> Tensor:
    if isinstance(scales, Tensor):
        return scales.to(device=device, dtype=torch.float32).contiguous()
    pair = torch.tensor(scales, dtype=torch.float32, device=device)
    return pair[:, None].expand(2, kv_heads).contiguous()


def _checked_scales(
    scales: Sequence[KVScales | None] | None, spec: ModelSpec
) -> tuple[KVScales, ...]:
    if scales is None:
        return ((1.0, 1.0),) * spec.num_layers
    if len(scales) != spec.num_layers:
        raise ValueError(f"{len(scales)} pairs of KV scales for {spec.num_layers} layers")
    filled = tuple((1.0, 1.0) if scale is None else scale for scale in scales)
    for layer, scale in enumerate(filled):
        _check_scale(layer, scale, spec.kv_heads)
    return filled


def _check_scale(layer: int, scale: KVScales, kv_heads: int) -> None:
    if isinstance(scale, Tensor) and scale.shape != (2, kv_heads):
        raise ValueError(
            f"KV scales of layer {layer} have shape {list(scale.shape)}; "
            f"a pair or [2, {kv_heads}] (keys and values by head) is expected"
        )
    values = scale.flatten().tolist() if isinstance(scale, Tensor) else scale
    if not all(0 < value < float("inf") for value in values):
        raise ValueError(f"KV scales of layer {layer} are {scale}; they must be positive")
