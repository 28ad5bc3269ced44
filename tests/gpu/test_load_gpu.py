"""Loading on a GPU: what is packed there is what the files say, and memory is what it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.synth import synthesize
from quant.artifact.artifact import Artifact
from quant.artifact.errors import IntegrityError
from runtime.model.decoder import Decoder
from runtime.model.linear import Linear
from runtime.model.loader import load_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def make(tmp_path: Path, recipe: str, **changes: Any) -> Artifact:
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    return synthesize(str(shape), recipe, tmp_path / "art", device="cpu", changes=changes)


def load(artifact: Artifact, device: str, **options: Any) -> Decoder:
    return load_decoder(artifact, device=device, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("w4a16", {}),
        ("w4a16", {"group_size": 32, "symmetric": False}),
        ("w4a16", {"lm_head": "w8a16"}),
        ("w8a16", {}),
        ("w8a8", {}),
        ("fp8", {"kv_cache": "fp8"}),
        ("none", {}),
    ],
)
def test_what_is_packed_on_the_gpu_is_what_the_files_say(
    recipe: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    artifact = make(tmp_path, recipe, **changes)
    there = load(artifact, "cuda", digests=artifact.tensor_digests())
    here = load(artifact, "cpu")
    assert torch.equal(there.embedding_VE.cpu(), here.embedding_VE)
    assert torch.equal(there.final_norm.cpu(), here.final_norm)
    for found, expected in zip(there.layers, here.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            check_same(getattr(found, name), getattr(expected, name))
    assert there.head is not None
    assert here.head is not None
    check_same(there.head, here.head)


def check_same(found: Linear, expected: Linear) -> None:
    """But for where bfloat16 rounds: codes that went astray are off by far more."""
    torch.testing.assert_close(
        found.reconstruct().float().cpu(), expected.reconstruct().float(), rtol=2**-7, atol=0
    )


def test_nothing_of_what_was_on_its_way_stays(tmp_path: Path) -> None:
    """Twice the bytes of the file at most: weights, the rope table, what packing adds."""
    artifact = make(tmp_path, "none")
    num_bytes = sum(artifact.reader.stored(name).num_bytes for name in artifact.reader.names)
    before = torch.cuda.memory_allocated()
    decoder = load(artifact, "cuda")
    held = torch.cuda.memory_allocated() - before
    assert num_bytes <= held < 1.3 * num_bytes + (8 << 20)
    assert decoder.device.type == "cuda"


def test_an_altered_byte_stops_the_start(tmp_path: Path) -> None:
    artifact = make(tmp_path, "w8a8")
    name = "model.layers.4.mlp.up_proj.weight"
    stored = artifact.reader.stored(name)
    with (artifact.path / stored.file).open("r+b") as file:
        file.seek(stored.start + 11)
        byte = file.read(1)[0]
        file.seek(stored.start + 11)
        file.write(bytes([byte ^ 128]))
    with pytest.raises(IntegrityError, match=rf"{name}: sha256 in"):
        load(artifact, "cuda", digests=artifact.tensor_digests())
