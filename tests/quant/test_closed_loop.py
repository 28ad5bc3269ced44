"""`quantize --until-accepted`: the gate is asked as a command, its exit codes are honoured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from said import Quantize

from quant.allocation import Allocation, Allocator, Group, Option
from quant.artifact.artifact import open_artifact
from quant.closed_loop import ACCEPTED, bisect
from quant.mixed_ask import make_gate
from quant.mixed_build import mixed_folder, recipe_path

RECIPE = {
    "scheme": "w4a16",
    "method": "rtn",
    "dtype": "float16",
    "calibration": {"samples": 8, "max_tokens": 48},
    "mixed": {"windows": 4, "heldout": 2, "draws": 1, "evaluations": 5},
}
# Accepts from `least` bytes of weights on; a line in calls.txt for each time it is asked.
FAKE_GATE = """
import sys, pathlib, json
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
artifact, here = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
gates = json.loads(pathlib.Path(options["--gates"]).read_text())
size = sum(p.stat().st_size for p in artifact.glob("*.safetensors"))
with (here / "calls.txt").open("a") as file:
    file.write(f"{size}\\n")
(pathlib.Path(options["--out"]) / "report.md").write_text("judged\\n")
print("the gate says something")
if "code" in gates:
    sys.exit(gates["code"])
