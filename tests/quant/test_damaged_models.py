"""Models damaged in every part that can be: one clear error, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.api import quantize
from quant.artifact.artifact import open_artifact, verify
from quant.artifact.errors import SchemeError
from quant.errors import AlreadyQuantizedError, SourceError
from quant.source import open_source

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model_copy(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny Llama that the test may spoil."""
    return shutil.copytree(tiny_model(), tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "abc"), ("hidden_size", -64), ("num_hidden_layers", 0),
        ("num_hidden_layers", 1.5), ("num_hidden_layers", -1), ("num_attention_heads", 0),
        ("num_attention_heads", 7), ("vocab_size", -1), ("pad_token_id", 99_999),
        ("rope_parameters", {"rope_type": "bogus", "rope_theta": 1e4}), ("rope_parameters", 5),
        ("hidden_act", "bogus"), ("tie_word_embeddings", "yes"), ("head_dim", 15),
        ("text_config", {"a": 1}), ("rms_norm_eps", "x"),
    ],
)  # fmt: skip
def test_configs_that_make_no_model(model_copy: Path, key: str, value: object) -> None:
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(SourceError, match=r"model: config\.json (describes no model|has num_hid)"):
        open_source(str(model_copy))


@pytest.mark.parametrize("section", ["gptq", ["x"], 5, {"bits": 4}])
def test_any_quantization_section_is_refused(model_copy: Path, section: object) -> None:
    config = json.loads((model_copy / "config.json").read_text())
    data = {**config, "quantization_config": section}
    (model_copy / "config.json").write_text(json.dumps(data))
    with pytest.raises(AlreadyQuantizedError, match="already quantized"):
        open_source(str(model_copy))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("raw", [b"", b"{", b"null", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_garbled_json_names_the_file(model_copy: Path, file: str, raw: bytes) -> None:
    (model_copy / file).write_bytes(raw)
    with pytest.raises(SourceError, match=file.replace(".", r"\.")):
        open_source(str(model_copy))


@pytest.mark.parametrize(
    ("file", "raw"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"null"),
        ("tokenizer.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_garbled_tokenizers_leave_nothing_behind(model_copy: Path, file: str, raw: bytes) -> None:
    (model_copy / file).write_bytes(raw)
    out = model_copy.parent / "art"
    with pytest.raises(SourceError, match="the tokenizer cannot be loaded"):
        quantize(model_copy, "fp8.yaml", out=out)
    assert [p.name for p in model_copy.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (Q_PROJ, torch.ones(64, 64, dtype=torch.int8), "is int8, so it holds codes"),
        (Q_PROJ, torch.ones(64, 64).to(torch.float8_e4m3fn), "is float8_e4m3fn, so it holds"),
        (Q_PROJ.replace("weight", "input_scale"), torch.ones(1), "codes or scales"),
        ("model.layers.0.self_attn.k_scale", torch.ones(1), "codes or scales"),
        (Q_PROJ.replace("weight", "qzeros"), torch.ones(1), "codes or scales"),
        (Q_PROJ.replace("0", "9"), torch.ones(64, 64), "1 tensors lie beyond the 2 layers"),
    ],
)
def test_tensors_that_are_no_weights_of_this_model(
    model_copy: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    path = model_copy / "model.safetensors"
    save_file({**load_file(path), name: tensor}, path, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=message):
        open_source(str(model_copy))


@pytest.mark.parametrize("name", ["", "z" * 300, "~no-such-user/model", "foo/bar..baz", "a--b/c"])
def test_names_that_cannot_be_looked_up(name: str) -> None:
    with pytest.raises(SourceError):
        open_source(name)


def test_a_tokenizer_of_a_larger_model_is_refused(model_copy: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((model_copy / "tokenizer.json").read_text())
    last = {"id": 900, "content": "Agreement", "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    tokenizer["model"]["vocab"].update({f"<fill{i}>": i for i in range(300, 900)})
    tokenizer["added_tokens"].append(last)
    (model_copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SourceError, match=r"makes the id 900, but the model has 300 embeddings"):
        quantize(model_copy, "fp8.yaml", out=tmp_path / "art")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_further_chat_templates_are_kept(model_copy: Path, tmp_path: Path) -> None:
    folder = model_copy / "additional_chat_templates"
    folder.mkdir()
    before = open_source(str(model_copy)).digest
    (folder / "tool_use.jinja").write_text("{{ messages }}")
    assert open_source(str(model_copy)).digest != before
    art = quantize(model_copy, "fp8.yaml", out=tmp_path / "art")
    assert (art / "additional_chat_templates/tool_use.jinja").read_text() == "{{ messages }}"
    assert verify(art) == []


def test_kv_scales_that_do_not_fit_name_the_way_out(model_copy: Path, tmp_path: Path) -> None:
    path = model_copy / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.v_proj.weight"
    save_file({**tensors, name: tensors[name] * 1e9}, path, metadata={"format": "pt"})
    recipe, calib = tmp_path / "r.yaml", tmp_path / "c.jsonl"
    recipe.write_text("scheme: dense\nmethod: none\nkv_cache: fp8\ndtype: bfloat16\n")
    calib.write_text('{"text": "The fee is due in thirty days."}\n')
    art = quantize(model_copy, recipe, calib, out=tmp_path / "art")
    assert open_artifact(art).kv_scales(1) is not None
    with pytest.raises((SchemeError, SourceError), match="does not fit torch.float16"):
        quantize(model_copy, recipe, calib, out=tmp_path / "art16", dtype="float16")
