"""`Group`: ranks that talk through torch.distributed, gloo for CPU tensors and NCCL for a GPU's.

Before anything is exchanged all ranks meet and say how they are. A rank that fails meets the others
one last time to tell its error, and every other rank raises it in its place; so an error of one is
the error of all, at once, without a timeout. A rank that was killed shows as a closed connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quant.artifact.errors import ArtifactError
from quant.errors import PipelineError, QuantError, first_line
from quant.parallel import Part, Ranks, Single
from quant.parallel_launch import RENDEZVOUS, world_size

T = TypeVar("T")

# Longest wait for another rank. The others wait while rank 0 hashes and seals a large artifact.
TIMEOUT_S = 30 * 60.0


@contextmanager
def joined(device: str = "cpu", *, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """The ranks that this process was started with, by `quantize --ranks` or torchrun.

    device: where this rank computes (`rank_device`). An error inside ends all ranks with it.
    """
    size = world_size()
    if size == 1:
        yield Single()
        return
    group = _start(int(os.environ["RANK"]), size, torch.device(device), timeout_s)
    try:
        yield group
        group.meet("the end")
    except Exception as error:
        group.fail(error)
        raise
    finally:
        group.leave()


def rank_device(device: str) -> str:
    """The device of this rank: `cuda` becomes the GPU of its number on this machine."""
    if world_size() == 1 or torch.device(device).type != "cuda":
        return device
    if device != "cuda":
        raise PipelineError(f"--device {device}: several ranks take a GPU each; give --device cuda")
    return f"cuda:{os.environ.get('LOCAL_RANK', os.environ['RANK'])}"


def _start(rank: int, size: int, device: torch.device, timeout_s: float) -> Group:
    file = os.environ.get(RENDEZVOUS)
    wait = timedelta(seconds=timeout_s)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            init_method=f"file://{file}" if file else "env://",
            rank=rank, world_size=size, timeout=wait,
        )  # fmt: skip
        control = dist.new_group(backend="gloo", timeout=wait) if is_gpu else dist.group.WORLD
    except (RuntimeError, ValueError) as error:
        raise PipelineError(
            f"rank {rank} of {size} could not join the others ({first_line(error)}); start all "
            "ranks anew, with quantize --ranks or torchrun"
        ) from error
    return Group(rank, size, device, control)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a rank says when all meet: what it is about to do, or what it failed with."""

    what: str
    kind: type[Exception] | None = None
    text: str = ""


class Group:
    """A Ranks of several processes."""

    def __init__(self, rank: int, size: int, device: torch.device, control: Any) -> None:
        self.rank, self.size = rank, size
        self._device, self._control = device, control
        self._is_over = self._is_lost = False

    def add(self, *tensors: Tensor) -> None:
        self._reduce("add", tensors, dist.ReduceOp.SUM)

    def largest(self, *tensors: Tensor) -> None:
        self._reduce("largest", tensors, dist.ReduceOp.MAX)

    def total(self, count: int) -> int:
        number = torch.tensor(count)
        self.add(number)
        return int(number)

    def first(self, make: Callable[[], T]) -> T:
        held: list[Any] = [_packed(make()) if self.rank == 0 else None]
        self.meet("first")
        with self._contact():
            dist.broadcast_object_list(held, src=0, group=self._control)
        value: T = self._unpacked(held[0])
        return value

    def first_tensors(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        mine = make() if self.rank == 0 else {}
        return dict(self.gather(Part(tensors=mine))[0].tensors)

    def gather(self, mine: Part) -> list[Part]:
        self.meet("gather")
        meta = [(name, t.dtype, tuple(t.shape), t.is_cuda) for name, t in mine.tensors.items()]
        heard: list[Any] = [None] * self.size
        parts = []
        with self._contact():
            dist.all_gather_object(heard, (meta, mine.value), group=self._control)
            for rank, (theirs, value) in enumerate(heard):
                own = mine.tensors if rank == self.rank else None
                tensors = {name: self._send(rank, own, name, *what) for name, *what in theirs}
                parts.append(Part(tensors=tensors, value=value))
        return parts

    def agree(self, what: str, value: Mapping[str, Any]) -> None:
        parts = self.gather(Part(tensors={}, value=dict(value)))
        for rank, part in enumerate(parts):
            keys = [k for k, v in parts[0].value.items() if part.value.get(k) != v]
            if keys:
                raise PipelineError(
                    f"rank {rank} has another {what} than rank 0 (differs in: {', '.join(keys)}); "
                    "all ranks need the same command, model, calibration files and versions"
                )

    def meet(self, what: str, error: Exception | None = None) -> None:
        """Wait for all ranks. Raises what another one failed with, unless this one did."""
        said = _Said(what=what)
        if error is not None:
            said = _Said(what=what, kind=_kind(error), text=str(error) or type(error).__name__)
        heard: list[Any] = [None] * self.size
        with self._contact():
            dist.all_gather_object(heard, said, group=self._control)
        for rank, other in enumerate(heard):
            if other.kind is not None and error is None:
                self._is_over = True
                raise other.kind(f"rank {rank} of {self.size}: {other.text}")
        assert error or len({other.what for other in heard}) == 1, f"the ranks parted: {heard}"

    def fail(self, error: Exception) -> None:
        """Tell the others, unless they know or cannot hear; then leave."""
        if not self._is_over:
            self._is_over = True
            try:
                self.meet("fail", error)
            except PipelineError:
                return  # this error is what the user should read, not that nobody heard of it

    def leave(self) -> None:
        """Close the connections, unless that means waiting for a GPU whose peer is gone."""
        if not (self._is_lost and self._device.type == "cuda"):
            dist.destroy_process_group()

    def _unpacked(self, data: bytes) -> Any:
        """What `_packed` packed; what was on another rank's GPU is on this one's."""

        def place(storage: Any, where: str) -> Any:
            return storage if where == "cpu" else storage.to(device=self._device)

        return torch.load(BytesIO(data), map_location=place, weights_only=False)

    def _reduce(self, what: str, tensors: tuple[Tensor, ...], op: Any) -> None:
        self.meet(what)
        with self._contact():
            for tensor in (tensor for tensor in tensors if tensor.numel()):
                dist.all_reduce(tensor, op=op, group=self._group(tensor.is_cuda))

    def _send(
        self,
        source: int,
        own: Mapping[str, Tensor] | None,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        is_cuda: bool,
    ) -> Tensor:
        """A tensor of rank `source`, as bytes: not every backend knows every dtype."""
        device = self._device if is_cuda else torch.device("cpu")
        if own is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        else:
            tensor = own[name].detach().contiguous()
        if tensor.numel():
            data = tensor.reshape(-1).view(torch.uint8)
            dist.broadcast(data, src=source, group=self._group(is_cuda))
        return tensor

    def _group(self, is_cuda: bool) -> Any:
        return dist.group.WORLD if is_cuda else self._control

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """PipelineError where the connection to another rank fails or nobody answers in time."""
        try:
            yield
        except RuntimeError as error:
            self._is_over = self._is_lost = True
            raise PipelineError(
                f"rank {self.rank} of {self.size} lost the others ({first_line(error)}); finished "
                "layers are kept, and the same command goes on from there"
            ) from error


def _packed(value: Any) -> bytes:
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _kind(error: Exception) -> type[Exception]:
    """The class that other ranks raise in its place: ours, so that it is handled as it would be."""
    return type(error) if isinstance(error, QuantError | ArtifactError) else PipelineError
