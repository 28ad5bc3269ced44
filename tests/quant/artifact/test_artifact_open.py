"""Opening, verifying and summarizing artifacts, sound and damaged; the golden one frozen."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from quant.artifact.artifact import open_artifact, verify
from quant.artifact.errors import (
    ArtifactError,
    FormatVersionError,
    IntegrityError,
    ManifestError,
    SchemeError,
    UnsafeCheckpointError,
)
from quant.artifact.layout import QuantizedWeight, dequantize
from quant.artifact.shipped import shipped_dir
from quant.artifact.stamp import (
    MetricRecord,
    Numerics,
    Stamp,
    judged_by,
    read_stamp,
    write_stamp,
)
from quant.artifact.store import INDEX_NAME
from quant.artifact.summary import inspect
from quant.inspect_table import render_inspection

SHARD = "model-00002-of-00003.safetensors"
SCALE = "model.layers.0.mlp.up_proj.weight_scale"
GOLDEN_DIGEST = "ace92dd5c4932bbf6c7de7861381db883244f20aab8e7678603e48944e9e569a"

# Of row 1: the first scale, and the first four values.
STATED = {
    "self_attn.q_proj": (0.0654296875, [0.0, 0.0654296875, 0.26171875, -0.45703125]),
    "self_attn.o_proj": (0.064453125, [-0.38671875, 0.0, -0.38671875, 0.322265625]),
    "mlp.up_proj": (0.0038604736328125, [0.296875, 0.007720947265625, -0.12353515625, 0.27734375]),
    "mlp.down_proj": (0.0011138916015625, [-0.080078125, -0.015625, 0.28515625, 0.3203125]),
}


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))


def seal_again(folder: Path, name: str) -> None:
    """Make artifact.json agree with an edited file, so that only deeper checks can object."""
    raw = (folder / name).read_bytes()
    record = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    edit_json(folder / "artifact.json", lambda data: data["files"].update({name: record}))


def drop_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / SHARD)
    del tensors[name]
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})


def drop_from_index(folder: Path, name: str) -> None:
    edit_json(folder / INDEX_NAME, lambda data: data["weight_map"].pop(name))


def test_the_golden_artifact_reads_to_stated_values(golden: ModuleType, golden_dir: Path) -> None:
    """A change of any of these is a change of the format."""
    artifact = open_artifact(golden_dir, verify="full")
    assert artifact.digest == GOLDEN_DIGEST
    assert artifact.manifest.format_version == "1.0"
    assert {name: scheme.label for name, scheme in artifact.schemes().items()} == {
        "lm_head": "dense",
        "model.layers.0.self_attn.q_proj": "w4a16-g32",
        "model.layers.0.self_attn.k_proj": "w4a16-g32",
        "model.layers.0.self_attn.v_proj": "w4a16-g32",
        "model.layers.0.self_attn.o_proj": "w4a16-g32-asym",
        "model.layers.0.mlp.gate_proj": "w8a8-channel",
        "model.layers.0.mlp.up_proj": "w8a8-channel",
        "model.layers.0.mlp.down_proj": "fp8-channel",
        "model.layers.1.self_attn.q_proj": "w4a16-g32-asym",
        "model.layers.1.self_attn.k_proj": "w4a16-g32-asym",
        "model.layers.1.self_attn.v_proj": "w4a16-g32-asym",
        "model.layers.1.self_attn.o_proj": "dense",
        "model.layers.1.mlp.gate_proj": "w4a16-g32",
        "model.layers.1.mlp.up_proj": "w4a16-g32",
        "model.layers.1.mlp.down_proj": "w8a16-channel",
    }
    assert artifact.kv_scales(1) == (0.0625, 0.03125)
    for module, (scale, values) in STATED.items():
        qw = artifact.weight(f"model.layers.0.{module}")
        assert isinstance(qw, QuantizedWeight)
        assert qw.scale.dtype == torch.bfloat16
        assert float(qw.scale[1, 0]) == scale
        weight = dequantize(qw)
        assert weight[1, :4].tolist() == values
        assert not weight[0].any()
        original = golden.weight(f"model.layers.0.{module}", qw.shape)
        assert (weight.float() - original).abs().max() < 0.04


def test_everything_sound_has_no_problems(golden_dir: Path) -> None:
    assert verify(golden_dir) == []
    artifact = open_artifact(golden_dir)
    assert artifact.stamp is None
    with pytest.raises(IntegrityError, match="has no module nowhere"):
        artifact.weight("nowhere")
    with pytest.raises(IntegrityError, match="no KV scales for layer 2"):
        artifact.kv_scales(2)


def test_missing_scale_is_named(artifact_dir: Path) -> None:
    """B01: from the shard and the index, from the shard only, from the index only."""
    drop_tensor(artifact_dir, SCALE)
    with pytest.raises(IntegrityError, match=re.escape(SCALE)):
        open_artifact(artifact_dir)
    drop_from_index(artifact_dir, SCALE)
    seal_again(artifact_dir, SHARD)
    seal_again(artifact_dir, INDEX_NAME)
    with pytest.raises(IntegrityError, match=rf"{re.escape(SCALE)}: the tensor is missing"):
        open_artifact(artifact_dir)
    edit_json(artifact_dir / "artifact.json", lambda data: data["tensors"].pop(SCALE))
    with pytest.raises(IntegrityError, match=rf"{re.escape(SCALE)}: the tensor is missing"):
        open_artifact(artifact_dir)


def test_scale_missing_from_the_index_only(artifact_dir: Path) -> None:
    drop_from_index(artifact_dir, SCALE)
    seal_again(artifact_dir, INDEX_NAME)
    with pytest.raises(IntegrityError, match=rf"{SHARD} holds tensor {re.escape(SCALE)}"):
        open_artifact(artifact_dir)


def test_missing_kv_scale_is_named(artifact_dir: Path) -> None:
    name = "model.layers.0.self_attn.v_scale"
    drop_tensor(artifact_dir, name)
    drop_from_index(artifact_dir, name)
    edit_json(artifact_dir / "artifact.json", lambda data: data["tensors"].pop(name))
    seal_again(artifact_dir, SHARD)
    seal_again(artifact_dir, INDEX_NAME)
    with pytest.raises(IntegrityError, match=rf"{re.escape(name)}: the tensor is missing"):
        open_artifact(artifact_dir)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1000], r"has \d+ bytes"),
        (lambda raw: raw[:4], "has 4 bytes"),
        (lambda raw: b"", "has 0 bytes"),
        (lambda raw: raw + b"x" * 100, r"has \d+ bytes"),
    ],
)
def test_damaged_shards(artifact_dir: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    """B03: the file and both sizes are named, and nothing is mapped."""
    path = artifact_dir / SHARD
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(IntegrityError, match=message) as caught:
        open_artifact(artifact_dir)
    assert SHARD in str(caught.value)
    assert any(SHARD in str(problem) for problem in verify(artifact_dir))


@pytest.mark.parametrize("name", ["config.json", "recipe.yaml", INDEX_NAME, SHARD])
def test_a_missing_file_is_listed_once(artifact_dir: Path, name: str) -> None:
    (artifact_dir / name).unlink()
    assert [str(problem) for problem in verify(artifact_dir)] == [f"{name}: the file is missing"]


def test_missing_shard(artifact_dir: Path) -> None:
    (artifact_dir / SHARD).unlink()
    with pytest.raises(IntegrityError, match=f"{SHARD} is missing"):
        open_artifact(artifact_dir)
    assert [p.subject for p in verify(artifact_dir)][0] == SHARD


def test_an_altered_byte_is_found_and_its_tensor_named(artifact_dir: Path) -> None:
    path = artifact_dir / SHARD
    raw = bytearray(path.read_bytes())
    where = open_artifact(artifact_dir).reader.stored(SCALE)
    raw[where.start] ^= 1
    path.write_bytes(raw)
    open_artifact(artifact_dir)  # fast: weights are not hashed
    with pytest.raises(IntegrityError, match=rf"sha256 is .*altered tensors: {re.escape(SCALE)};"):
        open_artifact(artifact_dir, verify="full")
    assert [problem.subject for problem in verify(artifact_dir)] == [SHARD]


@pytest.mark.parametrize("name", ["config.json", "recipe.yaml", "generation_config.json"])
def test_altered_small_files_are_found_by_the_fast_check(artifact_dir: Path, name: str) -> None:
    path = artifact_dir / name
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(IntegrityError, match=f"{name}: sha256 is"):
        open_artifact(artifact_dir)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("model-00004-of-00004.safetensors", IntegrityError),
        ("chat_template.jinja", IntegrityError),
        ("additional_chat_templates/tool.jinja", IntegrityError),
        ("tokenizer.json", IntegrityError),
        ("pytorch_model.bin", UnsafeCheckpointError),
    ],
)
def test_files_that_do_not_belong(
    artifact_dir: Path, name: str, error: type[ArtifactError]
) -> None:
    (artifact_dir / name).parent.mkdir(exist_ok=True)
    (artifact_dir / name).write_text("{}")
    with pytest.raises(error, match=f"{name}: .*remove it"):
        open_artifact(artifact_dir)


def test_reports_and_stamps_do_not_change_the_digest(artifact_dir: Path) -> None:
    for name in ("README.md", "report.json", "report.md", ".gitattributes"):
        (artifact_dir / name).write_text("{}")
    write_stamp(artifact_dir, stamp(GOLDEN_DIGEST))
    assert verify(artifact_dir) == []
    assert open_artifact(artifact_dir, verify="full").digest == GOLDEN_DIGEST


@pytest.mark.parametrize("version", ["2.0", "0.9", "10.1"])
def test_other_major_versions_are_refused(artifact_dir: Path, version: str) -> None:
    set_version(artifact_dir, version)
    with pytest.raises(FormatVersionError, match=rf"format version {version}; this build reads 1"):
        open_artifact(artifact_dir)


def set_version(folder: Path, version: object) -> None:
    edit_json(folder / "artifact.json", lambda data: data.update(format_version=version))


@pytest.mark.parametrize("version", [None, 1, "1", "one", ""])
def test_versions_that_are_none(artifact_dir: Path, version: object) -> None:
    set_version(artifact_dir, version)
    with pytest.raises(ManifestError, match='format_version is .*, expected "1.0"'):
        open_artifact(artifact_dir)


def test_newer_minor_versions_may_add_fields(artifact_dir: Path) -> None:
    def add(data: dict[str, Any]) -> None:
        data["novelty"] = {"x": 1}
        data["modules"]["lm_head"]["novelty"] = 2

    edit_json(artifact_dir / "artifact.json", add)
    with pytest.raises(ManifestError, match="novelty"):
        open_artifact(artifact_dir)
    set_version(artifact_dir, "1.7")
    assert open_artifact(artifact_dir).manifest.format_version == "1.7"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("modules"), "modules: Field required"),
        (lambda d: d["modules"]["lm_head"].update(scheme="w5"), "scheme 'w5', not in `schemes`"),
        (lambda d: d["schemes"]["dense"].update(layout="x"), r"schemes\.dense\.layout"),
        (lambda d: d["schemes"]["w4a16-g32"]["weights"].update(num_bits="4"), "num_bits"),
        (lambda d: d["schemes"]["w4a16-g32"]["weights"].update(num_bits=5), "4 or 8 bits, not 5"),
        (lambda d: d["modules"]["lm_head"].update(shape=[64]), r"modules\.lm_head\.shape"),
        (lambda d: d["probe"]["prompts"][0].update(top_ids=[1]), "differ in length"),
    ],
)
def test_garbled_manifests(
    artifact_dir: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_json(artifact_dir / "artifact.json", change)
    with pytest.raises(ManifestError, match=message):
        open_artifact(artifact_dir)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_manifests_that_are_no_json_object(artifact_dir: Path, text: str) -> None:
    (artifact_dir / "artifact.json").write_text(text)
    with pytest.raises(ManifestError, match=r"artifact\.json"):
        open_artifact(artifact_dir)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda q: q["config_groups"]["group_00"]["targets"].__setitem__(0, "model.other"),
            SchemeError,
            "'model.other' matches no module",
        ),
        (lambda q: q["ignore"].remove("lm_head"), None, ""),  # nothing targets it anyway
        (lambda q: q["ignore"].append("re:.*down_proj"), ManifestError, "says dense, .* says fp8"),
        (lambda q: q.update(kv_cache_scheme=None), ManifestError, "kv_cache_scheme and kv_cache"),
        (lambda q: q["config_groups"].pop("group_00"), ManifestError, "says dense"),
    ],
)
def test_config_and_manifest_must_agree(
    artifact_dir: Path,
    change: Callable[[dict[str, Any]], object],
    error: type[ArtifactError] | None,
    message: str,
) -> None:
    """B09: per-module schemes under another naming are an error, never a fallback."""
    edit_json(artifact_dir / "config.json", lambda data: change(data["quantization_config"]))
    seal_again(artifact_dir, "config.json")
    if error is None:
        open_artifact(artifact_dir)
    else:
        with pytest.raises(error, match=message):
            open_artifact(artifact_dir)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1.0])
def test_bad_scales_stop_the_weight(artifact_dir: Path, bad: float) -> None:
    tensors = load_file(artifact_dir / SHARD)
    tensors[SCALE][3, 0] = bad
    tensors["model.layers.0.self_attn.k_scale"][0] = bad
    save_file(tensors, artifact_dir / SHARD, metadata={"format": "pt"})
    seal_again(artifact_dir, SHARD)
    artifact = open_artifact(artifact_dir)
    with pytest.raises(IntegrityError, match=r"up_proj\.weight_scale has NaN, Inf or values <= 0"):
        artifact.weight("model.layers.0.mlp.up_proj")
    with pytest.raises(IntegrityError, match="expected a positive number"):
        artifact.kv_scales(0)


def test_what_is_not_an_artifact(artifact_dir: Path, tmp_path: Path) -> None:
    (artifact_dir / "artifact.json").unlink()
    with pytest.raises(ManifestError, match="compressed-tensors checkpoint without artifact.json"):
        open_artifact(artifact_dir)
    edit_json(artifact_dir / "config.json", lambda data: data.pop("quantization_config"))
    with pytest.raises(ManifestError, match=r"plain checkpoint.*method: none"):
        open_artifact(artifact_dir)
    (artifact_dir / "config.json").unlink()
    for path, message in (
        (artifact_dir, r"it has no artifact\.json"),
        (tmp_path / "absent", "there is no such directory"),
        (tmp_path / "m.gguf", "is a GGUF file"),
    ):
        with pytest.raises(ManifestError, match=message):
            open_artifact(path)
        with pytest.raises(ManifestError, match=message):
            verify(path)


def test_an_unfinished_artifact_is_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "art.partial").mkdir()
    with pytest.raises(
        ManifestError, match=r"no such directory, but .*art\.partial is an unfinished"
    ):
        open_artifact(tmp_path / "art")


def stamp(digest: str) -> Stamp:
    return Stamp(
        artifact_digest=digest,
        verdict="accepted",
        judged_at="2026-01-01T00:00:00Z",
        base="somewhere",
        gates_sha256="0" * 64,
        metrics=(MetricRecord(name="kl_mean", value=0.01, threshold=0.05, verdict="accepted"),),
        numerics=Numerics(
            device_class="cpu",
            compute_dtype="float32",
            kv_cache_dtype="fp8",
            lm_head_scheme="dense",
        ),
        summary="fine",
    )


def test_a_stamp_counts_only_for_the_bytes_it_judged(artifact_dir: Path) -> None:
    write_stamp(artifact_dir, stamp(GOLDEN_DIGEST))
    assert read_stamp(artifact_dir) == stamp(GOLDEN_DIGEST)
    assert open_artifact(artifact_dir).stamp == stamp(GOLDEN_DIGEST)
    write_stamp(artifact_dir, stamp("f" * 64))
    assert open_artifact(artifact_dir).stamp is None

    gate = artifact_dir / "gate.json"
    edit_json(gate, lambda data: data.update(verdict="maybe"))
    with pytest.raises(ManifestError, match="verdict.*run `evaluate` again"):
        read_stamp(artifact_dir)
    edit_json(gate, lambda data: data.update(format_version="2.0"))
    with pytest.raises(FormatVersionError, match=r"gate\.json has format version 2\.0"):
        read_stamp(artifact_dir)
    gate.write_text("{")
    with pytest.raises(ManifestError, match="not valid JSON"):
        read_stamp(artifact_dir)


def test_a_stamp_says_by_which_gates_it_was_given(
    artifact_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = stamp(GOLDEN_DIGEST)
    default = (shipped_dir("recipes") / "gates" / "default.yaml").read_bytes()
    shipped = own.model_copy(update={"gates_sha256": hashlib.sha256(default).hexdigest()})
    assert judged_by(shipped) == "default gates"
    assert judged_by(own) == "own gates (sha256 00000000...)"
    for given, expected in ((shipped, "by default gates against"), (own, "by own gates (sha256")):
        write_stamp(artifact_dir, given)
        shown = io.StringIO()
        summary = inspect(open_artifact(artifact_dir))
        Console(file=shown, width=200).print(render_inspection(summary))
        assert expected in shown.getvalue()
    monkeypatch.setattr("quant.artifact.stamp.shipped_dir", lambda kind: tmp_path / "absent")
    assert judged_by(shipped).startswith("gates with sha256 ")


def test_summary(golden_dir: Path) -> None:
    artifact = open_artifact(golden_dir)
    summary = inspect(artifact)
    by_label = {scheme.label: scheme for scheme in summary.schemes}
    assert sum(scheme.num_modules for scheme in summary.schemes) == len(artifact.schemes())
    w4 = by_label["w4a16-g32"]
    assert w4.num_modules == 5
    # 4 bits per code, 16 per scale of 32 codes, and 128 per weight_shape
    assert w4.num_bytes * 8 == w4.num_weights * (4 + 16 / 32) + w4.num_modules * 128
    assert by_label["fp8-channel"].bits_per_weight == 8 + 16 / 96
    assert by_label["dense"].bits_per_weight == 16
    weights = [p for p in golden_dir.iterdir() if p.suffix == ".safetensors"]
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in weights)
    assert summary.total_bytes == sum(p.stat().st_size for p in weights) - headers
    assert (summary.recipe_name, summary.methods) == ("golden", ("none", "rtn"))
    assert summary.stamp is None
