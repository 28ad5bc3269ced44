"""What an artifact keeps of its source: every tensor accounted for, files as they were when the run
began, the chat template, tied weights stored once."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quant.api import carry_out, prepare
from quant.artifact.artifact import open_artifact
from quant.artifact.layout import tensor_names
from quant.source import open_source

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How long is the term?"},
]


def made(model: Path, out: Path, recipe: str = "w8a16.yaml") -> Path:
    job = prepare(str(model), recipe, out=out, overrides={"method": "rtn"})
    return Path(carry_out(job).artifact)


def test_every_source_tensor_is_quantized_copied_or_on_the_drop_list(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    path = model / "model.safetensors"
    extra = {
        "model.mtp.head.weight": torch.ones(3, 4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    source = open_source(str(model))
    artifact = open_artifact(made(model, tmp_path / "art"))
    quantized = {m: s for m, s in artifact.schemes().items() if not s.is_dense}
    stands_for = {f"{module}.weight" for module in quantized}
    parts = {f"{m}.{leaf}" for m, scheme in quantized.items() for leaf in tensor_names(scheme)}
    kept = set(artifact.reader.names) - parts
    assert len(quantized) == 14
    assert kept | stands_for | set(source.dropped()) == set(source.names)
    assert not kept & stands_for
    for name in kept:
        assert torch.equal(artifact.reader.tensor(name), source.raw_tensor(name)), name


def test_a_tied_weight_is_stored_once_and_stays_tied(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also from a checkpoint that stores the head beside the embedding."""
    model = shutil.copytree(tiny_model(tie_word_embeddings=True), tmp_path / "model")
    path = model / "model.safetensors"
    tensors = load_file(path)
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, path, metadata={"format": "pt"})
    out = tmp_path / "art"
    carry_out(prepare(str(model), "none.yaml", out=out, overrides={}))
    artifact = open_artifact(out)
    assert "lm_head.weight" not in artifact.reader.names
    assert artifact.config["tie_word_embeddings"] is True
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (model, out)
        )
    assert torch.equal(before, after)


def test_files_are_those_of_the_start_of_the_run(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Someone empties the source's folder while layers are being quantized."""
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    expected = open_source(str(model)).files()

    class Spoil:
        def start(self, total_layers: int) -> None:
            return

        def layer(self, index: int, text: str) -> None:
            if index == 1:
                (model / "chat_template.jinja").unlink()
                (model / "tokenizer_config.json").write_text("{}")

        def done(self) -> None:
            return

    job = prepare(str(model), "w8a16.yaml", out=tmp_path / "art", overrides={"method": "rtn"})
    carry_out(job, progress=Spoil())
    for name, data in expected.items():
        assert (tmp_path / "art" / name).read_bytes() == data, name


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_the_chat_template_renders_alike(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], generation_prompt: bool
) -> None:
    def digest(folder: Path) -> str:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=generation_prompt
        )
        assert "How long is the term?" in text
        return hashlib.sha256(text.encode()).hexdigest()

    model = tiny_model()
    assert digest(model) == digest(artifact(model, scheme="w8a16", group_size=32))
