"""Mixtures of experts: layers as transformers computes them, experts as checkpoints name them,
starved experts treated safely, and artifacts that others can read."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quant.artifact.artifact import Artifact, open_artifact, verify
from quant.artifact.dialect import parse_quantization_config
from quant.artifact.layout import QuantizedWeight, dequantize
from quant.calibration import windows_from_token_lists
from quant.errors import PlanError, QuantError
from quant.estimate import estimate
from quant.expert_job import token_floor
from quant.peak_memory import Workload
from quant.pipeline import run
from quant.plan import Plan, make_plan
from quant.plan_table import render_plan
from quant.recipe import Recipe
from quant.report import RunReport
from quant.source import open_source

MIXTURES = ["mixtral", "qwen3_moe"]
RECIPES = {
    "w4a16": "scheme: w4a16\nmethod: gptq\ngroup_size: 32\n",
    "w8a8": "scheme: w8a8\nmethod: gptq\n",
    "fp8": "scheme: fp8\nmethod: rtn\n",
    "mixed": (
        "scheme: w4a16\nmethod: gptq\ngroup_size: 32\n"
        "overrides: [{match: '*.layers.1.*', scheme: w8a16}]\n"
    ),
}
BLOCK = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}


def windows(count: int = 12, length: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 250, (length,), generator=generator).tolist() for _ in range(count)]


def plan(model: Path, text: str) -> Plan:
    source = open_source(str(model))
    return make_plan(
        Recipe.parse(text), source.module_shapes, source.num_layers, source.config,
        source_dtype="float32", is_tied=source.skeleton.is_tied,
    )  # fmt: skip


def quantized(
    model: Path, out: Path, text: str, samples: list[list[int]] | None = None
) -> tuple[Artifact, RunReport]:
    made, recipe = plan(model, text), Recipe.parse(text)
    calibration = windows_from_token_lists(windows() if samples is None else samples)
    used = calibration if made.needs_calibration else None
    report = run(open_source(str(model)), made, recipe, used, out)
    return open_artifact(out, verify="full"), report


def dense_copy(model: Path, artifact: Artifact, out: Path) -> Path:
    """The model as a plain checkpoint of the artifact's dequantized weights."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    for name in artifact.schemes():
        weight = artifact.weight(name)
        value = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight
        assert tensors[f"{name}.weight"].shape == value.shape
        tensors[f"{name}.weight"] = value.float()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("family", MIXTURES)
