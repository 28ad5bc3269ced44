"""Interrupted runs: killed anywhere, taken up again, the same artifact to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quant import provenance, spill
from quant.artifact.artifact import open_artifact
from quant.artifact.errors import ArtifactError, StorageError
from quant.artifact.writer import ArtifactWriter
from quant.calibration import windows_from_token_lists
from quant.pipeline import run
from quant.plan import make_plan
from quant.recipe import Recipe
from quant.report import RunReport
from quant.source import open_source
from quant.spill import UNLIMITED, MemoryLimits

REPO = Path(__file__).resolve().parents[2]
RECIPE = "scheme: w4a16\nmethod: gptq\ngroup_size: 32\nkv_cache: fp8\n"
LAYERS = 4


class Die:
    """A Progress that kills its own process when a layer begins."""

    def __init__(self, layer: int) -> None:
        self.fatal = layer

    def start(self, total_layers: int) -> None:
        return

    def layer(self, index: int, text: str) -> None:
        if index == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def done(self) -> None:
        return


def make(
    model: Path,
    out: Path,
    *,
    die_at: int = -1,
    recipe_text: str = RECIPE,
    memory: MemoryLimits = UNLIMITED,
) -> RunReport:
    generator = torch.Generator().manual_seed(0)
    windows = windows_from_token_lists(
        torch.randint(3, 290, (length,), generator=generator).tolist() for length in (40, 9, 25)
    )
    source, recipe = open_source(str(model)), Recipe.parse(recipe_text)
    plan = make_plan(
        recipe, source.module_shapes, source.num_layers, source.config, source_dtype="float32"
    )
    return run(source, plan, recipe, windows, out, progress=Die(die_at), memory=memory)


def killed(model: Path, out: Path, *, at_layer: int = -1, at_rename: int = -1) -> None:
    """Run in a process of its own that is killed -9 as told; it must not get to the end."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import test_resume\n"
        "from pathlib import Path\n"
        "test_resume.die_at_rename(int(sys.argv[6]))\n"
        "test_resume.make(Path(sys.argv[3]), Path(sys.argv[4]), die_at=int(sys.argv[5]))\n"
    )
    words = [str(REPO), str(Path(__file__).parent), str(model), str(out)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, str(at_layer), str(at_rename)],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def die_at_rename(count: int) -> None:
    """Die at the `count`-th rename of a file: between writing one and its being there."""
    real, left = os.replace, [count]

    def replace(*args: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args)

    os.replace = replace  # in a process made to be killed


@pytest.fixture(scope="module")
def whole(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, RunReport]:
    """The model and the report of an uninterrupted run."""
    model = tiny_model(num_hidden_layers=LAYERS)
    return model, make(model, tmp_path_factory.mktemp("whole") / "art")


def test_killed_twice_and_resumed_is_bit_identical(
    whole: tuple[Path, RunReport], tmp_path: Path
) -> None:
    model, expected = whole
    out = tmp_path / "art"
    killed(model, out, at_layer=1)
    assert not out.exists()
    with pytest.raises(ArtifactError):
        open_artifact(tmp_path / "art.partial" / "artifact")
    killed(model, out, at_rename=10)  # the five files beside the weights are staged anew first
    assert not out.exists()
    report = make(model, out)
    assert report.artifact_digest == expected.artifact_digest
    assert report.resumed_layers >= 2
    assert report.modules == expected.modules
    assert [p.name for p in tmp_path.iterdir()] == ["art"]


@pytest.mark.slow
@pytest.mark.parametrize("at_rename", range(1, 21))
def test_killed_at_any_rename(
    whole: tuple[Path, RunReport], tmp_path: Path, at_rename: int
) -> None:
    model, expected = whole
    killed(model, tmp_path / "art", at_rename=at_rename)
    assert make(model, tmp_path / "art").artifact_digest == expected.artifact_digest


def test_full_disk_keeps_finished_layers(
    whole: tuple[Path, RunReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = whole
    real = ArtifactWriter.write_shard

    def full(self: ArtifactWriter, index: int, tensors: dict[str, torch.Tensor]) -> None:
        if index == 3:
            raise StorageError("no space left")
        real(self, index, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "write_shard", full)
        with pytest.raises(StorageError, match="no space left"):
            make(model, tmp_path / "art")
    report = make(model, tmp_path / "art")
    assert report.resumed_layers == 2
    assert report.artifact_digest == expected.artifact_digest


def test_another_job_is_not_mixed_in(
    whole: tuple[Path, RunReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = whole
    out = tmp_path / "art"
    with ArtifactWriter(out, num_shards=LAYERS + 1, job={"source": "another"}):
        pass
    assert json.loads((tmp_path / "art.partial" / "job.json").read_bytes())
    with pytest.raises(StorageError, match=r"unfinished job that differs in.*--no-resume"):
        make(model, out)


def test_hidden_states_on_disk_move_no_bit(
    whole: tuple[Path, RunReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that the process is beyond already: everything between layers goes to files."""
    model, expected = whole
    files: list[str] = []
    real = spill.shelf

    def seen(*args: object, **named: object) -> list[torch.Tensor]:
        pieces = real(*args, **named)
        files.extend(path.name for path in (tmp_path / "art.partial" / "work").glob("hidden-*"))
        return pieces

    monkeypatch.setattr(spill, "shelf", seen)
    report = make(model, tmp_path / "art", memory=MemoryLimits(host_bytes=1))
    assert set(files) == {"hidden-stream0-0.bin", "hidden-stream1-0.bin"}
    assert report.artifact_digest == expected.artifact_digest
    assert [path.name for path in tmp_path.iterdir()] == ["art"]


def test_code_that_has_changed_does_not_go_on(
    whole: tuple[Path, RunReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two algorithms must not meet in one artifact, though both call themselves one version."""
    model, _ = whole
    killed(model, tmp_path / "art", at_layer=1)
    monkeypatch.setattr(provenance, "own_sources", lambda: "edited")
    with pytest.raises(StorageError, match="differs in: quant_sources"):
        make(model, tmp_path / "art")


def test_sources_are_told_apart_by_name_and_content(tmp_path: Path) -> None:
    found = []
    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("b.py", "x = 2\n")):
        folder = tmp_path / str(len(found))
        (folder / "methods").mkdir(parents=True)
        (folder / "methods" / name).write_text(text)
        found.append(provenance.sources_digest(folder))
        (folder / "methods" / "a.pyc").write_bytes(b"compiled")
        assert provenance.sources_digest(folder) == found[-1]
    assert len(set(found)) == 3
