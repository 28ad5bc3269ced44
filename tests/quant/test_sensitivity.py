"""Fisher scores against the KL that is really measured when one group is rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quant.artifact.layout import dequantize
from quant.artifact.scheme import DENSE, preset, with_group_size
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
    path = tiny_model()
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
    alone, padded = scores(path, windows, 1), scores(path, windows, 4096)
    total = [sum(entry.score for entry in found) for found in (alone, padded)]
    assert total[0] == pytest.approx(total[1], rel=0.25)
