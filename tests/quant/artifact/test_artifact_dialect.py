"""quantization_config: what we write, compressed-tensors accepts and both resolvers read alike."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_targets
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.artifact.dialect import (
    check_fused_groups,
    fused_group,
    parse_kv_scheme,
    parse_quantization_config,
    quantization_config,
)
from quant.artifact.errors import SchemeError
from quant.artifact.scheme import DENSE, PRESETS, KVScheme, Scheme, with_group_size

W4, W8 = PRESETS["w4a16"], PRESETS["w8a8"]
W4_ASYM = replace(W4, weights=replace(W4.weights, symmetric=False))
CHOICES = (DENSE, W4, with_group_size(W4, 32), W4_ASYM, PRESETS["w8a16"], W8, PRESETS["fp8"])
FUSED = ("self_attn.qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj")
SHARDS = {
    "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}


def model(choices: list[Scheme]) -> dict[str, Scheme]:
    """Linears of a llama-like model; `choices` goes through the fused modules layer by layer."""
    modules = {"lm_head": DENSE}
    for i, scheme in enumerate(choices):
        layer, unit = divmod(i, len(FUSED))
        for leaf in SHARDS.get(FUSED[unit], (FUSED[unit],)):
            modules[f"model.layers.{layer}.{leaf}"] = scheme
    return modules


@given(
    st.lists(st.sampled_from(CHOICES), min_size=4, max_size=48).filter(
        lambda choices: any(not scheme.is_dense for scheme in choices)
    )
)
@settings(max_examples=60, deadline=None)
def test_round_trip_and_the_oracles_own_resolver(choices: list[Scheme]) -> None:
    modules = model(choices)
    config = json.loads(json.dumps(quantization_config(modules, kv=KVScheme()), sort_keys=True))
    assert parse_quantization_config(config, modules) == modules
    assert parse_kv_scheme(config) == KVScheme()

    theirs = QuantizationConfig.model_validate(config)
    by_target = {t: s for s in theirs.config_groups.values() for t in s.targets}
    linear = torch.nn.Linear(1, 1)
    for name, scheme in modules.items():
        is_ignored = bool(match_targets(name, linear, theirs.ignore))
        hits = [] if is_ignored else match_targets(name, linear, by_target)
        assert bool(hits) != scheme.is_dense
        if hits:
            assert by_target[hits[0]].format == scheme.layout
            assert by_target[hits[0]].weights.num_bits == scheme.weights.num_bits
            assert by_target[hits[0]].weights.group_size == scheme.weights.group_size


def test_one_scheme_is_the_class_target_and_several_are_named() -> None:
    one = quantization_config(model([W4] * 4))
    assert [g["targets"] for g in one["config_groups"].values()] == [["Linear"]]
    assert (one["format"], one["ignore"]) == ("pack-quantized", ["lm_head"])
    two = quantization_config(model([W4, W4, W4, W8]))
    assert two["format"] == "mixed-precision"
    assert "Linear" not in [t for g in two["config_groups"].values() for t in g["targets"]]
    assert quantization_config(model([DENSE] * 4)) == {}
    only_kv = quantization_config(model([DENSE] * 4), kv=KVScheme())
    assert (only_kv["format"], only_kv["config_groups"]) == ("dense", {})
    QuantizationConfig.model_validate(only_kv)


def test_fused_modules_share_a_scheme() -> None:
    modules = {**model([W4] * 4), "model.layers.0.self_attn.k_proj": W8}
    with pytest.raises(SchemeError, match=r"k_proj is w8a8-channel but .*q_proj is w4a16-g128"):
        quantization_config(modules)
    with pytest.raises(SchemeError, match="same scheme"):
        quantization_config({**model([W4] * 4), "model.layers.0.mlp.up_proj": DENSE})
    experts = {f"model.layers.0.mlp.experts.{i}.down_proj": W4 for i in range(3)}
    check_fused_groups(experts)
    with pytest.raises(SchemeError, match="same scheme"):
        check_fused_groups({**experts, "model.layers.0.mlp.experts.1.down_proj": W8})
    assert fused_group("model.layers.0.mlp.up_proj") == "model.layers.0.mlp.gate_up_proj"


def good() -> dict[str, Any]:
    return copy.deepcopy(quantization_config(model([W4, W4, W4, W8])))


MODULES = model([W4, W4, W4, W8])


def put(path: str, value: Any) -> dict[str, Any]:
    config = good()
    node: Any = config
    *parents, last = path.split(".")
    for part in parents:
        node = node[part]
    node[last] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("config_groups.group_00.weights.num_bits", "eight", r"group_00\.weights\.num_bits.*eight"),
        ("config_groups.group_00.weights.nmu_bits", 4, r"weights\.nmu_bits.*not permitted"),
        ("config_groups.group_00.weights.strategy", None, r"weights\.strategy"),
        ("config_groups.group_00.weights.strategy", "row", r"weights\.strategy"),
        ("config_groups.group_00.weights.strategy", "tensor", "strategy 'tensor' is not supported"),
        ("config_groups.group_00.weights.strategy", "block", "only blocks of 128 by 128, not None"),
        ("config_groups.group_00.weights.block_structure", ["a"], r"weights\.block_structure"),
        ("config_groups.group_00.weights.group_size", -5, r"group_00: group_size"),
        ("config_groups.group_00.weights.num_bits", 5, "3, 4 or 8 bits, not 5"),
        ("config_groups.group_00.weights.actorder", "group", r"weights\.actorder"),
        ("config_groups.group_00.surprise", 1, r"group_00\.surprise"),
        ("config_groups.group_00.format", "marlin-24", r"group_00\.format"),
        ("config_groups.group_00.output_activations", {}, "output_activations"),
        ("config_groups.group_01.input_activations.dynamic", False, "only dynamic"),
        ("config_groups.group_01.input_activations", None, "int-quantized is W8A8"),
        ("config_groups.group_00.targets", ["re:(("], "is not a regex"),
        ("config_groups.group_00.targets", ["other.q_proj"], "'other.q_proj' matches no module"),
        ("quant_method", "gptq", "quant_method"),
        ("transform_config", {"spin": 1}, "transform_config"),
        ("surprise", 1, "surprise"),
        ("quantization_status", "frozen", "quantization_status"),
    ],
)
def test_bad_configs_are_refused_with_the_path(path: str, value: Any, message: str) -> None:
    """B07, B09: nothing unknown, unsupported or unmatched is skipped over."""
    with pytest.raises(SchemeError, match=message):
        parse_quantization_config(put(path, value), MODULES)


def test_targets_that_resolve_differently_are_refused() -> None:
    name = "model.layers.0.mlp.down_proj"
    overlapping = put("config_groups.group_01.targets", [r"re:.*down_proj$"])
    overlapping["config_groups"]["group_00"]["targets"] = [r"re:.*layers\.0\..*"]
    reordered = dict(reversed(overlapping["config_groups"].items()))
    for groups in (overlapping["config_groups"], reordered):
        resolved_or_refused(overlapping | {"config_groups": groups}, name)
    twice = put("config_groups.group_01.targets", good()["config_groups"]["group_00"]["targets"])
    with pytest.raises(SchemeError, match="stands in both"):
        parse_quantization_config(twice, MODULES)
    shard = put("config_groups.group_00.targets", ["Linear"])
    shard["config_groups"]["group_01"]["targets"] = ["model.layers.0.mlp.gate_proj"]
    with pytest.raises(SchemeError, match="not all named in one group"):
        parse_quantization_config(shard, MODULES)


def test_a_quantized_head_is_named() -> None:
    """vLLM's head is no `Linear`; transformers' is."""
    modules = {**model([W4] * 4), "lm_head": W4}
    config = quantization_config(modules)
    assert "lm_head" in config["config_groups"]["group_00"]["targets"]
    assert parse_quantization_config(config, modules) == modules
    config["config_groups"]["group_00"]["targets"] = ["Linear"]
    with pytest.raises(SchemeError, match=r"module lm_head resolves to group_00 .* None in vLLM"):
        parse_quantization_config(config, modules)


def resolved_or_refused(config: dict[str, Any], name: str) -> None:
    """One order of the two regexes agrees by luck (and resolves), the other must be refused."""
    first = next(iter(config["config_groups"]))
    if first == "group_01":
        assert parse_quantization_config(config, MODULES)[name] == W8
    else:
        with pytest.raises(SchemeError, match="targets overlap"):
            parse_quantization_config(config, MODULES)


@pytest.mark.parametrize(
    ("key", "value"), [("num_bits", 4), ("type", "int"), ("strategy", "group"), ("dynamic", True)]
)
def test_kv_schemes_other_than_fp8_per_tensor_are_refused(key: str, value: Any) -> None:
    config = quantization_config(MODULES, kv=KVScheme())
    config["kv_cache_scheme"][key] = value
    with pytest.raises(SchemeError, match="kv_cache_scheme"):
        parse_kv_scheme(config)
