"""KV caches that an artifact declares: what is stored, what serves it, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.kv_quality import install_taps, taps_of
from benchmarks.quality import load_reference
from quant.api import quantize
from quant.artifact.artifact import open_artifact, verify
from quant.artifact.errors import ManifestError
from quant.errors import PlanError, RecipeError
from quant.modelling import ATTENTION
from quant.source import open_source
from runtime.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.score import ScoreItem

IDS = tuple(range(5, 60))
OPTIONS = EngineConfig(max_model_len=64, num_gpu_blocks_override=16)
KINDS: list[dict[str, Any]] = [
    {"kv_cache": "fp8"},
    {"kv_cache": "fp8", "kv_skip_layers": [0]},
    {"kv_cache": "fp8-head", "kv_skip_layers": [-1]},
    {"kv_cache": "int8"},
    {"kv_cache": "int8", "kv_skip_layers": [1]},
]


def label(kind: dict[str, Any]) -> str:
    return f"{kind['kv_cache']}-{kind.get('kv_skip_layers', '')}"


def score(path: Path, options: EngineConfig = OPTIONS) -> torch.Tensor:
    engine = Engine.from_artifact(path, options)
    return torch.tensor(engine.score([ScoreItem(token_ids=IDS)])[0].nll)


def expected(model: Path, path: Path) -> torch.Tensor:
    """transformers' own model in float32, keys and values rounded as the artifact says."""
    reference: nn.Module = load_reference(open_source(str(model)), "cpu")
    reference.config._attn_implementation = ATTENTION  # type: ignore[union-attr]
    install_taps(reference, taps_of(open_artifact(path), "cpu")["own"])
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        logprobs = reference(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return -logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_the_runtime_serves_what_the_artifact_declares(
    kind: dict[str, Any], tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    model = tiny_model("llama")
    path = artifact(model, scheme="dense", method="none", **kind)
    engine = Engine.from_artifact(path, OPTIONS)
    wanted = "int8" if kind["kv_cache"] == "int8" else "fp8"
    assert engine.resolved.kv_cache_dtype == wanted
    skipped = {i % 2 for i in kind.get("kv_skip_layers", [])}
    assert open_artifact(path).kv_kept_layers == skipped
    found = torch.tensor(engine.score([ScoreItem(token_ids=IDS)])[0].nll)
    # A last bit may move a code here and there; rounding as such moves far more.
    wrong = (found - expected(model, path)).abs().mean()
    rounding = (found - score(artifact(model, scheme="dense", method="none"))).abs().mean()
    assert wrong < 2e-5
    assert wrong < rounding / 10


def test_a_skipped_layer_is_not_rounded_and_takes_the_compute_type(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    """With every layer but the first skipped, and then but the last, the losses differ."""
    model = tiny_model("llama")
    exact = score(artifact(model, scheme="dense", method="none"))
    off = []
    for layer in (0, 1):
        path = artifact(
            model, scheme="dense", method="none", kv_cache="fp8", kv_skip_layers=[layer]
        )
        stored = open_artifact(path)
        assert f"model.layers.{layer}.self_attn.k_scale" not in stored.reader
        assert stored.kv_scales(layer) is None
        assert stored.kv_scales(1 - layer) is not None
        off.append(score(path) - exact)
        # Whoever asks for another type has it in all layers.
        plain = EngineConfig(max_model_len=64, num_gpu_blocks_override=16, kv_cache_dtype="float32")
        torch.testing.assert_close(score(path, plain), exact)
    assert all(difference.abs().max() > 0 for difference in off)
    assert not torch.equal(*off)


def test_an_int8_cache_needs_no_calibration_and_stands_in_no_config(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Serving engines refuse integers in kv_cache_scheme: artifact.json alone says it."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("scheme: w8a16\nmethod: rtn\nkv_cache: int8\n", encoding="utf-8")
    path = quantize(tiny_model("llama"), recipe, out=tmp_path / "art")
    stored = open_artifact(path)
    assert stored.kv_cache_dtype == "int8"
    assert stored.config["quantization_config"]["kv_cache_scheme"] is None
    assert not [
        name for name in stored.reader.names if name.endswith("_scale") and "attn.k_s" in name
    ]
    assert verify(path) == []


def test_layers_the_model_does_not_have_are_refused(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    settings = {"scheme": "dense", "method": "none", "kv_cache": "int8"}
    for layers, message in (([2], "found 2, but the model has layers 0 to 1"),
                            ([0, 1], "names every layer; write `kv_cache: none`")):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            artifact(tiny_model("llama"), **settings, kv_skip_layers=layers)
    with pytest.raises(RecipeError, match="kv_skip_layers: given without a quantized"):
        artifact(tiny_model("llama"), scheme="dense", method="none", kv_skip_layers=[0])


def test_a_kv_cache_of_modules_that_do_not_exist_is_refused(
    tiny_model: Callable[..., Path], artifact: Callable[..., Path], tmp_path: Path
) -> None:
    path = shutil.copytree(
        artifact(tiny_model("llama"), scheme="dense", method="none", kv_cache="int8"),
        tmp_path / "art",
    )
    manifest = json.loads((path / "artifact.json").read_text())
    manifest["kv_cache"]["modules"].append("model.layers.7.self_attn")
    (path / "artifact.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match=r"layers\.7\.self_attn: is listed in kv_cache"):
        open_artifact(path)
    manifest["kv_cache"] |= {"modules": ["model.layers.0.self_attn"], "strategy": "tensor"}
    (path / "artifact.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match="an int8 KV cache has a scale per token and head"):
        open_artifact(path)
