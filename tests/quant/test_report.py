"""Reports: the same figures in the terminal, in report.json, in report.md and in the model card."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from quant.calibration import windows_from_token_lists
from quant.errors import PipelineError
from quant.report import REPORT_VERSION, ModuleResult, RunReport, report_json, write_reports
from quant.report_render import model_card, render_summary, report_markdown


def module(layer: int, leaf: str, error: float | None, **more: object) -> ModuleResult:
    base = ModuleResult(
        module=f"model.layers.{layer}.mlp.{leaf}",
        shape=(100, 200),
        scheme="w4a16-g64",
        method="gptq",
        bytes=11_000,
        rel_error=error,
    )
    return replace(base, **more)  # type: ignore[arg-type]


def make_report() -> RunReport:
    rows = [module(i, leaf, 0.01 * (i + 1)) for i in range(8) for leaf in ("up_proj", "down_proj")]
    rows[0] = module(0, "up_proj", 0.2, method="rtn", fallback="Hessian not positive definite")
    rows[1] = module(0, "down_proj", 0.02, dead_columns=3)
    head = replace(rows[2], module="lm_head", scheme="dense", method="none", rel_error=None)
    return RunReport(
        model="/models/tiny",
        architecture="LlamaForCausalLM",
        recipe="w4a16",
        artifact="out/tiny-w4a16",
        artifact_digest="ab" * 32,
        dtype="bfloat16",
        source_bytes=4_000_000,
        artifact_bytes=1_250_000,
        modules=(*rows, head),
        seconds={"layers": 63.0, "seal": 3.0},
        peak_memory_bytes=1_500_000_000,
        threads=2,
        resumed_layers=4,
        coverage=windows_from_token_lists([[1, 2, 3]] * 3).coverage,
        warnings=("a warning of the plan",),
    )


def printed(report: RunReport, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render_summary(report))
    return out.getvalue()


def test_the_summary_says_what_matters() -> None:
    text = printed(make_report())
    for part in (
        "4 MB -> 1.25 MB (3.20x smaller)",
        "16 of 17 linear modules, 4.40 bits per weight",
        "3 samples, 9 tokens from 3 of 3 rows",
        "66 s (layers 63 s, seal 3 s) on cpu, 2 threads; 4 layers resumed",
        "1.5 GB at the peak",
        "gptq+rtn",
        "20.00%",
        "fell back: model.layers.0.mlp.up_proj: Hessian not positive definite (made with rtn)",
        "warning: a warning of the plan",
        "warning: 3 input columns of 1 modules were always 0",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 100


def test_fewer_tokens_than_inputs_is_warned_about() -> None:
    """Then GPTQ's Hessians are singular, and it can fit the calibration tokens by heart."""
    report = make_report()
    assert "9 calibration tokens are fewer than the 200 inputs" in " ".join(report.all_warnings())
    enough = windows_from_token_lists([list(range(1, 301))]).coverage
    assert "fewer" not in " ".join(replace(report, coverage=enough).all_warnings())


def test_worst_modules_come_first_and_dense_ones_never() -> None:
    worst = make_report().worst(3)
    assert [m.rel_error for m in worst] == [0.2, 0.08, 0.08]


def test_a_gguf_source_is_compared_as_floats() -> None:
    report = replace(make_report(), unpacked_bytes=8_000_000)
    assert "8 MB -> 1.25 MB (6.40x smaller); the GGUF has 4 MB" in printed(report)


def test_a_dense_run_has_no_error_table() -> None:
    dense = tuple(replace(m, scheme="dense", rel_error=None) for m in make_report().modules)
    report = replace(make_report(), modules=dense, artifact_bytes=4_000_000, coverage=None)
    text = printed(report)
    assert "error" not in text
    assert "smaller" not in text
    assert report.bits_per_weight() == 0


def test_report_json_is_versioned_and_complete() -> None:
    data = json.loads(report_json(make_report()))
    assert data["report_version"] == REPORT_VERSION
    assert len(data["modules"]) == 17
    assert data["coverage"]["tokens"] == 9
    assert data["warnings"][0] == "a warning of the plan"


def test_markdown_and_card() -> None:
    report = make_report()
    text = report_markdown(report)
    for heading in ("# tiny-w4a16", "## Error by kind", "## Fell back", "## Calibration"):
        assert heading in text
    card = model_card(report, "scheme: w4a16  # comment\n")
    assert "scheme: w4a16  # comment" in card
    assert "evaluate tiny-w4a16\nruntime serve tiny-w4a16\n" in card
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_only_what_works_is_suggested() -> None:
    """A mixture is for other engines; another tool's codes cannot be their own base."""
    mixture = replace(make_report(), runtime_serves=False)
    assert "vllm serve tiny-w4a16\n" in model_card(mixture, "")
    assert "runtime serve" not in model_card(mixture, "")
    codes = tuple(replace(m, method="none") for m in make_report().modules)
    converted = replace(make_report(), modules=codes)
    assert "evaluate tiny-w4a16 --base FLOAT_MODEL\n" in model_card(converted, "")
    assert not replace(make_report(), modules=()).is_converted
    merged = model_card(replace(make_report(), adapter="lora"), "")
    assert "--adapter lora --out MERGED\nevaluate tiny-w4a16 --base MERGED\n" in merged
    here = replace(make_report(), adapter="lora")
    merge, *_ = here.next_steps("x", model="m.gguf", adapter="adapters/lora")
    assert merge == "quantize convert m.gguf --adapter adapters/lora --out MERGED"
    assert replace(make_report(), adapter="lora", modules=()).next_steps("x") == (
        "runtime serve x",
    )


def test_a_card_of_dense_weights_claims_no_quantized_layout() -> None:
    assert "compressed-tensors layout" in model_card(make_report(), "")
    dense = model_card(replace(make_report(), modules=()), "")
    assert "Nothing is quantized" in dense
    assert "compressed-tensors" not in dense


def test_what_the_runtime_serves_is_known() -> None:
    from quant.modelling import FAMILIES
    from runtime.model.families import FAMILIES as SERVED

    assert {name for name, family in FAMILIES.items() if family.mixture is None} <= set(SERVED)
    assert not {name for name, family in FAMILIES.items() if family.mixture} & set(SERVED)


@pytest.mark.parametrize("model", ["/home/ann/models/tiny.gguf", "owner/tiny.gguf"])
def test_files_that_are_passed_on_hold_names_and_no_paths(model: str) -> None:
    report = replace(make_report(), model=model, artifact="/home/ann/out/tiny-w4a16")
    shown = model.removeprefix("/home/ann/models/")
    for text in (report_markdown(report), model_card(report, "scheme: w4a16\n")):
        assert "/home" not in text
        assert f"{shown} (LlamaForCausalLM)" in text
        assert text.startswith("# tiny-w4a16\n")
    assert model in printed(report), "the terminal says where it really is"


def test_a_report_that_cannot_be_written_says_that_the_artifact_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PipelineError, match="the artifact is complete, but report.md"):
        write_reports({"report.md": "a\n"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_whole(tmp_path: Path) -> None:
    write_reports({"report.md": "a\n", "README.md": "b\n"}, tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "report.md": "a\n",
        "README.md": "b\n",
    }
