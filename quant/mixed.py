"""Mixed precision under a budget: sensitivity -> knapsack -> the best plans built and judged.

Each group of modules that engines load as one gets the scheme that a knapsack over measured
sensitivities gives it. Predictions add up errors of plain rounding, one group at a time; so the few
best plans are really built, and judged by their KL on windows that neither scores nor methods saw.
The chosen one becomes the artifact, and is written beside it as an ordinary recipe.

Everything on the way lies in `<out>.mixed`: scores (kept, so that another budget is quick), and
one artifact for each plan with what was measured of it. A run that was killed finds them there.
It does not know how sensitivity is measured, how artifacts are made or how recipes are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quant.allocation import Allocation, Allocator, Group, diverse
from quant.artifact.artifact import open_artifact
from quant.artifact.durable import move_into_place, remove_tree, write_file
from quant.artifact.integrity import sha256_of
from quant.artifact.manifest import MANIFEST_NAME
from quant.budget import Budget
from quant.calibration import Calibration
from quant.checkpoint import Source
from quant.divergence import Divergence, Judge
from quant.errors import PipelineError, PlanError
from quant.mixed_plan import (
    Planner,
    Space,
    check_reachable,
    chosen_labels,
    other_bytes,
    survey,
    written_out,
)
from quant.mixed_scores import ScoreSettings, measure_scores, parts_of
from quant.pipeline import DTYPES, Progress, Silent, run, tokens_at_once
from quant.plan import Plan
from quant.provenance import job_identity, tools
from quant.recipe import Recipe
from quant.report import ModuleResult, PlanTrial, RunReport, SensitivityRow

DONE = "done.json"
RECIPE_MARK = "# Written by quantize"
# A plan found for `max_kl:` is good enough when it uses this much of it.
CLOSE_ENOUGH = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedJob:
    """What is needed to choose and build. `fit` is what scores and methods see, `heldout` judges;
    `planner` applies an ordinary recipe to the model."""

    source: Source
    recipe: Recipe
    space: Space
    planner: Planner
    fit: Calibration
    heldout: Sequence[Sequence[int]]
    out: Path
    device: str

    @property
    def folder(self) -> Path:
        """Where scores and plans are kept."""
        return mixed_folder(self.out)

    @property
    def recipe_path(self) -> Path:
        """Where the chosen plan is written down."""
        return recipe_path(self.out)

    @property
    def key(self) -> str:
        """A hash of everything that moves a bit of what will be chosen."""
        asked = [
            self.source.digest, self.recipe.data, self.fit.digest,
            [list(window) for window in self.heldout], tools(self.device),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def is_done(self) -> bool:
        """Whether `out` is what this very job chose. What a run left there that was killed at its
        very end is removed."""
        try:
            done = json.loads((self.folder / DONE).read_text(encoding="utf-8"))
            digest = sha256_of(self.out / MANIFEST_NAME)
        except (OSError, ValueError):
            return False
        if done != {"key": self.key, "digest": digest}:
            return False
        self.clear_plans()
        return True

    def clear_plans(self) -> None:
        """Drop the plans; scores stay."""
        for path in self.folder.iterdir():
            if path.is_dir():
                remove_tree(path)
            elif path.name.startswith("plan-"):
                path.unlink()

    def discard(self) -> None:
        """Forget what earlier runs left: scores and plans."""
        if self.folder.exists():
            remove_tree(self.folder)

    @property
    def limit(self) -> int | None:
        """Bytes that free groups may take; None without a budget."""
        return None if self.recipe.budget is None else self.space.limit(
            Budget.parse(self.recipe.budget)
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A plan that was built and judged; `path` holds its artifact."""

    allocation: Allocation
    recipe: Recipe
    path: Path
    report: RunReport
    kl: Divergence


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
        move_into_place(self.built.path, job.out, job.folder / "replaced")
        job.clear_plans()


def mixed_folder(out: Path) -> Path:
    """Where scores and plans on the way to `out` are kept: `<out>.mixed`."""
    return out.with_name(out.name + ".mixed")


def check_recipe_path(out: Path, *, overwrite: bool) -> None:
    """PipelineError when a recipe that somebody else wrote lies where ours will."""
    path = recipe_path(out)
    if path.is_file() and not overwrite and not path.read_bytes().startswith(RECIPE_MARK.encode()):
        raise PipelineError(
            f"{path}: the chosen plan will be written there, and another file has that name; "
            "--overwrite replaces it, --out names another place"
        )


