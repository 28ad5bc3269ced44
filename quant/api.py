"""`quantize` for Python programs, and the steps the command line is made of.

    from quant.api import quantize
    path = quantize("model-dir", "w4a16.yaml", calib="contracts.jsonl")

prepare (read everything that can be wrong, plan) -> calibrate -> carry out -> write the reports.
Nothing is written before `carry_out`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quant.adapter import AdapterSource, with_adapter
from quant.artifact.artifact import open_artifact
from quant.artifact.durable import storage_errors
from quant.artifact.errors import ArtifactError
from quant.artifact.manifest import MANIFEST_NAME
from quant.artifact.shipped import Kind, local_path, resolve_input
from quant.artifact.writer import clear_leftovers
from quant.calibration import Calibration, load_calibration
from quant.checkpoint import Source
from quant.closed_loop import Gate
from quant.errors import CalibrationError, PipelineError, QuantError, RecipeError
from quant.estimate import Estimate, estimate
from quant.foreign import QuantizedSource, is_quantized
from quant.foreign_convert import convert, foreign_plan
from quant.machine import (
    anonymous_bytes,
    check_device,
    free_disk_bytes,
    free_gpu_bytes,
    free_memory_bytes,
    is_gpu,
    measured_speed,
)
from quant.mixed import choose_plan
from quant.mixed_ask import check_keys, draw_windows, make_gate, notes_of, plans_to_build
from quant.mixed_build import MixedJob, check_recipe_path, mixed_folder, survey_source
from quant.mixed_plan import Planner, Space, guess_plan
from quant.parallel import Ranks, Single
from quant.peak_memory import PROCESS_BYTES, Workload
from quant.pipeline import Progress, check_smoothing, run, tokens_at_once
from quant.plan import Plan, make_plan
from quant.plan_table import size
from quant.provenance import is_made_by, job_identity
from quant.recipe import Recipe
from quant.recipe_keys import CalibrationSettings
from quant.report import RunReport, report_json, write_reports
from quant.report_html import html_files
from quant.report_render import model_card, report_markdown
from quant.rounded_weights import rounded_weights_warning
from quant.source import open_source
from quant.spill import UNLIMITED, MemoryLimits

PathLike = str | Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that is planned but not begun. `notes` are worth telling before anything is spent;
    `cost` is of one rank, `tokens` of all.

    space: what mixed precision may choose from; `plan` is then a guess of what it will be.
    """

    source: Source
    recipe: Recipe
    plan: Plan
    calib: tuple[Path, ...]
    out: Path
    cost: Estimate
    tokens: int
    device: str
    ranks: Ranks
    notes: tuple[str, ...]
    planner: Planner
    memory: MemoryLimits
    space: Space | None = None
    gate: Gate | None = None


def quantize(
    model: PathLike | None,
    recipe: PathLike,
    calib: PathLike | Sequence[PathLike] | None = None,
    out: PathLike | None = None,
    *,
    strict: bool = False,
    device: str = "cpu",
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | None = None,
    until_accepted: PathLike | None = None,
    gate_command: str | None = None,
    ranks: Ranks | None = None,
    memory: MemoryLimits = UNLIMITED,
    **overrides: Any,
) -> Path:
    """Make an artifact and return its directory.

    model: HF directory, hub id or GGUF file; None takes the recipe's `model:`. recipe and calib are
    looked up where given, then among the shipped ones. out defaults to NAME-RECIPE in the current
    directory; when it holds the artifact of this very job already, nothing is done.
    memory: what the run may take of the GPU and the host, beyond which hidden states are spilled.
    overrides: recipe keys (`group_size=64`, `samples=128`, ...; those of `calibration:`
    go there). strict refuses group sizes that do not divide. until_accepted: gates file; the
    smallest artifact that `evaluate` (or gate_command) accepts is made. ranks: processes that do
    this together (`quant.parallel_group.joined`), each calling this. Raises QuantError or
    ArtifactError.
    """
    gate = None
    if until_accepted is not None:
        gate = make_gate(until_accepted, gate_command, device)
    job = prepare(
        model, recipe, calib, out, strict=strict, device=device, overrides=overrides, gate=gate,
        ranks=ranks, memory=memory,
    )  # fmt: skip
    if not overwrite and is_done(job):
        return job.out.absolute()
    report = carry_out(job, progress=progress, overwrite=overwrite, resume=resume)
    return Path(report.artifact)


