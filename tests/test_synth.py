"""Random models of real shapes: complete artifacts, the same bytes again, text in and out."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.synth import main, synthesize
from eval.cli import main as evaluate
from quant.api import quantize
from quant.artifact.artifact import open_artifact, verify
from quant.errors import QuantError
from quant.random_model import SHAPES
from quant.random_tokenizer import made_up_tokenizer
from quant.source import open_source
from runtime.engine.engine import Engine
from runtime.model.loader import load_decoder
from runtime.model.spec import ModelSpec

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 608,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


VARIANTS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("w4a16", {}, {"w4a16-g64", "dense"}),
    ("w4a16", {"symmetric": False, "group_size": 32}, {"w4a16-g32-asym", "dense"}),
    ("w8a16", {"group_size": "channel", "kv_cache": "fp8"}, {"w8a16-channel", "dense"}),
    ("w8a8", {}, {"w8a8-channel", "dense"}),
    ("fp8", {"kv_cache": "fp8"}, {"fp8-channel", "dense"}),
    ("none", {}, {"dense"}),
    ("mixed", {}, {"w4a16-g64", "w8a16-g64", "dense"}),
    ("w4a16", {"lm_head": "w8a16"}, {"w4a16-g64", "w8a16-channel"}),
]


@pytest.mark.parametrize(("recipe", "changes", "labels"), VARIANTS)
def test_every_scheme_makes_a_sound_artifact_that_computes(
    shape: str, tmp_path: Path, recipe: str, changes: dict[str, Any], labels: set[str]
) -> None:
    made = synthesize(shape, recipe, tmp_path / "art", changes=changes, device="cpu")
    assert verify(made.path) == []
    assert {scheme.label for scheme in made.schemes().values()} == labels
    assert (made.kv_scales(0) is not None) == (changes.get("kv_cache") == "fp8")
    decoder = load_decoder(made, device="cpu", dtype=torch.float32)
    logits = decoder.logits(decoder.embedding_VE.new_ones(1, 64))
    assert torch.isfinite(logits).all()
    assert logits.unique().numel() > 500


def test_greedy_text_is_finite_and_every_id_is_text(shape: str, tmp_path: Path) -> None:
    from runtime.api import LLM

    llm = LLM(synthesize(shape, "w4a16", tmp_path / "art", device="cpu").path)
    answer = llm.chat([{"role": "user", "content": "hello"}], max_tokens=40, ignore_eos=True)
    assert len(answer.token_ids) == 40
    assert len(set(answer.token_ids)) > 5
    assert isinstance(llm.engine, Engine)
    assert answer.text


def test_the_weights_are_what_quantize_makes_of_the_lazy_source(shape: str, tmp_path: Path) -> None:
    made = synthesize(shape, "w4a16", tmp_path / "a", layers=2, seed=5, device="cpu")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("scheme: w4a16\nmethod: rtn\nskip: [lm_head]\n")
    out = quantize(f"synth:{shape}?seed=5&layers=2", recipe, out=tmp_path / "b")
    made_by_quantize = open_artifact(out, verify="full").manifest
    assert made_by_quantize.tensors == made.manifest.tensors
    assert made_by_quantize.probe is not None


def test_the_same_seed_is_the_same_artifact_and_another_is_not(shape: str, tmp_path: Path) -> None:
    one, same, other = (
        synthesize(shape, "w8a8", tmp_path / name, seed=seed, device="cpu", workers=workers)
        for name, seed, workers in (("a", 1, 1), ("b", 1, 3), ("c", 2, 1))
    )
    assert one.digest == same.digest != other.digest


def test_a_tensor_does_not_depend_on_what_was_read_before(shape: str) -> None:
    one, other = open_source(f"synth:{shape}"), open_source(f"synth:{shape}?seed=0")
    backwards = {name: other.tensor(name) for name in reversed(other.names)}
    assert all(torch.equal(one.tensor(name), backwards[name]) for name in one.names)
    assert len({float(one.tensor(name).float().sum()) for name in one.names}) > 20


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_the_shapes_have_the_published_sizes(name: str, parameters: int) -> None:
    source = open_source(f"synth:{name}")
    assert sum(prod(source.shape(tensor)) for tensor in source.names) == parameters
    assert source.num_bytes == 2 * parameters
    assert ModelSpec.from_config(source.config).num_layers == SHAPES[name]["num_hidden_layers"]


def test_a_layer_may_be_cut_off(shape: str) -> None:
    source = open_source(f"synth:{shape}?layers=1")
    assert source.num_layers == 1
    assert not any("layers.1." in name for name in source.names)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("synth:llama-9", "unknown shape 'llama-9'.*llama-3.1-8b"),
        ("synth:qwen3-14b?layers=0", "layers=0"),
        ("synth:qwen3-14b?layers=41", "the shape has 40"),
        ("synth:qwen3-14b?seed=one", "seed=one"),
        ("synth:qwen3-14b?size=2", "unknown key 'size'"),
        ("synth:qwen3-14b?seed=1&seed=2", "twice"),
        ("synth:qwen3-14b?seed", "key=value"),
        ("synth:nowhere/config.json", "not readable"),
        ("synth:qwen3-14b?tokenizer=nowhere", "no tokenizer.json"),
        ("synth:qwen3-14b?device=tpu", "tpu"),
    ],
)
def test_what_cannot_be_made_is_refused(model: str, says: str) -> None:
    with pytest.raises(QuantError, match=says):
        open_source(model)


def test_a_given_tokenizer_brings_its_ids(tiny_model: Any, shape: str) -> None:
    source = open_source(f"synth:{shape}?tokenizer={tiny_model()}")
    assert source.config["eos_token_id"] == source.tokenizer().eos_token_id
    assert "tokenizer.json" in source.files()


def test_the_made_up_tokenizer_knows_every_id_and_every_byte(shape: str) -> None:
    tokenizer = open_source(f"synth:{shape}").tokenizer()
    assert len(tokenizer) == TINY["vocab_size"]
    words = [tokenizer.decode([i]) for i in range(259, 608)]
    assert len(set(words)) == len(words)
    assert tokenizer.encode("".join(words)) == list(range(259, 608))
    text = "Zu\u0308rich \u00a75 \U0001f600\n\tx=1"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(QuantError, match="at least 259"):
        made_up_tokenizer(100)


def test_the_command_line_says_what_it_made_or_why_not(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--shape", shape, "--recipe", "fp8", "--out", str(tmp_path / "a"), "--device", "cpu"]
    assert main(command) == 0
    assert open_artifact(tmp_path / "a").digest in capsys.readouterr().out
    assert main(command) == 2
    assert "already holds an artifact" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--group-size", "64"]) == 2
    assert "scales whole channels" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["0", "-1", "two"])
def test_a_nonsense_number_of_workers_leaves_nothing(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    command = ["--shape", shape, "--recipe", "fp8", "--out", str(tmp_path / "a")]
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--workers", workers])
    assert f"'{workers}' is not a whole number from 1 on" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_random_weights_have_no_quality_to_judge(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthesize(shape, "w8a16", tmp_path / "a", device="cpu")
    with pytest.raises(SystemExit, match="2"):
        evaluate([str(tmp_path / "a")])
    assert "made of random weights (synth:" in " ".join(capsys.readouterr().err.split())