def survey_source(source: Source, recipe: Recipe, planner: Planner) -> Space:
    """What `recipe` may choose from for this model; PlanError when its budget cannot be met."""
    extra = sum(source.raw_tensor(name).nbytes for name in source.extra_names())
    heads = int(source.config.get("num_key_value_heads") or source.config["num_attention_heads"])

    def beside(plan: Plan) -> int:
        return other_bytes(plan, source.skeleton.parameter_shapes, extra, heads)

    space = survey(recipe, planner, beside)
    if recipe.budget is not None:
        check_reachable(space, Budget.parse(recipe.budget), recipe.where("budget"))
    return space


def recipe_path(out: Path) -> Path:
    """The ordinary recipe beside an artifact: `<out>.recipe.yaml`."""
    return out.with_name(out.name + ".recipe.yaml")


def choose_plan(job: MixedJob, progress: Progress | None = None) -> Chosen:
    """Measure sensitivity, solve, build and judge the best plans, choose one.

    Under a budget the least KL wins; with `max_kl` the smallest artifact that keeps it. Raises
    PlanError (budget too small), PipelineError (no plan keeps max_kl: what was tried is listed).
    """
    shop = Workshop(job, progress or Silent())
    scores = shop.scores()
    groups = job.space.scored(scores)
    max_kl = job.recipe.max_kl
    if max_kl is None:
        assert job.limit is not None
        plans = diverse(groups, job.limit, job.recipe.mixed.plans)
        built = [shop.build(plan, f"plan {i + 1} of {len(plans)}") for i, plan in enumerate(plans)]
        best = min(built, key=lambda one: one.kl.mean)
    else:
        built = list(search_kl(shop.build, groups, max_kl, job.limit, job.recipe.mixed.plans))
        best = smallest_within(built, max_kl, job.space)
    return finish(job, scores, built, best)


def score_windows(job: MixedJob) -> list[list[int]]:
    """Evenly drawn calibration windows, their beginnings: one is a sample, however long it is."""
    asked, samples = job.recipe.mixed, job.fit.samples
    every = max(1, len(samples) // asked.windows)
    return [window[: asked.tokens] for window in samples[::every][: asked.windows]]


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


def smallest_within(built: Sequence[Built], max_kl: float, space: Space) -> Built:
    """The smallest plan that keeps `max_kl`; PipelineError with the table when none does."""
    fitting = [one for one in built if one.kl.mean <= max_kl]
    if not fitting:
        lines = "\n".join(
            f"  {space.bits(one.allocation.num_bytes):.2f} bits per weight: {one.kl.mean:.4f}"
            for one in sorted(built, key=lambda b: b.allocation.num_bytes)
        )
        raise PipelineError(
            f"no plan keeps a KL of {max_kl:g}; measured were\n{lines}\nraise max_kl or the "
            "budget, or list larger schemes under `candidates:` (dense is one)"
        )
    return min(fitting, key=lambda one: one.allocation.num_bytes)


def finish(
    job: MixedJob, scores: Mapping[str, Sequence[float]], built: Sequence[Built], best: Built
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
            chosen=one is best,
        )
        for one in built
    )  # fmt: skip
    report = replace(best.report, artifact=str(job.out), sensitivity=rows, plans=trials)
    return Chosen(built=best, report=report, job=job)


