"""`method: auto`: each module gets what does best on windows that no method has seen, and says
so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quant.api import quantize
from quant.artifact.artifact import open_artifact
from quant.artifact.layout import dequantize, fake_quantize_activations
from quant.artifact.scheme import preset
from quant.artifact.summary import inspect
from quant.capture import Stream, make_batches
from quant.held_out import hold_out, sample_inputs
from quant.methods.auto import output_error
from quant.methods.rtn import rtn
from quant.report import chosen_candidate
from quant.report_facts import facts_of
from quant.report_html import report_html
from quant.report_render import facts
from tests.quant.test_smoothing import make

W4 = "scheme: w4a16\ngroup_size: 32\n"


def test_the_best_on_unseen_windows_is_taken_and_recorded(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    report = make(tiny_model(), tmp_path / "art", f"{W4}method: auto\n")
    manifest = open_artifact(tmp_path / "art", verify="full").manifest
    for module in report.quantized:
        errors = dict(module.candidates)
        assert list(errors) == ["rtn (inputs)", "rtn (outputs)", "gptq"]
        best = chosen_candidate(module.candidates)
        assert errors[best] == min(errors.values())
        assert module.method == best.partition(" ")[0]
        assert f"auto chose {best}" in manifest.modules[module.module].reason
        assert manifest.modules[module.module].method == module.method
    assert any(name == "auto chose" for name, _ in facts(report))
    counted = dict(inspect(open_artifact(tmp_path / "art")).modules_by_method)
    assert counted.pop("none") == 1  # the head
    assert counted == Counter(m.method for m in report.quantized)
    data = json.loads(json.dumps(report.to_json()))
    choices = facts_of({**data, "runtime_serves": True})["choices"]
    assert sum(choice["chosen"] for choice in choices) == len(report.quantized)
    pytest.importorskip("matplotlib")
    assert "What <code>method: auto</code> tried" in report_html(data)


def test_gptq_loses_where_calibration_says_nothing_of_the_rest(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Each module's choice is its own: with so few tokens, not one method wins everywhere."""
    report = make(tiny_model(), tmp_path / "art", "scheme: w3a16\ngroup_size: 32\nmethod: auto\n")
    chosen = {chosen_candidate(m.candidates) for m in report.quantized}
    assert "gptq" in chosen
    rtn_alone = sum(dict(m.candidates)["rtn (outputs)"] ** 2 for m in report.quantized)
    taken = sum(min(dict(m.candidates).values()) ** 2 for m in report.quantized)
    assert taken < rtn_alone


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w4a8"])
def test_schemes_that_round_inputs(
    tiny_model: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    report = make(tiny_model(), tmp_path / "art", f"scheme: {scheme}\nmethod: auto\n")
    assert all(len(m.candidates) == 3 for m in report.quantized)


def test_the_error_is_that_of_the_outputs_with_rounded_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 64, generator=generator)
    inputs = torch.randn(50, 64, generator=generator)
    scheme = preset("w8a8")
    stored = rtn(weight, scheme, torch.bfloat16)
    assert scheme.activations is not None
    seen = fake_quantize_activations(inputs, scheme.activations)
    exact = inputs.double() @ weight.double().T
    missed = seen.double() @ dequantize(stored).double().T - exact
    expected = float(missed.norm() / exact.norm())
    assert output_error(weight, stored, inputs) == pytest.approx(expected, rel=1e-4)
    assert output_error(torch.zeros_like(weight), stored, inputs) == 0.0


def test_windows_are_either_seen_or_judged() -> None:
    lengths = [5 + i % 4 for i in range(50)]
    batches = make_batches([[1] * n for n in lengths], 24)
    hidden = [torch.randn(*batch.mask.shape, 3) for batch in batches]
    stream = Stream(batches=batches, hidden=hidden)
    kept, held = hold_out(stream)
    seen, judged = ({s for b in part.batches for s in b.samples} for part in (kept, held))
    assert not seen & judged
    assert seen | judged == set(range(50))
    assert len(judged) == 3
    for part in (kept, held):
        for batch, states in part:
            assert batch.mask.shape == states.shape[:2]
            assert states.untyped_storage().data_ptr() in {
                h.untyped_storage().data_ptr() for h in hidden
            }
    few = Stream(batches=batches[:1], hidden=hidden[:1])
    few.batches, few.hidden = make_batches([[1] * 5] * 3, 5), list(torch.randn(3, 1, 5, 3))
    assert hold_out(few) == (few, few)


def test_judged_inputs_are_drawn_from_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.held_out.JUDGED_TOKENS", 10)
    linear = torch.nn.Linear(1, 1, bias=False)
    batches = make_batches([[1] * 7, [1] * 9, [1] * 11], 11)
    start, hidden = 0, []
    for batch in batches:
        count = batch.mask.numel()
        hidden.append(torch.arange(start, start + count).float().reshape(1, count, 1))
        start += count
    stream = Stream(batches=batches, hidden=hidden)
    found = sample_inputs(linear, stream, lambda h, m: linear(h), "m")
    assert found[:, 0].tolist() == list(range(0, 27, 3))


def test_experts_take_gptq_without_being_judged(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    report = make(tiny_model("mixtral"), tmp_path / "art", f"{W4}method: auto\n")
    experts = [m for m in report.quantized if ".experts." in m.module]
    assert {m.method for m in experts} <= {"gptq", "rtn"}
    assert all(not m.candidates and m.tokens_seen is not None for m in experts)
    assert all(m.candidates for m in report.quantized if ".self_attn." in m.module)


def test_two_runs_give_the_same_bytes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("one", "two"):
        make(tiny_model(), tmp_path / name, f"{W4}method: auto\nlm_head: w8a16\nskip: []\n")
    one, two = (open_artifact(tmp_path / name) for name in ("one", "two"))
    assert one.tensor_digests() == two.tensor_digests()


def test_it_needs_calibration(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{W4}method: auto\n")
    with pytest.raises(Exception, match="needs calibration text"):
        quantize(str(tiny_model()), recipe, out=tmp_path / "art")
