"""Building and judging the plans of one mixed-precision job, each once.

Everything lies in `<out>.mixed`: scores, an artifact for each plan, and what was measured of it. A
run that was killed finds them there. It does not know which plans are worth building
(`quant.mixed`), nor how sensitivity is measured, artifacts are made or recipes are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quant.allocation import Allocation, Group
from quant.artifact.artifact import open_artifact
from quant.artifact.durable import remove_tree, write_file
from quant.artifact.integrity import sha256_of
from quant.artifact.manifest import MANIFEST_NAME
from quant.budget import Budget
from quant.calibration import Calibration
from quant.checkpoint import Source
from quant.closed_loop import Gate, bisect
from quant.divergence import Divergence, Judge
from quant.errors import PipelineError
from quant.machine import give_back_gpu
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
from quant.pipeline import run
from quant.plan import Plan
from quant.provenance import RunInputs, calibration_record, job_identity, sketch_digest, tools
from quant.recipe import Recipe
from quant.report import KVLayerResult, ModuleResult, RunReport
from quant.run_progress import Progress
from quant.run_start import DTYPES, tokens_at_once
from quant.spill import UNLIMITED, MemoryLimits

DONE = "done.json"
RECIPE_MARK = "# Written by quantize"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedJob:
    """What is needed to choose and build. `fit` is what scores and methods see, `heldout` judges;
    `planner` applies an ordinary recipe to the model; with `gate` the smallest plan that it accepts
    is wanted."""

    source: Source
    recipe: Recipe
    space: Space
    planner: Planner
    fit: Calibration
    heldout: Sequence[Sequence[int]]
    out: Path
    device: str
    gate: Gate | None = None
    memory: MemoryLimits = UNLIMITED

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
            sketch_digest(calibration_record(self.fit)),
            [list(window) for window in self.heldout], tools(self.device),
            self.gate and self.gate.key,
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
        """Forget what earlier runs left: scores and plans. The lock is this run's."""
        self.clear_plans()
        for name in ("scores.json", DONE):
            (self.folder / name).unlink(missing_ok=True)

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
    verdict: str = ""


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
        dtype = str(source.dtype) if recipe.dtype == "auto" else recipe.dtype
        check_reachable(
            space, Budget.parse(recipe.budget), recipe.where("budget"),
            wide_scales=dtype.endswith("float32"),
        )  # fmt: skip
    return space


def recipe_path(out: Path) -> Path:
    """The ordinary recipe beside an artifact: `<out>.recipe.yaml`."""
    return out.with_name(out.name + ".recipe.yaml")


def score_windows(job: MixedJob) -> list[list[int]]:
    """Evenly drawn calibration windows, their beginnings: one is a sample, however long it is."""
    asked, samples = job.recipe.mixed, job.fit.samples
    every = max(1, len(samples) // asked.windows)
    return [window[: asked.tokens] for window in samples[::every][: asked.windows]]


@dataclass(slots=True)
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
        inputs = RunInputs(
            source=job.source, plan=plan, recipe=recipe, calibration=fit, device=job.device
        )
        identity = job_identity(inputs)
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        path, record = job.folder / f"plan-{name}", job.folder / f"plan-{name}.json"
        is_sealed = (path / MANIFEST_NAME).is_file()
        report, kl = _read_record(record, fit) if is_sealed else (None, None)
        if report is None:
            report = run(
                job.source, plan, recipe, fit, path, device=job.device,
                progress=Titled(self.progress, title), overwrite=True, memory=job.memory,
            )  # fmt: skip
            _write_record(record, report, None)
        if kl is None:
            kl = self.judge(path, title)
            _write_record(record, report, kl)
        return Built(allocation=allocation, recipe=recipe, path=path, report=report, kl=kl)

    def until_accepted(self, groups: Sequence[Group]) -> Iterator[Built]:
        """Plans built and judged by the gate, on the way to the smallest that it accepts."""
        job = self.job
        built: dict[Allocation, Built] = {}
        step = job.space.num_weights // 64  # an eighth of a bit per weight

        def verdict_of(plan: Allocation) -> str:
            built[plan] = self.build(plan, f"plan {len(built) + 1}")
            return self.verdict(built[plan].path, f"plan {len(built)}")

        count = job.recipe.mixed.evaluations
        for plan, verdict in bisect(verdict_of, groups, job.limit, step, count):
            yield replace(built[plan], verdict=verdict)

    def verdict(self, path: Path, title: str) -> str:
        """The gate's verdict on a plan's artifact, from the folder or asked for."""
        gate = self.job.gate
        assert gate is not None
        record = path.with_name(f"{path.name}-verdict.json")
        key = gate.key
        if record.is_file() and (kept := json.loads(record.read_text()))["key"] == key:
            return str(kept["verdict"])
        steps = Steps(self.progress, 1)
        steps.tell(f"{title}: the gate is judging")
        give_back_gpu()  # the gate is a process of its own, and holds two models
        found = gate.judge(path, path.with_name(f"{path.name}-evaluation"))
        write_file(record, json.dumps({"key": key, "verdict": found}).encode())
        steps.done()
        return found

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
        changes: dict[str, Any] = _paths_from(job.recipe, job.out.parent)
        if used < asked:
            changes["calibration"] = {"samples": used}
        comment = (
            f"{RECIPE_MARK.removeprefix('# ')}: the plan that was chosen under "
            f"{_goal(job)},\n{job.space.bits(allocation.num_bytes):.3f} bits per weight. "
            "An ordinary recipe: with the same --calib it makes the same artifact."
        )
        return written_out(
            job.recipe, chosen_labels(job.space, allocation), name=str(job.recipe_path),
            comment=comment, changes=changes,
        )  # fmt: skip


def _paths_from(recipe: Recipe, folder: Path) -> dict[str, str]:
    """The recipe's paths that are on this disk, as a recipe in `folder` has to write them."""
    found = {}
    for key in ("model", "adapter"):
        value = getattr(recipe, key)
        if value is None:
            continue
        beside = Path(recipe.where().rpartition(":")[0]).parent / value
        path = Path(value) if key in recipe.cli_overrides or not beside.exists() else beside
        if path.exists():
            found[key] = os.path.relpath(path.resolve(), folder.resolve())
    return found


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


def _goal(job: MixedJob) -> str:
    goals = {
        "--budget": job.recipe.budget, "--max-kl": job.recipe.max_kl,
        "--until-accepted": job.gate and job.gate.gates.name,
    }  # fmt: skip
    return " ".join(f"{flag} {value}" for flag, value in goals.items() if value is not None)


def _write_record(path: Path, report: RunReport, kl: Divergence | None) -> None:
    data = asdict(replace(report, coverage=None))
    write_file(path, json.dumps({"report": data, "kl": kl and asdict(kl)}).encode())


def _read_record(path: Path, fit: Calibration | None) -> tuple[RunReport | None, Divergence | None]:
    """What `_write_record` kept; nothing where a run was killed before it did."""
    if not path.is_file():
        return None, None
    data = json.loads(path.read_text(encoding="utf-8"))
    kept = data["report"]
    tables = {
        "modules": tuple(ModuleResult.from_json(module) for module in kept["modules"]),
        "kv_layers": tuple(KVLayerResult.from_json(layer) for layer in kept["kv_layers"]),
        "warnings": tuple(kept["warnings"]),
    }
    report = RunReport(**{**kept, **tables, "sensitivity": (), "plans": ()})
    report = replace(report, coverage=None if fit is None else fit.coverage)
    return report, Divergence(**data["kl"]) if data["kl"] else None
