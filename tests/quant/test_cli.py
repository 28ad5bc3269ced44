"""The `quantize` command in-process: what it prints, where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from said import Quantize

from quant.artifact.artifact import open_artifact
from quant.artifact.overlap import hashed_id
from quant.cli_steps import out_console


@pytest.fixture
def small_run(tiny_model: Callable[..., Path], calibration_file: Path) -> tuple[object, ...]:
    calib = ("--calib", calibration_file, "--samples", 4, "--max-tokens", 64)
    return ("--recipe", "w4a16.yaml", "--model", tiny_model(), *calib)


def test_help_answers_at_once_and_teaches() -> None:
    code = "from quant.cli import main; main(['--help'])"
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1, "CPU seconds"
    for part in ("Examples", "--calib", "--dry-run", "convert", "Exit codes"):
        assert part in done.stdout
    root = Path(__file__).resolve().parents[2]
    shipped = [*(root / "recipes").glob("*.yaml"), *(root / "calib_data").glob("*.jsonl")]
    for path in shipped:
        assert path.name in done.stdout


@pytest.mark.parametrize("command", [(), ("plan",), ("sample",)])
def test_help_names_values_in_the_users_words(quantize: Quantize, command: tuple[str, ...]) -> None:
    """`--budget 4.5bpw`, `--samples N`: what to write, not the type that holds it."""
    _, out, _ = quantize(*command, "--help")
    assert {value for value in re.findall(r"<[^<>]+>", out) if value != "<bool>"} == set()


def test_the_version_names_command_and_package(quantize: Quantize) -> None:
    code, out, _ = quantize("--version")
    assert code == 0
    assert re.fullmatch(r"quantize \(weighbridge\) \S+( installed\))?\n", out)


def test_threads_are_told_to_wait_quietly_before_torch_is_there() -> None:
    """The policy is read once, when torch loads OpenMP; the user's own setting stays."""
    code = (
        "import os, sys; from quant.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, expected in (({}, "PASSIVE False"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE False")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**plain, **given},
        )
        assert done.stdout.splitlines()[-1] == expected


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, quant.cli; "
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dry_run_prints_and_writes_nothing(
    quantize: Quantize, small_run: tuple[object, ...], tmp_path: Path
) -> None:
    code, out, _ = quantize(*small_run, "--dry-run")
    assert code == 0
    for part in ("w4a16-g64", "128 does not divide 64", "bits over the whole model", "memory"):
        assert part in out
    assert list(tmp_path.iterdir()) == []
    code, planned, _ = quantize("plan", *small_run[:4], "--all")
    assert code == 0
    assert "model.layers.1.mlp.down_proj" in planned.replace("\n", "")
    assert list(tmp_path.iterdir()) == []


def test_windows_beyond_the_models_positions_are_told(
    quantize: Quantize, small_run: tuple[object, ...]
) -> None:
    said = "longer than the model's 1,024 positions"
    assert said in " ".join(quantize("plan", *small_run[:4], "--max-tokens", 1025)[1].split())
    assert said not in " ".join(quantize("plan", *small_run[:4], "--max-tokens", 1024)[1].split())


def test_the_whole_command(
    quantize: Quantize, small_run: tuple[object, ...], tmp_path: Path
) -> None:
    code, out, err = quantize(*small_run, "--out", "art")
    assert code == 0, err
    assert "done: " in out
    assert "largest errors" in out
    assert "evaluate art" in out
    assert "calibrating on 4 samples" in err
    assert "layer 1 of 2" in err
    assert {p.name for p in tmp_path.iterdir()} == {"art"}
    report = json.loads((tmp_path / "art/report.json").read_text())
    assert report["coverage"]["samples"] == 4
    for name in ("README.md", "report.md"):
        text = (tmp_path / "art" / name).read_text()
        assert text.startswith("# art\n")
        assert str(tmp_path.parent) not in text
        assert str(Path(str(small_run[3])).parent) not in text
    recipe = open_artifact(tmp_path / "art").manifest.recipe
    assert recipe.overrides == {"calibration.samples": 4, "calibration.max_tokens": 64}

    again = quantize(*small_run, "--out", "art")
    assert again[0] == 0, "a run that is restarted after its end has nothing to do"
    assert "nothing left to do" in again[2]
    other = quantize(*small_run, "--seed", 1, "--out", "art")
    assert other[0] == 2
    assert "--overwrite" in other[2]
    assert other[1] == "", "refused before the plan is printed"


