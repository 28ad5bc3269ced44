"""Several ranks: two processes make what one makes, say the same, and end together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks_driver
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant.api import quantize
from quant.artifact.artifact import Artifact, open_artifact, verify
from quant.artifact.errors import StorageError
from quant.artifact.layout import QuantizedWeight
from quant.errors import PipelineError
from quant.parallel import Single, rows_of, share_of
from quant.parallel_launch import LOST, launch

REPO = Path(__file__).resolve().parents[2]
DRIVER = Path(ranks_driver.__file__)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAYERS = 3
# Where scales are searched on samples of the windows, two ranks have other samples.
CLOSE = ("gptq", "kv", "mixture")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the driver's two ranks left in `folder`, what one process made beside it, and what a
    command printed one of whose ranks was killed."""

    folder: Path
    model: Path
    mixture: Path
    calib: Path
    last_words: str = ""

    def said(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        files = (self.folder / f"{name}-{rank}.json" for rank in (0, 1))
        first, second = (json.loads(file.read_text()) for file in files)
        return first, second

    def artifact(self, name: str) -> Artifact:
        """Of the driver; its two ranks agree about it."""
        first, second = self.said(name)
        assert first["value"] == second["value"], (first, second)
        artifact = open_artifact(self.folder / name)
        assert artifact.digest == first["value"]
        return artifact

    def alone(self, recipe: str) -> Artifact:
        """The same by this process."""
        model = self.mixture if recipe == "mixture" else self.model
        out = self.folder / f"alone-{recipe}"
        return open_artifact(
            quantize(model, self.folder / f"{recipe}.yaml", calib=self.calib, out=out)
        )


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def quantize_command(played: Played, out: Path) -> list[str]:
    return [
        "-m", "quant.cli", "--recipe", str(played.folder / "gptq.yaml"), "--model",
        str(played.model), "--calib", str(played.calib), "--out", str(out),
    ]  # fmt: skip


def kill_a_rank(played: Played) -> str:
    """`quantize --ranks 2` into `killed`, whose rank 1 dies after a layer; what was printed."""
    out = played.folder / "killed"
    run = start([*quantize_command(played, out), "--ranks", "2"])
    deadline = time.monotonic() + 300
    while not (played.folder / "killed.partial" / "shard-00002.json").exists():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    ranks = {p.environ()["RANK"]: p for p in psutil.Process(run.pid).children()}
    ranks["1"].kill()
    printed, _ = run.communicate(timeout=120)
    assert run.returncode == LOST, printed
    assert not any(p.is_running() for p in ranks.values())
    assert not out.exists()
    return printed


@pytest.fixture(scope="module")
def played(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The driver, run once by two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, text in ranks_driver.RECIPES.items():
        (folder / f"{name}.yaml").write_text(text)
    calib = folder / "calib.jsonl"
    words = "the customer shall pay {} fee within thirty days of invoice term contract supplier"
    rows = [" ".join(words.split()[i % 5 :] * (1 + i % 4)) + f" {i * 7919}" for i in range(16)]
    calib.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = Played(
        folder=folder, model=tiny_model(num_hidden_layers=LAYERS), mixture=tiny_model("mixtral"),
        calib=calib,
    )  # fmt: skip
    last_words = kill_a_rank(found)
    with pytest.raises(StorageError, match=r"differs in: tools.ranks"):
        quantize(found.model, folder / "gptq.yaml", calib=calib, out=folder / "killed")
    arguments = [str(part) for part in (folder, found.model, found.mixture, calib)]
    run = start([*TORCHRUN, str(DRIVER), *arguments])
    printed, _ = run.communicate(timeout=600)
    assert run.returncode == 0, printed
    return replace(found, last_words=last_words)


def codes_differing(one: Artifact, other: Artifact) -> float:
    """The share of codes that are not alike."""
    alike = total = 0
    for name, scheme in one.schemes().items():
        if not scheme.is_dense:
            mine, theirs = one.weight(name), other.weight(name)
            assert isinstance(mine, QuantizedWeight)
            assert isinstance(theirs, QuantizedWeight)
            alike += int((mine.codes.float() == theirs.codes.float()).sum())
            total += mine.codes.numel()
    return 1 - alike / total


@pytest.mark.parametrize("recipe", ranks_driver.RECIPES)
def test_two_ranks_make_what_one_process_makes(played: Played, recipe: str) -> None:
    shared, alone = played.artifact(recipe), played.alone(recipe)
    assert verify(shared.path) == []
    assert shared.schemes() == alone.schemes()
    if recipe in CLOSE:
        assert codes_differing(shared, alone) < 0.01
    ours, theirs = (json.loads((a.path / "report.json").read_text()) for a in (shared, alone))
    assert (ours["ranks"], theirs["ranks"]) == (2, 1)
    assert ours["coverage"] == theirs["coverage"]
    for mine, other in zip(ours["modules"], theirs["modules"], strict=True):
        for key in ("module", "shape", "scheme", "method", "bytes", "dead_columns", "tokens_seen",
                    "is_starved", "note"):  # fmt: skip
            assert mine[key] == other[key], (mine["module"], key)
        if mine["rel_error"] is None:
            assert other["rel_error"] is None
            continue
        near = 0.02 if recipe in CLOSE else 0.2
        assert mine["weight_outliers"] == pytest.approx(other["weight_outliers"], rel=near)
        assert mine["rel_error"] == pytest.approx(other["rel_error"], rel=near)
        if recipe not in CLOSE:
            continue
        for (channel, ratio), (same, wanted) in zip(
            mine["input_outliers"], other["input_outliers"], strict=True
        ):
            assert (channel, ratio) == (same, pytest.approx(wanted, rel=1e-3))


def test_probes_say_the_same_within_noise(played: Played) -> None:
    probes = (played.artifact("gptq").manifest.probe, played.alone("gptq").manifest.probe)
    shared, alone = probes
    assert shared is not None
    assert alone is not None
    for mine, other in zip(shared.prompts, alone.prompts, strict=True):
        told = dict(zip(other.top_ids, other.top_logprobs, strict=True))
        for token, logprob in zip(mine.top_ids[:3], mine.top_logprobs[:3], strict=True):
            assert logprob == pytest.approx(told[token], abs=0.05)


def test_kv_scales_are_of_all_windows(played: Played) -> None:
    shared, alone = played.artifact("kv"), played.alone("kv")
    for layer in range(LAYERS):
        ours, theirs = shared.kv_scales(layer), alone.kv_scales(layer)
        assert isinstance(ours, torch.Tensor)
        assert isinstance(theirs, torch.Tensor)
        assert ours.shape == theirs.shape
        assert bool(((ours / theirs).log2().abs() <= 2).all()), (ours, theirs)


def test_a_rank_that_dies_ends_all_and_another_run_resumes(played: Played) -> None:
    assert "rank 1 of 2 was killed (SIGKILL, perhaps for memory)" in played.last_words
    report = json.loads((played.artifact("killed").path / "report.json").read_text())
    assert report["resumed_layers"] >= 1
    assert not (played.folder / "killed.partial").exists()
    assert played.artifact("killed").digest == played.artifact("gptq").digest
    manifest = played.artifact("gptq").manifest
    assert manifest.tools["ranks"] == "2"
    assert "ranks" not in played.alone("gptq").manifest.tools


def test_what_ranks_exchange(played: Played) -> None:
    first, second = (said["value"] for said in played.said("sums"))
    assert first == second
    assert first == {
        "sum": [2.0, 4.0], "count": 7, "total": 11, "most": [1.0, -1.0], "first": "of 0",
        "shown": [0, 1, 2],
        "parts": [[0, [[0.5], [0.5]], [0, 3]], [1, [[1.5, 1.5], [1.5, 1.5]], [0, 3]]],
    }  # fmt: skip


def test_an_error_of_one_rank_is_the_error_of_all(played: Played) -> None:
    other, own = played.said("told")
    assert (own["error"], own["text"]) == ("NonFiniteError", "sample 7 is NaN")
    assert (other["error"], other["text"]) == ("NonFiniteError", "rank 1 of 2: sample 7 is NaN")
    assert max(other["seconds"], own["seconds"]) < 100


def test_ranks_with_other_inputs_are_refused(played: Played) -> None:
    for said in played.said("other"):
        assert said["error"] == "PipelineError"
        assert "rank 1 has another job than rank 0 (differs in: calibration)" in said["text"]


def test_ranks_that_part_do_not_hang(played: Played) -> None:
    assert [said["error"] for said in played.said("parted")] == ["AssertionError"] * 2
    waiting, _ = played.said("stuck")
    assert waiting["error"] == "PipelineError"
    assert "rank 0 of 2 lost the others" in waiting["text"]
    assert waiting["seconds"] < 10


@pytest.mark.slow
def test_torchrun_runs_the_command(played: Played, tmp_path: Path) -> None:
    run = start([*TORCHRUN, *quantize_command(played, tmp_path / "art")])
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    assert printed.count("done: ") == 1
    assert open_artifact(tmp_path / "art").digest == played.artifact("gptq").digest


def play(tmp_path: Path, script: str) -> tuple[int, str, float]:
    """Two ranks of a script without torch."""
    file = tmp_path / "script.py"
    file.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + script)
    began = time.monotonic()
    code, message = launch(2, [sys.executable, "-S", str(file)])
    return code, message, time.monotonic() - began


def test_the_launcher_tells_what_ended_the_ranks(tmp_path: Path) -> None:
    assert play(tmp_path, "sys.exit(0)")[:2] == (0, "")
    assert play(tmp_path, "sys.exit(3 * rank)")[:2] == (3, "")
    code, message, seconds = play(
        tmp_path, "time.sleep(60 * (1 - rank)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert (code, seconds < 50) == (LOST, True)
    assert message.startswith("rank 1 of 2 was killed (SIGKILL")


def test_ranks_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    file = tmp_path / "launcher.py"
    file.write_text(
        "import sys\nfrom quant.parallel_launch import launch\n"
        "rank = 'import time; from quant.parallel_launch import watch_parent as w; w(); '"
        "'print(1, flush=True); time.sleep(60)'\n"
        "launch(2, [sys.executable, '-c', rank])\n"
    )
    launcher = start([str(file)])
    assert launcher.stdout is not None
    assert [launcher.stdout.readline(), launcher.stdout.readline()] == ["1\n", "1\n"]
    ranks = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=50)
    assert (len(gone), alive) == (2, [])
    launcher.stdout.close()


@dataclass(frozen=True)
class Of:
    """A rank that says nothing: for what is decided without asking."""

    rank: int
    size: int


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(1, 8))
def test_windows_are_dealt_out_evenly_and_whole(lengths: list[int], size: int) -> None:
    shares = [share_of(lengths, Of(rank, size)) for rank in range(size)]  # type: ignore[arg-type]
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)
    assert max(range(len(lengths)), key=lambda i: (lengths[i], -i)) in shares[0]
    if len(lengths) >= size:
        assert all(shares)


@given(st.integers(0, 300), st.integers(1, 8))
def test_rows_are_cut_evenly_and_whole(count: int, size: int) -> None:
    cuts = [rows_of(count, Of(rank, size)) for rank in range(size)]  # type: ignore[arg-type]
    assert [i for cut in cuts for i in range(count)[cut]] == list(range(count))
    sizes = [cut.stop - cut.start for cut in cuts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        (99, {}, "16 calibration windows are too few for 99 ranks"),
        (2, {"method": "auto"}, "method auto runs on one rank only"),
        (2, {"method": "gradient"}, "method gradient runs on one rank only"),
        (2, {"budget": "4.5bpw"}, "mixed precision scores and judges its plans on one rank"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    played: Played, tmp_path: Path, size: int, overrides: dict[str, str], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        quantize(
            played.model, played.folder / "gptq.yaml", calib=played.calib, out=tmp_path / "art",
            ranks=Single(size=size), **overrides,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
