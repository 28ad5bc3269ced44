"""What this machine can do: arithmetic speed, free memory, free disk. Measured, never assumed."""

from __future__ import annotations

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


def free_memory_bytes() -> int:
    """Memory that this process could still take without swapping."""
    return int(psutil.virtual_memory().available)


def free_disk_bytes(path: Path) -> int:
    """Free space where `path` lies or, when it does not exist yet, would lie."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free
