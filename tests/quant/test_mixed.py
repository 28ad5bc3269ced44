"""Mixed precision through the front door: budgets kept, plans judged, runs taken up again."""

from __future__ import annotations

import fcntl
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quant.allocation import Allocation, Allocator, Group, Option
from quant.api import Job, carry_out, is_done, prepare
from quant.artifact.artifact import Artifact, open_artifact, verify
from quant.artifact.dialect import fused_group
from quant.artifact.errors import StorageError
from quant.artifact.layout import QuantizedWeight, dequantize
from quant.budget import Budget, check_label, known_labels
from quant.calibration import load_calibration
from quant.divergence import Divergence, Judge
from quant.errors import CalibrationError, PipelineError, PlanError, RecipeError
from quant.mixed import search_kl
from quant.mixed_build import Built, mixed_folder, recipe_path
from quant.recipe_keys import CalibrationSettings
from quant.report import RunReport
from quant.source import open_source

WORDS = ("agreement", "supplier", "customer", "fee", "invoice", "payment", "party", "law", "within")
RECIPE: dict[str, Any] = {
    "scheme": "w4a16",
    "method": "gptq",
    "budget": "5bpw",
    "dtype": "float16",
    "calibration": {"samples": 8, "max_tokens": 48},
    "mixed": {"windows": 4, "heldout": 4, "draws": 2, "plans": 2},
}


