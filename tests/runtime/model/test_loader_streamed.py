"""Reading ahead in threads: the same decoder, every byte checked, order and memory kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.errors import IntegrityError
from quant.artifact.store import CheckpointReader
from runtime.model import tensor_stream
from runtime.model.decoder import Decoder, Norms
from runtime.model.loader import LoadProgress, load_decoder
from runtime.model.tensor_stream import TensorStream

Make = Callable[..., Path]
CPU = torch.device("cpu")
LINEARS = ("qkv", "o", "gate_up", "down")


def load(artifact: Artifact, **options: Any) -> Any:
    return load_decoder(artifact, device="cpu", dtype=torch.float32, **options)


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots far smaller than a tensor and runs of few: every seam is crossed."""
    monkeypatch.setattr(tensor_stream, "SLOT_BYTES", 61)
    monkeypatch.setattr(tensor_stream, "_RUN_BYTES", 5000)
    monkeypatch.setattr(tensor_stream, "MAX_THREADS", 3)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", {"scheme": "w4a16", "group_size": 32, "symmetric": False}),
        ("qwen3", {"scheme": "w8a8"}),
        ("qwen2", {"scheme": "fp8", "skip": []}),
        ("gemma3_text", {"scheme": "dense", "method": "none", "skip": []}),
    ],
)
def test_a_streamed_decoder_is_the_mapped_one(
    family: str, recipe: dict[str, Any], tiny_model: Make, artifact: Make, small_slots: None
) -> None:
    opened = open_artifact(artifact(tiny_model(family), **recipe))
    mapped = load(opened)
    streamed = load(opened, is_streamed=True, digests=opened.tensor_digests())
    found, expected = parts(streamed), parts(mapped)
    assert len(found) == len(expected) >= 15
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert streamed.lm_head_scheme == mapped.lm_head_scheme


def parts(decoder: Decoder) -> list[torch.Tensor]:
    """Every weight of a decoder, as the kernels see them."""
    linears = [getattr(layer, name) for layer in decoder.layers for name in LINEARS]
    linears += [decoder.head] if decoder.head is not None else []
    norms = [getattr(layer.norms, f.name) for layer in decoder.layers for f in fields(Norms)]
    return [
        decoder.embedding_VE,
        decoder.final_norm,
        *(linear.reconstruct() for linear in linears),
        *(linear.bias for linear in linears if linear.bias is not None),
        *(norm for norm in norms if norm is not None),
    ]


def test_progress_counts_the_layers(tiny_model: Make, artifact: Make) -> None:
    opened = open_artifact(artifact(tiny_model("llama"), scheme="w4a16"))
    told: list[LoadProgress] = []
    for is_streamed in (False, True):
        load(opened, progress=told.append, is_streamed=is_streamed)
    assert [(p.layers, p.num_layers) for p in told] == [(1, 2), (2, 2)] * 2


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight_packed",
        "model.layers.0.self_attn.o_proj.weight_scale",
        "model.layers.0.mlp.down_proj.weight_shape",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.v_scale",
    ],
)
def test_an_altered_byte_stops_the_start_by_name(
    name: str, is_streamed: bool, tiny_model: Make, artifact: Make, tmp_path: Path
) -> None:
    made = artifact(tiny_model("llama"), scheme="w4a16", kv_cache="fp8", method="gptq")
    opened = open_artifact(shutil.copytree(made, tmp_path / "copy"))
    digests = opened.tensor_digests()
    load(opened, digests=digests, is_streamed=is_streamed)
    opened.reader.close()
    flip_lowest_bit(opened.reader, name)
    with pytest.raises(IntegrityError, match=rf"{name}: sha256 in .*do not use this copy"):
        load(opened, digests=digests, is_streamed=is_streamed)
    altered = open_artifact(opened.path)  # sizes and headers are those that were sealed
    if not name.endswith("weight_shape"):
        load(altered, is_streamed=is_streamed)


def flip_lowest_bit(reader: CheckpointReader, name: str) -> None:
    stored = reader.stored(name)
    with (reader.directory / stored.file).open("r+b") as file:
        file.seek(stored.start)
        byte = file.read(1)[0]
        file.seek(stored.start)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointReader:
    """Ten tensors of odd sizes and several types in one file."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {
        f"t{i}": torch.randn(3 + i, 7, generator=generator).to(dtype)
        for i, dtype in enumerate(
            [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float16] * 2
        )
    }
    save_file({**tensors, "shape": torch.tensor([3, 7])}, tmp_path / "model.safetensors")
    return CheckpointReader(tmp_path)


def test_groups_come_in_order_with_few_ahead(
    checkpoint: CheckpointReader, small_slots: None
) -> None:
    groups = [["t9", "t0"], *([f"t{i}"] for i in range(1, 9))]
    with TensorStream(checkpoint, groups, CPU, resident=1) as stream:
        for name in ("t1", "t2", "t3", "t7", "t0", "t8", "t9"):
            found = stream.tensor(name)
            assert torch.equal(found.view(torch.uint8), checkpoint.tensor(name).view(torch.uint8))
            held = [g for g in stream._placed if g]
            assert len(held) <= tensor_stream.GROUPS_AHEAD + 1
        stream.finish()


def test_shapes_stay_on_the_host(checkpoint: CheckpointReader) -> None:
    with TensorStream(checkpoint, [["shape", "t0"]], torch.device("cpu")) as stream:
        assert stream.tensor("shape").tolist() == [3, 7]


def test_a_file_that_shrinks_meanwhile_is_reported(checkpoint: CheckpointReader) -> None:
    path = checkpoint.directory / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 20)
    last = max(checkpoint.names, key=lambda name: checkpoint.stored(name).stop)
    with TensorStream(checkpoint, [[last]], CPU) as stream, pytest.raises(
        IntegrityError, match=r"ended at byte \d+ while it was read"
    ):  # fmt: skip
        stream.tensor(last)


def test_leaving_early_ends_the_threads(checkpoint: CheckpointReader) -> None:
    groups = [[name] for name in checkpoint.names]
    stream = TensorStream(checkpoint, groups, CPU)
    with pytest.raises(KeyboardInterrupt), stream:
        raise KeyboardInterrupt
    assert stream._pool._shutdown


def test_all_that_is_altered_is_counted(tiny_model: Make, artifact: Make) -> None:
    opened = open_artifact(artifact(tiny_model("llama"), scheme="w4a16"))
    digests = dict.fromkeys(opened.tensor_digests(), "0" * 64)
    with pytest.raises(IntegrityError, match=r"\(\d+ more problems\)"):
        load(opened, digests=digests)
