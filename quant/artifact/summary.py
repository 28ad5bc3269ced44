"""What `quantize inspect` shows: an artifact in a few numbers. Pure; it prints nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from quant.artifact.artifact import Artifact
from quant.artifact.layout import tensor_names
from quant.artifact.scheme import Scheme
from quant.artifact.stamp import Stamp
from quant.artifact.store import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeSummary:
    """All modules of one scheme; bytes include scales and zero points.

    A tied head counts the embedding it is tied to.
    """

    label: str
    num_modules: int
    num_weights: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectSummary:
    """An artifact at a glance."""

    name: str
    digest: str
    format_version: str
    architecture: str
    dtype: str
    schemes: tuple[SchemeSummary, ...]  # the linears, by label
    other_bytes: int  # embeddings, norms, biases, KV scales
    total_bytes: int  # all tensors
    num_parameters: int  # of the unquantized model
    kv_cache: str  # "fp8", "fp8-head", "int8" or "model dtype"
    source: str
    source_dtype: str
    recipe_name: str
    recipe_sha256: str
    methods: tuple[str, ...]
    modules_by_method: tuple[tuple[str, int], ...]  # most first
    calibration: str
    probe: str
    tools: tuple[tuple[str, str], ...]
    stamp: Stamp | None

    @property
    def bits_per_weight(self) -> float:
        """All bytes over all parameters."""
        return 8 * self.total_bytes / self.num_parameters


def inspect(artifact: Artifact) -> InspectSummary:
    """Summarize an opened artifact from its manifest and stamp alone."""
    manifest = artifact.manifest
    sizes = {name: _num_bytes(t.dtype, t.shape) for name, t in manifest.tensors.items()}
    schemes = _by_scheme(artifact, sizes)
    other = {n: size for n, size in sizes.items() if n not in _linear_tensors(artifact)}
    other_params = sum(prod(manifest.tensors[name].shape) for name in other)
    probe, calibration = manifest.probe, manifest.calibration
    return InspectSummary(
        name=artifact.path.resolve().name,
        digest=artifact.digest,
        format_version=manifest.format_version,
        architecture=manifest.architecture,
        dtype=manifest.dtype,
        schemes=schemes,
        other_bytes=sum(other.values()),
        total_bytes=sum(sizes.values()),
        num_parameters=other_params + sum(scheme.num_weights for scheme in schemes),
        kv_cache=_kv_cache(artifact),
        source=_source(artifact),
        source_dtype=manifest.source.dtype,
        recipe_name=manifest.recipe.name,
        recipe_sha256=manifest.recipe.sha256,
        methods=tuple(sorted({module.method for module in manifest.modules.values()})),
        modules_by_method=tuple(
            Counter(module.method for module in manifest.modules.values()).most_common()
        ),
        calibration=(
            f"{calibration.samples} samples, {calibration.tokens} tokens" if calibration else "none"
        ),
        probe=f"{len(probe.prompts)} prompts, tolerance {probe.tolerance:g}" if probe else "none",
        tools=tuple(sorted(manifest.tools.items())),
        stamp=artifact.stamp,
    )


def _source(artifact: Artifact) -> str:
    source = artifact.manifest.source
    merged = f" with the adapter {source.adapter.name} merged" if source.adapter else ""
    return f"{source.path} ({source.kind}){merged}"


def _by_scheme(artifact: Artifact, sizes: dict[str, int]) -> tuple[SchemeSummary, ...]:
    totals: dict[str, tuple[int, int, int]] = {}
    for module, scheme in artifact.schemes().items():
        modules, weights, num_bytes = totals.get(scheme.label, (0, 0, 0))
        totals[scheme.label] = (
            modules + 1,
            weights + prod(artifact.manifest.modules[module].shape),
            num_bytes + sum(sizes[name] for name in _tensors_of(artifact, module, scheme)),
        )
    return tuple(
        SchemeSummary(label=label, num_modules=m, num_weights=w, num_bytes=b)
        for label, (m, w, b) in sorted(totals.items())
    )


def _linear_tensors(artifact: Artifact) -> set[str]:
    schemes = artifact.schemes()
    return {name for m in schemes for name in _tensors_of(artifact, m, schemes[m])}


def _tensors_of(artifact: Artifact, module: str, scheme: Scheme) -> list[str]:
    tied_to = artifact.manifest.modules[module].tied_to
    return [tied_to] if tied_to else [f"{module}.{leaf}" for leaf in tensor_names(scheme)]


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPES[dtype].itemsize * prod(shape)


def _kv_cache(artifact: Artifact) -> str:
    """The recipe's word for it, and the layers that it leaves out."""
    scheme = artifact.manifest.kv_scheme()
    if scheme is None:
        return "model dtype"
    kept = ", ".join(map(str, sorted(artifact.kv_kept_layers)))
    return scheme.label + (f", not in layers {kept}" if kept else "")
