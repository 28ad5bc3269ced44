"""Tensors of a checkpoint on their way to a device, read, checked, copied and used all at once.

Threads read whole tensors from the files into a few pinned buffers, hash the bytes where digests
are given, and start their copies on a stream of their own, while the loader repacks what came
before. Every byte is read once, so what was hashed is what is used. Host memory beyond that is the
pinned buffers; device memory is the groups that are on their way, and what the caller keeps.

Knows names, bytes and devices; not what tensors mean.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from queue import SimpleQueue
from threading import local
from typing import Any, Self

import torch
from torch import Tensor

from quant.artifact.errors import IntegrityError
from quant.artifact.integrity import altered_tensor, refusal
from quant.artifact.store import CheckpointReader, StoredTensor

# Few threads with large slots: what Python does per slot, one thread at a time, decides how fast
# bytes move, and hashing more tensors at once than there are whole cores slows the longest one.
SLOT_BYTES = 8 << 20
SLOTS_PER_THREAD = 2
MAX_THREADS = 8
GROUPS_AHEAD = 3
_cuda: Any = torch.cuda  # its classes have no annotations
_RUN_BYTES = 16 << 20  # tensors are read one by one from this size on, smaller ones together


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Tensors that lie one after another in a file; the work of one thread at a time."""

    file: str
    tensors: tuple[tuple[str, StoredTensor], ...]


