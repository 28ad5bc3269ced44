"""Finding a base model: a Hugging Face directory, a GGUF file (or a folder with one) or a hub id.

Answers where it lies, what kind it is and which bytes it has. Loads nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from eval.errors import TargetError, UsageError
from quant.artifact.checkpoint_files import checkpoint_digest
from quant.artifact.integrity import sha256_of

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONTENT = (".safetensors", ".json", ".gguf", ".jinja", ".model", ".txt")
_QUANTIZED_FILES = ("quantize_config.json", "quant_config.json")  # of GPTQ's and AWQ's older tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A base model on disk. `gguf_file` is the file's name inside `directory`; `states` is what its
    files looked like before they were hashed. source_digest: what artifacts call these files."""

    name: str
    kind: Literal["hf", "gguf"]
    directory: Path
    gguf_file: str | None
    digest: str
    source_digest: str
    states: Mapping[Path, tuple[int, ...]]

    def require_unchanged(self) -> None:
        """TargetError when a file was written or replaced since: `digest` would name other bytes
        than were read, and what is stored under it would be another model's."""
        changed = [p.name for p, state in self.states.items() if _state(p) != state]
        if changed:
            raise TargetError(
                f"the base {self.name} changed while it was read ({', '.join(sorted(changed))}); "
                "evaluate again once nothing writes into it"
            )


def locate(base: str) -> Checkpoint:
    """The checkpoint that `base` names.

    UsageError: nothing there, or more than one thing it could mean. TargetError: it is quantized.
    """
    path = Path(base).expanduser()
    if path.is_file():
        return _gguf(path)
    if path.is_dir():
        return _directory(path)
    if _HUB_ID.fullmatch(base):
        return _directory(_from_hub(base))
    raise UsageError(
        f"the base model {base!r} does not exist; pass --base with a model directory, a GGUF file "
        "or a hub id"
    )


def _gguf(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UsageError(f"{path} is not a GGUF file (it begins with {magic!r}); pass its folder?")
    states = {path: _state(path)}
    sha256 = sha256_of(path)
    return Checkpoint(
        name=str(path),
        kind="gguf",
        directory=path.parent,
        gguf_file=path.name,
        digest=_digest({path: sha256}),
        source_digest=sha256,
        states=states,
    )


def _directory(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _gguf(found[0])
        raise UsageError(
            f"{path} holds no config.json and {len(found)} GGUF files; "
            "expected a model directory or exactly one GGUF file"
        )
    _refuse_quantized(path)
    files = [p for p in path.iterdir() if p.suffix in _CONTENT and p.is_file()]
    states = {file: _state(file) for file in files}
    sha256 = {file: sha256_of(file) for file in files}
    return Checkpoint(
        name=str(path),
        kind="hf",
        directory=path,
        gguf_file=None,
        digest=_digest(sha256),
        source_digest=checkpoint_digest(path, lambda file: sha256.get(file) or sha256_of(file)),
        states=states,
    )


def _refuse_quantized(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise TargetError(f"{path / 'config.json'} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise TargetError(f"{path / 'config.json'} holds no JSON object")
    found = config.get("quantization_config") or config.get("compression_config")
    if found or any((path / name).is_file() for name in _QUANTIZED_FILES):
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise TargetError(
            f"the base {path} is itself quantized{f' ({method})' if method else ''}, so it cannot "
            "say what was lost; pass the float model it was made from with --base"
            + _named_by_card(path)
        )


def _named_by_card(path: Path) -> str:
    """What the model card names as `base_model`, as advice; empty without it."""
    try:
        card = (path / "README.md").read_text(encoding="utf-8", errors="replace")
        head = yaml.safe_load(card.split("---")[1]) if card.startswith("---") else None
    except (OSError, IndexError, yaml.YAMLError):
        return ""
    named = head.get("base_model") if isinstance(head, dict) else None
    names = named if isinstance(named, list) else [named]
    bases = [name for name in names if isinstance(name, str) and _HUB_ID.fullmatch(name)]
    return f" (its model card names {bases[0]})" if bases else ""


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[f"*{s}" for s in _CONTENT]))
    except Exception as error:
        raise UsageError(
            f"the base model {name!r} is no local path and could not be fetched from the hub: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; "
            "pass --base with a local copy"
        ) from error


def _state(path: Path) -> tuple[int, ...]:
    """What changes when a file is written or another one takes its place; empty once it is gone."""
    try:
        found = path.stat()
    except OSError:
        return ()
    # The last also where a copy restored the time of writing.
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(sha256: Mapping[Path, str]) -> str:
    """sha256 over the names and contents of files."""
    total = hashlib.sha256()
    for path in sorted(sha256, key=lambda path: path.name):
        total.update(f"{path.name}\0{sha256[path]}\n".encode())
    return total.hexdigest()
