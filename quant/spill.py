"""Where hidden states lie between two layers: on the GPU, in host memory, or in a file.

They are the one thing that grows with the calibration set. They take a third of what is free at
most, so that the layer has the rest: of the GPU's memory, else of the host's, else they go to a
file beside the unfinished artifact. Where they lie moves no bit of the result.

Shape legend: B sequences of a batch, T tokens (padded), H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quant.artifact.artifact import STAGING_SUFFIX
from quant.artifact.durable import make_directory, storage_errors
from quant.machine import free_gpu_bytes, free_memory_bytes, limit_gpu
from quant.parallel import Ranks

Place = Literal["gpu", "host", "disk"]
SHARE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What a run may take, in bytes (None: what is free): of the GPU, and of the host's memory."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None


UNLIMITED = MemoryLimits()


class Shelves:
    """Finds a place for each stream of a run."""

    def __init__(self, out: Path, device: str, ranks: Ranks, limits: MemoryLimits) -> None:
        """out: the artifact's folder. A limit of the GPU's memory is torch's from here on."""
        self._folder = out.with_name(out.name + STAGING_SUFFIX) / "work"
        self._device, self._rank, self._limits = device, ranks.rank, limits
        if limits.gpu_bytes is not None and torch.device(device).type == "cuda":
            limit_gpu(device, limits.gpu_bytes)

    def place(
        self, name: str, token_ids: Sequence[Tensor], *, width: int, dtype: torch.dtype
    ) -> tuple[torch.device, list[Tensor] | None]:
        """Where a stream's hidden states [B, T, `width`] live, of ids [B, T]: the device, and the
        tensors to fill where they are not made anew each time."""
        sizes = [(*ids.shape, width) for ids in token_ids]
        num_bytes = sum(torch.Size(size).numel() for size in sizes) * dtype.itemsize
        place = choose_place(num_bytes, self._device, self._limits)
        if place == "gpu":
            return torch.device(self._device), None
        pinned = torch.device(self._device).type == "cuda"
        if not sizes or (place == "host" and not pinned):
            return torch.device("cpu"), None
        path = self._folder / f"hidden-{name}-{self._rank}.bin"
        return torch.device("cpu"), shelf(sizes, dtype, place, path, pinned=pinned)


def choose_place(num_bytes: int, device: str, limits: MemoryLimits) -> Place:
    """The fastest place a third of whose free memory holds `num_bytes`."""
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu and SHARE * num_bytes <= free_gpu_bytes(device, limits.gpu_bytes):
        return "gpu"
    return "host" if SHARE * num_bytes <= free_memory_bytes(limits.host_bytes) else "disk"


def choose_home(num_bytes: int, device: str) -> torch.device:
    """The device that computes, if a third of what is free there holds `num_bytes`; else the CPU,
    for what cannot lie in a file."""
    is_there = choose_place(num_bytes, device, UNLIMITED) == "gpu"
    return torch.device(device if is_there else "cpu")


def shelf(
    sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, place: Place, path: Path, *, pinned: bool
) -> list[Tensor]:
    """Tensors of these sizes, one after another in a file at `path` or in (pinned) host memory.

    The file's space is taken at once: StorageError when the disk has no room for it.
    """
    counts = [torch.Size(size).numel() for size in sizes]
    if place == "disk":
        _take_space(path, sum(counts) * dtype.itemsize)
        whole = torch.from_file(str(path), shared=True, size=sum(counts), dtype=dtype)
    else:
        whole = torch.empty(sum(counts), dtype=dtype, pin_memory=pinned)
    pieces = torch.split(whole, counts)
    return [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]


def _take_space(path: Path, num_bytes: int) -> None:
    make_directory(path.parent)
    with storage_errors(path, num_bytes), path.open("wb") as file:
        file.truncate(num_bytes)
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(file.fileno(), 0, num_bytes)
