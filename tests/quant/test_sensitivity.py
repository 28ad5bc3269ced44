"""Fisher scores against the KL that is really measured when one group is rounded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quant.artifact.artifact import open_artifact
from quant.artifact.layout import dequantize
from quant.artifact.scheme import DENSE, preset, with_group_size
from quant.divergence import Judge
from quant.layer_job import quantize_input
from quant.methods.rtn import rtn
from quant.sensitivity import Sensitivity, fisher_sensitivity
from quant.source import open_source

SCHEMES = (with_group_size(preset("w4a16"), 32), with_group_size(preset("w8a16"), 32), DENSE)


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [int(n) for n in torch.randint(64, 128, (48,), generator=generator)]
    return [torch.randint(1, 250, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def measured_kl(model: nn.Module, entry: Sensitivity, windows: list[list[int]]) -> float:
    """Mean KL per token when the group alone is rounded."""
    kept = {name: model.get_submodule(name).weight.clone() for name in entry.modules}
    before = [model(torch.tensor([w])).logits[0].log_softmax(-1) for w in windows]
    for name, weight in kept.items():
        rounded = rtn(weight, entry.scheme, torch.float32, scale_search=True)
        model.get_submodule(name).weight.copy_(dequantize(rounded))
    after = [model(torch.tensor([w])).logits[0].log_softmax(-1) for w in windows]
    for name, weight in kept.items():
        model.get_submodule(name).weight.copy_(weight)
    kls = [(a.exp() * (a - b)).sum(-1) for a, b in zip(before, after, strict=True)]
    return float(torch.cat(kls).mean())


@torch.no_grad()
def mean_kl(model: nn.Module, changed: nn.Module, windows: list[list[int]]) -> float:
    """Mean KL(model || changed) per token."""
    kls = []
    for window in windows:
        ours, theirs = (
            m(torch.tensor([window])).logits[0].log_softmax(-1) for m in (model, changed)
        )
        kls.append((ours.exp() * (ours - theirs)).sum(-1))
    return float(torch.cat(kls).mean())


def test_rounded_inputs_count(tiny_model: Callable[..., Path], windows: list[list[int]]) -> None:
    """W8A8: most of what is lost is lost by the inputs."""
    path, scheme, windows = tiny_model(), preset("w8a8"), windows[:20]
    source = open_source(str(path))
    modules = [name for name in source.module_shapes if name != "lm_head"]
    found = fisher_sensitivity(
        source, windows, dict.fromkeys(modules, (scheme,)), dtype=torch.float32, draws=8
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ratios = {}
    for entry in found:
        changed = copy.deepcopy(model)
        for name in entry.modules:
            linear = changed.get_submodule(name)
            rounded = rtn(linear.weight.detach(), scheme, torch.float32, scale_search=True)
            linear.weight = nn.Parameter(dequantize(rounded))
            quantize_input(linear, scheme.activations)
        ratios[entry.layer, entry.group] = entry.score / mean_kl(model, changed, windows)
    assert len(ratios) == 8
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios


def test_the_experts_of_a_layer_are_scored_together(
    tiny_model: Callable[..., Path], windows: list[list[int]], artifact: Callable[..., Path]
) -> None:
    """Against the KL of an artifact in which only the experts of layer 0 are rounded."""
    path = tiny_model("mixtral")
    source, windows = open_source(str(path)), windows[:12]
    modules = [name for name in source.module_shapes if ".layers.0." in name and "experts" in name]
    [entry] = fisher_sensitivity(
        source, windows, dict.fromkeys(modules, SCHEMES[:1]), dtype=torch.float32, draws=8
    )
    assert entry.group == "experts"
    assert set(entry.modules) == set(modules)
    rounded = artifact(path, scheme="w4a16", group_size=32,
                       skip=["lm_head", "*.layers.1.*", "*.self_attn.*"])  # fmt: skip
    judge = Judge(source, windows, "cpu", batch_tokens=256)
    measured = judge.judge(open_artifact(rounded), lambda _: None).mean
    assert 0.5 < entry.score / measured < 2


def scores(model: Path, windows: list[list[int]], batch_tokens: int) -> list[Sensitivity]:
    source = open_source(str(model))
    modules = [name for name in source.module_shapes if name != "lm_head"]
    return fisher_sensitivity(
        source, windows, dict.fromkeys(modules, SCHEMES), dtype=torch.float32,
        batch_tokens=batch_tokens, draws=8,
    )  # fmt: skip


def test_scores_are_the_measured_kl(
    tiny_model: Callable[..., Path], windows: list[list[int]]
) -> None:
    path, windows = tiny_model(), windows[:32]
    found = scores(path, windows, 1024)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    coarse = [entry for entry in found if entry.scheme == SCHEMES[0]]
    assert len(coarse) == 4 * model.config.num_hidden_layers
    ratios = {(e.layer, e.group): e.score / measured_kl(model, e, windows) for e in coarse}
    assert all(0.6 < ratio < 1.6 for ratio in ratios.values()), ratios


def test_more_bits_cost_less_and_dense_costs_nothing(
    tiny_model: Callable[..., Path], windows: list[list[int]]
) -> None:
    found = scores(tiny_model(), windows[:8], 1024)
    for four, eight, dense in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert four.modules == eight.modules == dense.modules
        assert dense.score == 0 < 50 * eight.score < four.score


def test_padding_counts_for_nothing(
    tiny_model: Callable[..., Path], windows: list[list[int]]
) -> None:
    """Dense rounding aside, only the drawn y differ with the batches: sums stay near."""
    path = tiny_model()
    alone, padded = scores(path, windows[:24], 1), scores(path, windows[:24], 4096)
    total = [sum(entry.score for entry in found) for found in (alone, padded)]
    assert total[0] == pytest.approx(total[1], rel=0.25)
