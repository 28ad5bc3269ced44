"""Whole artifacts through other people's readers: compressed-tensors' and transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quant.artifact.artifact import Artifact, open_artifact
from quant.artifact.layout import QuantizedWeight, dequantize, tensor_names


def reconstructed(artifact: Artifact, module: str) -> Tensor:
    weight = artifact.weight(module)
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight


def test_compressed_tensors_decompresses_every_module_bit_for_bit(golden_dir: Path) -> None:
    """Its own config parser, module matching and decompression over our files; all schemes."""
    artifact = open_artifact(golden_dir)
    config = json.loads((golden_dir / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**config))
    apply_quantization_config(
        model, QuantizationConfig.model_validate(config["quantization_config"])
    )
    stored: dict[str, Tensor] = {}
    for shard in golden_dir.glob("*.safetensors"):
        stored |= load_file(shard)
    for module, scheme in artifact.schemes().items():
        theirs = getattr(model.get_submodule(module), "quantization_scheme", None)
        assert (theirs is None) == scheme.is_dense
        if theirs is None:
            continue
        assert theirs.format == scheme.layout
        compressor = BaseCompressor.get_value_from_registry(theirs.format)
        names = compressor.compression_param_names(theirs)
        assert set(names) == set(tensor_names(scheme))
        local = {name: stored[f"{module}.{name}"] for name in names}
        weight = compressor.decompress(local, theirs)["weight"]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, reconstructed(artifact, module))


def test_transformers_loads_it_and_holds_our_weights(
    golden: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symmetric schemes only: compressed-tensors 0.20.1 gives asymmetric modules zero points of
    the unpacked shape on the meta device, so transformers refuses its own asymmetric checkpoints.
    """
    first, second = golden.SCHEMES
    symmetric = ({**first, "o_proj": golden.W4_G32}, {**second, "self_attn": golden.W4_G32})
    monkeypatch.setattr(golden, "SCHEMES", symmetric)
    artifact = golden.build(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()
    for module in artifact.schemes():
        assert torch.equal(model.get_submodule(module).weight, reconstructed(artifact, module))
