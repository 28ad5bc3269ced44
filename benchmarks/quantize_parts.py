"""What each part of a run took, though the run be cut in parts: by a limit, or by a kill.

A part is one process. It writes its figures beside the unfinished artifact twice a second, so that
one that is killed still counts, all but its last half second. Seconds of parts are summed, work
done twice included; of peaks the largest counts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality import ShowProgress
from quant.artifact.durable import write_file
from quant.checkpoint import Source
from quant.machine import anonymous_bytes
from quant.random_model import RandomModel
from quant.synthetic import SyntheticSource

SAMPLE_S, RECORD_S = 0.02, 0.5


class OutOfTime(Exception):
    """The part's seconds are used up; what is finished is kept for the next one."""


@dataclass(slots=True, kw_only=True)
class Part:
    """Figures of one process. drawing_s: of seconds, what making the random weights took."""

    seconds: float = 0.0
    drawing_s: float = 0.0
    host_peak_bytes: int = 0
    gpu_peak_bytes: int = 0
    gpu_reserved_bytes: int = 0
    layers: list[float] = field(default_factory=list)  # when each began, seconds

    @classmethod
    def whole(cls, parts: list[Part]) -> Part:
        """All parts as one."""
        return cls(
            seconds=sum(part.seconds for part in parts),
            drawing_s=sum(part.drawing_s for part in parts),
            host_peak_bytes=max(part.host_peak_bytes for part in parts),
            gpu_peak_bytes=max(part.gpu_peak_bytes for part in parts),
            gpu_reserved_bytes=max(part.gpu_reserved_bytes for part in parts),
        )


class Recorder:
    """Watches this process while it is entered, and keeps `folder`/part-N.json up to date."""

    def __init__(self, folder: Path, device: str) -> None:
        self.part = Part()
        self._path = folder / f"part-{len(parts_in(folder)):03d}.json"
        self._is_cuda = device.startswith("cuda")
        self._started = time.perf_counter()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Recorder:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._record()

    @property
    def seconds(self) -> float:
        """Since the part began."""
        return time.perf_counter() - self._started

    def _watch(self) -> None:
        recorded = 0.0
        while True:
            self.part.host_peak_bytes = max(self.part.host_peak_bytes, anonymous_bytes())
            if self.seconds - recorded >= RECORD_S:
                recorded = self.seconds
                self._record()
            if self._done.wait(SAMPLE_S):
                return

    def _record(self) -> None:
        self.part.seconds = self.seconds
        if self._is_cuda:
            self.part.gpu_peak_bytes = torch.cuda.max_memory_allocated()
            self.part.gpu_reserved_bytes = torch.cuda.max_memory_reserved()
        write_file(self._path, json.dumps(asdict(self.part)).encode())


def parts_in(folder: Path) -> list[Part]:
    """The parts recorded in a folder, in order."""
    paths = sorted(folder.glob("part-*.json"))
    return [Part(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


class LimitedProgress(ShowProgress):
    """Layers on standard error; OutOfTime at the first that begins too late."""

    def __init__(self, recorder: Recorder, seconds: float | None) -> None:
        self._recorder, self._limit = recorder, seconds

    def layer(self, index: int, text: str) -> None:
        now = self._recorder.seconds
        self._recorder.part.layers.append(now)
        if self._limit is not None and now > self._limit:
            raise OutOfTime(f"stopped before {text} at {now:.0f} s")
        super().layer(index, text)


@contextmanager
def timed_drawing(source: Source, part: Part) -> Iterator[None]:
    """Book what random weights take to draw under `part`: it is no part of quantizing."""
    if not isinstance(source, SyntheticSource):
        yield
        return
    plain = RandomModel.draw

    def draw(self: RandomModel, name: str) -> Tensor:
        started = time.perf_counter()
        tensor = plain(self, name)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        part.drawing_s += time.perf_counter() - started
        return tensor

    RandomModel.draw = draw  # type: ignore[method-assign]
    try:
        yield
    finally:
        RandomModel.draw = plain  # type: ignore[method-assign]
