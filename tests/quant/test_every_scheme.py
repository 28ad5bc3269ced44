"""Every scheme that a recipe accepts becomes an artifact that compressed-tensors reads as we do.

The names come from the recipe itself: a scheme that is added is tested without a word here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from quant.artifact.artifact import open_artifact
from quant.artifact.dialect import quantization_config
from quant.artifact.errors import SchemeError
from quant.artifact.layout import QuantizedWeight, dequantize, to_tensors
from quant.artifact.scheme import GROUP_SIZES, Scheme, preset, with_group_size
from quant.methods.rtn import rtn
from quant.recipe_keys import KVCacheName, SchemeName

NAMES = sorted(set(get_args(SchemeName)) - {"dense"})
KV_CACHES = sorted(set(get_args(KVCacheName)) - {"none"})


def variants() -> list[Scheme]:
    """Every granularity and symmetry of every scheme that its layout allows."""
    found = [preset(name) for name in NAMES]
    for scheme in tuple(found):
        for size, symmetric in itertools.product((*GROUP_SIZES, None), (True, False)):
            with contextlib.suppress(SchemeError):
                sized = with_group_size(scheme, size)
                assert sized.weights is not None
                found.append(replace(sized, weights=replace(sized.weights, symmetric=symmetric)))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", variants(), ids=lambda scheme: scheme.label)
def test_every_variant_means_to_compressed_tensors_what_it_means_here(
    scheme: Scheme, dtype: torch.dtype
) -> None:
    """Our config.json and tensors, its parser and decompression: the same weight, bit for bit. And
    back: it compresses that weight, with the same scales, into the very tensors (but for 8 bits in
    bfloat16, where it divides in bfloat16, whose 8 digits cannot tell all codes apart)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    generator = torch.Generator().manual_seed(len(scheme.label))
    weight = rtn(torch.randn(96, 256, generator=generator), scheme, dtype)
    config = quantization_config({"model.layers.0.mlp.down_proj": scheme})
    section = QuantizationConfig.model_validate(json.loads(json.dumps(config)))
    (theirs,) = section.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    ours = to_tensors(weight)
    assert set(compressor.compression_param_names(theirs)) == set(ours)
    dense = compressor.decompress(dict(ours), theirs)["weight"]
    assert dense.dtype == dtype
    assert torch.equal(dense, dequantize(weight))
    if dtype == torch.bfloat16 and weight.codes.dtype == torch.int8 and "w8" in scheme.label:
        return
    parts = {"weight": dense, "weight_scale": weight.scale}
    if weight.zero_point is not None:
        parts["weight_zero_point"] = weight.zero_point
    again = compressor.compress(parts, theirs)
    for name, tensor in ours.items():
        assert again[name].shape == tensor.shape, name
        if name != "weight_shape":
            assert torch.equal(again[name].view(tensor.dtype), tensor), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_compressed_tensors_has_a_place_for_the_kv_scales(
    kv_cache: str, tiny_model: Callable[..., Path], artifact: Callable[..., Path]
) -> None:
    """What its dialect can say stands there, with scales of its shapes; the rest (int8, its scales
    made at run time) leaves config.json without a word of it, for engines that refuse it."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams

    opened = open_artifact(artifact(tiny_model(), scheme="w4a16", group_size=32, kv_cache=kv_cache))
    config = json.loads((opened.path / "config.json").read_text())
    section = QuantizationConfig.model_validate(config["quantization_config"])
    stored = {name for name in opened.reader.names if name.endswith(("k_scale", "v_scale"))}
    if not kv_cache.startswith("fp8"):
        assert section.kv_cache_scheme is None
        assert not stored
        return
    place = torch.nn.Module()
    heads, head_dim = config["num_key_value_heads"], config["hidden_size"] // 8
    initialize_qparams(
        place, "k", section.kv_cache_scheme, observed_shape=(heads, None, head_dim),
        observed_dtype=torch.float32, force_zero_point=False,
    )  # fmt: skip
    assert len(stored) == 4
    for name in stored:
        assert opened.reader.tensor(name).shape == place.k_scale.shape


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
