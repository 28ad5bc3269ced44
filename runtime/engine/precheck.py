"""Is there an artifact to run at this path at all? Answered before anything heavy is imported.

Presence and sizes only: `quant.artifact.artifact.open_artifact` checks the rest. Without torch, so
that a wrong path or an incomplete copy is refused at once.
"""

from __future__ import annotations

from pathlib import Path

from quant.artifact.errors import IntegrityError
from quant.artifact.manifest import MANIFEST_NAME, read_manifest
from runtime.config import ConfigError

_NO_ARTIFACT = f"is not an artifact (no {MANIFEST_NAME}); the runtime runs artifacts only"


def check_artifact(path: Path) -> None:
    """Raise unless `path` is a directory with a readable manifest and every file it lists.

    Raises:
        ConfigError: something else is there, or nothing, or a model of a kind that the runtime
            does not run; the message says what.
        ManifestError: artifact.json cannot be read.
        IntegrityError: a file is missing or has another size than artifact.json says.
    """
    if not (path / MANIFEST_NAME).is_file():
        raise ConfigError(_what_is_there(path))
    manifest, _ = read_manifest(path / MANIFEST_NAME)
    if any(".experts." in name for name in manifest.modules):
        raise ConfigError(
            f"{path}: {manifest.architecture} is a mixture of experts, which this runtime does not "
            "run; serve the artifact with an engine that reads compressed-tensors, such as vLLM"
        )
    for name, record in sorted(manifest.files.items()):
        problem = _file_problem(path / name, record.size)
        if problem is not None:
            raise IntegrityError(
                f"{path}: {name}: {problem}; do not use this copy: fetch or quantize it again "
                "(`quantize verify` lists everything)"
            )


def _file_problem(path: Path, expected_bytes: int) -> str | None:
    if not path.is_file():
        return "the file is missing"
    size = path.stat().st_size
    if size != expected_bytes:
        return f"has {size} bytes, {MANIFEST_NAME} says {expected_bytes}"
    return None


def _what_is_there(path: Path) -> str:
    """Only what `quantize convert` can read is sent there."""
    make = f"Make one of its weights as they are with: quantize convert {path}"
    if not path.exists():
        return f"{path}: no such artifact (nothing is there)"
    if path.is_dir():
        if (path / "config.json").is_file():
            return f"{path} {_NO_ARTIFACT}; it is a checkpoint. {make}"
        return f"{path} {_NO_ARTIFACT}; it is a directory without config.json, so no model either"
    if _is_gguf(path):
        return f"{path} {_NO_ARTIFACT}; it is a GGUF file. {make}"
    return (
        f"{path} {_NO_ARTIFACT}; it is a file, but no model: give the directory that `quantize` "
        "made"
    )


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
