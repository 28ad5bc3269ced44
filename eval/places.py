"""Places: folders that results could not or must not go to, refused before minutes are spent; and
the files that go there, all or none.
"""

from __future__ import annotations

import os
from pathlib import Path

from eval.errors import UsageError
from quant.artifact.staging import replace_files


def beside(folder: Path, ending: str) -> Path:
    """FOLDER's neighbour of that name and `ending`; below the working directory a relative path, as
    one would type it."""
    place = folder.resolve()
    found, here = place.with_name(f"{place.name}{ending}"), Path.cwd()
    return found.relative_to(here) if found.is_relative_to(here) else found


def check_out(folder: Path) -> None:
    """UsageError unless results may go to `folder`, which need not be there yet."""
    place = folder.resolve()
    if (place / "artifact.json").is_file():
        raise UsageError(
            f"--out is the artifact itself, whose report.md and report.json tell how it was made; "
            f"pass another folder than {folder}"
        )
    if why := _taken(place):
        raise UsageError(f"--out {folder} {why}; pass another folder")
    standing = next(each for each in (place, *place.parents) if each.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        raise UsageError(f"nothing can go to --out {folder}: {standing} is not a writable folder")


def _taken(place: Path) -> str:
    """What is there already, "" when nothing is in the way."""
    if (place / "config.json").is_file():
        return "is a model's folder, and a file in it would change the model's digest"
    if (place / "text.jsonl").is_file():
        return "is a suite, which would take samples.jsonl for tasks"
    if any((above / "artifact.json").is_file() for above in place.parents):
        return "lies inside the artifact, which is sealed"
    if any(_is_pack(each) for each in (place, *place.parents)):
        return "lies in the pack, where it would unseal it for raters"
    return ""


def _is_pack(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("pack.json", "items.jsonl"))


def as_bytes(text: str) -> bytes:
    """What stands on disk. A lone surrogate in a model's answer must not cost the report."""
    return text.encode("utf-8", errors="backslashreplace")


def write_files(texts: dict[str, str], out: Path) -> None:
    """Write them into `out`, all or none, the last one last; UsageError when the disk refuses."""
    try:
        replace_files(out, {name: as_bytes(text) for name, text in texts.items()})
    except OSError as error:
        raise UsageError(f"cannot write {', '.join(texts)} into {out}: {error.strerror}") from error