@pytest.mark.parametrize("goal", [(), ("--budget", "6bpw")])
def test_rows_that_were_given_names_are_not_the_same_job(
    quantize: Quantize, small_run: tuple[object, ...], tmp_path: Path, goal: tuple[str, ...]
) -> None:
    """No token of them differs, but the gate looks for leaks by these names."""
    calib = tmp_path / "rows.jsonl"
    asked = (*small_run, "--calib", calib, "--smoothing", "none", "--out", "art", *goal)
    rows = [{"text": f"{text} {i}"} for i, text in enumerate(["The customer pays."] * 8)]
    calib.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert quantize(*asked)[0] == 0
    assert "nothing left to do" in quantize(*asked)[2]
    calib.write_text("".join(json.dumps({**r, "doc": "contract-17"}) + "\n" for r in rows))
    code, _, err = quantize(*asked)
    assert code == 2
    assert "already holds an artifact" in err
    assert quantize(*asked, "--overwrite")[0] == 0
    calibration = open_artifact(tmp_path / "art").manifest.calibration
    assert calibration is not None
    assert calibration.sketch is not None
    assert hashed_id("contract-17") in calibration.sketch.ids
    planned = quantize(*small_run, "--out", "art", "--dry-run")
    assert planned[0] == 0
    assert "bits over the whole model" in planned[1]
    assert quantize(*small_run, "--out", "art", "--overwrite")[0] == 0

    code, out, _ = quantize("inspect", "art")
    assert code == 0
    assert "w4a16-g64" in out
    assert "none yet" in out
    assert quantize("verify", "art")[0] == 0
    weights = sorted((tmp_path / "art").glob("*.safetensors"))[1]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, out, _ = quantize("verify", "art")
    assert code == 1
    assert weights.name in out
    assert "art: 1 problem; do not use this copy" in out

    code, _, err = quantize(*small_run[:2], "--model", "art", *small_run[4:])
    assert code == 2
    assert "already quantized" in err


