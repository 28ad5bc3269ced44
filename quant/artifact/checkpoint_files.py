"""The files of a checkpoint on disk: which of them make the model, and their digest.

`artifact.json` records the digest as `source.digest`, so that whoever judges the artifact can tell
whether the model it was made from is still the one that lies there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from quant.artifact.integrity import sha256_of
from quant.artifact.store import PICKLE_SUFFIXES

# Where transformers keeps a tokenizer's chat templates but for the default one.
MORE_TEMPLATES = "additional_chat_templates"

# Never copied: weights, code, and the files that every artifact writes anew.
NOT_COPIED_SUFFIXES = PICKLE_SUFFIXES | {
    ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".tflite", ".ot", ".py", ".partial",
}  # fmt: skip
NOT_COPIED_NAMES = frozenset({
    "config.json", "artifact.json", "gate.json", "recipe.yaml", "report.json", "report.md",
    "report.html", "README.md", "quantize_config.json", "quant_config.json",
})  # fmt: skip


def checkpoint_digest(path: Path, sha256: Callable[[Path], str] = sha256_of) -> str:
    """sha256 (hex) of a GGUF file's bytes, or over names and bytes of a directory's model files.

    sha256: of one file, for callers who know some already.
    """
    if path.is_file():
        return sha256(path)
    lines = [f"{name} {sha256(file)}\n" for name, file in files_of(path) if is_model_file(file)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def files_of(directory: Path) -> list[tuple[str, Path]]:
    """(name in the directory, path) of every file of a model, sorted."""
    found = [*directory.iterdir(), *(directory / MORE_TEMPLATES).glob("*.jinja")]
    named = ((path.relative_to(directory).as_posix(), path) for path in found if path.is_file())
    return sorted(named)


def is_copied(path: Path) -> bool:
    """Whether an artifact holds the file as it is."""
    return not (
        path.suffix in NOT_COPIED_SUFFIXES
        or path.name in NOT_COPIED_NAMES
        or path.name.endswith(".index.json")
        or path.name.startswith(".")
    )


def is_model_file(path: Path) -> bool:
    """Whether another file in its place would be another model."""
    return is_copied(path) or path.suffix == ".safetensors" or path.name == "config.json"
