"""GPTQ towards the original model's outputs: the least-squares target, what it gains, resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quant.original as original
from quant.artifact.artifact import open_artifact
from quant.calibration import windows_from_token_lists
from quant.capture import Stream, make_batches
from quant.errors import PlanError
from quant.estimate import estimate
from quant.original import Beside, collect
from quant.peak_memory import Workload
from quant.pipeline import run
from quant.plan import make_plan
from quant.recipe import Recipe
from quant.report import RunReport
from quant.run_progress import Silent
from quant.run_time import H200
from quant.source import open_source
from tests.quant.test_pipeline import reconstructed

W4 = "scheme: w4a16\ngroup_size: 32\nmethod: gptq\ngptq: {target: TARGET}\n"


def windows(count: int = 24, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(30, 60, (count,), generator=generator).tolist()
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]


def make(model: Path, out: Path, text: str, **more: Any) -> RunReport:
    source, recipe = open_source(str(model)), Recipe.parse(text)
    plan = make_plan(recipe, source.module_shapes, source.num_layers, source.config)
    return run(source, plan, recipe, windows_from_token_lists(windows()), out, **more)


class TwoLinears(nn.Module):
    """As a decoder layer adds: stream + o_proj(...), and down_proj behind a norm that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj, self.down_proj = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.post_attention_layernorm = nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        stream = hidden + self.o_proj(hidden.sin())
        return stream + self.down_proj(self.post_attention_layernorm(stream).cos())


@pytest.mark.parametrize("leaf", ["o_proj", "down_proj"])
@pytest.mark.parametrize("ridge", [1e-9, 0.3])
def test_the_target_is_the_ridge_regression_of_the_original_stream(
    monkeypatch: pytest.MonkeyPatch, leaf: str, ridge: float
) -> None:
    """Against the augmented least-squares problem in float64; padding is not seen."""
    monkeypatch.setattr(original, "RIDGE", ridge)
    torch.manual_seed(0)
    layer, other = TwoLinears().double(), TwoLinears().double()
    layer.down_proj.load_state_dict(other.down_proj.state_dict())
    batches = make_batches([[5] * n for n in (40, 30, 20, 9)], 70)
    past = [torch.randn(*b.mask.shape, 12, dtype=torch.float64) for b in batches]
    hidden = [states + 0.1 * torch.randn_like(states) for states in past]
    for states, batch in zip(hidden, batches, strict=True):
        states[~batch.mask] = 1e6
    beside = Beside(
        layer=layer, original=other, stream=Stream(batches=batches, hidden=hidden),
        reference=Stream(batches=batches, hidden=past),
        run=lambda module, states, _: module(states), prefix="",
    )  # fmt: skip
    weight = other.get_submodule(leaf).weight
    assert isinstance(weight, Tensor)
    found = collect(beside, leaf).target(weight.detach())

    def stacked(module: TwoLinears, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([s[b.mask] for s, b in zip(states, batches, strict=True)])
        stream = rows if leaf == "o_proj" else rows + module.o_proj(rows.sin())
        return stream, stream.sin() if leaf == "o_proj" else stream.cos()

    (stream, read), (wanted_stream, wanted_read) = stacked(layer, hidden), stacked(other, past)
    wanted = wanted_read @ weight.T + wanted_stream - stream
    pull = (ridge * (read.T @ read).diagonal().mean()).sqrt() * torch.eye(12).double()
    solution = torch.linalg.lstsq(
        torch.cat([read, pull]), torch.cat([wanted, pull @ weight.T])
    ).solution
    torch.testing.assert_close(found.double(), solution.T.detach(), rtol=1e-4, atol=1e-5)


def divergence(model: Path, artifact: Path, texts: list[list[int]]) -> float:
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    made = reconstructed(model, open_artifact(artifact))
    total = []
    with torch.no_grad():
        for ids in texts:
            rows = [m(input_ids=torch.tensor([ids])).logits.log_softmax(-1) for m in (dense, made)]
            total.append((rows[0].exp() * (rows[0] - rows[1])).sum(-1).flatten())
    return float(torch.cat(total).mean())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_original_outputs_are_nearer(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    for target in ("layer", "original"):
        make(tiny_model(family), tmp_path / target, W4.replace("TARGET", target))
    lost = {
        t: divergence(tiny_model(family), tmp_path / t, windows()) for t in ("layer", "original")
    }
    assert lost["original"] < 0.95 * lost["layer"]


def test_where_it_was_aimed_is_in_the_report(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Experts are left out: the router may send them other tokens than in the original."""
    report = make(tiny_model("qwen3_moe"), tmp_path / "art", W4.replace("TARGET", "original"))
    aimed = {m.module for m in report.modules if "towards the original" in m.note}
    gptq = {m.module for m in report.modules if m.method == "gptq"}
    assert gptq - aimed == {name for name in gptq if ".experts." in name}
    assert aimed


class Dies(Silent):
    """Progress of a run that ends before layer 1."""

    def layer(self, index: int, text: str) -> None:
        if index == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("smoothing", ["none", "search"])
def test_a_resumed_run_makes_the_same_bits(
    tiny_model: Callable[..., Path], tmp_path: Path, smoothing: str
) -> None:
    text = W4.replace("TARGET", "original") + f"smoothing: {smoothing}\n"
    make(tiny_model(), tmp_path / "whole", text)
    with pytest.raises(KeyboardInterrupt):
        make(tiny_model(), tmp_path / "art", text, progress=Dies())
    make(tiny_model(), tmp_path / "art", text)
    digests = [open_artifact(tmp_path / n).tensor_digests() for n in ("whole", "art")]
    assert digests[0] == digests[1]


def test_a_family_that_norms_its_sums_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(
        PlanError, match=r"recipe:4: gptq.target: original cannot be had for Gemma3"
    ):
        make(tiny_model("gemma3_text"), tmp_path / "art", W4.replace("TARGET", "original"))
    assert not (tmp_path / "art").exists()


@pytest.mark.parametrize(
    ("family", "method", "wanted"),
    [("llama", "gptq", "original"), ("gemma3_text", "gptq", "layer"), ("llama", "rtn", "layer")],
)
def test_auto_aims_where_it_can(
    tiny_model: Callable[..., Path], family: str, method: str, wanted: str
) -> None:
    text = W4.replace("TARGET", "auto").replace("method: gptq", f"method: {method}")
    source, recipe = open_source(str(tiny_model(family))), Recipe.parse(text)
    plan = make_plan(recipe, source.module_shapes, source.num_layers, source.config)
    assert plan.gptq_target == wanted


def test_the_estimate_counts_the_second_stream(tiny_model: Callable[..., Path]) -> None:
    source, costs = open_source(str(tiny_model())), {}
    for target in ("layer", "original"):
        recipe = Recipe.parse(W4.replace("TARGET", target))
        plan = make_plan(recipe, source.module_shapes, source.num_layers, source.config)
        work = Workload(tokens=10**8, window_tokens=4096, batch_tokens=4096)
        costs[target] = estimate(plan, work, H200)
    more = costs["original"].host_bytes - costs["layer"].host_bytes
    assert more > 4 * 10**8 * 64  # float32 hidden states
    assert costs["original"].seconds > 1.2 * costs["layer"].seconds
