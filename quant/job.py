"""A run that is planned but not begun, and the calibration text it will need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quant.calibration import Calibration, load_calibration
from quant.checkpoint import Source
from quant.closed_loop import Gate
from quant.errors import CalibrationError
from quant.estimate import Estimate
from quant.mixed_ask import draw_windows
from quant.mixed_build import MixedJob
from quant.mixed_plan import Planner, Space
from quant.parallel import Ranks
from quant.plan import Plan
from quant.recipe import Recipe
from quant.spill import MemoryLimits


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


def _way_around(recipe: Recipe) -> str:
    if recipe.is_mixed:
        return "drop the budget: sensitivity is measured on such text"
    if recipe.kv_cache != "none":
        return "set `kv_cache: none`"
    if recipe.smoothing != "search":
        return "use --method rtn"
    return "use --smoothing none" + (" --method rtn" if recipe.sees_inputs else "")


def mixed_job(job: Job, space: Space) -> MixedJob:
    """The job of choosing a plan from `space`; reads the calibration rows."""
    fit, heldout = _draw_windows(job)
    return MixedJob(
        source=job.source, recipe=job.recipe, space=space, planner=job.planner, fit=fit,
        heldout=heldout, out=job.out.absolute(), device=job.device, gate=job.gate,
        memory=job.memory,
    )  # fmt: skip
