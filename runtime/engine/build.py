"""Which engine this is: its version, and a digest of the code that decides what it computes.

The version alone says nothing in a checkout. Stdlib only, so that whoever shows a verdict can ask
without loading the engine.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOMS = ("runtime/engine", "runtime/kernels", "runtime/model", "quant/artifact")
_SUFFIXES = (".py", ".json")
_LIBRARIES = ("torch", "triton")


@cache
def build() -> dict[str, str]:
    """version, code (the first 16 hex digits of a sha256), and the libraries that compute."""
    found = {"weighbridge": _version("weighbridge") or "0+clone", "code": _code()}
    return found | {name: number for name in _LIBRARIES if (number := _version(name))}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _code() -> str:
    """Over names and bytes of every source file and tile table of the rooms that compute."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for room in _ROOMS:
        files = (p for p in (root / room).rglob("*") if p.suffix in _SUFFIXES and p.is_file())
        for path in sorted(files):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
