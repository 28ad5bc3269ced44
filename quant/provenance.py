"""What an artifact says of its making: the job's identity, the manifest, config.json, the report.

The identity decides whether an interrupted run may be taken up again: everything that moves a bit
of the result is in it. Results of finished layers are kept as a journal beside the partial
artifact, so that a resumed run reports (and writes into the manifest) what the first one measured.
Knows no models and no methods.
"""

from __future__ import annotations

import hashlib
import json
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors
import torch

from quant.artifact.artifact import Artifact
from quant.artifact.durable import write_file
from quant.artifact.manifest import (
    CalibrationRecord,
    KVRecord,
    Manifest,
    ModuleRecord,
    RecipeRecord,
    SketchRecord,
    SourceRecord,
    scheme_tables,
)
from quant.artifact.probe import ProbeRecord
from quant.artifact.scheme import KV_SCHEMES
from quant.artifact.writer import ArtifactWriter
from quant.calibration import Calibration
from quant.checkpoint import Source
from quant.plan import Plan
from quant.recipe import Recipe
from quant.report import KVLayerResult, ModuleResult, RunReport

# Texts by file name that are made of a run's report and lie beside its artifact.
Describe = Callable[[RunReport], Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What a run is made of and where: all of it that the result depends on."""

    source: Source
    plan: Plan
    recipe: Recipe
    calibration: Calibration | None
    device: str = "cpu"
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFindings:
    """What a run found out: results by module, seconds by stage, layers that an earlier run of the
    same job had finished."""

    results: Mapping[str, ModuleResult]
    seconds: Mapping[str, float]
    resumed_layers: int


def no_texts(report: RunReport) -> Mapping[str, str]:
    """A Describe that makes nothing."""
    return {}


def package_version() -> str:
    """The installed version, or `0+clone` when run from a checkout that is not installed."""
    try:
        return version("weighbridge")
    except PackageNotFoundError:
        return "0+clone"


def tools(device: str, num_ranks: int = 1) -> dict[str, str]:
    """Versions and settings that can move a bit of the result."""
    found = {
        "weighbridge": package_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "safetensors": safetensors.__version__,
        "device": device_class(device),
        "threads": str(torch.get_num_threads()),
    }
    return found if num_ranks == 1 else {**found, "ranks": str(num_ranks)}


def device_class(device: str) -> str:
    """`cpu`, or the accelerator's name: results are bit-identical on one class of device."""
    kind = torch.device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type


def job_identity(inputs: RunInputs) -> dict[str, Any]:
    """What must be equal for a partial run to be taken up again; JSON data."""
    plan, recipe, calibration = inputs.plan, inputs.recipe, inputs.calibration
    return {
        "source": inputs.source.digest,
        "recipe": recipe.sha256,
        "overrides": recipe.cli_overrides,
        "plan": [[row.module, row.scheme.label, row.method] for row in plan.rows],
        "dtype": plan.dtype,
        "kv_cache": [plan.kv_cache, list(plan.kv_layers)],
        "calibration": None if calibration is None else calibration.digest,
        "sketch": sketch_digest(calibration_record(calibration)),
        "tools": tools(inputs.device, inputs.num_ranks),
        "quant_sources": own_sources(),
    }


def sketch_digest(record: CalibrationRecord | None) -> str | None:
    """sha256 (hex) of what the gate looks for leaks with: names of rows and documents, which no
    token tells. None without any."""
    if record is None or record.sketch is None:
        return None
    return hashlib.sha256(record.sketch.model_dump_json().encode()).hexdigest()


@cache
def own_sources() -> str:
    """Digest of the code that quantizes: between two releases it changes under one version."""
    return sources_digest(Path(__file__).parent)


def sources_digest(folder: Path) -> str:
    """sha256 (hex) over names and contents of all Python files in `folder` and below."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        own = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()} {own}\n".encode())
    return whole.hexdigest()


def is_made_by(manifest: Manifest, identity: Mapping[str, Any]) -> bool:
    """Whether an artifact with this manifest is the one that the job of `identity` makes."""
    calibration = manifest.calibration
    found = {
        "source": manifest.source.digest,
        "recipe": manifest.recipe.sha256,
        "overrides": manifest.recipe.overrides,
        "calibration": None if calibration is None else calibration.digest,
        "sketch": sketch_digest(calibration),
        "tools": manifest.tools,
    }
    wanted = json.loads(json.dumps({key: identity[key] for key in found}))
    return bool(json.loads(json.dumps(found)) == wanted)


def make_manifest(
    inputs: RunInputs, probe: ProbeRecord, results: Mapping[str, ModuleResult]
) -> Manifest:
    """The manifest, but for the tables of tensors and files."""
    source, plan, recipe = inputs.source, inputs.plan, inputs.recipe
    attention = [f"model.layers.{i}.self_attn" for i in plan.kv_layers]
    return Manifest(
        created_by=f"weighbridge {package_version()}",
        architecture=plan.architecture,
        dtype=plan.dtype,
        schemes=scheme_tables(plan.schemes()),
        modules={row.module: _module_record(results[row.module], plan) for row in plan.rows},
        kv_cache=kv_record(plan.kv_cache, attention),
        source=SourceRecord(
            path=source.name,
            kind=source.kind,
            revision=source.revision,
            digest=source.digest,
            dtype=str(source.dtype).removeprefix("torch."),
            adapter=source.merged,
        ),
        recipe=RecipeRecord(
            text=recipe.text,
            sha256=recipe.sha256,
            name=recipe.name,
            overrides=recipe.cli_overrides,
        ),
        calibration=calibration_record(inputs.calibration),
        tools=tools(inputs.device, inputs.num_ranks),
        probe=probe,
    )


def _module_record(result: ModuleResult, plan: Plan) -> ModuleRecord:
    is_tied = result.module == "lm_head" and plan.is_tied
    return ModuleRecord(
        scheme=result.scheme,
        shape=result.shape,
        method=result.method,
        reason=result.note,
        tied_to="model.embed_tokens.weight" if is_tied else None,
        rel_error=result.rel_error,
        damping=result.damping,
        fallback=result.fallback,
        dead_columns=result.dead_columns or None,
    )


def calibration_record(calibration: Calibration | None) -> CalibrationRecord | None:
    if calibration is None:
        return None
    coverage = calibration.coverage
    return CalibrationRecord(
        digest=calibration.digest,
        samples=coverage.samples,
        tokens=coverage.tokens,
        coverage=json.loads(json.dumps(coverage.to_json())),
        sketch=None if calibration.sketch is None else SketchRecord.of(calibration.sketch),
    )


def make_config(source: Source, plan: Plan) -> dict[str, Any]:
    """config.json: the source's with our dtype; `seal` adds the quantization section."""
    config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
    return {**config, "dtype": plan.dtype, "tie_word_embeddings": plan.is_tied}


def stage_files(source: Source, recipe: Recipe, writer: ArtifactWriter) -> None:
    """Everything beside the weights, byte for byte, before any work: what lies there later, or no
    longer, does not matter then."""
    for name, data in source.files().items():
        writer.write_file(name, data)
    writer.write_file("recipe.yaml", recipe.text.encode())


def finish(
    inputs: RunInputs,
    writer: ArtifactWriter,
    probe: ProbeRecord,
    findings: RunFindings,
    describe: Describe,
) -> RunReport:
    """Seal, and report: what `describe` makes of the report appears with the artifact."""
    manifest = make_manifest(inputs, probe, findings.results)
    reports: list[RunReport] = []

    def texts(artifact: Artifact) -> Mapping[str, str]:
        kv_layers = read_kv_results(writer, inputs.plan.num_layers)
        reports.append(make_report(inputs, findings, writer.out, artifact, kv_layers))
        return describe(reports[0])

    writer.seal(manifest, make_config(inputs.source, inputs.plan), texts)
    return reports[0]


def make_report(
    inputs: RunInputs,
    findings: RunFindings,
    out: Path,
    artifact: Artifact,
    kv_layers: tuple[KVLayerResult, ...] = (),
) -> RunReport:
    """What was done. `artifact` may still be staged; `out` is where it will be."""
    source, plan, recipe = inputs.source, inputs.plan, inputs.recipe
    calibration, results = inputs.calibration, findings.results
    return RunReport(
        model=source.name,
        adapter=source.merged.name if source.merged else None,
        architecture=plan.architecture,
        recipe=recipe.name,
        artifact=str(out),
        artifact_digest=artifact.digest,
        dtype=plan.dtype,
        source_bytes=source.num_bytes,
        artifact_bytes=_weight_bytes(artifact),
        modules=tuple(results[row.module] for row in plan.rows),
        seconds=dict(findings.seconds),
        peak_memory_bytes=peak_memory_bytes(),
        device=device_class(inputs.device),
        threads=torch.get_num_threads(),
        ranks=inputs.num_ranks,
        resumed_layers=findings.resumed_layers,
        coverage=None if calibration is None else calibration.coverage,
        warnings=plan.warnings,
        tools=tools(inputs.device, inputs.num_ranks),
        recipe_text=recipe.text,
        overrides=recipe.cli_overrides,
        source_digest=source.digest,
        calibration_digest="" if calibration is None else calibration.digest,
        runtime_serves=source.skeleton.mixture is None,
        kv_layers=kv_layers,
    )


def _weight_bytes(artifact: Artifact) -> int:
    stored = (artifact.reader.stored(name) for name in artifact.reader.names)
    return sum(tensor.num_bytes for tensor in stored)


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def journal_path(writer: ArtifactWriter, shard: int) -> Path:
    """Where the results of one shard are kept until the artifact is sealed."""
    return writer.work_dir / f"results-{shard:05d}.json"


def store_results(writer: ArtifactWriter, shard: int, results: Mapping[str, ModuleResult]) -> None:
    """Keep the results of a shard; call before the shard is committed."""
    data = {name: asdict(result) for name, result in results.items()}
    write_file(journal_path(writer, shard), json.dumps(data).encode())


def read_results(writer: ArtifactWriter, shard: int) -> dict[str, ModuleResult]:
    """The results that `store_results` kept."""
    data = json.loads(journal_path(writer, shard).read_text(encoding="utf-8"))
    return {name: ModuleResult.from_json(fields) for name, fields in data.items()}


def store_kv_result(writer: ArtifactWriter, result: KVLayerResult) -> None:
    """Keep what a layer's KV cache costs; call before the layer's shard is committed."""
    write_file(_kv_journal_path(writer, result.layer), json.dumps(asdict(result)).encode())


def read_kv_results(writer: ArtifactWriter, num_layers: int) -> tuple[KVLayerResult, ...]:
    """What `store_kv_result` kept of all layers."""
    paths = [_kv_journal_path(writer, layer) for layer in range(num_layers)]
    found = (json.loads(p.read_text(encoding="utf-8")) for p in paths if p.is_file())
    return tuple(KVLayerResult.from_json(data) for data in found)


def _kv_journal_path(writer: ArtifactWriter, layer: int) -> Path:
    return writer.work_dir / f"kv-{layer:05d}.json"


def kv_record(kv_cache: str, attention: Iterable[str]) -> KVRecord | None:
    """The manifest's entry for the recipe's `kv_cache:` and the attention modules that have it."""
    if kv_cache == "none":
        return None
    scheme = KV_SCHEMES[kv_cache]
    return KVRecord(kind=scheme.kind, strategy=scheme.strategy, modules=tuple(attention))
