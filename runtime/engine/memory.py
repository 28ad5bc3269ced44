"""How much memory the KV pool may take on this machine. Measures; decides nothing.

On a GPU the pool gets what the utilization leaves after the weights, what the worst step has in use
at once, the graphs and what lies outside of torch. What torch's allocator loses between the pieces
comes out of what the utilization leaves to nobody; where that is not enough the allocator gives
back what it keeps. On a CPU the limit of the control group counts as well as the machine's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from runtime.config import Account
from runtime.engine.resolve import PoolFacts

_CGROUP = Path("/sys/fs/cgroup")
# A captured step of 32 layers, as measured: its nodes, and what the driver keeps of each.
BYTES_PER_GRAPH = 2 * 2**20
LIBRARY_BYTES = 32 * 2**20  # scratch that cuBLAS keeps for the stream that captures


def available_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Memory that can still be used without swapping, within the control group's limit."""
    free = _meminfo_available(meminfo)
    limit, used = (_cgroup_bytes(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used))


def cuda_pool(
    run_worst_step: Callable[[], None],
    graph_bytes: Callable[[], int],
    device: torch.device,
    utilization: float,
) -> PoolFacts:
    """What a device's pool may take, by running the worst step that can come.

    `graph_bytes` says what graphs will take, which are captured later.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_worst_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return pool_facts(
        total=total,
        outside=total - free - torch.cuda.memory_reserved(device),
        weights=weights,
        workspace=peak - weights,
        graphs=graph_bytes(),
        utilization=utilization,
    )


def pool_facts(
    *, total: int, outside: int, weights: int, workspace: int, graphs: int, utilization: float
) -> PoolFacts:
    """The account of a device, all in bytes, as in `Account`."""
    taken = outside + weights + workspace + graphs
    return PoolFacts(
        pool_bytes=max(0, int(total * utilization) - taken),
        reason=f"{utilization:.0%} of the device less weights, the worst step and graphs",
        account=Account(
            total=total,
            weights=weights,
            kv=0,
            workspace=workspace,
            graphs=graphs,
            outside=outside,
            left=total - taken,
        ),
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
