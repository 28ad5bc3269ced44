"""The place where a job's artifact goes: whether it is there already, taken, or has no room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quant.artifact.artifact import open_artifact
from quant.artifact.durable import storage_errors
from quant.artifact.errors import ArtifactError
from quant.artifact.manifest import MANIFEST_NAME
from quant.artifact.shipped import local_path
from quant.artifact.writer import clear_leftovers
from quant.errors import PipelineError
from quant.job import Job, calibrate, mixed_job
from quant.machine import free_disk_bytes
from quant.mixed_ask import plans_to_build
from quant.mixed_build import check_recipe_path, mixed_folder
from quant.plan_table import size
from quant.provenance import RunInputs, is_made_by, job_identity


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


def is_done(job: Job) -> bool:
    """Whether `out` holds the artifact of this very job already: same model, recipe, calibration,
    versions, device and threads. What a run left there that was killed at its very end is removed.
    """
    return job.ranks.first(lambda: _is_done(job))


def _is_done(job: Job) -> bool:
    if not (job.out / MANIFEST_NAME).is_file():
        return False
    if job.space is not None:
        return bool(job.calib) and mixed_job(job, job.space).is_done()
    try:
        manifest = open_artifact(job.out).manifest
    except ArtifactError:
        return False
    inputs = RunInputs(
        source=job.source, plan=job.plan, recipe=job.recipe, calibration=None, device=job.device,
        num_ranks=job.ranks.size,
    )  # fmt: skip
    unseen = manifest.model_copy(update={"calibration": None})
    if not is_made_by(unseen, job_identity(inputs)):
        return False
    calibrated = replace(inputs, calibration=calibrate(job))
    if not is_made_by(manifest, job_identity(calibrated)):
        return False
    clear_leftovers(job.out)
    return True


def _bytes_to_write(job: Job) -> int:
    """Of the artifact; under a budget, of every plan that is built."""
    plans = 1 if job.space is None else plans_to_build(job.recipe, job.gate)
    return job.cost.artifact_bytes * plans + job.cost.spilled_bytes


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")