@pytest.fixture(scope="module")
def calib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty different rows of 60 words."""
    generator = random.Random(5)
    path = tmp_path_factory.mktemp("mixed-calib") / "rows.jsonl"
    rows = [{"text": " ".join(generator.choices(WORDS, k=60))} for _ in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_job(model: Path, calib: Path | None, out: Path, **changes: Any) -> Job:
    """A job of RECIPE with keys changed (None: taken out)."""
    keys = {**RECIPE, **changes}
    file = out.with_name(f"{out.name}-asked.yaml")
    file.write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))
    return prepare(str(model), file, calib, out, overrides={})


def make(model: Path, calib: Path | None, out: Path, **changes: Any) -> RunReport:
    return carry_out(make_job(model, calib, out, **changes))


@pytest.fixture(scope="module")
def made(
    tiny_model: Callable[..., Path], calib: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunReport:
    """The artifact of RECIPE."""
    return make(tiny_model(), calib, tmp_path_factory.mktemp("made") / "art")


def test_the_budget_is_kept_as_stored(made: RunReport) -> None:
    artifact = open_artifact(Path(made.artifact))
    names = {m.module for m in made.quantized}
    stored = [
        artifact.reader.stored(name).num_bytes
        for name in artifact.reader.names
        if name.rpartition(".")[0] in names
    ]
    weights = sum(m.shape[0] * m.shape[1] for m in made.quantized)
    bits = 8 * sum(stored) / weights
    chosen = next(plan for plan in made.plans if plan.chosen)
    assert 4.8 < bits <= 5
    assert bits == pytest.approx(chosen.bits_per_weight) == pytest.approx(made.bits_per_weight())
    assert verify(Path(made.artifact)) == []


def test_more_than_one_scheme_and_one_for_each_group(made: RunReport) -> None:
    schemes = open_artifact(Path(made.artifact)).schemes()
    by_group: dict[str, set[int]] = {}
    for name, scheme in schemes.items():
        if scheme.weights is not None:
            by_group.setdefault(fused_group(name), set()).add(scheme.weights.num_bits)
    assert all(len(bits) == 1 for bits in by_group.values())
    assert set().union(*by_group.values()) == {4, 8}


def test_the_report_tells_what_was_tried(made: RunReport) -> None:
    path = Path(made.artifact)
    data = json.loads((path / "report.json").read_text())
    assert [plan["chosen"] for plan in data["plans"]].count(True) == 1
    assert len(data["plans"]) == 2
    kls = [plan["kl"] for plan in data["plans"]]
    assert next(p["kl"] for p in data["plans"] if p["chosen"]) == min(kls)
    assert all(plan["kl"] > 0 < plan["predicted_kl"] for plan in data["plans"])
    rows = data["sensitivity"]
    groups = {row["group"] for row in rows}
    assert len(groups) == 8
    assert all(sum(r["chosen"] for r in rows if r["group"] == g) == 1 for g in groups)
    four, eight = (
        sum(r["loss"] for r in rows if r["scheme"].startswith(bits)) for bits in ("w4", "w8")
    )
    assert four > 20 * eight > 0
    assert "KL predicted" in (path / "report.md").read_text()
    assert Path(data["artifact"]).name == "art"


def test_the_recipe_beside_it_makes_the_same_artifact(
    made: RunReport, tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    out = Path(made.artifact)
    job = prepare(str(tiny_model()), recipe_path(out), calib, tmp_path / "again", overrides={})
    assert job.space is None, "an ordinary recipe"
    assert carry_out(job).artifact_digest == made.artifact_digest
    assert recipe_path(out).read_text() == (out / "recipe.yaml").read_text() == made.recipe_text
    assert left_beside(out) == {"scores.json", "done.json"}


def left_beside(out: Path) -> set[str]:
    return {path.name for path in mixed_folder(out).iterdir()}


def test_the_same_command_again_has_nothing_to_do(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    """Also where the first run was killed between its last rename and clearing up."""
    out, one = tmp_path / "art", {**RECIPE["mixed"], "plans": 1}
    job = make_job(tiny_model(), calib, out, method="rtn", mixed=one)
    assert not is_done(job)
    carry_out(job)
    (mixed_folder(out) / "plan-0123").mkdir()
    assert is_done(make_job(tiny_model(), calib, out, method="rtn", mixed=one))
    assert left_beside(out) == {"scores.json", "done.json"}
    assert not is_done(make_job(tiny_model(), calib, out, method="rtn", budget="6bpw", mixed=one))
    with pytest.raises(PipelineError, match="already holds an artifact"):
        make(tiny_model(), calib, out, method="rtn", budget="6bpw", mixed=one)


def test_few_rows_are_shared_out_and_the_recipe_says_so(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    """Windows are fewer than asked: a quarter of them judges."""
    first = make(
        tiny_model(), calib, tmp_path / "a", method="rtn", smoothing="search",
        calibration={"samples": 500, "max_tokens": 48}, mixed={**RECIPE["mixed"], "heldout": 40},
        smooth={"tokens": 16, "refine_steps": 0},
    )  # fmt: skip
    assert first.coverage is not None
    settings = CalibrationSettings(samples=500, max_tokens=48)
    total = len(
        load_calibration(calib, open_source(str(tiny_model())).tokenizer(), settings).samples
    )
    assert first.coverage.samples == total - total // 4 < 500
    again = prepare(
        str(tiny_model()), recipe_path(tmp_path / "a"), calib, tmp_path / "b", overrides={}
    )
    assert again.recipe.calibration.samples == first.coverage.samples
    assert carry_out(again).artifact_digest == first.artifact_digest


def test_a_size_counts_every_weight(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_model(), calib, tmp_path / "art", budget="0.13MB", method="rtn",
                   kv_cache="fp8-head", mixed={**RECIPE["mixed"], "plans": 1})  # fmt: skip
    report = carry_out(job)
    assert job.space is not None
    assert 125_000 < report.artifact_bytes <= 130_000
    assert job.space.artifact_bytes(sum(m.bytes for m in report.quantized)) == report.artifact_bytes


@pytest.mark.parametrize("budget", ["4.0bpw", "0.01MB"])
def test_an_impossible_budget_names_the_smallest_that_is_not(
    budget: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    fours = ["w4a16-g64", "w8a16-g64"]
    with pytest.raises(PlanError, match="cannot be met") as caught:
        make_job(tiny_model(), None, tmp_path / "art", budget=budget, candidates=fours)
    least = str(caught.value).partition("takes ")[2].split()[0]
    make_job(tiny_model(), None, tmp_path / "art", budget=least, candidates=fours)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_budget_that_wide_scales_use_up_says_so(
    dtype: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match="cannot be met") as caught:
        make_job(tiny_model(), None, tmp_path / "art", budget="1bpw", dtype=dtype)
    assert ("--dtype bfloat16" in str(caught.value)) == (dtype == "float32")


def test_three_bits_where_four_do_not_fit(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    job = make_job(tiny_model(), calib, tmp_path / "art", budget="4bpw", method="rtn",
                   mixed={**RECIPE["mixed"], "plans": 1})  # fmt: skip
    assert any(r.scheme == "w3a16-g32-asym" and r.chosen for r in carry_out(job).sensitivity)
    roomy = make_job(tiny_model(), calib, tmp_path / "b", budget="5bpw").space
    assert roomy is not None
    assert not any("w3a16" in label for group in roomy.groups for label in group.labels)


def test_overrides_and_skip_are_not_chosen_for(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    pinned = {"match": "*.self_attn.o_proj", "layers": [1], "scheme": "w8a16", "method": "rtn"}
    report = make(
        tiny_model(), calib, tmp_path / "art", overrides=[pinned], budget="5.5bpw",
        skip=["lm_head", "*.layers.0.mlp.*"], mixed={**RECIPE["mixed"], "plans": 1},
    )  # fmt: skip
    by_name = {m.module: m for m in report.modules}
    assert by_name["model.layers.1.self_attn.o_proj"].scheme == "w8a16-g64"
    assert by_name["model.layers.1.self_attn.o_proj"].method == "rtn"
    assert by_name["model.layers.0.mlp.up_proj"].scheme == "dense"
    groups = {row.group for row in report.sensitivity}
    assert len(groups) == 5
    assert not any("layers.0.mlp" in g or "layers.1.self_attn.o_proj" in g for g in groups)
    assert report.bits_per_weight() <= 5.5


def test_the_experts_of_a_layer_are_one_group(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    """Layer 1 has a dense MLP."""
    report = make(
        tiny_model("qwen3_moe"), calib, tmp_path / "art", method="rtn", budget="5.2bpw",
        mixed={**RECIPE["mixed"], "plans": 1},
    )  # fmt: skip
    experts = {row.group for row in report.sensitivity if row.group.endswith("experts")}
    assert len(experts) == 1
    assert all(row.loss > 0 for row in report.sensitivity if row.group in experts)
    for group in experts:
        schemes = {m.scheme for m in report.modules if f"{group}." in m.module}
        assert len(schemes) == 1
    assert report.bits_per_weight() <= 5.2


def test_schemes_that_round_inputs_keep_to_their_kind(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    report = make(tiny_model(), calib, tmp_path / "art", scheme="w8a8", method="rtn",
                  budget="9bpw", mixed={**RECIPE["mixed"], "plans": 1})  # fmt: skip
    assert {m.scheme for m in report.modules} == {"w8a8-channel", "dense"}
    losses = {(r.group, r.scheme): r.loss for r in report.sensitivity}
    assert all((loss == 0) == (scheme == "dense") for (_, scheme), loss in losses.items())


def test_max_kl_takes_the_smallest_plan_that_keeps_it(
    made: RunReport, tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    goal = 0.7 * min(plan.kl for plan in made.plans)
    report = make(tiny_model(), calib, tmp_path / "art", budget=None, max_kl=goal,
                  mixed={**RECIPE["mixed"], "plans": 4})  # fmt: skip
    chosen = next(plan for plan in report.plans if plan.chosen)
    assert chosen.kl <= goal
    assert chosen.bits_per_weight == min(p.bits_per_weight for p in report.plans if p.kl <= goal)
    assert 5 < chosen.bits_per_weight < 8


def test_a_max_kl_that_nothing_keeps_is_refused_with_what_was_measured(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    out = tmp_path / "art"
    with pytest.raises(PipelineError, match=r"no plan keeps a KL of 1e-09(.|\n)*8\.\d+ bits"):
        make(tiny_model(), calib, out, budget=None, max_kl=1e-9, method="rtn")
    assert not out.exists()


def test_the_command_line_shows_what_can_be_known_and_what_was_found(
    tiny_model: Callable[..., Path],
    calib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model is named by the recipe, from its own folder; the recipe that is written lies
    elsewhere and finds it too."""
    from quant.cli import main, out_console

    monkeypatch.setattr(out_console, "_width", 100)
    home = tmp_path / "home"
    home.mkdir()
    (home / "model").symlink_to(tiny_model())
    keys = {**RECIPE, "method": "rtn", "budget": None, "model": "model"}
    (home / "r.yaml").write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))

    def quantize(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        text = capsys.readouterr()
        return int(caught.value.code or 0), " ".join((text.out + text.err).split())

    before = set(tmp_path.rglob("*"))
    code, out = quantize("plan", "--recipe", home / "r.yaml", "--budget", "4.9bpw")
    assert code == 0
    assert "a guess from sizes alone. Plans can take 4.33 to 8.33 bits per weight" in out
    assert set(tmp_path.rglob("*")) == before
    code, out = quantize("plan", "--recipe", home / "r.yaml", "--budget", "4.9bpv")
    assert code == 2
    assert "--budget (over " in out
    art = tmp_path / "art"
    asked = ("--recipe", home / "r.yaml", "--budget", "4.9bpw", "--calib", calib, "--out", art)
    code, out = quantize(*asked)
    assert code == 0
    assert "KL predicted KL measured" in out
    assert "chosen 4." in out
    digest = open_artifact(art).digest
    code, _ = quantize("--recipe", recipe_path(art), "--calib", calib, "--out", tmp_path / "b")
    assert code == 0
    assert open_artifact(tmp_path / "b").digest == digest


class Ruler:
    """Builds nothing: the KL of a plan is `factor` times what was predicted."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, allocation: Allocation, _: str) -> Any:
        kl = Divergence(mean=self.factor * allocation.score, error=None)
        return Built(allocation=allocation, recipe=None, path=None, report=None, kl=kl)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0, 1.8])
def test_predictions_are_corrected_by_what_was_measured(factor: float) -> None:
    groups = [
        Group(name=str(i), options=tuple(
            Option(scheme=f"w{b}", num_bytes=100 * b + i, score=(1 + i % 7) * 4.0**-b)
            for b in (4, 8)
        ))
        for i in range(40)
    ]  # fmt: skip
    goal = 0.3
    built = list(search_kl(Ruler(factor), groups, goal, None, 4))
    best = min(b.allocation.num_bytes for b in built if b.kl.mean <= goal)
    exact = Allocator(groups).smallest(goal / factor)
    assert best <= 1.05 * exact.num_bytes


class Stop(BaseException):
    """What a killed process does to its caller here."""


class DieAt:
    """A Progress that dies when it has heard of so many layers; `heard` counts."""

    def __init__(self, fatal: int) -> None:
        self.fatal, self.heard = fatal, 0
        self.texts: list[str] = []

    def start(self, total_layers: int) -> None:
        return

    def layer(self, index: int, text: str) -> None:
        self.texts.append(text)
        self.heard += 1
        if self.heard == self.fatal:
            raise Stop

    def done(self) -> None:
        return


def deaths(model: Path, calib: Path, out: Path) -> Iterator[DieAt]:
    """One run after another, each dying later than the one before, until one is done."""
    for fatal in range(1, 60, 2):
        progress = DieAt(fatal)
        try:
            carry_out(make_job(model, calib, out), progress=progress)
        except Stop:
            yield progress
            continue
        return
    raise AssertionError("it never finished")


def test_a_run_killed_anywhere_is_taken_up_again(
    made: RunReport, tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    out = tmp_path / "art"
    runs = []
    for progress in deaths(tiny_model(), calib, out):
        assert not out.exists()
        runs.append(progress)
    assert len(runs) > 3
    assert (
        open_artifact(out).manifest.modules == open_artifact(Path(made.artifact)).manifest.modules
    )
    assert not any("sensitivity" in text for text in runs[-1].texts), "scores were kept"
    assert left_beside(out) == {"scores.json", "done.json"}


class DieIn(DieAt):
    """A Progress that dies when it first hears of `fatal_text`."""

    def __init__(self, fatal_text: str) -> None:
        super().__init__(fatal=-1)
        self.fatal_text = fatal_text

    def layer(self, index: int, text: str) -> None:
        if self.fatal_text in text:
            raise Stop
        super().layer(index, text)


def test_a_plan_with_kv_scales_is_taken_up_again(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    """What its KV cache costs is read back from the record of the plan, and reported."""
    one = {"windows": 4, "heldout": 4, "draws": 2, "plans": 1}
    straight = make(tiny_model(), calib, tmp_path / "straight", kv_cache="fp8-head", mixed=one)
    job = make_job(tiny_model(), calib, tmp_path / "art", kv_cache="fp8-head", mixed=one)
    with pytest.raises(Stop):
        carry_out(job, progress=DieIn("judging"))
    resumed = carry_out(job)
    assert len(resumed.kv_layers) == 2
    assert resumed.kv_layers == straight.kv_layers


@pytest.mark.parametrize("resume", [True, False])
def test_two_runs_do_not_share_a_folder(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path, resume: bool
) -> None:
    """Neither takes nor removes the plans of the other."""
    out, one = tmp_path / "art", {**RECIPE["mixed"], "plans": 1}
    job = make_job(tiny_model(), calib, out, method="rtn", mixed=one)
    mixed_folder(out).mkdir()
    (mixed_folder(out) / "plan-0123").mkdir()
    with (mixed_folder(out) / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="art is being written by process"):
            carry_out(job, resume=resume)
    assert (mixed_folder(out) / "plan-0123").is_dir()
    carry_out(job, resume=resume)
    assert left_beside(out) == {"scores.json", "done.json"}


def test_scores_of_other_windows_are_not_taken(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    out, texts = tmp_path / "art", []
    for seed in (0, 1, 1):
        settings = {**RECIPE["calibration"], "seed": seed}
        job = make_job(tiny_model(), calib, out, calibration=settings, method="rtn",
                       mixed={**RECIPE["mixed"], "plans": 1})  # fmt: skip
        progress = DieAt(-1)
        carry_out(job, progress=progress, overwrite=True)
        texts.append(any("sensitivity" in text for text in progress.texts))
    assert texts == [True, True, False]


def test_what_is_refused_before_any_work(
    tiny_model: Callable[..., Path], calib: Path, tmp_path: Path
) -> None:
    model, out = tiny_model(), tmp_path / "art"
    with pytest.raises(CalibrationError, match="give --calib FILE"):
        make(model, None, out)
    one = tmp_path / "one.jsonl"
    one.write_text('{"text": "a few words"}\n')
    with pytest.raises(CalibrationError, match="two calibration windows at least"):
        make(model, one, out)
    with pytest.raises(RecipeError, match="4.5bpw, or a size"):
        make_job(model, calib, out, budget="4.5 bits")
    with pytest.raises(RecipeError, match=r"candidates\[0\]: found 'w4a16-g48'.*did you mean"):
        make_job(model, calib, out, candidates=["w4a16-g48"])
    with pytest.raises(RecipeError, match="without a goal"):
        make_job(model, calib, out, budget=None, candidates=["w4a16-g64"])
    with pytest.raises(RecipeError, match="nothing is quantized"):
        make_job(model, calib, out, scheme="dense", method="none")
    with pytest.raises(PlanError, match="no module is left"):
        make_job(model, calib, out, overrides=[{"match": "*_proj", "scheme": "w8a16"}])
    recipe_path(out).write_text("mine\n")
    with pytest.raises(PipelineError, match="another file has that name"):
        make(model, calib, out)
    assert recipe_path(out).read_text() == "mine\n"
    assert not out.exists()


@torch.no_grad()
def transformers_kl(model: Path, artifact: Artifact, windows: list[list[int]]) -> float:
    """Mean KL per token by transformers alone, with the artifact's weights put into its model."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    candidate = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name, parameter in candidate.named_parameters():
        if name in artifact.manifest.tensors:
            parameter.copy_(artifact.reader.tensor(name))
    for name in artifact.schemes():
        weight = artifact.weight(name)
        if isinstance(weight, QuantizedWeight):
            candidate.get_submodule(name).weight.copy_(dequantize(weight))
    kls: list[Tensor] = []
    for window in windows:
        ours, theirs = (
            m(torch.tensor([window])).logits[0].log_softmax(-1) for m in (reference, candidate)
        )
        kls.append((ours.exp() * (ours - theirs)).sum(-1))
    return float(torch.cat(kls).mean())


def test_the_judge_agrees_with_transformers(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    generator = torch.Generator().manual_seed(1)
    windows = [torch.randint(1, 250, (n,), generator=generator).tolist() for n in (40, 7, 23)]
    quantized = open_artifact(artifact(tiny_model(), scheme="w4a16", group_size=32, lm_head="w8a16",
                                       skip=[]))  # fmt: skip
    judge = Judge(open_source(str(tiny_model())), windows, "cpu", batch_tokens=64)
    found = judge.judge(quantized, lambda _: None)
    assert found.mean == pytest.approx(transformers_kl(tiny_model(), quantized, windows), rel=1e-3)
    assert found.error is not None
    assert found.error > 0


def test_every_label_reads_back_and_others_are_explained() -> None:
    assert {"w4a16-g32-asym", "w8a16-channel", "w8a8", "fp8", "w4a8-fp8-g64", "dense"} <= set(
        known_labels()
    )
    assert all(check_label(label) is None for label in known_labels())
    assert "w4a16-g64-asym" in str(check_label("w4a16-g64-assym"))
    assert Budget.parse("5.5 GiB").value == 5.5 * 2**30
    for text in ("0bpw", "bpw", "4.5", "-1GB", "4 bpw/x"):
        with pytest.raises(ValueError, match="expected bits per weight"):
            Budget.parse(text)
