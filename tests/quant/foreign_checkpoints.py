"""Checkpoints as other tools write them, packed bit by bit from the formats' definitions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.api import carry_out, prepare

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, bits: int) -> Tensor:
    """Unsigned codes [n, m] -> int32 words [n * bits / 32, m]: code i at bits [i b, (i + 1) b)."""
    stream = (codes[:, None, :] >> np.arange(bits)[:, None]) & 1
    stream = stream.reshape(-1, 32, codes.shape[1]).astype(np.uint64)
    packed = (stream << np.arange(32, dtype=np.uint64)[:, None]).sum(1)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def awq_words(codes: np.ndarray) -> Tensor:
    """Unsigned codes [n, m] -> int32 words [n, m / 8]."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for nibble, column in enumerate(NIBBLES):
        packed |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(packed.view(np.int32))


def rounded(weight: Tensor, bits: int, size: int, sym: bool) -> tuple[Any, Any, Tensor]:
    """Unsigned codes [in, out], zero points [G, out] and float16 scales [G, out]."""
    grouped = weight.float().T.reshape(-1, size, weight.shape[0])
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    top = 2**bits - 1
    scale = torch.maximum(-low, high) * 2 / top if sym else (high - low) / top
    scale = scale.half()
    zero = torch.full_like(low, 2 ** (bits - 1)) if sym else (-low / scale).round().clamp(1, top)
    codes = (grouped / scale.float()[:, None] + zero[:, None]).round().clamp(0, top)
    return codes.flatten(0, 1).int().numpy(), zero.int().numpy(), scale


def quantized_copy(
    model: Path, out: Path, *, method: str, bits: int = 4, size: int = 32, sym: bool = True,
    version: str = "gptq_v2", only: str = "_proj.weight", more_bits: str = "-", **settings: Any,
) -> tuple[Path, dict[str, Tensor]]:  # fmt: skip
    """A checkpoint as that tool writes it, and the dense weight of each module it stands for.

    only: what the names of quantized modules hold; more_bits: of those that have 8."""
    shutil.copytree(model, out)
    tensors, dense, usual = {}, {}, bits
    for name, value in load_file(model / "model.safetensors").items():
        if only not in name or "_proj.weight" not in name:
            tensors[name] = value.half()
            continue
        module = name.removesuffix(".weight")
        bits = 8 if more_bits in name else usual
        codes, zero, scale = rounded(value, bits, size, sym)
        group = np.arange(codes.shape[0]) // size
        exact = torch.from_numpy(codes - zero[group]).half() * scale[torch.from_numpy(group)]
        dense[module] = exact.T.contiguous()
        if method == "awq":
            tensors[f"{module}.qweight"], tensors[f"{module}.qzeros"] = (
                awq_words(codes),
                awq_words(zero),
            )
        else:
            tensors[f"{module}.qweight"] = words(codes, bits)
            stored = zero - 1 if version == "gptq" else zero
            tensors[f"{module}.qzeros"] = words(stored.T, bits).T.contiguous()
            tensors[f"{module}.g_idx"] = torch.from_numpy(group).int()
        tensors[f"{module}.scales"] = scale
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    section: dict[str, Any] = {"quant_method": method, "bits": usual, "group_size": size}
    if method == "gptq":
        section |= {"sym": sym, "desc_act": False, "checkpoint_format": version}
    else:
        section |= {"zero_point": True, "version": "gemm"}
    section = {k: v for k, v in {**section, **settings}.items() if v is not None}
    set_config(out, quantization_config=section, dtype="float16")
    return out, dense


def set_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit(model: Path, **changes: Tensor | None) -> None:
    path = model / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, metadata={"format": "pt"})


def converted(model: Path, out: Path) -> Path:
    job = prepare(str(model), "none.yaml", out=out, overrides={}, keep_codes=True)
    return Path(carry_out(job).artifact)


def kv_checkpoint(
    artifact: Callable[..., Path], tiny_model: Callable[..., Path], out: Path, kv_cache: str
) -> Path:
    """A compressed-tensors directory of another tool with KV scales, in one shard."""
    made = artifact(tiny_model(), scheme="w4a16", group_size=32, method="gptq", kv_cache=kv_cache)
    model = shutil.copytree(made, out)
    (model / "artifact.json").unlink()
    (model / "model.safetensors.index.json").unlink()
    tensors = {n: t for shard in model.glob("*.safetensors") for n, t in load_file(shard).items()}
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model
