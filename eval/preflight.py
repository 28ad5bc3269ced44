"""Preflight: what must be true of an artifact before it is worth asking it anything."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import torch
import yaml

from eval.errors import EvaluationError, UsageError
from eval.evaluation import ArtifactFacts
from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.errors import ManifestError
from quant.artifact.manifest import MANIFEST_NAME

_AT_ONCE = 1 << 24  # values looked at together
_SYNTHETIC = "synth:"  # how `quantize` names a source of random weights


def open_judgeable(path: Path) -> Artifact:
    """Open the artifact at `path` and check that it is what its recipe set out to make.

    UsageError: there is no artifact. EvaluationError: the recipe quantizes, but what lies there is
    not quantized: float weights would pass every gate and save nothing. ArtifactError: damaged.
    """
    try:
        artifact = open_artifact(path)
    except ManifestError as error:
        if (path / MANIFEST_NAME).is_file():
            raise
        raise UsageError(str(error)) from error
    _require_quantized(artifact)
    return artifact


def _require_quantized(artifact: Artifact) -> None:
    if _is_meant_dense(artifact.manifest.recipe.text):
        return
    schemes = artifact.schemes()
    records = artifact.manifest.modules
    silent = [name for name, s in schemes.items() if s.is_dense and not records[name].reason]
    if silent or all(scheme.is_dense for scheme in schemes.values()):
        raise EvaluationError(
            f"{artifact.path} fell back to float: its recipe quantizes, but "
            f"{len(silent) or len(schemes)} of {len(schemes)} linear layers are dense"
            + (f" without a reason ({silent[0]}, ...)" if silent else "")
            + "; prepare it again"
        )


def _is_meant_dense(recipe_text: str) -> bool:
    try:
        recipe = yaml.safe_load(recipe_text)
    except yaml.YAMLError:
        return False
    return isinstance(recipe, dict) and recipe.get("method") == "none"


def require_finite(artifact: Artifact) -> None:
    """EvaluationError for a stored NaN or Inf: the suite may not reach it, but users will."""
    for name in artifact.reader.names:
        tensor = artifact.reader.tensor(name)
        parts = torch.split(tensor.flatten(), _AT_ONCE) if tensor.is_floating_point() else ()
        if not all(bool(torch.isfinite(part.float()).all()) for part in parts):
            raise EvaluationError(
                f"{artifact.path}: tensor {name} holds NaN or Inf; a prompt that reaches it "
                "gets no answer, whether the suite has one or not; prepare the artifact again"
            )
    artifact.reader.close()


def require_unchanged(artifact: Artifact | ArtifactFacts) -> None:
    """EvaluationError when another artifact has taken this one's place since it was opened."""
    if open_artifact(artifact.path).digest != artifact.digest:
        raise EvaluationError(
            f"{artifact.path} was replaced while it was being judged; evaluate it again"
        )


def source_of(artifact: Artifact) -> str:
    """The path of the model the artifact was made from; UsageError when it is gone, random, or not
    the model that was quantized because an adapter was merged into it."""
    path, adapter = artifact.manifest.source.path, artifact.manifest.source.adapter
    if adapter is not None:
        raise UsageError(
            f"{artifact.path} has the adapter {adapter.name} merged into {path}, and against that "
            "model alone all that the adapter changed would count as damage. Make the merged model "
            f"with `quantize convert {path} --adapter {adapter.name} --out MERGED` and pass "
            "--base MERGED"
        )
    if path.startswith(_SYNTHETIC):
        raise UsageError(
            f"{artifact.path} is made of random weights ({path}), good for speed and memory only; "
            "there is no quality to judge"
        )
    if not Path(path).expanduser().exists():
        raise UsageError(
            f"the base that {artifact.path} was made from, {path}, is not there any more; "
            "pass it with --base"
        )
    return path


def artifact_facts(artifact: Artifact) -> ArtifactFacts:
    """What the report says about the artifact."""
    manifest = artifact.manifest
    return ArtifactFacts(
        path=artifact.path,
        digest=artifact.digest,
        recipe=manifest.recipe.name or f"sha256 {manifest.recipe.sha256[:12]}",
        schemes=dict(Counter(s.label for s in artifact.schemes().values()).most_common()),
        tools=manifest.tools,
        stored_bytes=sum(path.stat().st_size for path in artifact.path.glob("*.safetensors")),
        dense_bytes=_dense_bytes(artifact),
    )


def _dense_bytes(artifact: Artifact) -> int:
    """What the same tensors would take in 16 bits."""
    manifest, schemes = artifact.manifest, artifact.schemes()
    quantized = {
        name for name, record in manifest.modules.items()
        if not schemes[name].is_dense and record.tied_to is None
    }  # fmt: skip
    values = sum(math.prod(manifest.modules[name].shape) for name in quantized)
    values += sum(
        math.prod(record.shape) for name, record in manifest.tensors.items()
        if name.rpartition(".")[0] not in quantized
    )  # fmt: skip
    return 2 * values
