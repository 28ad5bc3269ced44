"""`evaluate self-test`: the base passes, planted defects do not, and a miss says what it means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import self_test as subject
from eval import self_test_defects as defects
from eval.amounts import Amounts
from eval.api import make_job
from eval.cli import main
from eval.gate import Finding, Verdict
from eval.gate_spec import MetricRule
from eval.measurement import Measurement
from eval.progress import Silent
from eval.self_test_models import is_linear, layer_of, read_base, write_damaged, write_sound
from eval.self_test_rows import Row, defect_row, sound_row
from eval.stats import PairedCounts
from eval.targets.checkpoint import locate
from quant.artifact.artifact import verify
from quant.artifact.shipped import shipped_dir
from runtime.config import EngineConfig

QUICK = "version: 1\ndraws: 1000\nmetrics:\n"
SMALL = ("--windows", "24", "--window-tokens", "48")
DEFECTS = {
    "template-roles": "refused",
    "template-prompt": "refused",
    "tokenizer": "refused",
    "3-bit": "rejected",
    "noise-layer": "rejected",
    "zero-layer": "rejected",
    "vocabulary": "rejected",
}


@pytest.fixture
def call(
    suite_dir: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:  # fmt: skip
    """Exit code, stdout and stderr of `evaluate self-test ARGUMENTS`, reports in tmp_path/out."""
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(cache_dir))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    default = (shipped_dir("recipes") / "gates" / "default.yaml").read_text()
    quick = tmp_path / "quick.yaml"
    quick.write_text(default.replace("draws: 10000", "draws: 1000"))

    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["self-test", "--gates", str(quick), *map(str, arguments), *SMALL,
                  "--suite", str(suite_dir), "--out", str(tmp_path / "out")])  # fmt: skip
        assert not list((tmp_path / "temporary").iterdir()), "candidates were left behind"
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    data = json.loads((folder / "out" / "self-test.json").read_text())
    return {row["name"]: row for row in data["rows"]}


def test_the_base_is_accepted_and_every_defect_is_caught(
    taught_model: Path, dense_artifact: Callable[[Path], Path], call: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    artifact = dense_artifact(taught_model)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in artifact.iterdir())
    code, out, _ = call(artifact)
    found = rows(tmp_path)
    assert {name: row["outcome"] for name, row in found.items()} == {"base": "accepted"} | DEFECTS
    assert code == 0
    assert all(row["as_expected"] for row in found.values())
    for name, outcome in DEFECTS.items():
        assert found[name]["reason"]
        assert (found[name]["spoke"] == "reading check") == (outcome == "refused")
        assert found[name]["seconds"] > 0
    assert "different tokenizers" in found["tokenizer"]["reason"]
    assert "renders the chat" in found["template-roles"]["reason"]
    # This model learnt its answer so well that it gives it behind any prompt: that is said.
    assert found["template-prompt"]["beside"] == "inconclusive on 8 items"
    assert "Its answers alone: inconclusive on 8 items" in out
    assert out.startswith("write the base")
    assert "PASSED  The gate accepts the base" in out
    assert "7 of 7 planted defects were caught" in out
    markdown = (tmp_path / "out" / "self-test.md").read_text()
    assert markdown.startswith("# Self-test PASSED\n")
    assert "| one layer of noise |" in markdown
    assert sorted((p.name, p.stat().st_mtime_ns) for p in artifact.iterdir()) == before


def test_too_few_items_to_accept_are_no_failure_but_are_said(
    taught_model: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, _ = call("--base", taught_model, "--items", 30, "--defect", "zero-layer")
    found = rows(tmp_path)
    assert list(found) == ["base", "zero-layer"]
    assert found["base"]["outcome"] == "inconclusive"
    assert 55 <= found["base"]["num_needed"] <= 62
    assert code == 0
    assert "too small to accept even the base" in out
    assert f"Schema valid: {found['base']['num_needed']} items would do, 30 were used" in out


def test_limits_wide_enough_for_a_defect_fail_the_test(
    taught_model: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "wide.yaml").write_text(
        f"{QUICK}  kl_mean: {{max: 500.0}}\n  schema_valid_sampled: {{max_drop: 0.05}}\n"
    )
    code, out, _ = call("--base", taught_model, "--gates", tmp_path / "wide.yaml",
                        "--defect", "3-bit", "--items", 4)  # fmt: skip
    assert code == 1
    assert rows(tmp_path)["3-bit"]["outcome"] == "accepted"
    assert "FAILED  The gate missed 3-bit rounding" in out
    assert "tighten the limits" in out
    assert (tmp_path / "out" / "self-test.md").read_text().startswith("# Self-test FAILED\n")


def test_a_gate_that_accepts_nothing_fails_the_test(
    taught_model: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "gates.yaml").write_text(
        f"{QUICK}  top1_agreement: {{min: 0.9, judge: estimate}}\n"
        "  perplexity_ratio: {max: 0.5, judge: estimate}\n"
    )
    code, out, _ = call("--base", taught_model, "--gates", tmp_path / "gates.yaml",
                        "--defect", "zero-layer", "--items", 4)  # fmt: skip
    assert code == 1
    assert not rows(tmp_path)["base"]["as_expected"]
    assert "no candidate can pass" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either an artifact ART or --base MODEL"),
        (["no-such-artifact"], "no such directory"),
        (["--base", "no-such-model"], "does not exist"),
        (["--base", "m", "--defect", "2-bit"], "--defect 2-bit is unknown; there are"),
        (["--base", "m", "--items", "0"], "--items is 0"),
        (["--base", "m", "--gates", "no-gates.yaml"], "no-gates.yaml"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, call: Callable[..., Any]) -> None:
    code, out, err = call(*arguments)
    assert (code, out.count("Traceback")) == (2, 0)
    assert message in err


def test_a_result_is_not_written_into_a_model(
    taught_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["self-test", "--base", str(taught_model), "--out", str(taught_model)])
    assert ended.value.code == 2
    assert "is a model's folder" in capsys.readouterr().err


def test_a_base_without_weights_cannot_be_tested(
    taught_model: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    broken = shutil.copytree(taught_model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")
    code, _, err = call("--base", broken)
    assert code == 4
    assert "model.safetensors" in err
    assert not (tmp_path / "out").exists()


def test_a_template_defect_without_a_template_says_nothing(
    taught_model: Path, suite_dir: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """Neither caught nor missed: there is nothing to break."""
    plain = shutil.copytree(taught_model, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    (tmp_path / "gates.yaml").write_text(
        "version: 1\ndraws: 1000\nmetrics:\n  kl_mean: {max: 0.1}\n"
    )
    job = make_job(
        Path(), str(plain), tmp_path / "gates.yaml", suite=suite_dir, cache=cache_dir,
        amounts=Amounts(num_windows=24, window_tokens=48, num_items=4), engine=EngineConfig(),
    )  # fmt: skip
    made = subject.self_test(job, Silent(), artifact=None, wanted=("template-roles",))
    assert [row.outcome for row in made.rows] == ["accepted", "not applicable"]
    assert made.exit_code == 0


def change_of(name: str, layers: int = 2) -> Any:
    return next(d for d in defects.WEIGHT_DEFECTS if d.name == name).change(layers)


def test_weight_defects_touch_what_they_say(taught_model: Path, tmp_path: Path) -> None:
    checkpoint = locate(str(taught_model))
    base = read_base(checkpoint)
    sound = write_sound(base, checkpoint, tmp_path / "sound")
    assert verify(sound.path) == []
    kept = {n: base.read(n) for n in base.names}
    assert all(torch.equal(t, sound.reader.tensor(n)) for n, t in kept.items())
    touched = {
        "3-bit": {n for n, t in kept.items() if layer_of(n) is not None and is_linear(n, t.ndim)},
        "noise-layer": {n for n, t in kept.items() if layer_of(n) == 1 and t.ndim == 2},
        "zero-layer": {n for n, t in kept.items() if layer_of(n) == 1 and t.ndim == 2},
        "vocabulary": {"model.embed_tokens.weight", "lm_head.weight"},
    }
    for name, expected in touched.items():
        damaged = write_damaged(sound, tmp_path / name, change_of(name))
        changed = {n for n in kept if not torch.equal(kept[n], damaged.reader.tensor(n))}
        assert changed == expected, name


def test_three_bits_are_eight_levels_a_group_of_the_nearest() -> None:
    weight = torch.randn(5, 160, generator=torch.Generator().manual_seed(1))
    rounded = change_of("3-bit")("model.layers.0.mlp.down_proj.weight", weight)
    for start in (0, 64, 128):
        for row, found in zip(weight[:, start : start + 64], rounded[:, start : start + 64],
                              strict=True):  # fmt: skip
            levels = found.unique()
            assert len(levels) <= 8
            step = row.abs().max() / 3.5
            assert float((row - found).abs().max()) <= float(step) * 0.51


def test_exchanged_rows_are_a_permutation() -> None:
    weight = torch.arange(5.0)[:, None]
    found = change_of("vocabulary")("model.embed_tokens.weight", weight)
    assert found[:, 0].tolist() == [1, 0, 3, 2, 4]


@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 1, "c": 2}, [["a", 0], ["b", 0], ["c", 0]]])
def test_tokens_that_are_no_special_ones_exchange_ids(vocabulary: Any, tmp_path: Path) -> None:
    content = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 0, "content": "a"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    plant = next(d for d in defects.FILE_DEFECTS if d.name == "tokenizer").plant
    assert plant(tmp_path, defects.Reading(template=None, token_ids=(0, 2, 1))) == ""
    found = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    swapped = {"a": 0, "b": 2, "c": 1}
    assert found == (swapped if isinstance(vocabulary, dict) else [["a", 0], ["c", 0], ["b", 0]])


def test_tokens_are_ranked_by_use() -> None:
    assert defects.frequent_tokens([(3, 1), (3, 2), (3, 2)]) == (3, 2, 1)


def finding(outcome: Any, drop: int, num_needed: int | None, **rule: Any) -> Finding:
    counts = PairedCounts(num_items=40, num_base_ok=40, lost=drop, gained=0)
    return Finding(
        name="json_valid",
        outcome=outcome,
        reason="JSON valid: because",
        rule=MetricRule(max_drop=0.05, **rule),
        num_needed=num_needed,
        measurement=Measurement(
            name="json_valid", unit="drop", base=1.0, candidate=1 - drop / 40, estimate=drop / 40,
            lower=0.0, upper=0.2, counted="items", num_scored=40, num_clusters=40, paired=counts,
        ),
    )  # fmt: skip


def missed(result: Any, *findings: Finding) -> Row:
    verdict = Verdict(result=result, findings=findings)
    return defect_row("x", "X", "planted", verdict, num_windows=8, seconds=1.0)


def test_a_missed_defect_says_how_many_items_would_show_it() -> None:
    row = missed("inconclusive", finding("inconclusive", 4, 120))
    assert not row.as_expected
    assert row.num_needed == 120
    assert "too few items to see it; JSON valid: 120 items would do, 40 were used" in row.advice


def test_items_that_would_accept_the_defect_are_no_advice() -> None:
    """1 of 40 lost is below the margin: more of the same would prove it harmless."""
    row = missed("inconclusive", finding("inconclusive", 1, 120))
    assert row.num_needed is None
    assert "tighten the limits" in row.advice


def test_a_guard_that_would_reject_is_named_though_the_defect_was_accepted() -> None:
    row = missed("accepted", finding("inconclusive", 4, 90, required=False))
    assert (row.as_expected, row.num_needed) == (False, 90)


@pytest.mark.parametrize(("needed", "expected"), [(59, True), (None, False)])
def test_the_base_may_be_undecided_for_want_of_items_only(
    needed: int | None, expected: bool
) -> None:
    verdict = Verdict(result="inconclusive", findings=(finding("inconclusive", 0, needed),))
    row = sound_row(verdict, num_windows=8, seconds=1.0)
    assert row.as_expected is expected


def test_a_base_that_is_rejected_against_itself_fails() -> None:
    verdict = Verdict(result="rejected", findings=(finding("fail", 9, None),))
    assert not sound_row(verdict, num_windows=8, seconds=1.0).as_expected


@pytest.mark.slow
def test_the_real_model(smollm2_gguf: Path, tmp_path: Path) -> None:
    """A GGUF base on the shipped data, small: nothing planted is accepted."""
    job = make_job(
        Path(), str(smollm2_gguf), None, suite=None, cache=tmp_path / "cache",
        amounts=Amounts(num_windows=8, window_tokens=128, num_items=8), engine=EngineConfig(),
    )  # fmt: skip
    made = subject.self_test(job, Silent(), artifact=None)
    outcomes = {row.name: row.outcome for row in made.rows}
    assert outcomes["base"] in ("accepted", "inconclusive")
    del outcomes["base"]
    assert outcomes == DEFECTS
