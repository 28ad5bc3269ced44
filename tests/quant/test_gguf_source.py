"""GGUF sources: bit-equal to transformers' reading, for a tiny file and for the real model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from tokenizers import decoders
from transformers import AutoModelForCausalLM

from quant import gguf_source
from quant.errors import SourceError, UnsupportedModelError
from quant.gguf_reading import QuickReader, parsed_for_transformers
from quant.gguf_source import LEAVES, OUTER, TWO_NORMS
from quant.modelling import load_tokenizer
from quant.source import open_source


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """q or k rows as llama.cpp's converter stores them: rope pairs side by side."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Path, *, extra: dict[str, np.ndarray] | None = None) -> None:
    """A llama.cpp-like file of a tiny Llama, its matrices in Q8_0."""
    names = {v: k for k, v in {**LEAVES, **TWO_NORMS}.items()}
    outer = {v: k for k, v in OUTER.items()}
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(160)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(300)
    tokens = [*"abcdefgh", "ab", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(9)
    for name, value in load_file(model / "model.safetensors").items():
        leaf = name.removesuffix(".weight").split(".", 3)[-1]
        if name not in outer and leaf.endswith(("q_proj", "k_proj")):
            value = permuted(value, 8 if leaf.endswith("q_proj") else 2)
        target = outer.get(name) or f"blk.{name.split('.')[2]}.{names[leaf]}.weight"
        data = value.float().numpy()
        if data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, data)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers_weights(path: Path) -> dict[str, torch.Tensor]:
    from transformers import GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )  # fmt: skip
    return model.state_dict()


def test_tiny_gguf_is_what_transformers_reads(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    source = open_source(str(tmp_path))
    expected = transformers_weights(path)
    assert set(source.names) == set(expected)
    for name in source.names:
        assert torch.equal(source.tensor(name), expected[name]), name
    original = load_file(tiny_model() / "model.safetensors")
    close = source.tensor("model.layers.1.self_attn.q_proj.weight")
    torch.testing.assert_close(
        close, original["model.layers.1.self_attn.q_proj.weight"], rtol=0, atol=0.02
    )
    assert source.config["architectures"] == ["LlamaForCausalLM"]
    assert source.config["tie_word_embeddings"] is False


def test_one_parse_serves_transformers_as_its_own_would(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path, other = tmp_path / "tiny.gguf", tmp_path / "other.gguf"
    write_gguf(path, tiny_model())
    shutil.copy(path, other)
    own, quick = gguf.GGUFReader(path), QuickReader(path)
    assert {k: f.contents() for k, f in quick.fields.items()} == {
        k: f.contents() for k, f in own.fields.items()
    }
    for ours, theirs in zip(quick.tensors, own.tensors, strict=True):
        assert (ours.name, ours.tensor_type) == (theirs.name, theirs.tensor_type)
        assert ours.shape.tolist() == theirs.shape.tolist()
        assert np.array_equal(ours.data, theirs.data)
    with parsed_for_transformers(path, quick):
        assert gguf.GGUFReader(str(path)) is quick
        assert gguf.GGUFReader(other) is not quick
    assert gguf.GGUFReader is type(own)


def test_files_are_made_once_and_alike(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    first, second = (open_source(str(path)).files() for _ in range(2))
    assert first == second
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(first)


def test_what_the_file_says_of_its_tokenizer_outranks_transformers(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some releases take the first special token for the end of text and mix up two decoders."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model())
    right = open_source(str(path)).tokenizer()

    def confused(*args: Any, **options: Any) -> Any:
        tokenizer = load_tokenizer(*args, **options)
        tokenizer.eos_token = "<|endoftext|>"
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()]
        )
        return tokenizer

    monkeypatch.setattr(gguf_source, "load_tokenizer", confused)
    source = open_source(str(path))
    assert source.tokenizer().eos_token == right.eos_token != "<|endoftext|>"
    assert json.loads(source.files()["tokenizer.json"])["decoder"]["type"] == "ByteLevel"
    assert json.loads(source.files()["tokenizer_config.json"])["eos_token"] == right.eos_token


def test_rope_factors_in_a_gguf_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model(), extra={"rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        open_source(str(path))


@pytest.mark.slow
def test_the_real_model_is_what_transformers_reads(smollm2_gguf: Path) -> None:
    source = open_source(str(smollm2_gguf))
    with parsed_for_transformers(smollm2_gguf):
        expected = transformers_weights(smollm2_gguf)
    assert set(expected) - set(source.names) == {"lm_head.weight"}
    for name in source.names:
        if ".layers." not in name or ".layers.0." in name or ".layers.29." in name:
            assert torch.equal(source.tensor(name), expected[name]), name


def test_garbled_metadata_never_escapes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(path, tiny_model())
    whole = path.read_bytes()
    at = whole.index(b"llama.attention.head_count") + len(b"llama.attention.head_count") + 4
    for spoiled in (
        whole[:at] + (7).to_bytes(4, "little") + whole[at + 4 :],  # 64 is no multiple of 7
        whole[:at],
        whole[:200],
        whole[:-5000],
    ):
        path.write_bytes(spoiled)
        with pytest.raises(SourceError, match=r"bad\.gguf"):
            open_source(str(path))
