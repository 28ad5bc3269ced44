"""Where the recipes, adapters and calibration samples that come with the package lie. Stdlib only.

A clone has them at its root, a wheel under `quant/artifact/_shipped`. Nothing here reads them.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

_SUFFIXES = (".yaml", ".jsonl")
Kind = Literal["recipes", "calib_data"]


def shipped_dir(kind: Kind) -> Path:
    """The folder of shipped `kind`; FileNotFoundError when the installation lacks it."""
    here = Path(__file__).resolve()
    candidates = (here.parent / "_shipped" / kind, here.parents[2] / kind)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        f"the shipped {kind} folder is missing from this installation "
        f"(looked for {candidates[0]} and {candidates[1]}); reinstall weighbridge"
    )


def resolve_input(name: str, kind: Kind, *, within: str = "") -> Path:
    """The file called `name`: where given first, then among the shipped ones.

    `within`: the sub-folder of `kind` that holds what is asked for (`gates`); its files are found
    with and without its name. FileNotFoundError names both places and lists what is shipped there.
    """
    if not name:
        raise FileNotFoundError("found an empty file name")
    given, folder = local_path(name), shipped_dir(kind)
    if given.is_file():
        return given
    for shipped in (folder / name, folder / within / name):
        if not given.is_absolute() and shipped.is_file():
            return shipped
    raise FileNotFoundError(_not_found(name, given, folder / within))


def resolve_adapter(name: str) -> Path:
    """The directory called `name`: where given first, then among the shipped adapters.

    FileNotFoundError lists those when there is neither.
    """
    given, folder = local_path(name), shipped_dir("recipes") / "adapters"
    if given.is_dir():
        return given
    known = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if name in known:
        return folder / name
    raise FileNotFoundError(
        f"adapter {name}: no such directory, and no shipped adapter of that name "
        f"(shipped: {', '.join(known)})"
    )


def local_path(name: str) -> Path:
    """`name` as a path that can be looked up; FileNotFoundError when nothing can be called so."""
    try:
        path = Path(name).expanduser()
        path.exists()
        name.encode()
    except (OSError, RuntimeError, UnicodeEncodeError) as error:  # too long; no such home; bytes
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        shown = name[:80].encode(errors="replace").decode()
        raise FileNotFoundError(f"{shown}: {reason}") from None
    return path


def _not_found(name: str, given: Path, folder: Path) -> str:
    known = sorted(p.name for p in folder.iterdir() if p.suffix in _SUFFIXES)
    kind_of = "is not a file" if given.exists() else "does not exist"
    kind_of = "is a folder" if given.is_dir() else kind_of
    meant = _meant(name, known)
    return (
        f"{name}: {given.absolute()} {kind_of}, and there is no such file in {folder} "
        f"(shipped: {', '.join(known) or 'none'})" + (f"; did you mean {meant}?" if meant else "")
    )


def _meant(name: str, known: list[str]) -> str | None:
    """The file whose suffix was left out, given or shipped, else the shipped one spelled alike."""
    for suffix in _SUFFIXES:
        if f"{name}{suffix}" in known or Path(f"{name}{suffix}").is_file():
            return f"{name}{suffix}"
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.75)), None)
