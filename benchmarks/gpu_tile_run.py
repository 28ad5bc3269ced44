"""One product with a given tile on the device: compile it, check it, time it.

Weights and inputs are random, as many weights as it takes to leave none in the L2 cache.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_gemm import relative_error
from benchmarks.gpu_tile_candidates import Problem, Tile
from benchmarks.gpu_timing import call_us, num_copies
from quant.artifact.layout import QuantizedWeight, dequantize, quantize_activations
from quant.artifact.scheme import Scheme, preset, with_group_size
from runtime.kernels.backend import target_of
from runtime.kernels.dense.product import Product
from runtime.kernels.w4a16 import pack_w4a16
from runtime.kernels.w8a8 import pack_w8a8, scaled_mm
from runtime.kernels.w8a16 import pack_w8a16
from runtime.kernels.workspace import KernelOptions, Workspace

NUM_COUNTERS = 1 << 16
Job = tuple[Problem, int, Tile]  # rows in the middle


class Meter(Protocol):
    """What a sweep asks of a device, for one problem."""

    def error(self, rows: int, tile: Tile) -> float:
        """Relative error against float32; inf where two runs differ in a bit."""

    def us(self, rows: int, tile: Tile, repeats: int) -> float:
        """Median microseconds of a call."""

    def synchronize(self) -> None:
        """Raises where the device is lost: nothing can be launched any more."""


class DeviceMeter:
    """A problem's weights on a device, and the products with them."""

    def __init__(
        self, problem: Problem, device: torch.device, copies: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        self.problem, self.device = problem, device
        self.options = KernelOptions(workspace=Workspace(device))
        self.options.workspace.counters(NUM_COUNTERS)
        self._generator = torch.Generator(device).manual_seed(problem.n + problem.k)
        num = num_copies(problem.num_bytes, device) if copies is None else copies
        first = self._draw()
        self._activations = None if isinstance(first, Tensor) else first.scheme.activations
        self._matrix_NK = _floats(first)
        self._packed = [self._pack(first), *(self._pack(self._draw()) for _ in range(num - 1))]
        self._inputs: tuple[int, Any, Tensor] | None = None

    def error(self, rows: int, tile: Tile) -> float:
        call, expected = self._calls(rows, tile)[0], self._input(rows)[2] @ self._matrix_NK.T
        self._clear_counters()
        out, again = call(), call()
        self.synchronize()
        return relative_error(out, expected) if torch.equal(out, again) else float("inf")

    def us(self, rows: int, tile: Tile, repeats: int) -> float:
        return median(call_us(self._calls(rows, tile), self.device, repeats))

    def launch_once(self, rows: int, tile: Tile) -> None:
        self._calls(rows, tile)[0]()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _clear_counters(self) -> None:
        """A kernel that went wrong may have left them behind for the next one."""
        self.options.workspace.counters(NUM_COUNTERS).zero_()

    def _calls(self, rows: int, tile: Tile) -> list[Callable[[], Tensor]]:
        x = self._input(rows)[1]
        return [partial(_launch, self.problem, x, w, tile, self.options) for w in self._packed]

    def _input(self, rows: int) -> tuple[int, Any, Tensor]:
        """(rows, what the kernels take, the same numbers in float32)."""
        if self._inputs is None or self._inputs[0] != rows:
            x = torch.randn(rows, self.problem.k, generator=self._generator, device=self.device)
            x = x.to(self.dtype)
            if self._activations is None:
                self._inputs = rows, x, x.float()
            else:
                codes, scale = quantize_activations(x, self._activations)
                self._inputs = rows, (codes, scale.flatten()), codes.float() * scale
        return self._inputs

    def _draw(self) -> Tensor | QuantizedWeight:
        shape = (self.problem.n, self.problem.k)
        draw: dict[str, Any] = {"generator": self._generator, "device": self.device}
        if self.problem.op == "dense":
            return torch.randn(*shape, **draw).div_(shape[1] ** 0.5).to(self.dtype)
        scheme = _scheme(self.problem)
        assert scheme.weights is not None
        if scheme.weights.kind == "float":
            codes = torch.randn(*shape, **draw).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
        else:
            half = 1 << (scheme.weights.num_bits - 1)
            codes = torch.randint(-half, half, shape, dtype=torch.int8, **draw)
        num_groups = shape[1] // (scheme.weights.group_size or shape[1])
        scale = (torch.rand(shape[0], num_groups, **draw) + 0.5) * 1e-3
        return QuantizedWeight(scheme=scheme, codes=codes, scale=scale.to(torch.bfloat16))

    def _pack(self, weight: Tensor | QuantizedWeight) -> Any:
        if isinstance(weight, Tensor):
            return weight
        pack = {"w4a16": pack_w4a16, "w8a16": pack_w8a16}.get(self.problem.op, pack_w8a8)
        return pack(weight, self.dtype, self.device, self.options)


def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that one program may have."""
    from triton.runtime import driver

    found: int = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return found


def _floats(weight: Tensor | QuantizedWeight) -> Tensor:
    """In float32 throughout: scales are not rounded into the weights."""
    if isinstance(weight, Tensor):
        return weight.float()
    return dequantize(replace(weight, scale=weight.scale.float()))


def _scheme(problem: Problem) -> Scheme:
    found = preset(problem.op)
    if problem.op in ("w4a16", "w8a16"):
        return with_group_size(found, problem.group or None)
    return found


def _launch(problem: Problem, x: Any, packed: Any, tile: Tile, options: KernelOptions) -> Tensor:
    """The product by the very functions that the engine launches it with."""
    if problem.op == "w4a16":
        return _w4a16(x, packed, tile)
    if problem.op == "w8a16":
        return _w8a16(x, packed, tile)
    if problem.op == "dense":
        return _dense(x, packed, tile, options)
    return _w8a8(x, packed, tile, options)


def _w4a16(x: Tensor, packed: Any, tile: Any) -> Tensor:
    from runtime.kernels.w4a16.launch import launch

    return launch(x, packed, None, tile)


def _w8a16(x: Tensor, packed: Any, tile: Any) -> Tensor:
    from runtime.kernels.w8a16.launch import dequantize as unpacked
    from runtime.kernels.w8a16.launch import launch

    if tile.kernel == "torch":
        return functional.linear(x, unpacked(packed))
    return launch(x, packed, None, tile, target_of(x.device))


def _dense(x: Tensor, packed: Any, tile: Any, options: KernelOptions) -> Tensor:
    if tile.kernel == "torch":
        return functional.linear(x, packed)
    from runtime.kernels.dense.launch import launch

    product = Product(x_MK=x, w_NK=packed, dtype=x.dtype, options=options)
    return launch(product, tile, target_of(x.device))


def _w8a8(x: tuple[Tensor, Tensor], packed: Any, tile: Any, options: KernelOptions) -> Tensor:
    product = Product(
        x_MK=x[0], w_NK=packed.codes_NK, dtype=packed.dtype, options=options,
        row_scale_M=x[1], channel_scale_N=packed.scale_N,
    )  # fmt: skip
    if tile.kernel == "torch":
        return scaled_mm(product)
    from runtime.kernels.w8a8.launch import launch

    return launch(product, tile, target_of(product.x_MK.device))


def signature(job: Job) -> Job:
    """The job that stands for all whose kernels are the same: a few channels, as many as leave the
    same remainders, and a row count of the same kind, since kernels are specialized on those."""
    problem, rows, tile = job
    kind = 1 if rows == 1 else (16 if rows % 16 == 0 else 2) + (512 if rows > 256 else 0)
    return replace(problem, n=problem.n % 512 + 512), kind, tile


def compile_ahead(jobs: Sequence[Job], num_processes: int, until: float) -> tuple[set[Job], str]:
    """(signatures of jobs whose kernels are in Triton's cache now, what went wrong in a process).

    until: time.time() after which nothing is begun. Kernels that do not compile are among them:
    their first launch says why.
    """
    done: set[Job] = set()
    remarks: list[str] = []
    todo = list(dict.fromkeys(map(signature, jobs)))
    with _pool(num_processes, multiprocessing.get_context("spawn")) as pool:
        parts = [todo[i::num_processes] for i in range(num_processes)]
        futures = [pool.submit(compile_some, part, until) for part in parts if part]
        for future in futures:
            remarks += _collect(future, until, done)
    return done, "; ".join(dict.fromkeys(remarks))


@contextmanager
def _pool(num_processes: int, context: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool that nobody waits for: a compilation that hangs is left behind and ended."""
    pool = ProcessPoolExecutor(num_processes, mp_context=context)
    try:
        yield pool
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def _collect(future: Future[list[Job]], until: float, done: set[Job]) -> list[str]:
    try:
        done.update(future.result(timeout=max(1.0, until + 10 - time.time())))
    except FutureTimeout:
        return ["a compiling process did not end in time"]
    except Exception as problem:  # whatever ended it: its kernels are not compiled
        return [f"a compiling process failed: {type(problem).__name__}: {problem}"]
    return []


def compile_some(jobs: Sequence[Job], until: float) -> list[Job]:
    """In a process of its own: compile without running. Returns the jobs that were reached."""
    from runtime.kernels.compile_ahead import compiling_ahead

    done: list[Job] = []
    meters: dict[Problem, DeviceMeter] = {}
    device = torch.device("cuda", torch.cuda.current_device())
    for problem, rows, tile in jobs:
        if time.time() > until:
            break
        if problem not in meters:
            meters[problem] = DeviceMeter(problem, device, copies=1)
        # What cannot be launched at all says so again, and to somebody, when it is checked.
        with suppress(Exception), compiling_ahead(1):
            meters[problem].launch_once(rows, tile)
        done.append((problem, rows, tile))
    return done
