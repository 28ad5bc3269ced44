"""Files that are replaced, whoever is killed meanwhile and whoever else writes there."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quant.artifact.staging import replace_files, sole_writer

REPO = Path(__file__).resolve().parents[2]
FILES = {"a.json": b"new a", "b.md": b"new b"}
KILLED = """
import os, signal, sys
from pathlib import Path
from quant.artifact.staging import replace_files
events = 0
def kill(name, _):
    global events
    is_counted = name in ("open", "os.rename")
    events += is_counted
    if is_counted and events == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
folder = Path(sys.argv[1])
sys.addaudithook(kill)
replace_files(folder, {"a.json": b"new a", "b.md": b"new b"})
"""


@pytest.mark.parametrize("event", [2, 3, 4, 5])
def test_a_killed_writer_leaves_nothing_to_the_next(tmp_path: Path, event: int) -> None:
    folder = tmp_path / "out"
    replace_files(folder, {"a.json": b"old a", "b.md": b"old b"})
    (folder / ".a.json.notes").touch()  # somebody's own
    line = [sys.executable, "-c", KILLED, str(folder), str(event)]
    ended = subprocess.run(line, cwd=REPO, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (folder / "a.json").read_bytes() == (b"new a" if event == 5 else b"old a")
    assert (folder / "b.md").read_bytes() == b"old b"
    assert len(list(folder.iterdir())) > 3 or event == 2
    replace_files(folder, FILES)
    assert {path.name for path in folder.iterdir()} == {*FILES, ".a.json.notes"}
    assert all((folder / name).read_bytes() == data for name, data in FILES.items())


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    writer = threading.Thread(target=replace_files, args=(tmp_path, FILES))
    with sole_writer(tmp_path) as alone:
        assert alone
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
        assert not list(tmp_path.iterdir())
    writer.join(10)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
