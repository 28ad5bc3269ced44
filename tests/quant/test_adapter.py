"""LoRA adapters: merged weights against PEFT's formulas in float64, logits against hooks that add
s B A x, and every way in which an adapter does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quant.adapter import AdapterSource, with_adapter
from quant.api import prepare, quantize
from quant.artifact.artifact import open_artifact
from quant.artifact.errors import UnsafeCheckpointError
from quant.artifact.summary import inspect
from quant.errors import QuantError, SourceError, UnsupportedModelError
from quant.source import open_source
from quant.synthetic import SyntheticSource

Q, DOWN = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"
SHAPES = {"q_proj": (64, 64), "down_proj": (64, 160)}
START = "base_model.model."


def modules() -> list[str]:
    return [name.format(i) for i in range(2) for name in (Q, DOWN)]


def lora_tensors(ranks: Callable[[str], int] = lambda _: 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name in modules():
        rows, width = SHAPES[name.rpartition(".")[2]]
        rank = ranks(name)
        found[f"{START}{name}.lora_A.weight"] = torch.randn(rank, width, generator=generator) / 9
        found[f"{START}{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 9
    return found


def save_adapter(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "acme/base",
        "r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "target_modules": ["q_proj", "down_proj"],
        "bias": "none", "inference_mode": True, "init_lora_weights": True, "loftq_config": {},
        "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    save_file(tensors or lora_tensors(), folder / "adapter_model.safetensors")
    return folder


def opened(model: Path, adapter: Path) -> AdapterSource:
    return with_adapter(open_source(str(model)), adapter)


def test_a_model_that_looks_quantized_is_told_under_an_adapter_too(
    rounded_model: Path, tmp_path: Path
) -> None:
    adapter = str(save_adapter(tmp_path / "adapter"))
    plan = prepare(
        str(rounded_model), "w8a16.yaml", overrides={"method": "rtn", "adapter": adapter}
    ).plan
    assert any("looks quantized already" in warning for warning in plan.warnings)


def delta(tensors: dict[str, Tensor], name: str) -> Tensor:
    up, down = (tensors[f"{START}{name}.lora_{x}.weight"].double() for x in "BA")
    return up @ down


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"down_proj": 2}, "lora_alpha": 2}, 0.5),
        ({"fan_in_fan_out": True}, 2.0),
    ],
)
def test_merged_weights_are_the_dense_formula(
    tiny_model: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], scale: float
) -> None:
    model, tensors = tiny_model(dtype=torch.bfloat16), lora_tensors()
    source = opened(model, save_adapter(tmp_path / "lora", **changes))
    base = load_file(model / "model.safetensors")
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module in modules():
            expected = weight.double() + scale * delta(tensors, module)
            found = source.tensor(name)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
        else:
            assert torch.equal(source.tensor(name), weight), name


def test_patterns_of_rank_and_alpha_are_per_module(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A pattern matches whole name parts from the end, as PEFT's does."""
    wide = "model.layers.1.mlp.down_proj"
    tensors = lora_tensors(lambda name: 6 if name == wide else 4)
    lora = save_adapter(
        tmp_path / "lora", tensors,
        rank_pattern={"layers.1.mlp.down_proj": 6},
        alpha_pattern={r"layers\.\d+\.mlp.down_proj": 3},
    )  # fmt: skip
    source, base = opened(tiny_model(), lora), load_file(tiny_model() / "model.safetensors")
    for name, scale in ((wide, 3 / 6), (DOWN.format(0), 3 / 4), (Q.format(1), 8 / 4)):
        expected = base[f"{name}.weight"].double() + scale * delta(tensors, name)
        found = source.tensor(f"{name}.weight").double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_dora_scales_the_rows_to_its_magnitudes(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = lora_tensors()
    for i, name in enumerate(modules()):
        tensors[f"{START}{name}.lora_magnitude_vector"] = torch.linspace(0.5, 1.5 + i, 64)
    source = opened(tiny_model(), save_adapter(tmp_path / "lora", tensors, use_dora=True))
    base = load_file(tiny_model() / "model.safetensors")
    for i, name in enumerate(modules()):
        direction = base[f"{name}.weight"].double() + 2 * delta(tensors, name)
        magnitude = torch.linspace(0.5, 1.5 + i, 64).double()[:, None]
        expected = magnitude * direction / (direction**2).sum(1, keepdim=True).sqrt()
        found = source.tensor(f"{name}.weight").double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_whole_tensors_biases_and_embeddings(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("qwen2")
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    head, bias = torch.randn(vocab, 64), torch.randn(64)
    down, up = torch.randn(4, vocab), torch.randn(64, 4)
    tensors = lora_tensors() | {
        f"{START}lm_head.weight": head,
        f"{START}model.layers.0.self_attn.q_proj.base_layer.bias": bias,
        f"{START}model.embed_tokens.lora_embedding_A": down,
        f"{START}model.embed_tokens.lora_embedding_B": up,
    }
    lora = save_adapter(
        tmp_path / "lora", tensors, bias="all", modules_to_save=["lm_head"],
        target_modules=["q_proj", "down_proj", "embed_tokens"],
    )  # fmt: skip
    source, base = opened(model, lora), load_file(model / "model.safetensors")
    assert torch.equal(source.tensor("lm_head.weight"), head)
    assert torch.equal(source.tensor("model.layers.0.self_attn.q_proj.bias"), bias)
    table = base["model.embed_tokens.weight"].double() + 2 * (up.double() @ down.double()).T
    found = source.tensor("model.embed_tokens.weight").double()
    torch.testing.assert_close(found, table, rtol=0, atol=1e-5)


def test_logits_are_those_of_base_and_adapter_side_by_side(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The artifact, loaded by transformers, against the base with hooks that add s B A x."""
    model = tiny_model()
    save_adapter(tmp_path / "lora")
    recipe = tmp_path / "none.yaml"
    recipe.write_text("scheme: dense\nmethod: none\nadapter: ./lora\n")
    path = quantize(str(model), recipe, out=tmp_path / "art")
    ids, tensors = torch.arange(5, 45)[None], lora_tensors()
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        plain = base(ids).logits
        for name in modules():
            base.get_submodule(name).register_forward_hook(_adding(tensors, name))
        expected = base(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert float((plain - expected).abs().max()) > 0.05
    source = open_artifact(path).manifest.source
    assert source.adapter is not None
    assert source.adapter.name == "lora"
    assert "lora (LoRA), merged" in (path / "README.md").read_text()


def _adding(tensors: dict[str, Tensor], name: str) -> Callable[..., Tensor]:
    up, down = (tensors[f"{START}{name}.lora_{x}.weight"] for x in "BA")

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + 2.0 * (args[0] @ down.T @ up.T)

    return hook


def test_another_adapter_is_another_job(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """What one left unfinished is not taken up by the other."""
    model, one = str(tiny_model()), save_adapter(tmp_path / "one")
    two = save_adapter(tmp_path / "two", lora_alpha=9)
    sources = [open_source(model), opened(tiny_model(), one), opened(tiny_model(), two)]
    assert len({source.digest for source in sources}) == 3
    paths = [
        quantize(model, "none.yaml", out=tmp_path / f"art-{lora.name}", adapter=str(lora))
        for lora in (one, two)
    ]
    artifacts = [open_artifact(path) for path in paths]
    records = [artifact.manifest for artifact in artifacts]
    assert records[0].source.digest != records[1].source.digest
    assert records[0].recipe.overrides["adapter"] == str(one)
    shown = [inspect(artifact).source for artifact in artifacts]
    assert shown == [f"{model} (hf) with the adapter {name} merged" for name in ("one", "two")]


def test_norms_that_were_trained_whole(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """PEFT goes by how a name ends: `norm` saves the norms of the layers as well."""
    base = load_file(tiny_model() / "model.safetensors")
    norms = {name: torch.rand(64) for name in base if name.endswith("norm.weight")}
    assert len(norms) == 5
    tensors = lora_tensors() | {START + name: norm for name, norm in norms.items()}
    lora = save_adapter(tmp_path / "lora", tensors, modules_to_save=["norm"])
    source = opened(tiny_model(), lora)
    for name, norm in norms.items():
        assert torch.equal(source.tensor(name), norm), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"use_qalora": True}, "use_qalora"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"something_new": 1}, "something_new = 1"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
        ({"r": 8}, r"rank 8 make it \[8, 160\]"),
        ({"r": "four"}, "r: "),
        ({"bias": "some"}, "bias 'some'"),
        ({"target_modules": ["q_proj", "k_proj"]}, r"names 2 modules whose tensors are missing"),
        ({"modules_to_save": ["lm_head"]}, "names 1 modules whose tensors are missing.*lm_head"),
        ({"modules_to_save": ["norm"]}, r"names 1 modules whose tensors are missing.*model\.norm"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(
    tiny_model: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuantError, match=message):
        opened(tiny_model(), save_adapter(tmp_path / "lora", **changes))


def test_tensors_that_do_not_fit_are_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    def refused(match: str, error: type[Exception] = SourceError, **extra: Tensor | None) -> None:
        tensors = {k: v for k, v in {**lora_tensors(), **extra}.items() if v is not None}
        with pytest.raises(error, match=match):
            opened(tiny_model(), save_adapter(tmp_path / "lora", tensors))

    stranger = f"{START}model.layers.7.self_attn.q_proj.lora_"
    both = {f"{stranger}A.weight": torch.ones(4, 64), f"{stranger}B.weight": torch.ones(64, 4)}
    refused(r"1 modules .* not in .*: model\.layers\.7\.self_attn\.q_proj.*acme/base", **both)
    first = f"{START}{Q.format(0)}."
    refused("has lora_A.weight but no lora_B.weight", **{f"{first}lora_B.weight": None})
    refused(r"q_proj\.lora_B\.weight has shape \[32, 4\]",
            **{f"{first}lora_B.weight": torch.ones(32, 4)})  # fmt: skip
    refused("of no kind of adapter", UnsupportedModelError, **{f"{first}hada_w1_a": torch.ones(2)})
    refused("bias is 'none'", **{f"{first}bias": torch.ones(64)})
    refused("resized vocabulary", **{f"{START}lm_head.weight": torch.ones(999, 64)})


def test_tied_embeddings_are_not_adapted(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    tensors = lora_tensors() | {f"{START}model.embed_tokens.weight": torch.ones(vocab, 64)}
    with pytest.raises(UnsupportedModelError, match="shares its weight with lm_head"):
        opened(model, save_adapter(tmp_path / "lora", tensors))


def test_the_merged_model_goes_by_the_name_of_its_base(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """What the artifact says it is made of must be found again, random weights too."""
    lora, config = save_adapter(tmp_path / "lora"), tiny_model() / "config.json"
    for base in (open_source(str(config.parent)), SyntheticSource(f"synth:{config}")):
        assert with_adapter(base, lora).name == base.name
    assert base.name == f"synth:{config}"


def test_directories_that_are_no_adapter(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    lora = save_adapter(tmp_path / "lora")
    shutil.move(lora / "adapter_model.safetensors", lora / "adapter_model.bin")
    with pytest.raises(UnsafeCheckpointError, match="safe_serialization"):
        opened(tiny_model(), lora)
    with pytest.raises(SourceError, match="no such directory"):
        opened(tiny_model(), tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"no adapter_config\.json"):
        opened(tiny_model(), tmp_path)


def test_a_truncated_adapter_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "lora") / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match="truncated"):
        opened(tiny_model(), path.parent)
