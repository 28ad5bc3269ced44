"""Writing an artifact: shard by shard into a staging folder, then sealed in one rename.

The staging folder `<out>.partial` lies beside `<out>`. It holds job.json (what is being made), a
lock, one record per finished shard, and the folder `artifact` that becomes `<out>`. Until the
rename there is no config.json, index or artifact.json in it that a loader could take for a model.
A killed job leaves the staging folder behind, and the next writer of the same job resumes from it.
This module knows nothing of how weights are made.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Self

from safetensors.torch import load_file
from torch import Tensor

from quant.artifact.artifact import STAGING_SUFFIX, Artifact, open_artifact
from quant.artifact.dialect import quantization_config
from quant.artifact.durable import (
    WrittenShard,
    make_directory,
    move_into_place,
    remove_tree,
    remove_unfinished,
    storage_errors,
    write_file,
    write_safetensors,
)
from quant.artifact.errors import IntegrityError, StorageError
from quant.artifact.integrity import CONFIG_NAME, sha256_of
from quant.artifact.jsonio import canonical_json
from quant.artifact.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    TensorRecord,
    is_outside_digest,
)
from quant.artifact.store import DTYPES, INDEX_NAME

_STAGED = re.compile(r"lock|work|artifact|replaced|sealed|\..*\.tmp|shard-\d+\.json")
_SEALED = "sealed"
_WRITTEN_BY_SEAL = (CONFIG_NAME, INDEX_NAME, MANIFEST_NAME)


def shard_name(index: int, num_shards: int) -> str:
    """File name of shard `index` (from 0): model-00001-of-000NN.safetensors."""
    return f"model-{index + 1:05}-of-{num_shards:05}.safetensors"


class ArtifactWriter:
    """Stages an artifact's files; `seal` makes them the artifact `out`, all or nothing.

    `job` is a JSON-able identity of what is made (recipe, source, calibration, versions): a
    staging folder of the same job is resumed, one of another job is refused, or discarded when
    `overwrite` is set. An existing artifact at `out` is only replaced when `overwrite` is set,
    and stays untouched until `seal`. `source_path` is the checkpoint being read, which must not
    be written to. Raises StorageError for all of these and when another process is writing `out`.
    """

    def __init__(
        self,
        out: Path,
        *,
        num_shards: int,
        job: Mapping[str, Any],
        overwrite: bool = False,
        source_path: Path | None = None,
    ) -> None:
        self.out = Path(out).absolute()
        self.num_shards = num_shards
        _check_out(self.out, overwrite, source_path)
        self._staging = self.out.with_name(self.out.name + STAGING_SUFFIX)
        self._files = self._staging / "artifact"
        make_directory(self._staging)
        self._lock = _lock(self._staging / "lock", self.out)
        self._unlock = weakref.finalize(self, os.close, self._lock)
        try:
            self._resume_or_start({"job": dict(job), "num_shards": num_shards}, overwrite)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def work_dir(self) -> Path:
        """A folder for the job's own resumable state; it vanishes when the artifact is sealed."""
        path = self._staging / "work"
        make_directory(path)
        return path

    @property
    def committed(self) -> frozenset[int]:
        """Shards already durable, from this run or an earlier one of the same job."""
        return frozenset(i for i in range(self.num_shards) if self._is_committed(i))

    def write_shard(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one shard durably; on return it survives a kill. StorageError on a full disk."""
        assert 0 <= index < self.num_shards
        record = self._record_path(index)
        record.unlink(missing_ok=True)
        written = write_safetensors(self._shard_path(index), tensors)
        write_file(record, canonical_json(asdict(written)))

    def read_shard(self, index: int) -> dict[str, Tensor]:
        """The tensors of a committed shard."""
        assert self._is_committed(index), f"shard {index} is not committed"
        return load_file(self._shard_path(index))

    def write_file(self, name: str, data: bytes) -> None:
        """Add a file, verbatim: tokenizer, generation config, recipe, model card, report.

        `name` may have folders (`templates/tool.jinja`). ValueError for a name that leaves the
        artifact, names weights, or belongs to `seal` (config.json, the index, artifact.json).
        """
        parts = PurePosixPath(name).parts
        is_ours = name in _WRITTEN_BY_SEAL or name.endswith(".safetensors")
        if is_ours or not parts or parts[0] == "/" or ".." in parts:
            raise ValueError(f"{name!r} cannot be added: it is written by seal() or lies elsewhere")
        write_file(self._files / name, data)

    def seal(
        self,
        manifest: Manifest,
        config: Mapping[str, Any],
        describe: Callable[[Artifact], Mapping[str, str]] | None = None,
    ) -> Artifact:
        """Complete the artifact, check it, move it to `out` and open it there.

        Fills in the manifest's tensors and files; `config` is the model's config.json, whose
        quantization_config is made here. `describe` makes texts outside the digest (reports, the
        card) of what is complete but not yet at `out`, so that they appear with it. Raises the
        ArtifactError of whatever is inconsistent, in which case `out` is as it was.
        """
        try:
            complete = self._complete(manifest, config)
            for name, text in (describe(complete) if describe else {}).items():
                self.write_file(name, text.encode())
        except BaseException:
            for name in _WRITTEN_BY_SEAL:  # nobody may take what is staged for a model
                (self._files / name).unlink(missing_ok=True)
            raise
        write_file(self._sealed_marker, complete.digest.encode())
        move_into_place(self._files, self.out, self._staging / "replaced")
        self._remove_staging()
        return open_artifact(self.out)

    def _complete(self, manifest: Manifest, config: Mapping[str, Any]) -> Artifact:
        """Write config, index and manifest; check the whole and return it as it is staged."""
        shards = self._load_records()
        tensors = self._tensors(shards)
        self._write_json(CONFIG_NAME, self._config(manifest, config))
        self._write_json(INDEX_NAME, _index(tensors))
        files = self._file_records(shards)
        sealed = manifest.model_copy(update={"tensors": tensors, "files": files})
        write_file(self._files / MANIFEST_NAME, sealed.to_bytes())
        artifact = open_artifact(self._files)
        artifact.reader.close()
        return artifact

    def discard(self) -> None:
        """Give the job up: remove the staging folder. `out` is as it was."""
        self._remove_staging()

    def close(self) -> None:
        """Let go of the lock, keeping the staging folder for a later run to resume."""
        self._unlock()

    @property
    def _sealed_marker(self) -> Path:
        return self._staging / _SEALED

    def _shard_path(self, index: int) -> Path:
        return self._files / shard_name(index, self.num_shards)

    def _record_path(self, index: int) -> Path:
        return self._staging / f"shard-{index + 1:05}.json"

    def _is_committed(self, index: int) -> bool:
        shard, record = self._shard_path(index), self._record_path(index)
        if not (shard.is_file() and record.is_file()):
            return False
        return bool(_load_record(record).size == shard.stat().st_size)

    def _resume_or_start(self, identity: dict[str, Any], overwrite: bool) -> None:
        self._clear_finished()
        job_path = self._staging / "job.json"
        wanted = canonical_json(identity)
        if job_path.is_file() and job_path.read_bytes() != wanted:
            if not overwrite:
                raise StorageError(_other_job(self._staging, job_path, identity))
            _clear(self._staging)
        if not job_path.is_file():
            _check_ours(self._staging)
            _clear(self._staging)
            write_file(job_path, wanted)
        make_directory(self._files)
        remove_unfinished(self._files)

    def _clear_finished(self) -> None:
        """Drop the leftovers of a job that was killed after its artifact had been moved to out."""
        if _is_leftover(self._staging, self.out):
            _clear(self._staging)

    def _remove_staging(self) -> None:
        _clear(self._staging)
        remove_tree(self._staging)
        self.close()

    def _load_records(self) -> list[WrittenShard]:
        missing = sorted(set(range(self.num_shards)) - self.committed)
        if missing:
            raise IntegrityError(
                f"{self.out}: shard {missing[0]} has not been written "
                f"({len(missing)} of {self.num_shards} missing), so it cannot be sealed"
            )
        return [_load_record(self._record_path(i)) for i in range(self.num_shards)]

    def _config(self, manifest: Manifest, config: Mapping[str, Any]) -> dict[str, Any]:
        quantization = quantization_config(manifest.module_schemes(), kv=manifest.kv_scheme())
        complete = {key: value for key, value in config.items() if key != "quantization_config"}
        return {**complete, "quantization_config": quantization} if quantization else complete

    def _tensors(self, shards: list[WrittenShard]) -> dict[str, TensorRecord]:
        tensors: dict[str, TensorRecord] = {}
        for index, shard in enumerate(shards):
            file = shard_name(index, self.num_shards)
            for name, (dtype, shape, sha256) in shard.tensors.items():
                if name in tensors:
                    raise IntegrityError(f"tensor {name} is in {tensors[name].file} and in {file}")
                tensors[name] = TensorRecord(dtype=dtype, shape=shape, file=file, sha256=sha256)
        return tensors

    def _file_records(self, shards: list[WrittenShard]) -> dict[str, FileRecord]:
        """Every file the digest covers; the weight files' hashes were taken while writing."""
        records = {
            shard_name(index, self.num_shards): FileRecord(size=shard.size, sha256=shard.sha256)
            for index, shard in enumerate(shards)
        }
        for path in sorted(p for p in self._files.rglob("*") if p.is_file()):
            name = path.relative_to(self._files).as_posix()
            if name not in records and name != MANIFEST_NAME and not is_outside_digest(name):
                records[name] = FileRecord(size=path.stat().st_size, sha256=sha256_of(path))
        return records

    def _write_json(self, name: str, data: Any) -> None:
        write_file(self._files / name, canonical_json(data))


@contextmanager
def sole_maker(folder: Path, out: Path) -> Iterator[None]:
    """Hold `folder`, where what leads to `out` is kept; StorageError while another process does."""
    make_directory(folder)
    path = folder / "lock"
    lock = _lock(path, out)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def clear_leftovers(out: Path) -> None:
    """Remove what a run left beside `out` that was killed after its artifact had been moved there.

    A staging folder of anything else stays. StorageError while another process writes `out`.
    """
    staging = out.with_name(out.name + STAGING_SUFFIX)
    if not staging.is_dir():
        return
    lock = _lock(staging / "lock", out)
    try:
        if _is_leftover(staging, out):
            _clear(staging)
            remove_tree(staging)
    finally:
        os.close(lock)


def _is_leftover(staging: Path, out: Path) -> bool:
    """Whether `staging` only had to be removed: what was staged in it is the artifact at `out`."""
    marker, manifest = staging / _SEALED, out / MANIFEST_NAME
    if not manifest.is_file():
        return False
    if {path.name for path in staging.iterdir()} <= {"lock"}:
        return True
    return marker.is_file() and sha256_of(manifest) == marker.read_text()


def _clear(staging: Path) -> None:
    """Empty a staging folder but for its lock; the mark of a finished job goes last."""
    with storage_errors(staging):
        for path in sorted(staging.iterdir(), key=lambda path: path.name == _SEALED):
            if path.is_dir():
                remove_tree(path)
            elif path.name != "lock":
                path.unlink()


def _index(tensors: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """model.safetensors.index.json; total_size is of the tensors, as transformers counts it."""
    total = sum(DTYPES[t.dtype].itemsize * prod(t.shape) for t in tensors.values())
    return {
        "metadata": {"total_size": total},
        "weight_map": {name: record.file for name, record in tensors.items()},
    }


def _load_record(path: Path) -> WrittenShard:
    data = json.loads(path.read_bytes())
    tensors = {n: (dtype, tuple(shape), sha) for n, (dtype, shape, sha) in data["tensors"].items()}
    return WrittenShard(size=data["size"], sha256=data["sha256"], tensors=tensors)


def _check_out(out: Path, overwrite: bool, source_path: Path | None) -> None:
    if source_path is not None:
        _check_apart(out, Path(source_path))
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise StorageError(f"{out} exists and is not a directory; choose another output")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise StorageError(f"{out} is a folder with other things in it; choose another output")
    if not overwrite:
        raise StorageError(f"{out} already holds an artifact; choose another output or overwrite")


def _check_ours(staging: Path) -> None:
    """A folder that merely has the staging folder's name must not be cleared."""
    with storage_errors(staging):
        foreign = sorted(p.name for p in staging.iterdir() if not _STAGED.fullmatch(p.name))
    if foreign:
        raise StorageError(
            f"{staging} is where the artifact would be staged, but it holds {foreign[0]}, which is "
            "not of a quantization job; move it away or choose another output"
        )


def _check_apart(out: Path, source: Path) -> None:
    """The output must neither be, contain, nor lie inside the checkpoint that is being read."""
    here, there = out.resolve(), source.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise StorageError(
            f"the output {out} and the source {source} overlap, and the source must not be "
            "written to; choose another output"
        )


def _lock(path: Path, out: Path) -> int:
    """Take the lock file; it falls to the next writer as soon as its holder is gone."""
    while True:
        with storage_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise StorageError(
                f"{out} is being written by process {holder or 'unknown'}; wait for it or stop it"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise StorageError(f"{path} cannot be locked: {error.strerror}") from None
        if _is_same_file(descriptor, path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)
        make_directory(path.parent)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the lock taken is still the one others would find (it may just have been removed)."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _other_job(staging: Path, job_path: Path, identity: dict[str, Any]) -> str:
    try:
        found = json.loads(job_path.read_bytes())["job"]
        differing = list(_differences(found, json.loads(canonical_json(identity["job"]))))
    except (ValueError, KeyError, TypeError):
        differing = ["job.json unreadable"]
    return (
        f"{staging} holds an unfinished job that differs in: {', '.join(differing) or 'shards'}. "
        "Run that job again to finish it, start over with --no-resume, or name another --out"
    )


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """`recipe`, `tools.threads (4, now 2)`: keys that differ, with their values when short."""
    for key in sorted({*found, *wanted}):
        before, now = found.get(key), wanted.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from (f"{key}.{inner}" for inner in _differences(before, now))
        elif before != now:
            was, is_ = ("not given" if value is None else value for value in (before, now))
            values = f"{was}, now {is_}"
            yield f"{key} ({values})" if len(values) <= 60 else key