def test_layer_by_layer_is_transformers_own_forward(
    family: str, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model(family)
    source, reference = open_source(str(model)), AutoModelForCausalLM.from_pretrained(model)
    skeleton, ids = source.skeleton, torch.tensor(windows(2))
    hidden = next(skeleton.embed(source.tensors(["model.embed_tokens.weight"]), [ids]))
    for index in range(source.num_layers):
        layer = skeleton.build_layer(index, source.tensors(skeleton.layer_names(index)))
        hidden = skeleton.run_layer(index, layer, hidden, torch.ones_like(ids, dtype=torch.bool))
    outer = source.tensors(skeleton.outer_names())
    with torch.no_grad(), skeleton.head(outer) as head:
        found = head(inputs_embeds=hidden).logits
        expected = reference(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_artifacts_have_checkpoint_names_and_compute_what_the_probe_says(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: transformers, fused experts and all, on the dequantized weights."""
    model = tiny_model(family)
    artifact, report = quantized(model, tmp_path / "art", RECIPES["w4a16"])
    assert verify(tmp_path / "art") == []
    source = open_source(str(model))
    for name in source.names:
        scheme = artifact.schemes().get(name.removesuffix(".weight"))
        packed = name.removesuffix("weight") + "weight_packed"
        assert (packed if scheme and not scheme.is_dense else name) in artifact.reader, name
    dense = dense_copy(model, artifact, tmp_path / "dense")
    loaded = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    assert artifact.manifest.probe is not None
    for prompt in artifact.manifest.probe.prompts:
        with torch.no_grad():
            logits = loaded(torch.tensor([prompt.token_ids])).logits[0, -1]
        found = logits.log_softmax(-1)[list(prompt.top_ids)]
        torch.testing.assert_close(found, torch.tensor(prompt.top_logprobs), atol=1e-4, rtol=0)
    experts = [m for m in report.modules if ".experts." in m.module]
    assert len(experts) == {"mixtral": 2 * 4 * 3, "qwen3_moe": 8 * 3}[family]
    assert all(m.tokens_seen is not None for m in experts)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_routers_stay_dense_and_targets_resolve(
    name: str, family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    artifact, _ = quantized(tiny_model(family), tmp_path / "art", RECIPES[name])
    router = f"model.layers.0.{BLOCK[family]}.gate"
    section = json.loads((tmp_path / "art" / "config.json").read_text())["quantization_config"]
    assert router in section["ignore"]
    assert f"{router}.weight" in artifact.reader
    schemes = parse_quantization_config(section, artifact.schemes())
    assert schemes == artifact.schemes()
    # What vLLM asks for, whatever the checkpoint calls its projections.
    if name == "mixed":
        asked = [f"model.layers.0.{BLOCK[family]}.experts.0.{p}_proj" for p in ("gate", "down")]
        found = parse_quantization_config(section, [*artifact.schemes(), *asked])
        assert {found[n].label for n in asked} == {"w4a16-g32"}
    for module in artifact.schemes():
        weight = artifact.weight(module)
        if isinstance(weight, QuantizedWeight):
            assert bool(torch.isfinite(weight.scale).all())
            assert bool(dequantize(weight).any())


def with_all_experts_as(model: Path, out: Path, expert: int) -> Path:
    """The model with this expert in every other's place: whatever the router says, it computes."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    for name in tensors:
        if ".experts." in name:
            chosen = re.sub(r"experts\.\d+", f"experts.{expert}", name)
            tensors[name] = tensors[chosen].clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("expert", range(4))
def test_starved_experts_are_finite_close_and_named(
    expert: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """cases.md A19: two short rows, and each expert asked afterwards."""
    model = tiny_model("mixtral")
    artifact, report = quantized(model, tmp_path / "art", RECIPES["w4a16"], [[5, 6, 7], [8, 9]])
    starved = [m for m in report.modules if m.is_starved]
    assert min(m.tokens_seen for m in starved if m.tokens_seen is not None) <= 1
    assert all("topped up" in m.note for m in starved)
    assert any("saw too few calibration tokens" in text for text in report.all_warnings())
    source = open_source(str(model))
    for leaf in ("w1", "w2", "w3"):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.{leaf}"
        weight, original = artifact.weight(name), source.tensor(f"{name}.weight")
        assert isinstance(weight, QuantizedWeight)
        error = (dequantize(weight) - original).norm() / original.norm()
        assert 0.0 < float(error) < 0.2, name
    dense = dense_copy(model, artifact, tmp_path / "dense")
    logits = []
    for where, name in ((dense, "forced"), (model, "original")):
        forced = with_all_experts_as(where, tmp_path / name, expert)
        loaded = AutoModelForCausalLM.from_pretrained(forced, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(loaded(torch.tensor(windows(2))).logits)
    assert bool(torch.isfinite(logits[0]).all())
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.5


def test_padding_is_routed_nowhere(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Tokens an expert saw add up to top-k times all real tokens, whatever the batches."""
    samples = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16]]
    counts = []
    for batch in (1, 400):
        text = RECIPES["w4a16"] + f"calibration: {{batch_tokens: {batch}}}\n"
        _, report = quantized(tiny_model("mixtral"), tmp_path / str(batch), text, samples)
        seen = {m.module: m.tokens_seen for m in report.modules if m.module.endswith(".w1")}
        counts.append(seen)
        for layer in (0, 1):
            inside = [n for m, n in seen.items() if f"layers.{layer}." in m]
            assert sum(n or 0 for n in inside) == 2 * 12
    assert counts[0] == counts[1]


def test_token_floor_is_the_larger_of_both_rules() -> None:
    assert token_floor(100, 64) == 8
    assert token_floor(10_000, 64) == 50
    assert token_floor(1, 4) == 1


def test_experts_share_a_group_size_that_fits_all_their_projections(
    tiny_model: Callable[..., Path],
) -> None:
    made = plan(tiny_model("qwen3_moe"), "scheme: w4a16\nmethod: gptq\ngroup_size: 64\n")
    inside = {r.scheme.label for r in made.rows if ".experts." in r.module}
    outside = {r.scheme.label for r in made.rows if "q_proj" in r.module}
    assert (inside, outside) == ({"w4a16-g32"}, {"w4a16-g64"})


def test_plans_join_experts_and_say_where_the_artifact_runs(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    made = plan(tiny_model("qwen3_moe"), RECIPES["w4a16"])
    cost = estimate(made, Workload(tokens=100, window_tokens=100, batch_tokens=100))
    out = io.StringIO()
    Console(file=out, width=100).print(render_plan(made, cost, tokens=100))
    text = out.getvalue()
    assert "mlp.experts.0-7.gate_proj" in text
    assert "routers stay dense" in text
    assert "mixture of experts" in text
    assert text.count("experts.0-7.") == 3
    _, report = quantized(tiny_model("qwen3_moe"), tmp_path / "art", RECIPES["w4a16"])
    assert cost.quantized_bytes == sum(m.bytes for m in report.quantized)
    assert not report.runtime_serves


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("{match: '*.experts.3.*', scheme: w8a16}", "experts of a layer run as one"),
        ("{match: '*.experts.*.down_proj', scheme: w8a16}", "experts of a layer run as one"),
        ("{match: '*.mlp.gate', scheme: w8a16}", "routers alone"),
    ],
)
def test_plans_refuse_what_engines_would_misread(
    override: str, message: str, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(tiny_model("qwen3_moe"), f"{RECIPES['w4a16']}overrides: [{override}]\n")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "OtherForCausalLM"])
def test_unknown_layouts_are_named(
    architecture: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """cases.md A21: linears called fc1 and fc2: what was looked for, what was found, in what."""
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    renamed = {name.replace("up_proj", "fc1"): tensor for name, tensor in tensors.items()}
    save_file(renamed, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    with pytest.raises(QuantError) as caught:
        open_source(str(model))
    assert architecture in str(caught.value)
    named = ["mlp.up_proj.weight", "mlp.fc1.weight"] if architecture[0] == "L" else ["supported"]
    assert all(name in str(caught.value) for name in named)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("attention", ["w4a16", "w8a16"])
def test_transformers_reads_experts_through_compressed_tensors(
    attention: str, family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """It fuses packed experts itself (5.24; not int8 experts)."""
    model = tiny_model(family)
    apart = f"overrides: [{{match: '*.self_attn.*', scheme: {attention}}}]\n"
    artifact, _ = quantized(model, tmp_path / "art", RECIPES["w4a16"] + apart)
    dense = dense_copy(model, artifact, tmp_path / "dense")
    logits = []
    for path in (tmp_path / "art", dense):
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(loaded(torch.tensor(windows(2))).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)


def test_experts_of_two_schemes_are_warned_about(tiny_model: Callable[..., Path]) -> None:
    """transformers 5.24 decodes all experts by the first group that names experts
    (`integrations.compressed_tensors.get_experts_scheme`): log-probs off by 1.6, without a word."""
    by_layer = "overrides: [{match: '*.experts.*', layers: [1], scheme: w8a16}]\n"
    model = tiny_model("mixtral")
    assert any("one scheme" in line for line in plan(model, RECIPES["w4a16"] + by_layer).warnings)
    apart = "overrides: [{match: '*.self_attn.*', scheme: w8a16}]\n"
    assert not any("one scheme" in w for w in plan(model, RECIPES["w4a16"] + apart).warnings)


def test_extra_tensors_are_copied(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """quant.md 6 #9: a multi-token-prediction head that the model class does not use."""
    model = shutil.copytree(tiny_model("mixtral"), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    extra: dict[str, Tensor] = {"mtp.fc.weight": torch.randn(8, 64)}
    save_file({**tensors, **extra}, model / "model.safetensors", metadata={"format": "pt"})
    artifact, _ = quantized(model, tmp_path / "art", RECIPES["fp8"])
    assert torch.equal(artifact.reader.tensor("mtp.fc.weight"), extra["mtp.fc.weight"])


def test_the_runtime_and_the_gate_refuse_at_once(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eval.cli import main as evaluate
    from runtime.cli import main as runtime

    quantized(tiny_model("mixtral"), tmp_path / "art", RECIPES["fp8"])
    refusals = (
        (runtime, ["serve"], "MixtralForCausalLM is a mixture of experts"),
        (evaluate, [], "'mixtral' is not supported"),
    )
    for main, arguments, message in refusals:
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, str(tmp_path / "art")])
        assert stopped.value.code not in (None, 0, 1)
        assert message in " ".join(capsys.readouterr().err.split())