sys.exit(0 if size >= gates["least"] else gates.get("below", 1))
"""


@pytest.fixture
def command(
    tiny_model: Callable[..., Path], calibration_file: Path, tmp_path: Path
) -> Callable[..., tuple[object, ...]]:
    """`command({"least": bytes})`: the arguments of a run whose gate is the fake one."""
    (tmp_path / "gate.py").write_text(FAKE_GATE)
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))

    def make(gates: dict[str, Any]) -> tuple[object, ...]:
        (tmp_path / "gates.yaml").write_text(json.dumps(gates))
        return (
            "--recipe", tmp_path / "recipe.yaml",
            "--model", tiny_model(max_position_embeddings=2048), "--calib", calibration_file,
            "--out", tmp_path / "art", "--until-accepted",
            tmp_path / "gates.yaml", "--gate-command", f"{sys.executable} {tmp_path / 'gate.py'}",
        )  # fmt: skip

    return make


def calls(folder: Path) -> list[int]:
    """Sizes the fake gate was asked about."""
    path = folder / "calls.txt"
    return [int(line) for line in path.read_text().split()] if path.is_file() else []


def test_the_smallest_that_is_accepted_is_made(
    quantize: Quantize, command: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    code, out, err = quantize(*command({"least": 150_000}))
    assert code == 0, err
    artifact = open_artifact(tmp_path / "art")
    size = sum(p.stat().st_size for p in artifact.path.glob("*.safetensors"))
    asked = calls(tmp_path)
    assert size == min(s for s in asked if s >= 150_000)
    assert max((s for s in asked if s < 150_000), default=0) > size - 81_920 / 8
    assert len(asked) <= 5
    assert "accepted, chosen" in out
    assert "rejected" in out
    data = json.loads((artifact.path / "report.json").read_text())
    assert {plan["verdict"] for plan in data["plans"]} == {"accepted", "rejected"}
    assert "--until-accepted gates.yaml" in recipe_path(artifact.path).read_text()
    assert (tmp_path / "art-evaluation" / "report.md").read_text() == "judged\n"
    left = {path.name for path in mixed_folder(artifact.path).iterdir()}
    assert left == {"scores.json", "done.json"}
    code, _, err = quantize(*command({"least": 150_000}))
    assert code == 0
    assert "nothing left to do" in err
    assert calls(tmp_path) == asked


def test_none_accepted_ends_with_the_table_and_exit_code_1(
    quantize: Quantize, command: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    """Inconclusive is not accepted. A second run asks nothing that is known already; one with
    another gates file, or another script that judges, asks again."""
    code, _, err = quantize(*command({"least": 1e9, "below": 3}))
    assert code == 1
    assert "accepted no plan" in err
    asked = len(calls(tmp_path))
    assert 3 <= asked <= 5
    assert err.count("bits per weight: KL") == err.count("inconclusive") == asked
    assert not (tmp_path / "art").exists()
    assert not recipe_path(tmp_path / "art").exists()
    code, _, again = quantize(*command({"least": 1e9, "below": 3}))
    assert code == 1
    assert again.partition("error:")[2] == err.partition("error:")[2]
    assert len(calls(tmp_path)) == asked
    code, _, err = quantize(*command({"least": 1e9, "below": 1}))
    assert err.count("rejected") == asked
    assert len(calls(tmp_path)) == 2 * asked
    (tmp_path / "gate.py").write_text(FAKE_GATE + "# another\n")
    quantize(*command({"least": 1e9, "below": 1}))
    assert len(calls(tmp_path)) == 3 * asked


def test_a_gate_that_cannot_judge_stops_everything(
    quantize: Quantize, command: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    code, _, err = quantize(*command({"code": 4}))
    assert code == 2
    assert "could not judge plan-" in err
    assert "exit code 4" in err
    assert "the gate says something" in err
    assert len(calls(tmp_path)) == 1
    code, _, err = quantize(*command({"least": 0}))
    assert code == 0, "what was built is taken up"
    assert min(calls(tmp_path)[1:]) > 0


def test_an_interrupted_gate_interrupts_and_is_asked_again(
    quantize: Quantize, command: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    code, _, err = quantize(*command({"code": 130}))
    assert code == 130
    assert "interrupted" in err
    assert len(calls(tmp_path)) == 1
    code, *_ = quantize(*command({"least": 0}))
    assert code == 0
    assert calls(tmp_path)[0] == calls(tmp_path)[1]


def test_the_real_gate_is_asked(
    quantize: Quantize, command: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    """evaluate itself, once, on a handful of windows; its verdict is stamped on what was made."""
    evaluate = f"{sys.executable} -m eval.cli --items 1 --windows 16 --window-tokens 16"
    gates = {"version": 1, "metrics": {"kl_mean": {"max": 1.0, "judge": "estimate"}}}
    (tmp_path / "recipe.yaml").write_text(
        json.dumps({**RECIPE, "mixed": {"windows": 2, "draws": 1, "evaluations": 1}})
    )
    code, _, err = quantize(*command(gates)[:-1], evaluate, "--budget", "5bpw")
    assert code == 0, err
    stamp = open_artifact(tmp_path / "art").stamp
    assert stamp is not None
    assert stamp.verdict == "accepted"
    assert (tmp_path / "art-evaluation" / "report.json").is_file()


def test_what_is_refused_before_any_work(
    quantize: Quantize, command: Callable[..., tuple[object, ...]], tmp_path: Path
) -> None:
    plain = command({"least": 0})
    for extra, message in (
        (("--max-kl", "0.1"), "take one of them out"),
        (("--method", "none"), "method"),
        (("--gate-command", '"open'), "No closing quotation"),
        (("--until-accepted", "missing.yaml"), "/gates (shipped: default.yaml"),
        (("--budget", "1bpw"), "cannot be met"),
    ):
        code, _, err = quantize(*plain, *extra)
        assert code == 2, (extra, err)
        assert message in err
    code, _, err = quantize(*plain[:-4], "--gate-command", "x")
    assert code == 2
    assert "goes with --until-accepted" in err
    code, _, err = quantize(*plain[:-1], "no-such-program")
    assert code == 2
    assert "cannot be run" in err
    assert not (tmp_path / "art").exists()
    assert calls(tmp_path) == []


@pytest.mark.parametrize("name", ["default.yaml", "gates/default.yaml"])
def test_the_shipped_gates_are_found_as_evaluate_finds_them(name: str) -> None:
    assert make_gate(name, None, "cpu").gates.parts[-3:] == ("recipes", "gates", "default.yaml")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000), share=st.floats(0, 1.1), count=st.integers(2, 9),
    step=st.integers(1, 400),
)  # fmt: skip
def test_bisection_finds_the_smallest_within_a_step(
    seed: int, share: float, count: int, step: int
) -> None:
    groups = [
        Group(name=str(i), options=tuple(
            Option(scheme=str(b), num_bytes=10 * b + (seed * i) % 7, score=(1 + i) * 4.0**-b)
            for b in (4, 8)
        ))
        for i in range(30)
    ]  # fmt: skip
    allocator = Allocator(groups)
    least, most = allocator.least_bytes, allocator.most_bytes
    threshold = least + share * (most - least)
    asked: list[Allocation] = []

    def verdict_of(plan: Allocation) -> str:
        assert plan not in asked
        asked.append(plan)
        return ACCEPTED if plan.num_bytes >= threshold else "rejected"

    found = list(bisect(verdict_of, groups, None, step, count))
    assert [plan for plan, _ in found] == asked
    assert len(asked) <= count
    sizes = [plan.num_bytes for plan, verdict in found if verdict == ACCEPTED]
    assert bool(sizes) == (most >= threshold)
    if sizes and len(asked) < count:
        finer = [p.num_bytes for p in allocator.frontier() if p.num_bytes >= threshold]
        assert min(sizes) <= min(finer) + step + 40
