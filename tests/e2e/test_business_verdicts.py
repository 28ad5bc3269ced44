"""What the gate is for, on the business model: one command each, and the verdict is the right one.

The suite is of the shipped gate half: English text, and the shorter tasks without their worked
example. Sixty items are the fewest that can accept anything at a margin of 5 points. A
rejection needs far less, and gets less. The base's answers are shared through one cache.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eval.cli import main as evaluate
from eval.self_test_defects import WEIGHT_DEFECTS
from eval.self_test_models import num_layers, read_base, write_sound
from eval.targets.checkpoint import locate
from quant.artifact.artifact import open_artifact
from quant.artifact.shipped import shipped_dir
from quant.artifact.stamp import read_stamp
from quant.cli import main as quantize

pytestmark = pytest.mark.e2e
TEXT = ("--window-tokens", "64", "--noise-items", "2")
ENOUGH = ("--items", "60", "--windows", "32")
FEW_ITEMS = ("--items", "8", "--windows", "32")
FEW = ("--items", "8", "--windows", "8")
# As recipes/w8a8.yaml with a shorter search, and the inputs of the outermost down projections,
# whose outliers are the largest, left alone.
W8A8 = {
    "scheme": "w8a8",
    "smoothing": "search",
    "smooth": {"tokens": 384, "refine_steps": 6},
    "overrides": [
        {"match": "*.mlp.down_proj", "layers": [0, 1, -2, -1], "scheme": "w8a16",
         "group_size": "channel"},
    ],
}  # fmt: skip
CALIBRATION = ("--calib", "contracts.jsonl", "--calib", "service.jsonl", "--calib", "code.jsonl",
               "--samples", "6", "--max-tokens", "128")  # fmt: skip
# 8 bits, and 4 in the MLPs of three middle layers.
MIXED = {
    "scheme": "w8a16",
    "group_size": "channel",
    "overrides": [
        {"match": r"re:.*\.mlp\.(gate|up)_proj", "layers": [10, 11, 12], "scheme": "w4a16",
         "group_size": 32},
    ],
}  # fmt: skip
SHORT = ("term", "payment", "sql", "javascript", "intent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """How one `evaluate` ended: its exit code and report.json, {} where none was written."""

    code: int
    report: dict[str, Any]

    def outcome(self, metric: str) -> str:
        """What the rule of this metric says over all items."""
        found = [f for f in self.report["findings"] if f["metric"] == metric and not f["stratum"]]
        (finding,) = found
        return str(finding["outcome"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The base and where things are made."""

    folder: Path
    base: Path
    suite: Path

    def quantized(self, name: str, recipe: dict[str, Any], *words: str) -> Path:
        """`quantize` of the base."""
        out, file = self.folder / name, self.folder / f"{name}.yaml"
        file.write_text(json.dumps({"method": "rtn", **recipe}))
        run(quantize, "--recipe", str(file), "--model", str(self.base), "--out", str(out), *words)
        return out

    def judge(self, artifact: Path, *words: str) -> Judged:
        """`evaluate` of an artifact by the default gates."""
        out = self.folder / f"{artifact.name}-report"
        shutil.rmtree(out, ignore_errors=True)
        code = run(
            evaluate, str(artifact), "--base", str(self.base), "--suite", str(self.suite),
            "--out", str(out), *TEXT, *words, expected=None,
        )  # fmt: skip
        file = out / "report.json"
        return Judged(code=code, report=json.loads(file.read_text()) if file.is_file() else {})


def run(command: Callable[[list[str]], None], *words: str, expected: int | None = 0) -> int:
    """The exit code of a console command."""
    with pytest.raises(SystemExit) as ended:
        command(list(words))
    code = int(ended.value.code or 0)
    assert expected in (None, code)
    return code