class _Slot:
    """A piece of pinned memory and the copy that last read it."""

    def __init__(self, memory: Tensor, copies: Any) -> None:
        self.memory, self.view, self._copies = memory, memory.numpy().data, copies
        self._copied = None if copies is None else _cuda.Event(blocking=True)

    def wait(self) -> None:
        """Until the memory may be written again."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        """Whatever has been asked of the copy stream so far reads this memory."""
        if self._copied is not None:
            self._copied.record(self._copies)


class TensorStream:
    """The tensors of `groups`, read in that order onto `device`.

    The first `resident` groups begin at once and are kept; of the others, which must be asked for
    in order, GROUPS_AHEAD are on their way and only the one in use is kept. `digests` (sha256 in
    hex, by name): the bytes of every tensor named there are checked, those of no group too. Int64
    tensors, which are shapes for the host, stay there. Use as a context manager.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        groups: Sequence[Sequence[str]],
        device: torch.device,
        *,
        resident: int = 0,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        self._reader, self._groups, self._device = reader, groups, _with_index(device)
        self._resident, self._digests = resident, digests or {}
        self._group_of = {name: i for i, names in enumerate(groups) for name in names}
        self._copies = _cuda.Stream(device) if device.type == "cuda" else None
        self._pending: dict[int, list[Future[None]]] = {}
        self._placed: dict[int, dict[str, Tensor]] = {}
        self._begun = 0
        self._thread = local()
        self._files: dict[str, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for file in self._reader.files:
                self._files[file] = os.open(self._reader.directory / file, os.O_RDONLY)
                stack.callback(os.close, self._files[file])
            threads = min(MAX_THREADS, os.cpu_count() or 1)
            slots = self._make_slots(threads)
            self._pool = ThreadPoolExecutor(threads, "read", self._begin_thread, (slots,))
            stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)
            self._begin_up_to(self._resident + GROUPS_AHEAD)
            others = [name for name in self._digests if name not in self._group_of]
            self._others = [self._pool.submit(self._read, run, {}) for run in self._runs(others)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._pending.clear()
        self._placed.clear()
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """The tensor on the device, ready for the current stream; IntegrityError when altered."""
        if self._reader.dtype(name) == torch.int64:
            return self._reader.tensor(name)
        group = self._group_of[name]
        if group >= self._resident:
            self._begin_up_to(group + GROUPS_AHEAD + 1)
            for past in [g for g in self._placed if self._resident <= g < group]:
                del self._placed[past]
        self._wait_for(group)
        return self._placed[group][name]

    def finish(self) -> None:
        """Wait for the check of the tensors that nobody asked for."""
        for group in list(self._pending):
            self._wait_for(group)
        for future in self._others:
            future.result()

    def _wait_for(self, group: int) -> None:
        futures = self._pending.pop(group, None)
        if futures is None:
            return
        for future in futures:
            future.result()
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)

    def _begin_up_to(self, stop: int) -> None:
        for group in range(self._begun, min(stop, len(self._groups))):
            placed = self._place(self._groups[group])
            runs = self._runs(self._groups[group])
            self._pending[group] = [self._pool.submit(self._read, run, placed) for run in runs]
            self._placed[group] = {
                name: raw.view(self._reader.dtype(name)).view(self._reader.shape(name))
                for name, raw in placed.items()
            }
            self._begun = group + 1

    def _place(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Memory on the device for the bytes of each tensor, so that one may be kept alone.

        It belongs to the copy stream, and the allocator is told that the current one uses it too:
        it is not given away before both are done.
        """
        placed = {}
        for name in names:
            if self._reader.dtype(name) != torch.int64:
                size = self._reader.stored(name).num_bytes
                with torch.cuda.stream(self._copies):
                    placed[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
                if self._copies is not None:
                    placed[name].record_stream(torch.cuda.current_stream(self._device))
        return placed

    def _runs(self, names: Sequence[str]) -> Iterator[_Run]:
        """`names` as runs, the longest tensors first: they decide when the last one is done."""
        stored = {name: self._reader.stored(name) for name in names}
        ordered = sorted(stored.items(), key=lambda item: (item[1].file, item[1].start))
        runs: list[list[tuple[str, StoredTensor]]] = []
        for name, tensor in ordered:
            if not runs or not _fits(runs[-1], tensor):
                runs.append([])
            runs[-1].append((name, tensor))
        runs.sort(key=lambda run: run[0][1].start - run[-1][1].stop)
        return (_Run(file=run[0][1].file, tensors=tuple(run)) for run in runs)

    def _make_slots(self, threads: int) -> SimpleQueue[list[_Slot]]:
        num_slots = threads * SLOTS_PER_THREAD
        is_pinned = self._copies is not None
        memory = torch.empty(num_slots * SLOT_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        slots = [_Slot(part, self._copies) for part in torch.split(memory, SLOT_BYTES)]
        queue: SimpleQueue[list[_Slot]] = SimpleQueue()
        for first in range(0, num_slots, SLOTS_PER_THREAD):
            queue.put(slots[first : first + SLOTS_PER_THREAD])
        return queue

    def _begin_thread(self, slots: SimpleQueue[list[_Slot]]) -> None:
        """A thread's current stream is its own: from here on its copies go to the copy stream."""
        self._thread.slots = cycle(slots.get())
        if self._copies is not None:
            torch.cuda.set_stream(self._copies)

    def _read(self, run: _Run, placed: Mapping[str, Tensor]) -> None:
        """Bring one run to its places and check it."""
        begin, end = run.tensors[0][1].start, run.tensors[-1][1].stop
        hashes = {name: hashlib.sha256() for name, _ in run.tensors if name in self._digests}
        for start in range(begin, end, SLOT_BYTES):
            stop = min(start + SLOT_BYTES, end)
            slot: _Slot = next(self._thread.slots)
            slot.wait()
            self._fill(slot.view[: stop - start], run.file, start)
            for name, at, here in _pieces(run, start, stop):
                if name in placed:
                    placed[name][at].copy_(slot.memory[here], non_blocking=True)
                if name in hashes:
                    hashes[name].update(slot.view[here])
            slot.mark()
        for name, found in hashes.items():
            self._check(name, found.hexdigest())

    def _fill(self, view: memoryview, file: str, start: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._files[file], [view[done:]], start + done)
            if count == 0:
                raise IntegrityError(
                    f"{self._reader.directory / file} ended at byte {start + done} while it was "
                    "read: it was changed; fetch or quantize the model again"
                )
            done += count

    def _check(self, name: str, found: str) -> None:
        if found != self._digests[name]:
            problem = altered_tensor(self._reader, name, found, self._digests[name])
            raise refusal(self._reader.directory, [problem])


def _with_index(device: torch.device) -> torch.device:
    """Threads have a current device of their own, so "the current one" must be named."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _fits(run: list[tuple[str, StoredTensor]], tensor: StoredTensor) -> bool:
    first, last = run[0][1], run[-1][1]
    is_next = tensor.file == last.file and tensor.start == last.stop
    return is_next and tensor.stop - first.start <= _RUN_BYTES


def _pieces(run: _Run, start: int, stop: int) -> Iterator[tuple[str, slice, slice]]:
    """What of each tensor lies in [start, stop) of the file: where in it, where in the slot."""
    for name, tensor in run.tensors:
        low, high = max(start, tensor.start), min(stop, tensor.stop)
        if low < high:
            at = slice(low - tensor.start, high - tensor.start)
            yield name, at, slice(low - start, high - start)
