"""Reading checkpoints: whatever is wrong with a file is said before a byte of it is mapped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quant.artifact.durable import write_safetensors
from quant.artifact.errors import ArtifactError, IntegrityError, UnsafeCheckpointError
from quant.artifact.store import INDEX_NAME, SINGLE_NAME, CheckpointReader, read_header

ONE = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3, dtype=torch.bfloat16)}
TWO = {"b.weight": torch.arange(6, dtype=torch.int32), "b.flag": torch.tensor(True)}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(ONE, tmp_path / SINGLE_NAME)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file(ONE, tmp_path / "s1.safetensors")
    save_file(TWO, tmp_path / "s2.safetensors")
    write_index(
        tmp_path, {**dict.fromkeys(ONE, "s1.safetensors"), **dict.fromkeys(TWO, "s2.safetensors")}
    )
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_single_file(single: Path) -> None:
    reader = CheckpointReader(single)
    assert reader.names == ("a.bias", "a.weight")
    assert (reader.shape("a.weight"), reader.dtype("a.bias")) == ((3, 4), torch.bfloat16)
    assert torch.equal(reader.tensor("a.weight"), ONE["a.weight"])
    assert "a.bias" in reader
    assert "missing" not in reader
    with pytest.raises(IntegrityError, match="tensor missing is missing"):
        reader.tensor("missing")


def test_shards(sharded: Path) -> None:
    reader = CheckpointReader(sharded)
    assert reader.files == ("s1.safetensors", "s2.safetensors")
    for name, tensor in {**ONE, **TWO}.items():
        assert torch.equal(reader.tensor(name), tensor)
    reader.close()
    assert torch.equal(reader.tensor("b.weight"), TWO["b.weight"])


def size_of(folder: Path) -> int:
    return (folder / SINGLE_NAME).stat().st_size


def test_truncated_and_padded_files_name_both_sizes(single: Path) -> None:
    path, whole = single / SINGLE_NAME, (single / SINGLE_NAME).read_bytes()
    for damaged, what in (
        (whole[:-10], rf"has {len(whole) - 10} bytes, its header asks for {len(whole)}.*truncated"),
        (whole[:40], r"has 40 bytes, its header alone needs \d+: it is truncated"),
        (whole[:4], "has 4 bytes; a safetensors file has at least 8"),
        (b"", "has 0 bytes; a safetensors file has at least 8"),
        (whole + b"x" * 100, rf"has {len(whole) + 100} bytes.*asks for {len(whole)}.*junk"),
        (b"\xff" * 64, "is not a safetensors file"),
        ((8).to_bytes(8, "little") + b"not json", "garbled safetensors header"),
        ((2).to_bytes(8, "little") + b"[]", "garbled safetensors header"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=what) as caught:
            CheckpointReader(single)
        assert SINGLE_NAME in str(caught.value)


def with_header(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "= 8 bytes, .* gives it 4"),
        ({"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}, "dtype F99"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "gap or overlap"),
        ({"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}, "garbled header entry"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}, "garbled header entry"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "garbled header entry"),
        ({"dtype": "F32", "shape": [2]}, "garbled header entry"),
        ("F32", "garbled header entry"),
    ],
)
def test_garbled_header_entries(tmp_path: Path, entry: object, message: str) -> None:
    with_header(tmp_path / SINGLE_NAME, {"t": entry}, b"12345678")
    with pytest.raises(IntegrityError, match=message):
        CheckpointReader(tmp_path)


@given(data=st.binary(max_size=200), keep=st.integers(0, 400))
@settings(max_examples=150, deadline=None)
def test_no_bytes_lead_to_anything_but_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, keep: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    save_file(ONE, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep] + data + whole[keep + len(data) :])
    message = ""
    try:
        read_header(path)
    except IntegrityError as error:
        message = str(error)
    assert not message or path.name in message


def test_index_and_shards_must_agree(sharded: Path) -> None:
    good = json.loads((sharded / INDEX_NAME).read_text())["weight_map"]
    write_index(sharded, {**good, "c.weight": "s2.safetensors"})
    with pytest.raises(IntegrityError, match=r"c\.weight is missing from s2\.safetensors"):
        CheckpointReader(sharded)
    write_index(sharded, {name: file for name, file in good.items() if name != "b.flag"})
    with pytest.raises(IntegrityError, match=r"s2\.safetensors holds tensor b\.flag, which"):
        CheckpointReader(sharded)
    write_index(sharded, {**good, "b.flag": "s1.safetensors"})
    with pytest.raises(IntegrityError, match=r"b\.flag"):
        CheckpointReader(sharded)
    write_index(sharded, good)
    (sharded / "s2.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"s2\.safetensors is missing"):
        CheckpointReader(sharded)
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(IntegrityError, match=f"{INDEX_NAME} is missing"):
        CheckpointReader(sharded)


@pytest.mark.parametrize("bad", [{}, [], None, {"a": 3}, {"a": "../up.safetensors"}])
def test_garbled_index(sharded: Path, bad: object) -> None:
    write_index(sharded, bad)
    with pytest.raises(IntegrityError, match=INDEX_NAME):
        CheckpointReader(sharded)
    (sharded / INDEX_NAME).write_text("{")
    with pytest.raises(IntegrityError, match="is garbled"):
        CheckpointReader(sharded)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsafeCheckpointError, match=r"pytorch_model\.bin.*Convert"):
        CheckpointReader(tmp_path)
    write_index(tmp_path, {"a": "pytorch_model.bin"})
    with pytest.raises(UnsafeCheckpointError, match="refused"):
        CheckpointReader(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="holds neither"):
        CheckpointReader(tmp_path)
    with pytest.raises(ArtifactError, match="is not a directory"):
        CheckpointReader(tmp_path / "absent")


def test_what_we_write_is_what_safetensors_reads(tmp_path: Path) -> None:
    odd = torch.arange(8, dtype=torch.int8).reshape(1, 8).T  # strides that are not C order
    tensors = {
        **ONE,
        **TWO,
        "odd": odd,
        "empty": torch.empty(0, 3),
        "one": torch.ones(4, 4, dtype=torch.bfloat16)[:1, :1],
        "fp8": torch.linspace(-4, 4, 9).to(torch.float8_e4m3fn),
    }
    write_safetensors(tmp_path / SINGLE_NAME, tensors)
    reader = CheckpointReader(tmp_path)
    assert reader.names == tuple(sorted(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name).float(), tensor.float())
    first = (tmp_path / SINGLE_NAME).read_bytes()
    write_safetensors(tmp_path / SINGLE_NAME, dict(reversed(tensors.items())))
    assert (tmp_path / SINGLE_NAME).read_bytes() == first
