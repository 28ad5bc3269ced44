"""Every scheme that a recipe accepts becomes an artifact that compressed-tensors reads as we do.

The names come from the recipe itself: a scheme that is added is tested without a word here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from quant.artifact.artifact import open_artifact
from quant.artifact.layout import QuantizedWeight, dequantize, to_tensors
from quant.recipe import SchemeName

NAMES = sorted(set(get_args(SchemeName)) - {"dense"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_reads_the_very_weights(
    name: str, tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    """Its own config parser, module matching and decompression over the stored bytes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128}
    if name == "fp8-block":  # all that runs as one in whole blocks
        sizes |= {"intermediate_size": 256, "num_key_value_heads": 8}
    opened = open_artifact(artifact(tiny_model("llama", **sizes), scheme=name))
    config = json.loads((opened.path / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**config))
    section = QuantizationConfig.model_validate(config["quantization_config"])
    apply_quantization_config(model, section)
    labels = {scheme.label for scheme in opened.schemes().values()}
    assert name != "fp8-block" or labels == {"dense", "fp8-block"}
    for module, scheme in opened.schemes().items():
        theirs = getattr(model.get_submodule(module), "quantization_scheme", None)
        assert (theirs is None) == scheme.is_dense, f"the resolvers disagree on {module}"
        weight = opened.weight(module)
        if theirs is not None:
            assert isinstance(weight, QuantizedWeight)
            compressor = BaseCompressor.get_value_from_registry(theirs.format)
            unpacked = compressor.decompress(to_tensors(weight), theirs)["weight"]
            assert torch.equal(unpacked.float(), dequantize(weight).float())
    assert sum(not scheme.is_dense for scheme in opened.schemes().values()) == 14
