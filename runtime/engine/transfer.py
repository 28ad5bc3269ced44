"""Copies between host and device that nobody waits for until the values are needed.

On CUDA both directions go through pinned memory of torch's caching host allocator, which hands a
buffer out again only when the copies that use it are done. On the CPU they are plain copies, so
that the same runner can be tested there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]
_ALIGNED = 4  # int32 words in 16 bytes
_PADDING = np.zeros(_ALIGNED, np.int32)


def upload(values: Ints, device: torch.device) -> Tensor:
    """An int32 tensor on `device` with these values, in stream order."""
    if device.type == "cpu":
        return torch.from_numpy(values.copy())
    return _pinned(values).to(device, non_blocking=True)


def upload_all(parts: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors of int32 and int64 arrays of any shape, in one copy.

    Each begins at a multiple of 16 bytes: kernels are compiled apart for those that do not. A step
    begins when these are there, so torch is called as little as can be.
    """
    words: list[Ints] = []
    for part in parts:
        flat = np.ascontiguousarray(part).view(np.int32).ravel()
        words += (flat, _PADDING[: -len(flat) % _ALIGNED])
    sent = torch.split(upload(np.concatenate(words), device), [len(word) for word in words])
    found = []
    for part, tensor in zip(parts, sent[::2], strict=True):
        if part.dtype == np.int64:
            tensor = tensor.view(torch.int64)
        found.append(tensor if part.ndim == 1 else tensor.view(part.shape))
    return found


def upload_into(target: Tensor, values: Ints) -> None:
    """`target[...] = values`, in stream order; both int32 and of one shape."""
    if target.device.type == "cpu":
        target.copy_(torch.from_numpy(values))
    else:
        target.copy_(_pinned(values), non_blocking=True)


class Download:
    """Tensors on their way to the host; `wait` gives them as they were when this was made.

    Waits for everything launched before, even where there is nothing to bring.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cpu":
            self._host = [tensor.clone() for tensor in tensors]
            return
        self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _pinned(values: Ints) -> Tensor:
    host = torch.empty(values.shape, dtype=torch.int32, pin_memory=True)
    host.numpy()[...] = values
    return host
