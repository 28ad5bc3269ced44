"""Mixed precision under a budget: sensitivity -> knapsack -> the best plans built and judged.

Each group of modules that engines load as one gets the scheme that a knapsack over measured
sensitivities gives it. Predictions add up errors of plain rounding, one group at a time; so the few
best plans are really built, and judged by their KL on windows that neither scores nor methods saw.
The chosen one becomes the artifact, and is written beside it as an ordinary recipe.

Under a budget the least KL wins, under `max_kl` or a gate the smallest plan that keeps it. What is
chosen from is `quant.mixed_plan`, what is built and kept on the way `quant.mixed_build`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quant.allocation import Allocation, Allocator, Group, diverse
from quant.artifact.durable import move_into_place, write_file
from quant.artifact.integrity import sha256_of
from quant.artifact.manifest import MANIFEST_NAME
from quant.closed_loop import ACCEPTED
from quant.errors import NotAcceptedError, PipelineError, PlanError
from quant.mixed_build import DONE, Built, MixedJob, Workshop
from quant.mixed_plan import Space
from quant.report import PlanTrial, RunReport, SensitivityRow
from quant.run_progress import Progress, Silent

# A plan found for `max_kl:` is good enough when it uses this much of it.
CLOSE_ENOUGH = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The artifact that will be `out` once it is installed, and the report of the whole."""

    built: Built
    report: RunReport
    job: MixedJob

    def install(self) -> None:
        """Write the recipe, move the artifact to `out` in one rename, drop the other plans."""
        job = self.job
        done = {"key": job.key, "digest": sha256_of(self.built.path / MANIFEST_NAME)}
        write_file(job.folder / DONE, json.dumps(done).encode())
        write_file(job.recipe_path, self.built.recipe.text.encode())
        evaluation = self.built.path.with_name(f"{self.built.path.name}-evaluation")
        if evaluation.is_dir():  # where `evaluate` writes when it is not told otherwise
            for path in sorted(p for p in evaluation.iterdir() if p.is_file()):
                beside = job.out.with_name(f"{job.out.name}-evaluation")
                write_file(beside / path.name, path.read_bytes())
        move_into_place(self.built.path, job.out, job.folder / "replaced")
        job.clear_plans()


def choose_plan(job: MixedJob, progress: Progress | None = None) -> Chosen:
    """Measure sensitivity, solve, build and judge the best plans, choose one.

    Under a budget the least KL wins; with `max_kl` the smallest artifact that keeps it, with a gate
    the smallest that it accepts. Raises PlanError (budget too small), PipelineError (no plan keeps
    max_kl) and NotAcceptedError, which list what was tried.
    """
    began = time.perf_counter()
    shop = Workshop(job, progress or Silent())
    scores = shop.scores()
    scored = time.perf_counter()
    groups = job.space.scored(scores)
    max_kl = job.recipe.max_kl
    if job.gate is not None:
        built = list(shop.until_accepted(groups))
        best = smallest_accepted(built, job)
    elif max_kl is None:
        assert job.limit is not None
        plans = diverse(groups, job.limit, job.recipe.mixed.plans)
        built = [shop.build(plan, f"plan {i + 1} of {len(plans)}") for i, plan in enumerate(plans)]
        best = min(built, key=lambda one: one.kl.mean)
    else:
        built = list(search_kl(shop.build, groups, max_kl, job.limit, job.recipe.mixed.plans))
        best = smallest_within(built, max_kl, job.space)
    own = best.report.total_seconds
    seconds = {
        "sensitivity": scored - began,
        "judging, other plans": max(0.0, time.perf_counter() - scored - own),
        **best.report.seconds,
    }
    return finish(job, scores, built, best, seconds)


def search_kl(
    build: Callable[[Allocation, str], Built],
    groups: Sequence[Group],
    max_kl: float,
    limit: int | None,
    count: int,
) -> Iterator[Built]:
    """Plans towards the smallest of at most `max_kl`: each one corrects the predictions by what
    was measured of the one before; where none of `count` keeps it, the best plan is built too."""
    allocator = Allocator(groups, limit=limit)
    best = allocator.within(allocator.most_bytes if limit is None else limit)
    tried: set[Allocation] = set()
    ratio, fits = 1.0, False
    for number in range(1, count + 1):
        try:
            plan = allocator.smallest(max_kl / ratio)
        except PlanError:
            plan = best
        if plan in tried:
            break
        tried.add(plan)
        built = build(plan, f"plan {number} of at most {count + 1}")
        yield built
        fits = fits or built.kl.mean <= max_kl
        if CLOSE_ENOUGH * max_kl <= built.kl.mean <= max_kl:
            return
        ratio = max(built.kl.mean, 1e-9) / max(plan.score, 1e-9)
    if not fits and best not in tried:
        yield build(best, "the best plan")


def smallest_accepted(built: Sequence[Built], job: MixedJob) -> Built:
    """The smallest plan that the gate accepted; NotAcceptedError with the table when none was."""
    accepted = [one for one in built if one.verdict == ACCEPTED]
    if not accepted:
        assert job.gate is not None
        raise NotAcceptedError(
            f"the gate ({job.gate.gates}) accepted no plan; asked were\n"
            f"{_tried(built, job.space)}\n"
            "raise the budget, list larger schemes under `candidates:` (dense is one), or look at "
            f"what it missed: artifacts and its reports are in {job.folder}"
        )
    return min(accepted, key=lambda one: one.allocation.num_bytes)


def _tried(built: Sequence[Built], space: Space) -> str:
    """A line for each plan, smallest first."""
    return "\n".join(
        f"  {space.bits(one.allocation.num_bytes):.2f} bits per weight: KL {one.kl.mean:.4f}"
        + (f", {one.verdict}" if one.verdict else "")
        for one in sorted(built, key=lambda b: b.allocation.num_bytes)
    )


def smallest_within(built: Sequence[Built], max_kl: float, space: Space) -> Built:
    """The smallest plan that keeps `max_kl`; PipelineError with the table when none does."""
    fitting = [one for one in built if one.kl.mean <= max_kl]
    if not fitting:
        raise PipelineError(
            f"no plan keeps a KL of {max_kl:g}; measured were\n{_tried(built, space)}\n"
            "raise max_kl or the budget, or list larger schemes under `candidates:` (dense is one)"
        )
    return min(fitting, key=lambda one: one.allocation.num_bytes)


def finish(
    job: MixedJob,
    scores: Mapping[str, Sequence[float]],
    built: Sequence[Built],
    best: Built,
    seconds: Mapping[str, float],
) -> Chosen:
    """The report of the whole: what was tried, and what every group would lose in each scheme."""
    taken = [option.scheme for option in best.allocation.choices]
    rows = tuple(
        SensitivityRow(
            group=group.name, scheme=group.shown(i), loss=loss, chosen=group.labels[i] == label
        )
        for group, label in zip(job.space.groups, taken, strict=True)
        for i, loss in enumerate(scores[group.name])
    )
    trials = tuple(
        PlanTrial(
            bits_per_weight=job.space.bits(one.allocation.num_bytes),
            artifact_bytes=one.report.artifact_bytes,
            predicted_kl=one.allocation.score, kl=one.kl.mean, kl_error=one.kl.error,
            chosen=one is best, verdict=one.verdict,
        )
        for one in built
    )  # fmt: skip
    report = replace(
        best.report, artifact=str(job.out), sensitivity=rows, plans=trials, seconds=seconds
    )
    return Chosen(built=best, report=report, job=job)
