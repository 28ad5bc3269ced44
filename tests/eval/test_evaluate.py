"""The whole gate on a tiny model that can answer: accepted, rejected, inconclusive, refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from suite_rows import ANSWER, item_row, write_rows

from eval.amounts import Amounts
from eval.api import evaluate, make_job, run
from eval.cache import Cache
from eval.errors import EvaluationError, TargetError, UsageError
from eval.evaluation import Evaluation
from eval.metrics.ladder import describe
from eval.preflight import source_of
from eval.progress import Silent
from eval.review.samples import read_samples
from eval.runner import score_windows
from eval.stats import Sampling
from eval.suites import load_suite
from eval.targets.checkpoint import locate
from eval.targets.engine import EngineTarget
from eval.targets.reference import ReferenceTarget
from eval.windows import pick_windows
from quant.artifact.artifact import open_artifact
from quant.artifact.stamp import read_stamp
from runtime.config import EngineConfig
from runtime.engine.build import build
from runtime.text import TextProcessor

SMALL = {"windows": 24, "window_tokens": 48}


@pytest.fixture
def judge(suite_dir: Path, cache_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """evaluate() on the small suite, with its report in a folder of the test's own."""

    def call(artifact: Path, **options: Any) -> Any:
        settings = {"suite": suite_dir, "cache": cache_dir, "out": tmp_path / "out", **SMALL}
        return evaluate(artifact, **{**settings, **options})

    return call


@pytest.fixture(scope="module")
def dense(taught_model: Path, dense_artifact: Callable[[Path], Path]) -> Path:
    return dense_artifact(taught_model)


def damaged(dense_model: Path, artifact: Callable[..., Path], folder: Path,
            change: Callable[[dict[str, torch.Tensor]], None]) -> Path:  # fmt: skip
    """An artifact of the model with `change` done to its weights, as a quantizer's bug would."""
    copy = shutil.copytree(dense_model, folder / "model")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return artifact(copy, method="none", scheme="dense", skip=[])


def measured(evaluation: Evaluation) -> dict[str, Any]:
    return {m.name: m for m in evaluation.measurements}


def test_a_model_against_itself_is_accepted(
    dense: Path, suite_dir: Path, cache_dir: Path, tmp_path: Path
) -> None:
    job = make_job(
        dense,
        None,
        None,
        suite=suite_dir,
        amounts=Amounts(num_windows=24, window_tokens=48),
        engine=EngineConfig(),
        cache=cache_dir,
    )
    written = run(job, out=tmp_path / "out", stamp=True)
    found = measured(written.evaluation)
    assert written.evaluation.verdict.exit_code == 0
    assert found["perplexity_ratio"].estimate == pytest.approx(1, abs=1e-5)
    assert abs(found["kl_mean"].estimate) < 1e-6
    assert found["top1_agreement"].estimate == 1
    assert found["schema_valid"].base == found["schema_valid"].candidate > 0.9
    assert found["kl_mean"].num_scored == 24 * 47

    stamp = read_stamp(dense)
    assert stamp is not None
    assert stamp.verdict == "accepted"
    assert stamp.artifact_digest == written.evaluation.artifact.digest
    assert stamp.numerics.compute_dtype == "float32"
    assert stamp.numerics.lm_head_scheme == "dense"
    assert stamp.numerics.chat_template_sha256
    assert stamp.suites == written.evaluation.suite.digests
    assert stamp.seeds == {"items and windows": 0, "bootstrap": 0}
    assert stamp.engine == build()
    report = json.loads(written.json.read_text())
    assert report["verdict"] == "accepted"
    assert report["exit_code"] == 0
    assert report["method"]["num_windows"] == 24
    assert "scored once" in report["method"]["unit"]
    assert report["layer1"]["domains"]["all"]["Same top p"]["estimate"] == 1.0
    [power] = report["method"]["power"]
    assert power["metric"] == "schema_valid"
    assert power["num_items"] == 70
    assert 0.04 < min(power["noticed"], power["rejected"]) < 0.2
    assert "this run could notice a drop of" in report["method"]["detectable"]
    assert "Noise floor" in report["notes"][-1]
    assert "0 of 16 answers differ" in report["notes"][-1]
    assert {f["noise_floor"] for f in report["findings"] if f["metric"] == "schema_valid"} == {0.0}
    assert sum(part["num_tokens"] for part in report["layer1"]["lengths"]) == 24 * 47
    assert report["measurements"]["perplexity_ratio"]["domains"].keys() == {
        "source:contracts", "source:service", "source:code", "lang:en", "lang:zh",
    }  # fmt: skip
    text = written.markdown.read_text()
    assert text.startswith("# ACCEPTED: ")
    assert "| RMS delta-p |" in text
    assert not list(written.json.parent.glob(".*"))


