"""`method: gradient` through the pipeline: layers come out no worse on windows that no step saw,
by an independent forward; every family, resumed or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quant.artifact.artifact import open_artifact
from quant.errors import RecipeError
from quant.estimate import estimate
from quant.peak_memory import Workload
from quant.pipeline import run
from quant.plan import make_plan
from quant.recipe import Recipe
from quant.report_render import facts
from quant.run_time import H200
from quant.source import open_source
from tests.conftest import FAMILIES
from tests.quant.test_pipeline import probe_difference, reconstructed
from tests.quant.test_smoothing import make, planted, windows

W3 = "scheme: w3a16\ngroup_size: 32\n"
# What gradient begins from where nothing is said.
AIMED = "method: gptq\ngptq: {target: original}\n"
START = {"gemma3_text": "method: gptq\n"}
QUICK = "method: gradient\ngradient: {steps: 12, tokens: 80, rate: 0.01}\n"


def first_layers(model: Path, artifact: Path) -> tuple[Tensor, Tensor]:
    """What layer 0 puts out for the windows kept apart, dense and stored, [tokens, H].

    Of six windows of one length every third is kept apart, of a batch the last ones.
    """
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    stored = reconstructed(model, open_artifact(artifact))
    found: list[Tensor] = []
    for one in (dense, stored):
        outputs: list[Tensor] = []
        one.model.layers[0].register_forward_hook(
            lambda *args, into=outputs: into.append(
                args[2][0] if isinstance(args[2], tuple) else args[2]
            )
        )
        with torch.no_grad():
            for ids in windows()[-2:]:
                one(input_ids=torch.tensor([ids]))
        found.append(torch.cat([part.reshape(-1, part.shape[-1]) for part in outputs]))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("llama", W3), ("gemma3_text", W3), ("qwen2", "scheme: w4a8\ngroup_size: 32\n")],
    ids=["llama-w3a16", "gemma3-w3a16", "qwen2-w4a8"],
)
def test_a_layer_is_never_worse_than_its_start(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, scheme: str
) -> None:
    report = make(tiny_model(family), tmp_path / "art", scheme + QUICK)
    make(tiny_model(family), tmp_path / "start", scheme + START.get(family, AIMED))
    errors = []
    for name in ("start", "art"):
        wanted, found = first_layers(tiny_model(family), tmp_path / name)
        missed = (found - wanted).square().mean(1) / wanted.square().mean(1)
        errors.append(float(missed.mean().sqrt()))
    learned = [m for m in report.quantized if m.module.startswith("model.layers.0.")]
    assert {m.layer_error for m in learned} == {learned[0].layer_error}
    assert learned[0].layer_error is not None
    assert errors == pytest.approx(list(learned[0].layer_error), rel=2e-3)
    for module in report.quantized:
        assert module.layer_error is not None
        assert module.layer_error[1] <= module.layer_error[0]
    assert errors[1] <= errors[0]
    better = {m.module for m in report.quantized if m.layer_error[1] < m.layer_error[0]}
    assert better == {m.module for m in report.quantized if m.method == "gradient"}


@pytest.mark.parametrize("family", sorted(n for n in FAMILIES if n not in ("mixtral", "qwen3_moe")))
def test_the_probe_saw_what_is_stored(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    text = f"{W3}{QUICK}dtype: bfloat16\n".replace("steps: 12", "steps: 3")
    make(tiny_model(family), tmp_path / "art", text)
    artifact = open_artifact(tmp_path / "art", verify="full")
    assert probe_difference(tiny_model(family), artifact) < 2e-4


def test_offsets_smoothing_rtn_and_an_fp8_cache_go_together(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = planted(tiny_model, tmp_path, "llama")
    text = (
        f"{W3}method: gradient\nsmoothing: search\nkv_cache: fp8\n"
        "gradient: {steps: 40, tokens: 80, rate: 0.01, start: rtn, offsets: true}\n"
    )
    report = make(model, tmp_path / "art", text)
    errors = [m.layer_error for m in report.quantized if m.layer_error]
    assert len(errors) == len(report.quantized)
    assert all(after <= before for before, after in errors)
    assert any(after < before for before, after in errors)
    assert any(name == "gradient" and "windows kept apart" in text for name, text in facts(report))
    assert any("into input_layernorm" in m.smoothing for m in report.quantized)
    artifact = open_artifact(tmp_path / "art", verify="full")
    assert "model.layers.0.self_attn.k_scale" in artifact.reader.names


def test_it_may_begin_from_what_auto_chose(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    text = f"{W3}method: gradient\ngradient: {{steps: 4, tokens: 80, rate: 0.01, start: auto}}\n"
    report = make(tiny_model(), tmp_path / "art", text)
    assert all(m.candidates and m.layer_error for m in report.quantized)


def test_where_no_step_helps_the_start_stays(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = f"{W3}method: gradient\ngradient: {{steps: 1, tokens: 80, rate: 0.1}}\n"
    report = make(tiny_model(), tmp_path / "art", text)
    start = make(tiny_model(), tmp_path / "start", W3 + AIMED)
    kept = [m for m in report.quantized if m.method == "gptq"]
    assert kept
    assert all("no step was better than the start" in m.note for m in kept)
    one, two = (open_artifact(tmp_path / name) for name in ("art", "start"))
    if {m.method for m in report.quantized} == {"gptq"}:
        assert one.tensor_digests() == two.tensor_digests()
    assert start.bits_per_weight() == report.bits_per_weight()


def test_experts_keep_their_start(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    report = make(tiny_model("mixtral"), tmp_path / "art", W3 + QUICK)
    experts = [m for m in report.quantized if ".experts." in m.module]
    others = [m for m in report.quantized if ".experts." not in m.module]
    assert experts
    assert all("experts are not learned" in m.note and m.method != "gradient" for m in experts)
    assert all(m.layer_error is not None for m in others)
    artifact, source = open_artifact(tmp_path / "art"), open_source(str(tiny_model("mixtral")))
    norm = "model.layers.0.post_attention_layernorm.weight"
    assert torch.equal(artifact.reader.tensor(norm), source.tensor(norm))


def test_only_the_modules_asked_for_are_learned(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = f"{W3}method: gptq\noverrides: [{{match: '*.layers.1.mlp.*', method: gradient}}]\n"
    text += "gradient: {steps: 6, tokens: 80, rate: 0.01}\n"
    report = make(tiny_model(), tmp_path / "art", text)
    make(tiny_model(), tmp_path / "plain", W3 + AIMED)
    one, two = (open_artifact(tmp_path / name).tensor_digests() for name in ("art", "plain"))
    assert {n for n in one if one[n] != two[n]} <= {n for n in one if ".layers.1." in n}
    learned = {m.module for m in report.quantized if m.layer_error}
    assert learned == {f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")}


def test_two_runs_and_a_resumed_one_give_the_same_bytes(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source, recipe = open_source(str(tiny_model())), Recipe.parse(W3 + QUICK)
    plan = make_plan(recipe, source.module_shapes, source.num_layers, source.config)
    assert plan.needs_calibration
    digests = []
    for name in ("one", "two"):
        make(tiny_model(), tmp_path / name, W3 + QUICK)
        digests.append(open_artifact(tmp_path / name).digest)
    assert digests[0] == digests[1]

    class Dies(Exception):
        pass

    class Progress:
        def start(self, total_layers: int) -> None: ...

        def layer(self, index: int, text: str) -> None:
            if index == 1:
                raise Dies

        def done(self) -> None: ...

    from quant.calibration import windows_from_token_lists

    windows_again = windows_from_token_lists(windows())
    with pytest.raises(Dies):
        run(source, plan, recipe, windows_again, tmp_path / "three", progress=Progress())
    report = run(source, plan, recipe, windows_again, tmp_path / "three")
    assert report.resumed_layers == 1
    assert report.artifact_digest == digests[0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("gradient: {step: 3}\n", "did you mean 'steps'"),
        ("gradient: {start: gptk}\n", "did you mean 'gptq'"),
        ("gradient: {steps: 0}\n", "at least 1"),
        ("gradient: {rate: 1}\n", "at most 0.1"),
    ],
)
def test_faults_of_a_recipe(text: str, part: str) -> None:
    with pytest.raises(RecipeError, match=part):
        Recipe.parse(f"{W3}method: gradient\n{text}")


def test_the_plan_says_that_it_takes_longer(tiny_model: Callable[..., Path]) -> None:
    source, seconds, memory = open_source(str(tiny_model())), [], []
    for text in ("method: gptq\n", QUICK, QUICK.replace("12", "120")):
        recipe = Recipe.parse(W3 + text)
        plan = make_plan(recipe, source.module_shapes, source.num_layers, source.config)
        work = Workload(tokens=4000, window_tokens=1000, batch_tokens=1000)
        cost = estimate(plan, work, H200)
        seconds.append(cost.seconds)
        memory.append(cost.host_bytes)
    assert seconds[0] < seconds[1] < seconds[2]
    assert memory[0] < memory[1] == memory[2]
