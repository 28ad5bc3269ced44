"""Captured decode steps: one CUDA graph per number of rows and way of drawing, made when needed.

A step of n rows replays the graph of the next size up; rows beyond n are padding. The first step of
a size runs as it is (which compiles its kernels and settles its memory) and is captured behind it;
so a capture costs the host some milliseconds, once, while the device is busy. All graphs share one
memory pool, since only one runs at a time: what a step returns is good until the next one runs. A
capture that fails is reported once, and the engine goes on without graphs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows to capture for, by rising size; the last one is `max_num_seqs`.

    Padding costs little: attention skips it, weights are read once however many rows there are,
    and products take their rows by tiles of these sizes.
    """
    sizes = {1, 2, 4, 8, 16, 24, max_num_seqs}
    for low, high, step in ((24, 64, 8), (64, 128, 16), (128, 256, 32), (256, 2048, 64)):
        sizes.update(range(low + step, high + 1, step))
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A graph, the memory its step's result lies in, and what the graph relies on."""

    graph: torch.cuda.CUDAGraph
    result: Tensor | None
    kept: Any


class DecodeGraphs:
    """Runs `step(num_rows, kind)` for a size that fits, by replay where it was captured.

    `step` reads and writes tensors at fixed addresses only and allocates on one stream. `keep`
    gives tensors whose memory the graphs rely on; it is asked at each capture.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        step: Callable[[int, Any], Tensor | None],
        keep: Callable[[], Any],
    ) -> None:
        self.sizes = sizes
        self._step, self._keep = step, keep
        self._captured: dict[tuple[int, Hashable], _Captured] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._is_off = False

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @property
    def kinds(self) -> list[Any]:
        """The kinds that steps had so far."""
        return list(dict.fromkeys(kind for _, kind in self._captured))

    def size_for(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def run(self, size: int, kind: Hashable) -> Tensor | None:
        """One step of `size` rows (one of `sizes`); what it returns is good until the next one."""
        captured = self._captured.get((size, kind))
        if captured is not None:
            captured.graph.replay()
            return captured.result
        result = self._step(size, kind)
        if not self._is_off:
            self._try_capture(size, kind)
        return result

    def missing(self, kind: Hashable) -> list[int]:
        """Sizes not captured yet, largest first: its memory then serves the smaller ones."""
        if self._is_off:
            return []
        return [size for size in reversed(self.sizes) if (size, kind) not in self._captured]

    def _try_capture(self, size: int, kind: Hashable) -> None:
        torch.cuda.synchronize()  # a fault of the step itself shows here, not as a failed capture
        try:
            self._captured[size, kind] = self._capture(size, kind)
        except RuntimeError as error:  # torch's and CUDA's way to say that it cannot
            self._is_off = True
            log.warning(
                "CUDA graphs are off from here on: capturing a decode step of %d rows failed "
                "(%s); answers are the same, small batches are slower", size, error,
            )  # fmt: skip

    def _capture(self, size: int, kind: Hashable) -> _Captured:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # One for all: libraries keep scratch memory for every stream they see.
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph, result = torch.cuda.CUDAGraph(), None
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = self._step(size, kind)
            finally:
                graph.capture_end()
        return _Captured(
            graph=graph, result=None if result is None else unowned(result), kept=self._keep()
        )


def unowned(tensor: Tensor) -> Tensor:
    """The same memory, without keeping it: for what lies in the pool that all graphs share."""
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, tensor.nbytes
    )
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, 0, tensor.shape, tensor.stride())
