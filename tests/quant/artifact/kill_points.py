"""Kill a writer at every one of its syncs in turn, resume it, and report what was found.

Run by test_artifact_writer in a process of its own, because it forks. Prints a JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from quant.artifact import durable
from quant.artifact.artifact import open_artifact, verify
from quant.artifact.errors import ManifestError

sys.path.insert(0, str(Path(__file__).parents[2] / "golden"))
import make_golden

_sync = durable._sync


def run(out: Path, *, kill_at: int | None) -> int:
    """Build in a child that kills itself before its n-th sync; returns the child's wait status."""
    child = os.fork()
    if child == 0:
        count = 0

        def sync(descriptor: int) -> None:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            _sync(descriptor)

        durable._sync = sync
        try:
            make_golden.build(out, overwrite=out.exists())
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def staging_is_refused(out: Path) -> bool:
    staging = out.with_name(out.name + ".partial")
    if not staging.exists():
        return True
    try:
        open_artifact(staging)
    except ManifestError as error:
        return "unfinished" in str(error)
    return False


def sweep(
    work: Path, old: Path | None, expected: dict[str, bytes], first: int = 1
) -> dict[str, Any]:
    """Kill at sync `first`, ... until a run ends by itself; `old` is an artifact to be replaced."""
    faults: list[str] = []
    for kill_at in itertools.count(first):
        out = work / f"out-{kill_at}"
        if old is not None:
            shutil.copytree(old, out)
        before = contents(out) if old is not None else None
        status = run(out, kill_at=kill_at)
        if not os.WIFSIGNALED(status):
            return {"kills": kill_at - first, "faults": faults, "last": status}
        after = contents(out) if out.exists() else None
        if after not in (before, expected) or not staging_is_refused(out):
            faults.append(f"kill {kill_at}: something half-written can be seen")
        if run(out, kill_at=None) != 0 or contents(out) != expected or verify(out):
            faults.append(f"kill {kill_at}: the resumed run ended otherwise")
        if len(list(work.glob(f"{out.name}*"))) != 1:
            faults.append(f"kill {kill_at}: leftovers")
    raise AssertionError("unreachable")


def main(work: Path) -> None:
    torch.set_num_threads(1)
    make_golden.build(work / "expected")
    expected = contents(work / "expected")
    old = work / "old"
    shutil.copytree(work / "expected", old)
    (old / "README.md").write_text("an older one")
    fresh = sweep(work, None, expected)
    for path in work.glob("out-*"):
        shutil.rmtree(path)
    # What comes before the last syncs does not depend on what `out` holds.
    replacing = sweep(work, old, expected, first=max(1, fresh["kills"] - 9))
    sys.stdout.write(json.dumps({"fresh": fresh, "replacing": replacing}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