def test_out_defaults_to_name_and_recipe(
    quantize: Quantize, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    code, out, err = quantize("convert", tiny_model())
    assert code == 0, err
    assert [p.name for p in tmp_path.iterdir()] == [f"{tiny_model().name}-none"]
    assert "error" not in out


def test_calibration_that_is_not_needed_is_said(
    quantize: Quantize, small_run: tuple[object, ...]
) -> None:
    code, out, _ = quantize("--recipe", "fp8.yaml", *small_run[2:], "--dry-run")
    assert code == 0
    assert "--calib is not used" in out


def test_several_calibration_files(
    quantize: Quantize, small_run: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "The fee is due in thirty days."}\n')
    code, _, err = quantize(*small_run, "--calib", "more.jsonl", "--out", "a", "--method", "gptq")
    assert code == 0, err
    report = json.loads((tmp_path / "a/report.json").read_text())
    assert set(report["coverage"]["by_source"]) == {"contracts", "more"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--recip", "x"], "No such option: --recip"),
        (["plan"], "Missing option '--recipe'"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["--model", "x"], "give --recipe FILE"),
        (["--recipe", "x", "plan", "--recipe", "y"], "come after it: quantize plan --recipe"),
        (["--device", "cpu", "plan", "--recipe", "y"], "come after it: quantize plan --device"),
        (["--recipe", "nope.yaml"], "no such file in"),
        (["--recipe", "w4a16.yaml"], "no model: give --model"),
        (["--recipe", "w4a16.yaml", "--model", "nope"], "nope: no such file"),
        (["--recipe", "w4a16.yaml", "--model", "x", "--calib", "no.jsonl"], "no.jsonl"),
        (["--recipe", "w4a16.yaml", "--model", "x", "--group-size", "7"], "--group-size"),
        (["--recipe", "w4a16.yaml", "--model", "x", "--device", "abacus"], "--device abacus"),
        (["--recipe", "w4a16.yaml", "--threads", "0"], "--threads"),
        (["--recipe", "w4a16.yaml", "--threads", "1000000000000"], "--threads"),
        (["--recipe", "w4a16.yaml", "--device", "meta"], "meta is not supported"),
        (["--recipe", "w4a16.yaml", "--group-size", "1" * 5000], "--group-size"),
        (["--recipe", ""], "an empty file name"),
        (["--recipe", "x" * 300], "File name too long"),
        (["--recipe", "~no-such-user/x.yaml"], "home directory"),
        (["--recipe", "/dev/null"], "is not a file"),
        (["--recipe", "w4a16.yaml", "--calib", "y" * 300], "File name too long"),
        (["verify", "nope"], "is not an artifact"),
        (["inspect", "nope"], "is not an artifact"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    quantize: Quantize, tmp_path: Path, arguments: list[str], part: str
) -> None:
    code, _, err = quantize(*arguments)
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert part in lines[0]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["", ".", "..", "/", "o" * 250, "file/art", "a.txt"])
def test_outputs_that_cannot_be_made(
    quantize: Quantize, tiny_model: Callable[..., Path], tmp_path: Path, out: str
) -> None:
    for name in ("file", "a.txt"):
        (tmp_path / name).write_text("mine")
    code, _, err = quantize("--recipe", "fp8.yaml", "--model", tiny_model(), "--out", out)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert {p.name for p in tmp_path.iterdir()} == {"file", "a.txt"}


def test_names_may_hold_anything(
    quantize: Quantize, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "[/red] my model \u6a21\u578b")
    out = tmp_path / "[bold] out \u00fc"
    code, text, err = quantize("--recipe", "fp8.yaml", "--model", f"{model}/", "--out", out)
    assert code == 0, err
    assert "[/red] my model" in text
    assert "[bold] out" in text
    assert quantize("inspect", out)[0] == quantize("verify", out)[0] == 0


def test_bad_recipes_and_rows_name_the_line(
    quantize: Quantize, small_run: tuple[object, ...], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("scheme: w4a16\nmethod: gptq\ngrup_size: 64\n")
    code, _, err = quantize("--recipe", "bad.yaml", *small_run[2:])
    assert code == 2
    assert "bad.yaml:3: grup_size: unknown key; did you mean 'group_size'?" in err
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "fine"}\n{"text": "broken\n')
    code, _, err = quantize(*small_run[:4], "--calib", "rows.jsonl")
    assert code == 2
    assert "rows.jsonl:2: not JSON" in err
    code, out, err = quantize(*small_run[:4])
    assert code == 2
    assert out == "", "refused before the plan is printed"
    assert "needs calibration text; give --calib FILE" in err
    code, out, _ = quantize(*small_run[:4], "--dry-run")
    assert code == 0
    assert "give --calib FILE to run it" in out
    assert {p.name for p in tmp_path.iterdir()} == {"bad.yaml", "rows.jsonl"}


def test_strict_refuses_before_anything_is_spent(
    quantize: Quantize, small_run: tuple[object, ...], tmp_path: Path
) -> None:
    code, out, err = quantize(*small_run, "--strict")
    assert code == 2
    assert "(160 columns, group 128)" in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_says_that_the_same_command_resumes(
    quantize: Quantize,
    small_run: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import quant.pipeline

    whole = quant.pipeline.advance

    def interrupt(job: object, index: int, tensors: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quant.pipeline, "advance", interrupt)
    code, _, err = quantize(*small_run, "--out", "art")
    assert code == 130
    assert "the same command goes on" in err
    assert not (tmp_path / "art").exists()
    monkeypatch.setattr(quant.pipeline, "advance", whole)
    code, out, err = quantize(*small_run, "--out", "art")
    assert code == 0, err
    assert "1 layers resumed" in out


def test_a_full_disk_is_refused_before_calibration(
    quantize: Quantize,
    small_run: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import quant.job_out

    monkeypatch.setattr(quant.job_out, "free_disk_bytes", lambda path: 1000)
    code, _, err = quantize(*small_run, "--out", "art")
    assert code == 2
    assert "make room or name another place" in err
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written_is_one_line(
    quantize: Quantize, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        text = io.TextIOWrapper(full, encoding="utf-8", write_through=True)
        monkeypatch.setattr(out_console, "_file", text)
        code, _, err = quantize("plan", "--recipe", "w8a8.yaml", "--model", tiny_model())
    assert code == 2
    assert err.strip() == "error: the output: No space left on device"


def test_names_that_are_not_utf8(
    quantize: Quantize, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    code, _, err = quantize("--recipe", "fp8.yaml", "--model", tiny_model(), "--out", "o\udcff")
    assert code == 2
    assert "error: --out " in err
    assert quantize("--recipe", "w8a8.yaml", "--model", "m\udcff")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_calibration_files_in_any_order_from_anywhere_give_the_same_artifact(
    quantize: Quantize,
    small_run: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "The fee is due in thirty days."}\n')
    head, calib, tail = small_run[:4], small_run[4:6], small_run[6:]
    digests = set()
    for out, order in (("a", (calib, ("--calib", "more.jsonl"))),
                       ("b", (("--calib", tmp_path / "more.jsonl"), calib))):  # fmt: skip
        code, _, err = quantize(*head, *order[0], *order[1], *tail, "--out", out)
        assert code == 0, err
        digests.add(open_artifact(tmp_path / out).digest)
    assert len(digests) == 1


def test_an_fp8_cache_without_calibration_names_its_own_way_out(
    quantize: Quantize, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text("scheme: fp8\nmethod: rtn\nkv_cache: fp8\n")
    code, _, err = quantize("--recipe", "r.yaml", "--model", tiny_model())
    assert code == 2
    assert "give --calib FILE" in err
    assert "or set `kv_cache: none`" in err
