"""AWQ and searched rounding as a recipe asks for them: what is folded, what is not, what is
refused, and that the outputs are never worse than those of plain rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quant.artifact.artifact import open_artifact
from quant.artifact.layout import dequantize
from quant.errors import PipelineError, RecipeError
from quant.methods.rtn import rtn
from quant.plan import make_plan
from quant.recipe import Recipe
from quant.source import open_source
from tests.quant.test_pipeline import reconstructed
from tests.quant.test_smoothing import make, planted, windows

W4 = "scheme: w4a16\ngroup_size: 32\n"
W3 = "scheme: w3a16\ngroup_size: 32\n"


def output_errors(model: Path, artifact: Path) -> dict[str, float]:
    """Squared error of q, k and v of layer 0, whose inputs nothing before them has changed."""
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    stored = reconstructed(model, open_artifact(artifact))
    found: dict[str, float] = {}
    for leaf in ("q_proj", "k_proj", "v_proj"):
        total, outputs = 0.0, []
        for one in (dense, stored):
            linear = one.model.layers[0].self_attn.get_submodule(leaf)
            linear.register_forward_hook(lambda *a, into=outputs: into.append(a[2]))
        for ids in windows():
            outputs.clear()
            with torch.no_grad():
                dense(input_ids=torch.tensor([ids]))
                stored(input_ids=torch.tensor([ids]))
            total += float((outputs[1] - outputs[0]).square().sum())
        found[leaf] = total
    return found


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("llama", W4), ("gemma3_text", W4), ("llama", "scheme: w8a8\n")],
    ids=["llama-w4a16", "gemma3-w4a16", "llama-w8a8"],
)
def test_awq_is_never_worse_than_rounding(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, scheme: str
) -> None:
    model = planted(tiny_model, tmp_path, family)
    make(model, tmp_path / "rtn", f"{scheme}method: rtn\n", calibrated=False)
    report = make(model, tmp_path / "awq", f"{scheme}method: awq\n")
    before, after = (output_errors(model, tmp_path / name) for name in ("rtn", "awq"))
    assert all(after[leaf] <= before[leaf] for leaf in before)
    assert sum(after.values()) < 0.5 * sum(before.values())
    rows = {m.module: m for m in report.modules if m.scheme != "dense"}
    assert {m.method for m in rows.values()} == {"awq"}
    assert "into input_layernorm" in rows["model.layers.0.self_attn.q_proj"].smoothing
    assert all(m.error_of == "outputs" for m in rows.values())


@pytest.mark.parametrize("search", ["weights", "inputs", "outputs"])
def test_searched_scales_of_rtn_are_chosen_by_recipe(
    tiny_model: Callable[..., Path], tmp_path: Path, search: str
) -> None:
    text = f"{W3}method: rtn\nrtn: {{scale_search: {search}}}\n"
    report = make(tiny_model(), tmp_path / "art", text, calibrated=search != "weights")
    artifact, name = open_artifact(tmp_path / "art"), "model.layers.0.mlp.up_proj"
    weight = open_source(str(tiny_model())).tensor(f"{name}.weight").float()
    stored = artifact.weight(name)
    plain = rtn(weight, stored.scheme, torch.float32)
    assert not torch.equal(stored.scale, plain.scale)
    if search == "weights":
        errors = [float((dequantize(q).float() - weight).norm()) for q in (stored, plain)]
        assert errors[0] < errors[1]
    assert all(m.smoothing == "" and m.method in ("rtn", "none") for m in report.modules)


def test_the_clip_alone_is_never_worse_either(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = f"{W3}method: rtn\n"
    make(tiny_model(), tmp_path / "rtn", text, calibrated=False)
    make(tiny_model(), tmp_path / "clip", f"{text}rtn: {{scale_search: outputs}}\n")
    before, after = (output_errors(tiny_model(), tmp_path / name) for name in ("rtn", "clip"))
    assert all(after[leaf] < before[leaf] for leaf in before)


def test_awq_of_a_part_folds_that_part_alone(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = planted(tiny_model, tmp_path, "llama")
    text = f"{W4}method: gptq\noverrides: [{{match: '*.mlp.*', method: awq}}]\n"
    report = make(model, tmp_path / "art", text)
    rows = {m.module.removeprefix("model.layers.0."): m for m in report.modules}
    assert "post_attention_layernorm" in rows["mlp.up_proj"].smoothing
    assert rows["self_attn.q_proj"].smoothing == ""
    assert rows["self_attn.q_proj"].method == "gptq"
    artifact, source = open_artifact(tmp_path / "art"), open_source(str(model))
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(artifact.reader.tensor(norm), source.tensor(norm))


def test_a_mixture_clips_experts_with_their_own_tokens(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    text = f"{W3}method: rtn\nrtn: {{scale_search: outputs}}\n"
    report = make(tiny_model("mixtral"), tmp_path / "art", text)
    experts = [m for m in report.modules if ".experts." in m.module]
    assert experts
    assert all(m.error_of == "outputs" and m.tokens_seen is not None for m in experts)


@pytest.mark.parametrize("how", ["method: awq\n", "method: rtn\nrtn: {scale_search: inputs}\n"])
def test_without_calibration_it_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, how: str
) -> None:
    with pytest.raises(PipelineError, match="needs calibration text"):
        make(tiny_model(), tmp_path / "art", W4 + how, calibrated=False)


def test_unknown_folds_are_refused_by_name(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = open_source(str(tiny_model()))
    text = f"{W4}method: awq\n"
    config = {**source.config, "architectures": ["StrangeForCausalLM"]}
    recipe = Recipe.parse(text)
    plan = make_plan(recipe, source.module_shapes, source.num_layers, config)
    assert plan.needs_calibration
    from quant.run_checks import check_smoothing

    with pytest.raises(PipelineError, match="awq does not know where .*method: gptq"):
        check_smoothing(plan)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("method: awk\n", "did you mean 'awq'"),
        ("method: awq\nsmoothing: none\n", "awq is smoothing and then a weight clip"),
        ("method: rtn\nrtn: {scale_search: output}\n", "did you mean 'outputs'"),
        ("method: rtn\nrtn: {scale_serch: outputs}\n", "did you mean 'scale_search'"),
    ],
)
def test_faults_of_a_recipe(text: str, part: str) -> None:
    with pytest.raises(RecipeError, match=part):
        Recipe.parse(W4 + text)