@dataclass(slots=True, kw_only=False)
class Workshop:
    """Builds and judges plans of one job, each once: what is in the job's folder is taken."""

    job: MixedJob
    progress: Progress
    _judge: Judge | None = field(default=None, init=False)

    def scores(self) -> dict[str, list[float]]:
        """Sensitivity of each group in each choice, from the folder or measured."""
        job = self.job
        plan = job.planner(written_out(job.recipe, []))
        windows = score_windows(job)
        settings = ScoreSettings(
            dtype=DTYPES[plan.dtype], device=job.device, draws=job.recipe.mixed.draws,
            seed=job.recipe.calibration.seed,
            batch_tokens=tokens_at_once(job.recipe, plan, job.device),
        )  # fmt: skip
        steps = Steps(self.progress, 2 * plan.num_layers * len(parts_of(windows)))
        found = measure_scores(
            job.source, job.space, windows, settings, job.folder / "scores.json", steps.tell
        )
        steps.done()
        return found

    def build(self, allocation: Allocation, title: str) -> Built:
        """Build the plan, or take it from the folder; judge it, unless that was done."""
        job = self.job
        recipe = self.recipe_of(allocation)
        plan = job.planner(recipe)
        fit = job.fit if plan.needs_calibration else None
        identity = job_identity(job.source, plan, recipe, fit, job.device)
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        path, record = job.folder / f"plan-{name}", job.folder / f"plan-{name}.json"
        report, kl = _read_record(record, fit) if (path / MANIFEST_NAME).is_file() else (None, None)
        if report is None:
            report = run(
                job.source, plan, recipe, fit, path, device=job.device,
                progress=Titled(self.progress, title), overwrite=True,
            )  # fmt: skip
            _write_record(record, report, None)
        if kl is None:
            kl = self.judge(path, title)
            _write_record(record, report, kl)
        return Built(allocation=allocation, recipe=recipe, path=path, report=report, kl=kl)

    def judge(self, path: Path, title: str) -> Divergence:
        """Mean KL of an artifact on the held-out windows."""
        layers = self.job.source.num_layers * (1 if self._judge else 2)
        steps = Steps(Titled(self.progress, title), layers)
        if self._judge is None:
            self._judge = Judge(
                self.job.source, self.job.heldout, self.job.device,
                batch_tokens=self.job.recipe.calibration.batch_tokens,
            )  # fmt: skip
        artifact = open_artifact(path)
        found = self._judge.judge(artifact, steps.tell)
        artifact.reader.close()
        steps.done()
        return found

    def recipe_of(self, allocation: Allocation) -> Recipe:
        """The ordinary recipe of a plan, as it will lie beside the artifact."""
        job = self.job
        asked, used = job.recipe.calibration.samples, len(job.fit.samples)
        changes: dict[str, Any] = {} if used >= asked else {"calibration": {"samples": used}}
        comment = (
            f"{RECIPE_MARK.removeprefix('# ')}: the plan that was chosen under "
            f"{_goal(job.recipe)},\n{job.space.bits(allocation.num_bytes):.3f} bits per weight. "
            "An ordinary recipe: with the same --calib it makes the same artifact."
        )
        return written_out(
            job.recipe, chosen_labels(job.space, allocation), name=str(job.recipe_path),
            comment=comment, changes=changes,
        )  # fmt: skip


class Titled:
    """A Progress that says which plan a layer is of."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._title = progress, title

    def start(self, total_layers: int) -> None:
        self._progress.start(total_layers)

    def layer(self, index: int, text: str) -> None:
        self._progress.layer(index, f"{self._title}: {text}")

    def done(self) -> None:
        self._progress.done()


class Steps:
    """Work that only tells what it is at, as a Progress of `total` steps."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._count = progress, total, 0
        progress.start(total)

    def tell(self, text: str) -> None:
        self._progress.layer(min(self._count, self._total - 1), text)
        self._count += 1

    def done(self) -> None:
        self._progress.done()


def _goal(recipe: Recipe) -> str:
    goals = [f"--budget {recipe.budget}"] if recipe.budget else []
    return " ".join([*goals, f"--max-kl {recipe.max_kl:g}"] if recipe.max_kl else goals)


def _write_record(path: Path, report: RunReport, kl: Divergence | None) -> None:
    data = asdict(replace(report, coverage=None))
    write_file(path, json.dumps({"report": data, "kl": kl and asdict(kl)}).encode())


def _read_record(path: Path, fit: Calibration | None) -> tuple[RunReport | None, Divergence | None]:
    """What `_write_record` kept; nothing where a run was killed before it did."""
    if not path.is_file():
        return None, None
    data = json.loads(path.read_text(encoding="utf-8"))
    modules = tuple(ModuleResult.from_json(module) for module in data["report"]["modules"])
    fields = {**data["report"], "modules": modules, "warnings": tuple(data["report"]["warnings"])}
    report = RunReport(**{**fields, "sensitivity": (), "plans": ()})
    report = replace(report, coverage=None if fit is None else fit.coverage)
    return report, Divergence(**data["kl"]) if data["kl"] else None