def prepare(
    model: PathLike | None,
    recipe: PathLike,
    calib: PathLike | Sequence[PathLike] | None = None,
    out: PathLike | None = None,
    *,
    strict: bool = False,
    device: str = "cpu",
    memory: MemoryLimits = UNLIMITED,
    overrides: Mapping[str, Any],
    keep_codes: bool = False,
    gate: Gate | None = None,
    ranks: Ranks | None = None,
) -> Job:
    """Read the recipe and the model, plan, and estimate; calibration files are found, not read.

    keep_codes: a checkpoint that another tool quantized is taken as it is, instead of refused.
    gate: what must accept the artifact; the smallest plan that it does accept is wanted.
    """
    ranks = ranks or Single()
    check_device(device)
    loaded = load_recipe(recipe, overrides)
    check_keys(loaded, gate)
    if (loaded.is_mixed or gate is not None) and ranks.size > 1:
        raise PipelineError(
            "mixed precision scores and judges its plans on one rank; leave --ranks (torchrun) "
            "away, or write the schemes down with `overrides:`"
        )
    files = _calibration_files(calib)
    name = str(model) if model is not None else _recipe_model(loaded)
    began = time.perf_counter()
    source = _open_source(name, loaded, keep_codes=keep_codes)
    opening_s = time.perf_counter() - began
    planner = partial(_plan, source, strict=strict)
    plan, space = planner(loaded), None
    if loaded.is_mixed or gate is not None:
        space = survey_source(source, loaded, planner)
        plan = guess_plan(loaded, space, planner)
    if isinstance(source, QuantizedSource):
        plan = foreign_plan(plan, source)
    else:
        check_smoothing(plan)
        plan = _with_source_warning(plan, source)
    tokens = loaded.calibration.samples * loaded.calibration.max_tokens
    tokens += loaded.calibration.kv_samples * longest_text(loaded, source)
    tokens = tokens if plan.needs_calibration else 0
    work = Workload(
        tokens=-(-tokens // ranks.size),
        window_tokens=loaded.calibration.max_tokens,
        batch_tokens=tokens_at_once(loaded, plan, device),
        is_gpu=is_gpu(device),
        free_gpu_bytes=free_gpu_bytes(device, memory.gpu_bytes) if is_gpu(device) else None,
        free_host_bytes=free_memory_bytes(memory.host_bytes),
        process_bytes=max(PROCESS_BYTES, anonymous_bytes()),
    )
    cost = estimate(plan, work, measured_speed(device), opening_s=opening_s)
    target = Path(f"{_model_name(source)}-{loaded.name}") if out is None else Path(out)
    return Job(
        source=source,
        recipe=loaded,
        plan=plan,
        calib=files,
        out=target,
        cost=cost,
        tokens=tokens,
        device=device,
        ranks=ranks,
        notes=(
            *_notes(plan, files, cost, ranks.size, work.free_gpu_bytes),
            *_source_notes(source),
            *notes_of(loaded, space, gate),
        ),
        planner=planner,
        memory=memory,
        space=space,
        gate=gate,
    )


def _plan(source: Source, recipe: Recipe, *, strict: bool) -> Plan:
    """`recipe` applied to the model."""
    return make_plan(
        recipe,
        source.module_shapes,
        source.num_layers,
        source.config,
        strict=strict,
        source_dtype=str(source.dtype).removeprefix("torch."),
        is_tied=source.skeleton.is_tied,
    )


def calibrate(job: Job) -> Calibration | None:
    """The job's calibration windows; None when its methods need none.

    Under a budget these are what scores and methods see; others are held out (`held_out`).
    """
    if not job.plan.needs_calibration:
        return None
    check_calibration(job)
    if job.space is None:
        return load_calibration(
            job.calib, job.source.tokenizer(), job.recipe.calibration,
            longest=longest_text(job.recipe, job.source),
        )  # fmt: skip
    return _draw_windows(job)[0]


def _draw_windows(job: Job) -> tuple[Calibration, list[list[int]]]:
    tokenizer = job.source.tokenizer()
    return draw_windows(
        job.calib, tokenizer, job.recipe, longest=longest_text(job.recipe, job.source)
    )


def longest_text(recipe: Recipe, source: Source) -> int:
    """Tokens of the longest text that KV scales are measured on, 0 where none is longer than a
    window."""
    limit = int(source.config.get("max_position_embeddings") or 0)
    asked = recipe.calibration.kv_max_tokens
    longest = min(asked, limit) if limit else asked
    return longest if recipe.calibrates_kv and longest > recipe.calibration.max_tokens else 0


def check_calibration(job: Job) -> None:
    """CalibrationError when the plan needs calibration text and no file was given."""
    if job.plan.needs_calibration and not job.calib:
        raise CalibrationError(
            f"recipe {job.recipe.name} needs calibration text; give --calib FILE (JSONL, rows like "
            f"the requests the model will get), or {_way_around(job.recipe)}"
        )


def carry_out(
    job: Job,
    calibration: Calibration | None = None,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    resume: bool = True,
) -> RunReport:
    """Calibrate (unless windows are given), quantize, seal, write the reports beside it."""
    check_out(job, overwrite=overwrite)
    if job.space is not None:
        return _carry_out_mixed(job, job.space, progress=progress, resume=resume)

    def texts(report: RunReport) -> dict[str, str]:
        return report_texts(_with_unpacked_bytes(report, job), job.recipe)

    if isinstance(job.source, QuantizedSource):
        report = convert(
            job.source, job.plan, job.recipe, job.out,
            progress=progress, overwrite=overwrite, resume=resume, describe=texts,
        )  # fmt: skip
    else:
        windows = calibration if calibration is not None else calibrate(job)
        report = run(
            job.source, job.plan, job.recipe, windows, job.out, device=job.device,
            progress=progress, overwrite=overwrite, resume=resume, describe=texts,
            ranks=job.ranks, memory=job.memory,
        )  # fmt: skip
    return _with_unpacked_bytes(report, job)


def is_done(job: Job) -> bool:
    """Whether `out` holds the artifact of this very job already: same model, recipe, calibration,
    versions, device and threads. What a run left there that was killed at its very end is removed.
    """
    return job.ranks.first(lambda: _is_done(job))


def _is_done(job: Job) -> bool:
    if not (job.out / MANIFEST_NAME).is_file():
        return False
    if job.space is not None:
        return bool(job.calib) and _mixed_job(job, job.space).is_done()
    try:
        manifest = open_artifact(job.out).manifest
    except ArtifactError:
        return False
    size = job.ranks.size
    identity = job_identity(job.source, job.plan, job.recipe, None, job.device, size)
    if not is_made_by(manifest.model_copy(update={"calibration": None}), identity):
        return False
    windows = calibrate(job)
    identity = job_identity(job.source, job.plan, job.recipe, windows, job.device, size)
    if not is_made_by(manifest, identity):
        return False
    clear_leftovers(job.out)
    return True


def report_texts(report: RunReport, recipe: Recipe) -> dict[str, str]:
    """The files that tell of a run, by name."""
    return {
        "report.json": report_json(report),
        "report.md": report_markdown(report),
        "README.md": model_card(report, recipe.text),
        **html_files(report),
    }


def _with_unpacked_bytes(report: RunReport, job: Job) -> RunReport:
    is_gguf = job.source.kind == "gguf"
    return replace(report, unpacked_bytes=job.cost.source_bytes) if is_gguf else report


def _mixed_job(job: Job, space: Space) -> MixedJob:
    fit, heldout = _draw_windows(job)
    return MixedJob(
        source=job.source, recipe=job.recipe, space=space, planner=job.planner, fit=fit,
        heldout=heldout, out=job.out.absolute(), device=job.device, gate=job.gate,
        memory=job.memory,
    )  # fmt: skip


def _carry_out_mixed(
    job: Job, space: Space, *, progress: Progress | None, resume: bool
) -> RunReport:
    """Choose a plan, complete its artifact with the reports, and only then move it to `out`."""
    check_calibration(job)
    mixed = _mixed_job(job, space)
    if not resume:
        mixed.discard()
    chosen = choose_plan(mixed, progress)
    report = _with_unpacked_bytes(chosen.report, job)
    write_reports(report_texts(report, chosen.built.recipe), chosen.built.path)
    chosen.install()
    return report


def check_out(job: Job, *, overwrite: bool) -> None:
    """PipelineError when `out` is taken or the disk too full; costs nothing, so do it first.

    What an interrupted run left counts as already written. Rank 0 alone writes, and looks.
    """
    if job.ranks.rank != 0:
        return
    if job.out.name in ("", ".."):
        raise PipelineError(f"--out {job.out}: expected the name of a directory to make")
    try:
        local_path(str(job.out.absolute()))
    except FileNotFoundError as error:
        raise PipelineError(f"--out {error}") from error
    with storage_errors(job.out):
        if (job.out / MANIFEST_NAME).exists() and not overwrite:
            raise PipelineError(
                f"{job.out}: already holds an artifact; --overwrite replaces it, --out names "
                "another"
            )
        kept = [_partial(job.out)] if job.space is None else [mixed_folder(job.out)]
        files = (path for folder in kept for path in folder.rglob("*"))
        written = sum(p.stat().st_size for p in files if p.is_file())
        free, needed = free_disk_bytes(job.out), _bytes_to_write(job) - written
    if job.space is not None:
        check_recipe_path(job.out, overwrite=overwrite)
    if free < needed:
        raise PipelineError(
            f"{job.out}: the artifact needs {size(needed)} more and the disk has {size(free)} "
            "free; make room or name another place with --out"
        )


def _bytes_to_write(job: Job) -> int:
    """Of the artifact; under a budget, of every plan that is built."""
    plans = 1 if job.space is None else plans_to_build(job.recipe, job.gate)
    return job.cost.artifact_bytes * plans + job.cost.spilled_bytes


def load_recipe(recipe: PathLike, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe, found where given or among the shipped ones, with `overrides` applied."""
    loaded = Recipe.load(find_input(recipe, "recipes", RecipeError))
    sections = dict.fromkeys(CalibrationSettings.model_fields, "calibration.")
    changes = {f"{sections.get(key, '')}{key}": value for key, value in overrides.items()}
    return loaded.with_overrides(changes)


def find_input(name: PathLike, kind: Kind, error: type[QuantError]) -> Path:
    """`resolve_input`, with a missing file as one of our errors."""
    try:
        return resolve_input(str(name), kind)
    except FileNotFoundError as missing:
        raise error(str(missing)) from missing


def _way_around(recipe: Recipe) -> str:
    if recipe.is_mixed:
        return "drop the budget: sensitivity is measured on such text"
    if recipe.kv_cache != "none":
        return "set `kv_cache: none`"
    if recipe.smoothing != "search":
        return "use --method rtn"
    return "use --smoothing none" + (" --method rtn" if recipe.sees_inputs else "")


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _calibration_files(calib: PathLike | Sequence[PathLike] | None) -> tuple[Path, ...]:
    if calib is None:
        return ()
    names = [calib] if isinstance(calib, str | Path) else calib
    return tuple(find_input(name, "calib_data", CalibrationError) for name in names)


def _recipe_model(recipe: Recipe) -> str:
    """The recipe's `model:`; a relative path counts from the recipe's folder when it is there."""
    if recipe.model is None:
        raise RecipeError("no model: give --model MODEL, or `model:` in the recipe")
    beside = Path(recipe.where().rpartition(":")[0]).parent / recipe.model
    return str(beside) if beside.exists() else recipe.model


def _open_source(name: str, recipe: Recipe, *, keep_codes: bool) -> Source:
    adapter = _adapter(recipe)
    if keep_codes and Path(name).is_dir() and is_quantized(Path(name)):
        if adapter is not None:
            raise RecipeError(f"{name}: an adapter cannot be merged into codes; give the original")
        if recipe.dtype != "auto":
            raise RecipeError(f"{name}: --dtype would round the scales; codes are kept as they are")
        return QuantizedSource(Path(name))
    source = open_source(name)
    return source if adapter is None else with_adapter(source, adapter)


def _adapter(recipe: Recipe) -> str | None:
    """The directory of `--adapter` or the recipe's `adapter:`, which counts from its folder."""
    if recipe.adapter is None:
        return None
    beside = Path(recipe.where().rpartition(":")[0]).parent / recipe.adapter
    in_recipe = "adapter" not in recipe.cli_overrides
    return str(beside) if in_recipe and beside.exists() else recipe.adapter


def _with_source_warning(plan: Plan, source: Source) -> Plan:
    """The plan, with a warning where something is quantized that looks quantized already."""
    if all(row.scheme.is_dense for row in plan.rows):
        return plan
    warning = rounded_weights_warning(source)
    return replace(plan, warnings=(*plan.warnings, warning)) if warning else plan


def _source_notes(source: Source) -> Iterator[str]:
    if isinstance(source, AdapterSource):
        yield f"the adapter {source.adapter.path.name} is merged into the model before quantizing"
        yield from source.notes()
    if isinstance(source, QuantizedSource):
        yield from source.notes


def _model_name(source: Source) -> str:
    path = source.path.resolve()
    name = path.stem if path.suffix == ".gguf" else path.name
    return f"{name}-{source.merged.name}" if source.merged else name


def _notes(
    plan: Plan, calib: Sequence[Path], cost: Estimate, ranks: int, gpu_bytes: int | None
) -> Iterator[str]:
    if ranks > 1:
        yield f"{ranks} ranks share the calibration windows; memory and time are of each"
    if calib and not plan.needs_calibration:
        yield "this recipe needs no calibration; --calib is not used"
    if plan.needs_calibration and not calib:
        yield "this recipe needs calibration text: give --calib FILE to run it"
    if plan.smoothing != "none":
        yield "smoothing: norms, v_proj and up_proj take over scales that are searched first"
    if plan.dtype == "float32" and any(row.method != "none" for row in plan.rows):
        yield "dense parts and scales stay float32; --dtype bfloat16 halves them"
    yield from _memory_notes(cost, ranks, gpu_bytes)


def _memory_notes(cost: Estimate, ranks: int, gpu_bytes: int | None) -> Iterator[str]:
    """What is short; gpu_bytes: what is free of the GPU's memory, None without one."""
    needed = cost.host_bytes * ranks
    wanted = [("memory", needed, free_memory_bytes())]
    if gpu_bytes is not None:
        wanted.append(("GPU memory", cost.gpu_bytes, gpu_bytes))
    for what, needed, free in wanted:
        if free < needed:
            yield (
                f"about {needed / 1e9:.1f} GB of {what} are needed and {free / 1e9:.1f} GB are "
                "free; use fewer --samples or shorter --max-tokens"
            )
    if cost.spilled_bytes:
        yield f"hidden states go to a file of {size(cost.spilled_bytes)} while the run lasts"