@pytest.fixture(scope="module")
def bench(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("business")
    base = folder / "base"
    run(quantize, "convert", str(smollm2_gguf), "--adapter", "business", "--out", str(base))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHBRIDGE_CACHE", str(folder / "cache"))
        yield Bench(folder=folder, base=base, suite=short_suite(folder / "suite"))
    shutil.rmtree(folder)


def short_suite(folder: Path) -> Path:
    """English text and tasks of all three sources; of the tasks, instruction and request alone."""
    gate = shipped_dir("calib_data") / "gate"
    folder.mkdir()
    write_rows(folder / "text.jsonl", english(gate / "text.jsonl"))
    short = [row for row in english(gate / "extraction.jsonl") if row["task"] in SHORT]
    for row in short:
        row["messages"] = [row["messages"][0], row["messages"][-1]]
    write_rows(folder / "extraction.jsonl", short)
    return folder


def english(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["lang"] == "en"]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def w8a8(bench: Bench) -> Path:
    return bench.quantized("w8a8", W8A8, *CALIBRATION)


def test_w8a8_is_accepted(bench: Bench, w8a8: Path) -> None:
    judged = bench.judge(w8a8, *ENOUGH)
    assert judged.code == 0
    assert judged.outcome("schema_valid") == "pass"
    stamp = read_stamp(w8a8)
    assert stamp is not None
    assert stamp.verdict == "accepted"


def test_a_good_mixed_artifact_is_accepted(bench: Bench) -> None:
    artifact = bench.quantized("mixed", MIXED)
    assert {s.label for s in open_artifact(artifact).schemes().values()} >= {
        "w4a16-g32", "w8a16-channel",
    }  # fmt: skip
    assert bench.judge(artifact, *ENOUGH).code == 0


def test_plain_rounding_to_4_bits_is_rejected(bench: Bench) -> None:
    artifact = bench.quantized("w4-rtn", {"scheme": "w4a16"})
    judged = bench.judge(artifact, *FEW)
    assert judged.code == 1
    assert judged.outcome("kl_mean") == "fail"
    stamp = read_stamp(artifact)
    assert stamp is not None
    assert stamp.verdict == "rejected"


def test_a_layer_of_noise_is_rejected(bench: Bench) -> None:
    """Spoilt before it was sealed; afterwards its probe would tell, and it could not be opened."""
    checkpoint = locate(str(bench.base))
    base = read_base(checkpoint)
    (defect,) = (defect for defect in WEIGHT_DEFECTS if defect.name == "noise-layer")
    change = defect.change(num_layers(open_artifact(bench.base)))
    spoilt = replace(base, read=lambda name: change(name, base.read(name)))
    judged = bench.judge(write_sound(spoilt, checkpoint, bench.folder / "noise").path, *FEW)
    assert judged.code == 1
    assert judged.outcome("kl_mean") == "fail"


def test_a_template_without_roles_is_refused_before_any_question(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its answers would be answers to other prompts; the verdict is that there can be none."""
    copy = bench.folder / "copy"
    shutil.copytree(bench.base, copy, copy_function=os.link)
    (copy / "chat_template.jinja").unlink()
    (copy / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    )
    checkpoint = locate(str(copy))
    broken = write_sound(read_base(checkpoint), checkpoint, bench.folder / "broken")
    judged = bench.judge(broken.path, *FEW)
    assert (judged.code, judged.report) == (4, {})
    assert "renders the chat" in capsys.readouterr().err
    assert read_stamp(broken.path) is None


def test_too_few_items_are_inconclusive_and_say_how_many_would_do(bench: Bench, w8a8: Path) -> None:
    """The very artifact that is accepted with enough of them."""
    judged = bench.judge(w8a8, *FEW_ITEMS, "--no-stamp")
    assert judged.code == 3
    assert judged.outcome("schema_valid") == "inconclusive"
    (finding,) = (f for f in judged.report["findings"] if f["metric"] == "schema_valid")
    assert 55 <= finding["num_needed"] <= 60
