"""Starting several ranks on this machine, and knowing that one is such a rank.

`quantize --ranks 2 ...` starts itself twice with the same arguments and the environment that
torchrun would give (RANK, LOCAL_RANK, WORLD_SIZE), watches, and ends all when one fails. Under
torchrun or `accelerate launch` nothing is started: the processes are there already.

Stdlib only: the process that watches needs no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# The file where the ranks of one machine find each other, and the pipe whose end is our death.
RENDEZVOUS, LIFELINE = "QUANTIZE_RENDEZVOUS", "QUANTIZE_LIFELINE"
# What the others get to end by themselves: after an error of one (each is told it), after Ctrl-C
# or a kill.
GRACE_S, LAST_GRACE_S = 60.0, 5.0
LOST, INTERRUPTED = 2, 130
MAX_RANKS = 64


def world_size() -> int:
    """How many ranks this process was started among; 1 when it was started on its own."""
    names = ("RANK", "WORLD_SIZE")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def is_follower() -> bool:
    """Whether this is a rank that leaves files and screen to rank 0."""
    return world_size() > 1 and os.environ["RANK"] != "0"


def is_launched() -> bool:
    """Whether this is a rank that `launch` started."""
    return LIFELINE in os.environ


def launch(size: int, command: Sequence[str]) -> tuple[int, str]:
    """Run `command` as `size` ranks; (exit code, what to tell of a rank that was killed)."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="quantize-") as folder:
        shared = {
            **os.environ, **_loopback(), "OMP_NUM_THREADS": _threads(size),
            "PYTHONPATH": _search_path(),
            "WORLD_SIZE": str(size), RENDEZVOUS: str(Path(folder) / "ranks"),
            LIFELINE: str(read_end),
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                pass_fds=(read_end,),
            )
            for rank in range(size)
        ]
        try:
            return _watch(ranks)
        except KeyboardInterrupt:  # the ranks have it too
            _wait(ranks, LAST_GRACE_S)
            return INTERRUPTED, ""
        finally:
            _end(ranks)
            os.close(write_end)
            os.close(read_end)


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, str]:
    """Wait for all; the outcome of the first that failed."""
    failed: tuple[int, str] | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = [process.poll() for process in ranks]
        bad = [(rank, code) for rank, code in enumerate(codes) if code]
        if bad and failed is None:
            rank, code = bad[0]
            failed = _outcome(rank, len(ranks), code)
            deadline = time.monotonic() + (GRACE_S if code > 0 else LAST_GRACE_S)
    bad = [(rank, p.returncode) for rank, p in enumerate(ranks) if p.returncode]
    return failed or (_outcome(bad[0][0], len(ranks), bad[0][1]) if bad else (0, ""))


def _outcome(rank: int, size: int, code: int) -> tuple[int, str]:
    if code > 0:
        return code, ""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return LOST, (
        f"rank {rank} of {size} was killed ({name}"
        f"{', perhaps for memory' if -code == signal.SIGKILL else ''}); finished layers are kept, "
        "and the same command goes on from there"
    )


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """No rank outlives this: asked to end, then killed."""
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    _wait(ranks, LAST_GRACE_S)
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, but not longer."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)


def watch_parent() -> None:
    """End this process with the one that launched it: a thread waits for the pipe to close."""
    if is_launched():
        descriptor = int(os.environ[LIFELINE])
        threading.Thread(target=_die_with, args=(descriptor,), daemon=True).start()


def _die_with(descriptor: int) -> None:
    os.read(descriptor, 1)
    os._exit(LOST)


def _threads(size: int) -> str:
    """Threads of each rank: the cores dealt out, unless the user said otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (cores or 1) // size)))


def _search_path() -> str:
    """What finds this very package, whatever folder the ranks run in."""
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def _loopback() -> Mapping[str, str]:
    """Ranks of one machine talk over its loopback, whatever its name resolves to."""
    names = {name for _, name in socket.if_nameindex()}
    found = next((name for name in ("lo", "lo0") if name in names), None)
    return {} if found is None or "GLOO_SOCKET_IFNAME" in os.environ else {
        "GLOO_SOCKET_IFNAME": found
    }  # fmt: skip


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts `quantize` with these arguments again."""
    return [sys.executable, "-P", "-m", "quant.cli", *arguments]
