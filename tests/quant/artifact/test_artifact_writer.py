"""Writing artifacts: all or nothing, resumable, the same bytes each time, and clear refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quant.artifact import durable
from quant.artifact.artifact import open_artifact
from quant.artifact.errors import IntegrityError, ManifestError, SchemeError, StorageError
from quant.artifact.manifest import MANIFEST_NAME, ModuleRecord, scheme_tables
from quant.artifact.scheme import DENSE
from quant.artifact.writer import ArtifactWriter

HERE = Path(__file__).parent
SHARD = {"a.weight": torch.arange(8.0)}


def writer(out: Path, **changes: object) -> ArtifactWriter:
    arguments: dict[str, object] = {"num_shards": 2, "job": {"recipe": "x"}, **changes}
    return ArtifactWriter(out, **arguments)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory where there is one, for tests that sync hundreds of times."""
    base = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=base if base.is_dir() else None) as folder:
        yield Path(folder)


def staging(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def test_same_inputs_give_the_golden_bytes(golden: ModuleType, golden_dir: Path, out: Path) -> None:
    golden.build(out)
    ours, committed = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (out, golden_dir))
    assert ours == committed
    assert not staging(out).exists()


def test_killed_at_any_sync_it_resumes_to_the_same_bytes(in_memory: Path) -> None:
    """A29: whatever instant the writer dies, nothing half-written is seen and nothing is lost."""
    done = subprocess.run(
        [sys.executable, HERE / "kill_points.py", in_memory],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for case in ("fresh", "replacing"):
        assert report[case]["faults"] == []
        assert report[case]["kills"] >= 10
        assert report[case]["last"] == 0


def test_committed_shards_are_kept_and_readable(out: Path) -> None:
    with writer(out) as first:
        first.write_shard(1, SHARD)
        (first.work_dir / "state.json").write_text("{}")
        (staging(out) / "artifact" / ".model-00001-of-00002.safetensors.tmp").write_text("x")
    with writer(out) as second:
        assert second.committed == {1}
        assert torch.equal(second.read_shard(1)["a.weight"], SHARD["a.weight"])
        assert (second.work_dir / "state.json").exists()
        assert not list(staging(out).rglob("*.tmp"))
        second.discard()
    assert not staging(out).exists()


def test_a_shard_that_lost_bytes_is_not_committed(out: Path) -> None:
    with writer(out) as first:
        first.write_shard(0, SHARD)
        shard = next(staging(out).rglob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
        assert first.committed == frozenset()


def test_another_jobs_staging_is_refused_or_restarted(out: Path) -> None:
    with writer(out) as first:
        first.write_shard(0, SHARD)
    with pytest.raises(StorageError, match=r"differs in: recipe \(.*, now y\), seed \(not given"):
        writer(out, job={"recipe": "y", "seed": 1})
    with writer(out) as same:
        assert same.committed == {0}
    with writer(out, job={"recipe": "y"}, overwrite=True) as restarted:
        assert restarted.committed == frozenset()


def test_what_differs_is_named_down_to_the_setting(out: Path) -> None:
    writer(out, job={"recipe": "x", "tools": {"threads": "4", "torch": "2"}}).close()
    with pytest.raises(StorageError, match=r"differs in: tools\.threads \(4, now 2\)\. Run"):
        writer(out, job={"recipe": "x", "tools": {"threads": "2", "torch": "2"}})


def test_a_folder_of_someone_elses_is_not_cleared(out: Path) -> None:
    staging = out.with_name(out.name + ".partial")
    staging.mkdir()
    (staging / "thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"holds thesis\.txt, which is not of a quantization"):
        writer(out)
    assert (staging / "thesis.txt").read_text() == "mine"


def test_two_writers_on_one_output(out: Path) -> None:
    with writer(out), pytest.raises(StorageError, match=f"written by process {os.getpid()}"):
        writer(out)
    writer(out).close()  # the lock of a writer that is gone is taken over


def test_existing_outputs(golden: ModuleType, out: Path) -> None:
    golden.build(out)
    with pytest.raises(StorageError, match="already holds an artifact"):
        golden.build(out)
    stale = out / "model-00009-of-00009.safetensors"
    stale.write_bytes(b"stale")
    golden.build(out, overwrite=True)
    assert not stale.exists()
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]

    (out / MANIFEST_NAME).unlink()
    with pytest.raises(StorageError, match="other things in it"):
        writer(out, overwrite=True)
    shutil.rmtree(out)
    out.write_text("a file")
    with pytest.raises(StorageError, match="not a directory"):
        writer(out)


def test_overwrite_without_directory_exchange(
    golden: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
    golden.build(out)
    golden.build(out, overwrite=True)
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_the_source_is_never_written_to(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for out in (source, source / "quantized", tmp_path):
        with pytest.raises(StorageError, match="overlap"):
            writer(out, source_path=source, overwrite=True)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(StorageError, match="overlap"):
        writer(tmp_path / "link" / "inside", source_path=source)
    assert list(source.iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("is_foreseen", [True, False], ids=["statvfs", "ENOSPC"])
def test_disk_full(tiny_disk: Path, is_foreseen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_foreseen:
        monkeypatch.setattr(durable, "_check_free", lambda path, needed: None)
    check_disk_full(tiny_disk / "out")


def test_disk_full_injected(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = durable._chunks

    def full(tensor: torch.Tensor) -> Iterator[memoryview]:
        if tensor.numel() > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        yield from real(tensor)

    monkeypatch.setattr(durable, "_chunks", full)
    check_disk_full(out)


def check_disk_full(out: Path) -> None:
    with writer(out) as first:
        first.write_shard(0, SHARD)
        with pytest.raises(StorageError, match=r"needs 2,000,\d+ bytes, [\d,]+ are free.*resume"):
            first.write_shard(1, {"b.weight": torch.zeros(500_000)})
        assert first.committed == {0}
        with pytest.raises(IntegrityError, match="shard 1 has not been written"):
            first._load_records()
    assert not out.exists()
    assert not list(staging(out).rglob("*.tmp"))
    with pytest.raises(ManifestError, match="is unfinished"):
        open_artifact(staging(out))
    with writer(out) as second:
        assert second.committed == {0}


def test_unwritable_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written: Not a directory"):
        writer(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    "name",
    ["config.json", MANIFEST_NAME, "model.safetensors", "../up", "/etc/x", "", "a/../../b"],
)
def test_file_names_that_are_not_the_callers(out: Path, name: str) -> None:
    with writer(out) as job, pytest.raises(ValueError, match="cannot be added"):
        job.write_file(name, b"")


def shards(golden: ModuleType, job: ArtifactWriter) -> None:
    job.write_shard(0, golden.outer_tensors())
    for layer in range(golden.NUM_LAYERS):
        job.write_shard(layer + 1, golden.layer_tensors(layer))


def test_seal_refuses_what_does_not_fit_together(golden: ModuleType, out: Path) -> None:
    manifest = golden.manifest()
    with writer(out, num_shards=golden.NUM_SHARDS) as job:
        shards(golden, job)
        with pytest.raises(ManifestError, match="tie_word_embeddings is true"):
            job.seal(manifest, {**golden.CONFIG, "tie_word_embeddings": True})
        extra = manifest.modules | {"model.layers.2.mlp.up_proj": manifest.modules["lm_head"]}
        with pytest.raises(IntegrityError, match=r"layers\.2\.mlp\.up_proj\.weight.*missing"):
            job.seal(manifest.model_copy(update={"modules": extra}), golden.CONFIG)
        job.write_shard(1, {**golden.layer_tensors(0), **golden.outer_tensors()})
        with pytest.raises(IntegrityError, match=r"lm_head\.weight is in .*00001.* and in .*00002"):
            job.seal(manifest, golden.CONFIG)
        job.write_shard(1, golden.layer_tensors(0))
        mixed = dict(manifest.modules)
        name = "model.layers.0.self_attn.k_proj"
        mixed[name] = mixed[name].model_copy(update={"scheme": "w8a8-channel"})
        with pytest.raises(SchemeError, match="same scheme"):
            job.seal(manifest.model_copy(update={"modules": mixed}), golden.CONFIG)
        assert not out.exists()
        assert not list(staging(out).rglob("config.json"))
        assert job.seal(manifest, golden.CONFIG).path == out


def test_a_tied_head_is_written_down(golden: ModuleType, out: Path) -> None:
    tied_to = "model.embed_tokens.weight"
    manifest = golden.manifest()
    modules = dict(manifest.modules)
    modules["lm_head"] = modules["lm_head"].model_copy(update={"tied_to": tied_to})
    outer = {k: v for k, v in golden.outer_tensors().items() if not k.startswith("lm_head")}
    with writer(out, num_shards=golden.NUM_SHARDS) as job:
        shards(golden, job)
        job.write_shard(0, outer)
        tied = manifest.model_copy(update={"modules": modules})
        with pytest.raises(
            ManifestError, match="tie_word_embeddings is false, but lm_head is tied"
        ):
            job.seal(tied, golden.CONFIG)
        artifact = job.seal(tied, {**golden.CONFIG, "tie_word_embeddings": True})
    weight = artifact.weight("lm_head")
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, outer[tied_to])


def test_a_dense_artifact_has_no_quantization_config(out: Path, golden: ModuleType) -> None:
    """A25: what is skipped is stored in float, equal to the source."""
    weight = torch.randn(8, 8)
    manifest = golden.manifest().model_copy(
        update={
            "schemes": scheme_tables({"lm_head": DENSE}),
            "modules": {"lm_head": ModuleRecord(scheme="dense", shape=(8, 8))},
            "kv_cache": None,
        }
    )
    with writer(out, num_shards=1) as job:
        job.write_shard(0, {"lm_head.weight": weight})
        artifact = job.seal(manifest, {"model_type": "llama", "quantization_config": {"old": 1}})
    assert "quantization_config" not in artifact.config
    assert torch.equal(artifact.weight("lm_head"), weight)
