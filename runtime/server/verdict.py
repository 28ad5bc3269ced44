"""What the stamp on an artifact is worth here: its verdict, and whether the numerics are those
it was judged by. Knows the manifest and the stamp, not how either was made.
"""

from __future__ import annotations

from pathlib import Path

from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.stamp import Stamp
from runtime.config import ConfigError

NOT_JUDGED = "not judged"


def open_for_serving(path: Path) -> Artifact:
    """The artifact at `path`, headers checked. ConfigError when it is something else."""
    if not path.exists():
        raise ConfigError(f"{path}: no such artifact")
    if not path.is_dir() or not (path / "artifact.json").is_file():
        raise ConfigError(
            f"{path} is not an artifact (no artifact.json); the runtime runs artifacts only. "
            f"Make a dense one with: quantize convert {path}"
        )
    return open_artifact(path, verify="fast")


def judge(
    stamp: Stamp | None, numerics: dict[str, str], chat_template_sha256: str | None
) -> tuple[str, str | None]:
    """(verdict, warning). The warning says why the artifact may not be as good as it should."""
    if stamp is None:
        return NOT_JUDGED, "this artifact was not judged; run: evaluate ART"
    if stamp.verdict != "accepted":
        return stamp.verdict, f"the gate's verdict on this artifact is: {stamp.verdict}"
    here = {**numerics, "chat_template_sha256": chat_template_sha256}
    judged = stamp.numerics.model_dump()
    different = [
        f"{name} {judged[name]} (here {here[name]})"
        for name in judged
        if name in here and (judged[name] or None) != (here[name] or None)
    ]
    if different:
        return stamp.verdict, "accepted, but judged by other numerics: " + ", ".join(different)
    return stamp.verdict, None


def refuse_unless_accepted(stamp: Stamp | None) -> None:
    """ConfigError unless the stamp says accepted (numerics are compared once they are known)."""
    verdict = NOT_JUDGED if stamp is None else stamp.verdict
    if verdict != "accepted":
        raise ConfigError(f"--require-accepted: the verdict on this artifact is: {verdict}")
