"""Sources: what is read, what is kept, what is refused and how it is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quant.artifact.errors import ArtifactError, IntegrityError, UnsafeCheckpointError
from quant.errors import (
    AlreadyQuantizedError,
    NonFiniteError,
    SourceError,
    UnsupportedModelError,
)
from quant.modelling import FAMILIES
from quant.source import open_source


@pytest.fixture
def model_copy(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny Llama that the test may spoil."""
    return shutil.copytree(tiny_model(), tmp_path / "model")


def edit_json(path: Path, **changes: object) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layer_by_layer_is_the_full_forward(tiny_model: Callable[..., Path], family: str) -> None:
    """Masks (padding, sliding windows shorter than the text), rope and soft caps included."""
    directory = tiny_model(family)
    source = open_source(str(directory))
    skeleton = source.skeleton
    token_ids = torch.randint(3, 290, (2, 60), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[1, 41:] = False
    outer = source.tensors(skeleton.outer_names())
    hidden = next(skeleton.embed(outer, [token_ids]))
    for index in range(source.num_layers):
        layer = skeleton.build_layer(index, source.tensors(skeleton.layer_names(index)))
        hidden = skeleton.run_layer(index, layer, hidden, mask)
    with torch.no_grad(), skeleton.head(outer) as head:
        logits = head(inputs_embeds=hidden).logits
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=token_ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(logits[mask], expected[mask], rtol=0, atol=1e-6)


def test_everything_beside_the_weights_is_kept_verbatim(model_copy: Path) -> None:
    (model_copy / "NOTICE").write_bytes(b"\xff\x00 not text")
    kept = open_source(str(model_copy)).files()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "NOTICE",
                 "generation_config.json"):  # fmt: skip
        assert kept[name] == (model_copy / name).read_bytes()
    assert not {"config.json", "model.safetensors"} & set(kept)


def test_digest_follows_weights_and_tokenizer(model_copy: Path) -> None:
    first = open_source(str(model_copy)).digest
    assert open_source(str(model_copy)).digest == first
    edit_json(model_copy / "tokenizer_config.json", note="other")
    assert open_source(str(model_copy)).digest != first


def test_tied_head_and_old_buffers_are_on_the_drop_list(tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model(tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    copy = shutil.copytree(directory, directory.parent / "tied-with-head")
    edit_tensors(
        copy,
        **{
            "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "model.mtp.weight": torch.ones(3),
        },
    )
    source = open_source(str(copy))
    assert set(source.dropped()) == {
        "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
    }  # fmt: skip
    assert source.extra_names() == ("model.mtp.weight",)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(
    tiny_model: Callable[..., Path],
) -> None:
    """transformers 4 would drop it, transformers 5 keeps it."""
    directory = tiny_model(tie_word_embeddings=True)
    copy = shutil.copytree(directory, directory.parent / "two-heads")
    head = load_file(directory / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[3, 5] += 1
    edit_tensors(copy, **{"lm_head.weight": head})
    with pytest.raises(SourceError, match=r"lm_head\.weight is stored and is not .*false` there"):
        open_source(str(copy))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_name_the_tensor(model_copy: Path, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    bad = load_file(model_copy / "model.safetensors")[name]
    bad[3, 5] = value
    edit_tensors(model_copy, **{name: bad})
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 "):
        open_source(str(model_copy)).tensor(name)


def test_missing_and_misshapen_tensors(model_copy: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(model_copy, **{name: torch.ones(4, 64)})
    with pytest.raises(SourceError, match=r"k_proj\.weight has shape \[4, 64\].*\[16, 64\]"):
        open_source(str(model_copy))
    edit_tensors(model_copy, **{name: None})
    with pytest.raises(SourceError, match=r"1 tensors .* missing, the first is .*k_proj\.weight"):
        open_source(str(model_copy))


def test_truncated_weights(model_copy: Path) -> None:
    path = model_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="truncated"):
        open_source(str(model_copy))


def test_pickle_weights_are_refused(model_copy: Path) -> None:
    (model_copy / "model.safetensors").rename(model_copy / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpointError, match=r"pytorch_model\.bin"):
        open_source(str(model_copy))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(model_copy: Path, file: str) -> None:
    edit_json(model_copy / file, auto_map={"AutoModelForCausalLM": "modelling_x.X"})
    with pytest.raises(UnsafeCheckpointError, match=rf"{file} names code to run"):
        open_source(str(model_copy))


def test_unknown_architecture_names_the_supported(model_copy: Path) -> None:
    edit_json(model_copy / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM.*LlamaForCausalLM.*gemma3"):
        open_source(str(model_copy))


def test_quantized_models_are_refused(model_copy: Path) -> None:
    edit_json(model_copy / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(AlreadyQuantizedError, match="gptq"):
        open_source(str(model_copy))


def test_quantized_tensors_without_a_config_section_are_refused(model_copy: Path) -> None:
    edit_tensors(model_copy, **{"model.layers.0.mlp.up_proj.qweight": torch.ones(2)})
    with pytest.raises(AlreadyQuantizedError, match="qweight"):
        open_source(str(model_copy))


def test_our_own_quantized_artifact_is_refused(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    with pytest.raises(AlreadyQuantizedError, match="compressed-tensors"):
        open_source(str(artifact(tiny_model(), scheme="w4a16", group_size=32)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json and no .gguf"),
        (lambda d: (d / "config.json").write_text("{"), "not readable as JSON"),
        (lambda d: (d / "config.json").write_text("{}"), "no model_type"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)
def test_incomplete_directories(
    model_copy: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(model_copy)
    with pytest.raises(SourceError, match=message):
        open_source(str(model_copy))


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file or directory, and no hub id"):
        open_source(str(tmp_path / "nowhere"))
    (tmp_path / "weights.txt").write_text("x")
    with pytest.raises(SourceError, match=r"expected a model directory or a \.gguf file"):
        open_source(str(tmp_path / "weights.txt"))


def test_hub_ids_say_so_when_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(SourceError, match="the hub did not deliver it"):
        open_source("nobody/no-such-model")


def test_hub_snapshots_record_id_and_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    import huggingface_hub

    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / ("a1" * 20)
    shutil.copytree(tiny_model(), snapshot)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    source = open_source("acme/tiny")
    assert (source.name, source.revision) == ("acme/tiny", "a1" * 20)


def test_two_ggufs_in_a_directory_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(SourceError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        open_source(str(tmp_path))


def test_garbled_gguf(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(8))
    with pytest.raises((SourceError, ArtifactError), match=r"bad\.gguf"):
        open_source(str(path))
