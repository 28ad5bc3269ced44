"""What this machine can do: arithmetic speed, free memory, free disk. Measured, never assumed."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from quant.errors import PipelineError
from quant.run_time import H200, Speed

# Side of the matrices that are multiplied, by kind of device; values of an elementwise pass.
_SIZES = {"cpu": 1024, "cuda": 4096}
_VALUES = 1 << 22
_MIN_SECONDS = 0.05
_LAUNCHES = 2000
# What an H200 reaches in such products, and its host in launches: the speeds of a run
# (`run_time.H200`) grow with them.
_H200_BFLOAT16, _H200_FLOAT32, _H200_LAUNCHES = 700e12, 50e12, 169e3
# GPTQ's passes over each weight, as if all were one elementwise pass, and its time for a column:
# solved from two runs on 2 idle cores, the fixture on 64 x 512 tokens and the memory proof.
_GPTQ_PASSES, _COLUMN_S = 5500, 3e-4
# Weights in and out. Measured with a 135 M GGUF on a shared 2-core machine.
_CPU_MOVED_BYTES_PER_S = 125e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A device in a second of tests: operations a second in products of float32 and, on a GPU,
    bfloat16; values a second in an elementwise pass, on a CPU; a GPU's kernels launched a second,
    which is its host's speed."""

    float32_flops: float
    bfloat16_flops: float | None = None
    values_per_s: float | None = None
    launches_per_s: float | None = None


def measured_speed(device: str) -> Speed:
    """What `device` reaches in a run, by tests of under 1 s."""
    return speed_of(device_speed(device))


def device_speed(device: str) -> Measured:
    """Measure `device`."""
    float32 = measured_flops(device)
    if not is_gpu(device):
        return Measured(float32_flops=float32, values_per_s=_values_per_s())
    return Measured(
        float32_flops=float32, bfloat16_flops=measured_flops(device, torch.bfloat16),
        launches_per_s=_launches_per_s(device),
    )  # fmt: skip


def speed_of(found: Measured) -> Speed:
    """What a device of which that was measured reaches in a run."""
    if found.bfloat16_flops is not None and found.launches_per_s is not None:
        host = _H200_LAUNCHES / found.launches_per_s
        return replace(
            H200,
            layer_flops=H200.layer_flops * found.bfloat16_flops / _H200_BFLOAT16,
            float32_flops=H200.float32_flops * found.float32_flops / _H200_FLOAT32,
            column_s=H200.column_s * host, layer_s=H200.layer_s * host, start_s=H200.start_s * host,
        )  # fmt: skip
    assert found.values_per_s is not None
    return Speed(
        layer_flops=found.float32_flops, float32_flops=found.float32_flops,
        weight_s=_GPTQ_PASSES / found.values_per_s, column_s=_COLUMN_S, layer_s=0.05,
        moved_bytes_per_s=_CPU_MOVED_BYTES_PER_S, start_s=0.0,
    )  # fmt: skip


def measured_flops(device: str, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of a matrix product on `device`."""
    size = _SIZES[torch.device(device).type]
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 * _calls_per_s(lambda: matrix @ matrix, device)


def _values_per_s() -> float:
    """Float32 values that one elementwise pass changes in a second on the CPU."""
    values = torch.ones(_VALUES)
    return _VALUES * _calls_per_s(lambda: values.mul_(1.0), "cpu")


def _launches_per_s(device: str) -> float:
    """Kernels that the host launches in a second, one after another."""
    value = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            value.add_(1.0)

    return _LAUNCHES * _calls_per_s(launch, device)


def _calls_per_s(call: Callable[[], object], device: str) -> float:
    """By the quickest call: others were held up by what else runs on the machine."""
    call()  # the first also pays for start-up
    _wait(device)
    quickest, started = math.inf, time.perf_counter()
    while (began := time.perf_counter()) < started + _MIN_SECONDS:
        call()
        _wait(device)
        quickest = min(quickest, time.perf_counter() - began)
    return 1 / quickest


def named_device(asked: str) -> str:
    """`auto` is `cuda` where torch finds a GPU, else `cpu`; anything else stays as it is. Looks at
    no device: nothing is set up on one."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def chosen_device(asked: str) -> str:
    """`named_device`; PipelineError unless it exists here."""
    device = named_device(asked)
    check_device(device)
    return device


def check_device(device: str) -> None:
    """PipelineError unless `device` (`cpu`, `cuda`, `cuda:1`) exists here."""
    try:
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda"):
            raise RuntimeError(f"{kind} is not supported")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:60]
        raise PipelineError(
            f"--device {device}: not usable here ({reason}); expected auto, cpu, or cuda on a "
            "machine with a GPU and a torch built for it"
        ) from error


def is_gpu(device: str) -> bool:
    """Whether a device's name is a GPU's."""
    return torch.device(device).type == "cuda"


def give_back_gpu() -> None:
    """Let other processes have what torch keeps of a GPU and does not use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _wait(device: str) -> None:
    if is_gpu(device):
        torch.cuda.synchronize(device)


def free_memory_bytes(limit: int | None = None) -> int:
    """Memory that this process could still take without swapping, and within `limit` in all."""
    free = int(psutil.virtual_memory().available)
    return free if limit is None else max(0, min(free, limit - anonymous_bytes()))


def anonymous_bytes() -> int:
    """Memory of this process that no file backs (Linux: RssAnon); elsewhere all it has."""
    status = Path("/proc/self/status")
    if not status.exists():
        return int(psutil.Process().memory_info().rss)
    lines = status.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def free_gpu_bytes(device: str, limit: int | None = None) -> int:
    """GPU memory that this process could still take, and within `limit` in all."""
    free, _ = torch.cuda.mem_get_info(device)
    return free if limit is None else max(0, min(free, limit - torch.cuda.memory_reserved(device)))


def limit_gpu(device: str, limit: int) -> None:
    """Have torch fail rather than take more than `limit` bytes of the GPU."""
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)


def parse_bytes(text: str) -> int:
    """`24GB`, `1.5GiB`, `800MB` as bytes; PipelineError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", text.strip())
    if found is None:
        raise PipelineError(f"{text!r} is no amount of memory; expected such as 24GB or 1.5GiB")
    base = 1024 if "i" in found[2] else 1000
    return int(float(found[1]) * base ** ("KMGT".index(found[2][0]) + 1))


def free_disk_bytes(path: Path) -> int:
    """Free space where `path` lies or, when it does not exist yet, would lie."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free
