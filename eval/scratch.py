"""A folder for a while: gone when its user is done, and after a kill when the next one comes.

The copies of a model in it are too large to be left to whoever tidies the temporary folder. Its
user holds its lock, which the system takes back when a process dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Between the making of a folder and its lock lie microseconds.
_NEW_S = 60.0


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder under the temporary one; those of killed processes of this user are removed."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_left(path)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: nobody will take it for left
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_if_left(path: Path) -> None:
    """Remove it unless it is another user's, brand new, or its maker is alive."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _NEW_S:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
