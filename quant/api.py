"""`quantize` for Python programs, and the steps the command line is made of.

    from quant.api import quantize
    path = quantize("model-dir", "w4a16.yaml", calib="contracts.jsonl")

prepare (read everything that can be wrong, plan) -> calibrate -> carry out -> write the reports.
Nothing is written before `carry_out`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quant.artifact.writer import sole_maker
from quant.calibration import Calibration
from quant.checkpoint import Source
from quant.closed_loop import Gate
from quant.errors import PipelineError
from quant.estimate import estimate
from quant.foreign import QuantizedSource
from quant.foreign_convert import convert, foreign_plan
from quant.job import Job, calibrate, check_calibration, longest_text, mixed_job
from quant.job_inputs import (
    PathLike,
    calibration_files,
    load_recipe,
    model_name,
    open_model,
    recipe_model,
)
from quant.job_notes import plan_notes, source_notes, window_notes, with_source_warning
from quant.job_out import check_out, is_done
from quant.machine import (
    anonymous_bytes,
    chosen_device,
    free_gpu_bytes,
    free_memory_bytes,
    is_gpu,
    measured_speed,
)
from quant.mixed import choose_plan
from quant.mixed_ask import check_keys, make_gate, notes_of
from quant.mixed_build import survey_source
from quant.mixed_plan import Planner, Space, guess_plan
from quant.parallel import Ranks, Single
from quant.peak_memory import PROCESS_BYTES, Workload
from quant.pipeline import run
from quant.plan import Plan, make_plan
from quant.recipe import Recipe
from quant.report import RunReport, report_json, write_reports
from quant.report_html import html_files
from quant.report_render import model_card, report_markdown
from quant.run_checks import check_smoothing
from quant.run_progress import Progress
from quant.run_start import tokens_at_once
from quant.spill import UNLIMITED, MemoryLimits


def quantize(
    model: PathLike | None,
    recipe: PathLike,
    calib: PathLike | Sequence[PathLike] | None = None,
    out: PathLike | None = None,
    *,
    strict: bool = False,
    device: str = "auto",
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
    device: auto (a GPU where torch finds one), cpu, cuda or cuda:N.
    memory: what the run may take of the GPU and the host, beyond which hidden states are spilled.
    overrides: recipe keys (`group_size=64`, `samples=128`, ...; those of `calibration:`
    go there). strict refuses group sizes that do not divide. until_accepted: gates file; the
    smallest artifact that `evaluate` (or gate_command) accepts is made. ranks: processes that do
    this together (`quant.parallel_group.joined`), each calling this. Raises QuantError or
    ArtifactError.
    """
    gate, device = None, chosen_device(device)
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
    device: str = "auto",
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
    device = chosen_device(device)
    loaded = load_recipe(recipe, overrides)
    check_keys(loaded, gate)
    is_mixed = loaded.is_mixed or gate is not None
    if is_mixed and ranks.size > 1:
        raise PipelineError(
            "mixed precision scores and judges its plans on one rank; leave --ranks (torchrun) "
            "away, or write the schemes down with `overrides:`"
        )
    files = calibration_files(calib)
    name = str(model) if model is not None else recipe_model(loaded)
    began = time.perf_counter()
    source = open_model(name, loaded, keep_codes=keep_codes)
    opening_s = time.perf_counter() - began
    planner = partial(_plan, source, strict=strict)
    plan, space = _first_plan(source, loaded, planner, is_mixed=is_mixed)
    tokens = _calibration_tokens(loaded, source) if plan.needs_calibration else 0
    work = _workload(loaded, plan, -(-tokens // ranks.size), device, memory)
    cost = estimate(plan, work, measured_speed(device), opening_s=opening_s)
    notes = (
        *plan_notes(plan, files, cost, ranks.size, work.free_gpu_bytes),
        *window_notes(loaded, plan, source.config),
        *source_notes(source),
        *notes_of(loaded, space, gate),
    )
    target = Path(f"{model_name(source)}-{loaded.name}") if out is None else Path(out)
    return Job(
        source=source, recipe=loaded, plan=plan, calib=files, out=target, cost=cost, tokens=tokens,
        device=device, ranks=ranks, notes=notes, planner=planner, memory=memory, space=space,
        gate=gate,
    )  # fmt: skip


def _first_plan(
    source: Source, recipe: Recipe, planner: Planner, *, is_mixed: bool
) -> tuple[Plan, Space | None]:
    """The plan, or a guess of it and what mixed precision may choose from."""
    plan, space = planner(recipe), None
    if is_mixed:
        space = survey_source(source, recipe, planner)
        plan = guess_plan(recipe, space, planner)
    if isinstance(source, QuantizedSource):
        return foreign_plan(plan, source), space
    check_smoothing(plan)
    return with_source_warning(plan, source), space


def _calibration_tokens(recipe: Recipe, source: Source) -> int:
    asked = recipe.calibration
    return asked.samples * asked.max_tokens + asked.kv_samples * longest_text(recipe, source)


def _workload(
    recipe: Recipe, plan: Plan, tokens: int, device: str, memory: MemoryLimits
) -> Workload:
    """What a rank has to do, and what is free for it."""
    return Workload(
        tokens=tokens,
        window_tokens=recipe.calibration.max_tokens,
        batch_tokens=tokens_at_once(recipe, plan, device),
        is_gpu=is_gpu(device),
        free_gpu_bytes=free_gpu_bytes(device, memory.gpu_bytes) if is_gpu(device) else None,
        free_host_bytes=free_memory_bytes(memory.host_bytes),
        process_bytes=max(PROCESS_BYTES, anonymous_bytes()),
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


def _carry_out_mixed(
    job: Job, space: Space, *, progress: Progress | None, resume: bool
) -> RunReport:
    """Choose a plan, complete its artifact with the reports, and only then move it to `out`."""
    check_calibration(job)
    mixed = mixed_job(job, space)
    with sole_maker(mixed.folder, job.out):
        if not resume:
            mixed.discard()
        chosen = choose_plan(mixed, progress)
        report = _with_unpacked_bytes(chosen.report, job)
        write_reports(report_texts(report, chosen.built.recipe), chosen.built.path)
        chosen.install()
    return report
