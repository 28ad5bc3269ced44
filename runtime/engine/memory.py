"""How much memory the KV pool may take on this machine. Measures; decides nothing.

On a GPU the pool gets what the utilization leaves after the weights and the peak of one full-sized
dummy step. On a CPU the limit of the control group counts as well as the machine's.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from runtime.engine.batch import Piece
from runtime.engine.model_runner import ModelRunner
from runtime.engine.resolve import PoolFacts

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Memory that can still be used without swapping, within the control group's limit."""
    free = _meminfo_available(meminfo)
    limit, used = (_cgroup_bytes(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used))


def cuda_pool(runner: ModelRunner, num_tokens: int, num_rows: int, utilization: float) -> PoolFacts:
    """What is left on the runner's device after a step of `num_tokens` tokens in one span.

    The runner's KV cache must hold them; it is scratch and counts as part of the peak.
    """
    device = runner.decoder.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    blocks = range(-(-num_tokens // runner.block_size))
    wanted = range(max(0, num_tokens - num_rows), num_tokens)
    piece = Piece(tokens=[0] * num_tokens, start=0, block_ids=blocks, wanted=wanted)
    runner.logits(runner.forward([piece]))
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device) + outside_torch
    return PoolFacts(
        pool_bytes=max(0, int(total * utilization) - peak),
        reason=f"{utilization:.0%} of the device less weights and the peak of a full step",
    )


def _meminfo_available(path: Path) -> int:
    if path.is_file():
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_bytes(path: Path) -> int | None:
    """The number in a control group's file; None where there is no such limit."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="ascii").strip()
    return int(text) if text.isdigit() else None
