"""How long a fresh process takes to its first answer, with the kernel cache cold and warm.

`measure` starts `python -m benchmarks.gpu_start`, which loads an artifact with the engine's own
settings (all digests checked) and answers one request; the clock starts before the process does.
The artifact is read through once before, so that disks have no say. Cold means an empty
TRITON_CACHE_DIR; warm is the next process with the same one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_artifacts import read_through
from benchmarks.gpu_rows import REPO, Origin, Subject, row


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """When each phase ended, in seconds from the start of the process; and what loading took."""

    phases: dict[str, float]
    load_s: dict[str, float]

    @property
    def total_s(self) -> float:
        return self.phases["answer"]


def measure(
    path: Path, subject: Subject, origin: Origin, device: str, tokens: tuple[int, int],
    repeats: int, say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each state of the kernel cache. Each cold start fills a cache of its own."""
    read_through(path)
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for state in starts:
                starts[state].append(start(path, device, tokens, Path(cache)))
                say(f"start, kernel cache {state}: {starts[state][-1]}")
    for state, found in starts.items():
        about = Subject(
            suite="start", shape=subject.shape, scheme=subject.scheme, kv_dtype=subject.kv_dtype,
            batch=1, extra={**subject.extra, "input": tokens[0], "output": tokens[1]},
        )  # fmt: skip
        middle = sorted(found, key=lambda s: s.total_s)[len(found) // 2]
        yield row(about, "startup_s", [s.total_s for s in found], origin, cache=state,
                  phases=middle.phases, load_s=middle.load_s)  # fmt: skip


def start(path: Path, device: str, tokens: tuple[int, int], cache: Path) -> Start:
    """One process, from nothing to its answer. RuntimeError with its words if it fails."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    paths = [str(REPO), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    began = time.time()
    command = [sys.executable, "-m", "benchmarks.gpu_start", str(path), device, repr(began),
               *map(str, tokens)]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the process failed: {done.stderr[-2000:]}")
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    began = float(sys.argv[3])
    phases = {"python": time.time() - began}
    import torch  # noqa: F401

    phases["torch"] = time.time() - began
    from benchmarks.gpu_engine import Driver
    from runtime.config import EngineConfig
    from runtime.engine.engine import Engine
    from runtime.engine.load import load

    phases["imports"] = time.time() - began
    is_cuda = sys.argv[2].startswith("cuda")
    pool = None if is_cuda else 64 * 2**20
    config = EngineConfig(device=sys.argv[2], kv_cache_memory_bytes=pool)
    loaded = load(Path(sys.argv[1]), config)
    engine = Engine(loaded.decoder, loaded.kv, loaded.resolved, loaded.artifact, loaded.runner)
    phases["engine"] = time.time() - began
    driver = Driver(engine)
    names = driver.add(1, int(sys.argv[4]), int(sys.argv[5]))
    driver.until_started(names)
    phases["first_token"] = time.time() - began
    driver.drain()
    phases["answer"] = time.time() - began
    print(json.dumps({"phases": _rounded(phases), "load_s": _rounded(loaded.startup.seconds)}))


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


if __name__ == "__main__":
    main()
