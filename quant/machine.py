"""What this machine can do: arithmetic speed, free memory, free disk. Measured, never assumed."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from quant.errors import PipelineError

_SIZE = 1024
_MIN_SECONDS = 0.05


def measured_flops(device: str) -> float:
    """Floating-point operations per second of a float32 matrix product on `device`."""
    matrix = torch.ones(_SIZE, _SIZE, device=device)
    matrix @ matrix  # the first product also pays for start-up
    _wait(device)
    products, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < _MIN_SECONDS:
        matrix @ matrix
        _wait(device)
        products += 1
    return 2 * _SIZE**3 * products / seconds


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
            f"--device {device}: not usable here ({reason}); expected cpu, or cuda on a machine "
            "with a GPU and a torch built for it"
        ) from error


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
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