def test_few_items_are_inconclusive_and_say_how_many_decide(
    dense: Path, judge: Callable[..., Any]
) -> None:
    verdict = judge(dense, items=30, stamp=False)
    assert verdict.exit_code == 3
    [finding] = verdict.deciding
    assert finding.name == "schema_valid"
    assert 55 <= finding.num_needed <= 62


def zero_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.startswith("model.layers.1.") and name.endswith("_proj.weight"):
            tensors[name].zero_()


def multiply_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.down_proj.weight"].mul_(4)


@pytest.mark.parametrize("change", [zero_a_layer, multiply_scales])
def test_planted_defects_are_rejected(
    taught_model: Path,
    artifact: Callable[..., Path],
    judge: Callable[..., Any],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    broken = damaged(taught_model, artifact, tmp_path, change)
    verdict = judge(broken, base=str(taught_model))
    assert verdict.result == "rejected"
    stamp = read_stamp(broken)
    assert stamp is not None
    assert stamp.verdict == "rejected"
    assert stamp.summary
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.startswith("# REJECTED: ")
    samples, _ = read_samples(tmp_path / "out" / "samples.jsonl")
    assert len(samples) == 70
    assert samples[0].task == "fields+json_valid+schema_valid"


def test_kl_and_perplexity_agree_with_transformers(
    taught_model: Path, artifact: Callable[..., Path], suite_dir: Path
) -> None:
    """Full-vocabulary float32 in transformers, with the quantized weights put into the model."""
    from transformers import AutoModelForCausalLM

    from quant.artifact.artifact import open_artifact
    from quant.artifact.layout import dequantize

    made = artifact(taught_model, method="rtn", scheme="w4a16", group_size=32)
    base = AutoModelForCausalLM.from_pretrained(taught_model, dtype=torch.float32).eval()
    quantized = AutoModelForCausalLM.from_pretrained(taught_model, dtype=torch.float32).eval()
    opened = open_artifact(made)
    for module, scheme in opened.schemes().items():
        if not scheme.is_dense:
            weight = dequantize(opened.weight(module)).float()
            quantized.get_submodule(module).weight.data.copy_(weight)

    windows = pick_windows(
        load_suite(suite_dir).documents, TextProcessor.load(made), count=6, width=48, seed=0
    )
    ours = score_windows(
        windows,
        ReferenceTarget(locate(str(taught_model)), device="cpu", cache=Cache(None)),
        EngineTarget(made, EngineConfig()),
        Silent(),
    )
    totals = np.zeros(4)
    for window, scores in zip(windows, ours, strict=True):
        kl, base_nll, nll, agrees = independent(base, quantized, window.token_ids)
        totals += [kl.sum(), base_nll.sum(), nll.sum(), len(kl)]
        assert scores.kl == pytest.approx(kl, abs=1e-5)
        assert scores.base_nll == pytest.approx(base_nll, abs=1e-5)
        assert scores.candidate_nll == pytest.approx(nll, abs=1e-5)
        assert scores.agrees.tolist() == agrees
    kl, base_nll, nll = totals[:3] / totals[3]
    assert kl > 1e-4
    whole = describe(ours, Sampling(draws=1000)).domains[0].means
    assert whole["Mean KLD"].estimate == pytest.approx(kl, abs=1e-5)
    assert whole["Mean PPL(base)"].estimate == pytest.approx(math.exp(base_nll), rel=1e-5)
    assert whole["Mean PPL(Q)"].estimate == pytest.approx(math.exp(nll), rel=1e-5)
    assert whole["Mean PPL(Q)/PPL(base)"].estimate == pytest.approx(
        math.exp(nll - base_nll), abs=1e-5
    )


@torch.no_grad()
def independent(base: Any, quantized: Any, tokens: tuple[int, ...]) -> tuple[Any, ...]:
    ids = torch.tensor([tokens])
    p, q = (m(ids).logits[0, :-1].double().log_softmax(-1) for m in (base, quantized))
    following = ids[0, 1:, None]
    return (
        (p.exp() * (p - q)).sum(-1).numpy(),
        -p.gather(1, following)[:, 0].numpy(),
        -q.gather(1, following)[:, 0].numpy(),
        (p.argmax(-1) == q.argmax(-1)).tolist(),
    )


def test_a_candidate_that_gives_nan_is_never_accepted(
    taught_model: Path, dense: Path, judge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One NaN among a thousand good numbers."""
    score = EngineTarget.score

    def one_nan(self: EngineTarget, windows: Any, references: Any) -> Any:
        scores = score(self, windows, references)
        scores[0].kl[3] = math.nan
        return scores

    monkeypatch.setattr(EngineTarget, "score", one_nan)
    verdict = judge(dense, stamp=False)
    assert verdict.result == "rejected"
    assert "NaN" in verdict.deciding[0].reason


def test_a_base_that_gives_nan_cannot_judge(
    dense: Path, judge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ReferenceTarget._head
    monkeypatch.setattr(
        ReferenceTarget, "_head", lambda self, hidden: head(self, hidden) * math.nan
    )
    monkeypatch.setattr("torch.equal", lambda a, b: True)
    before = read_stamp(dense)
    with pytest.raises(EvaluationError, match="the base gives NaN"):
        judge(dense, cache=None)
    assert read_stamp(dense) == before


def test_a_crash_leaves_neither_stamp_nor_report(
    taught_model: Path,
    artifact: Callable[..., Path],
    judge: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = artifact(taught_model, method="rtn", scheme="w8a16", group_size=32)
    monkeypatch.setattr(EngineTarget, "generate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        judge(made)
    assert read_stamp(made) is None
    assert not (tmp_path / "out").exists()


def test_silent_fall_back_to_float_cannot_be_judged(
    taught_model: Path, artifact: Callable[..., Path], judge: Callable[..., Any]
) -> None:
    """Every module skipped: the recipe says w4a16, the weights are floats, the gate would pass."""
    made = artifact(taught_model, method="rtn", scheme="w4a16", skip=["*"])
    with pytest.raises(EvaluationError, match="fell back to float"):
        judge(made)
    assert read_stamp(made) is None


def test_base_that_does_not_belong_to_the_artifact(
    taught_model: Path, dense: Path, judge: Callable[..., Any], tmp_path: Path
) -> None:
    other = shutil.copytree(taught_model, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TargetError, match="different tokenizers"):
        judge(dense, base=str(other))
    templated = shutil.copytree(taught_model, tmp_path / "templated")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if (templated / name).is_file():
            text = (templated / name).read_text().replace("<|im_end|>' +", "<|im_end|>!' +")
            (templated / name).write_text(text)
    with pytest.raises(TargetError, match="renders the chat"):
        judge(dense, base=str(templated))


def test_a_template_that_treats_earlier_answers_otherwise_is_found(
    taught_model: Path, dense: Path, judge: Callable[..., Any], suite_dir: Path, tmp_path: Path
) -> None:
    """Both models get the artifact's prompts, so only the rendering can show it."""
    suite = shutil.copytree(suite_dir, tmp_path / "suite")
    checks = [{"kind": "json_valid"}]
    turns = [
        {"messages": item_row(n)["messages"], "checks": checks, "gold": ANSWER} for n in (1, 2)
    ]
    row = {"id": "d", "source": "talk", "lang": "en", "turns": turns}
    write_rows(suite / "dialog.jsonl", [row])
    other = shutil.copytree(taught_model, tmp_path / "forgets")
    template = other / "chat_template.jinja"
    users = "{% for message in messages if message.role != 'assistant' %}"
    told = template.read_text().replace("{% for message in messages %}", users)
    assert told != template.read_text()
    template.write_text(told)
    with pytest.raises(TargetError, match="renders the chat of item d#2 differently"):
        judge(dense, base=str(other), suite=suite)


def test_a_check_that_was_passed_without_tools_is_not_one_with_them(
    taught_model: Path, dense: Path, judge: Callable[..., Any], suite_dir: Path, tmp_path: Path
) -> None:
    """The artifact's template leaves tools out, so its own texts are the same with and without."""
    other = shutil.copytree(taught_model, tmp_path / "shows-tools")
    template = other / "chat_template.jinja"
    template.write_text("{% if tools %}You may call functions.{% endif %}" + template.read_text())
    few = {"base": str(other), "items": 6, "windows": 6}
    judge(dense, **few)
    suite = shutil.copytree(suite_dir, tmp_path / "suite")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    checks = [{"kind": "json_valid"}]
    rows = [
        {k: v for k, v in item_row(n).items() if k not in ("schema", "critical")}
        | {"checks": checks, "gold": ANSWER}
        for n in range(70)
    ]
    gates = tmp_path / "gates.yaml"
    gates.write_text("version: 1\nmetrics: {json_valid: {max_drop: 0.3}}\n")
    write_rows(suite / "extraction.jsonl", rows)
    judge(dense, suite=suite, gates=gates, **few)
    write_rows(suite / "extraction.jsonl", [{**row, "tools": tools} for row in rows])
    with pytest.raises(TargetError, match="renders the chat"):
        judge(dense, suite=suite, gates=gates, **few)


def test_golden_rows_that_were_not_asked_are_named(
    dense: Path, judge: Callable[..., Any], suite_dir: Path, tmp_path: Path
) -> None:
    suite = shutil.copytree(suite_dir, tmp_path / "suite")
    golden = [{**item_row(n), "golden": True} for n in range(70)]
    write_rows(suite / "extraction.jsonl", golden)
    judge(dense, suite=suite, items=66, stamp=False)
    notes = json.loads((tmp_path / "out" / "report.json").read_text())["notes"]
    [said] = [note for note in notes if "golden" in note]
    assert said.startswith("4 golden items, which must never be lost, were not asked (item-")
    assert said.endswith("--items 70 asks all.")


def test_missing_base_asks_for_it(
    taught_model: Path, artifact: Callable[..., Path], judge: Callable[..., Any], tmp_path: Path
) -> None:
    moved = shutil.copytree(taught_model, tmp_path / "moved")
    made = artifact(moved, method="none", scheme="dense", skip=[])
    shutil.rmtree(moved)
    with pytest.raises(UsageError, match="not there any more; pass it with --base"):
        judge(made)


def test_the_base_of_a_merged_adapter_is_the_merged_model(dense: Path, tmp_path: Path) -> None:
    """Against the model without it, what the adapter changed would count as damage."""
    copy = shutil.copytree(dense, tmp_path / "art")
    manifest = json.loads((copy / "artifact.json").read_text())
    manifest["source"]["adapter"] = {"name": "lora", "digest": "0" * 64}
    (copy / "artifact.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="--adapter lora --out MERGED` and pass --base MERGED"):
        source_of(open_artifact(copy))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": 0}, "--items is 0"),
        ({"windows": -1}, "--windows is -1"),
        ({"window_tokens": 4}, "--window-tokens is 4"),
        ({"suite": "no-suite"}, "no suite at no-suite"),
        ({"gates": "no-gates.yaml"}, "no-gates.yaml"),
        ({"base": "no-model"}, "'no-model' does not exist"),
    ],
)
def test_wrong_usage(
    dense: Path, judge: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        judge(dense, **options)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_places_that_cannot_be_written_are_refused_before_anything_runs(
    dense: Path, judge: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.api.weighed", lambda *_: 1 / 0)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="not a writable folder"):
        judge(dense, out=tmp_path / "file" / "report")
    with pytest.raises(UsageError, match="--out is the artifact itself"):
        judge(dense, out=dense)


def test_an_unknown_device(
    taught_model: Path, artifact: Callable[..., Path], judge: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no-such-device"):
        judge(artifact(taught_model, method="none", scheme="dense", skip=[]),
              device="no-such-device")  # fmt: skip


def test_windows_longer_than_the_context(dense: Path, judge: Callable[..., Any]) -> None:
    with pytest.raises(EvaluationError, match="exceed the model's context"):
        judge(dense, window_tokens=2000, suite=None)


def test_damaged_artifact_cannot_be_judged(
    dense: Path, judge: Callable[..., Any], tmp_path: Path
) -> None:
    copy = shutil.copytree(dense, tmp_path / "damaged")
    shard = next(copy.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(EvaluationError) as caught:
        judge(copy)
    assert caught.value.exit_code == 4


def test_prompts_hold_one_bos(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A template that writes BOS and a tokenizer that adds one: still a single BOS."""
    from eval.workload import prepare

    model = shutil.copytree(tiny_model(), tmp_path / "model")
    template = "<|endoftext|>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    config = json.loads((model / "tokenizer.json").read_text())
    config["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0],
                                             "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(config))
    text = TextProcessor.load(model)
    assert text.encode("a")[0] == 0
    from suite_rows import document_row, item_row, write_rows

    write_rows(tmp_path / "text.jsonl", [document_row(0)])
    write_rows(tmp_path / "extraction.jsonl", [item_row(0)])
    work = prepare(load_suite(tmp_path), text, Amounts(num_windows=3, window_tokens=32))
    for prompt in work.prompts:
        assert prompt.token_ids.count(0) == 1
        assert prompt.token_ids[0] == 0
    for window in work.windows:
        assert window.token_ids.count(0) == 1
        assert window.num_scored == len(window.token_ids) - 1


def test_results_do_not_depend_on_how_windows_are_batched(
    dense: Path, taught_model: Path, suite_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = pick_windows(
        load_suite(suite_dir).documents, TextProcessor.load(dense), count=8, width=40, seed=3
    )
    reference = ReferenceTarget(locate(str(taught_model)), device="cpu", cache=Cache(None))
    engine = EngineTarget(dense, EngineConfig())
    together = score_windows(windows, reference, engine, Silent())
    monkeypatch.setattr("eval.runner._HELD_FLOATS", 1)
    one_by_one = score_windows(windows[::-1], reference, engine, Silent())[::-1]
    for left, right in zip(together, one_by_one, strict=True):
        assert left.candidate_nll == pytest.approx(right.candidate_nll, abs=1e-4)
        assert left.base_nll == pytest.approx(right.base_nll, abs=1e-4)
        assert left.kl == pytest.approx(right.kl, abs=1e-5)
