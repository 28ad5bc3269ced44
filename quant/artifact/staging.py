"""Replacing small files in a folder, all or none, by one writer at a time.

The files are written beside their places under names of this process and then renamed. The writer
holds the folder's own lock, which the system takes back when a process dies: whatever lies under
such a name while the lock is held was left by a writer that was killed, and is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def sole_writer(folder: Path) -> Iterator[bool]:
    """Wait until nobody else writes into `folder`, which must be there, and hold it.

    Not reentrant. False where the file system knows no locks: then others may be writing.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # as network file systems may say of a folder
        return False
    return True


def staged(path: Path) -> Path:
    """The name under which this process writes what is to become `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def leftovers(path: Path) -> list[Path]:
    """What killed writers of `path` left; only under `sole_writer` is nobody at work on it."""
    prefix = f".{path.name}."
    names = [name for name in os.listdir(path.parent) if name.startswith(prefix)]
    return [path.with_name(name) for name in sorted(names) if name[len(prefix) :].isdigit()]


def replace_files(folder: Path, contents: Mapping[str, bytes], *, durable: bool = True) -> None:
    """Write the files, by name, in this order, all or none; OSError when the disk refuses.

    durable: synced, so that a power cut leaves the old files or the new ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with sole_writer(folder) as alone:
        for name in contents if alone else ():
            for path in leftovers(folder / name):
                remove(path)
        try:
            for name, data in contents.items():
                _write(staged(folder / name), data, durable=durable)
            for name in contents:
                staged(folder / name).replace(folder / name)
        except BaseException:
            for name in contents:
                remove(staged(folder / name))
            raise


def remove(path: Path) -> None:
    """Remove a file or a folder as far as the disk allows: nobody is to fail for it."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, data: bytes, *, durable: bool) -> None:
    with path.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
