"""Random mixed plans: compressed-tensors' (and so transformers') way of finding a module's scheme
and that of serving engines, which load fused modules under names of their own, give for every
module what the plan says.

The first is asked itself. The second is written here from its documented behaviour: a layer's name
against the targets in the config's order, and then its class and the names of what it is fused of,
in either order, since releases differ; experts are one module, asked for by the name of expert 0.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_targets
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st

from quant.artifact.dialect import quantization_config
from quant.artifact.scheme import DENSE, KVScheme, Scheme
from quant.errors import PlanError, RecipeError
from quant.plan import Plan, make_plan
from quant.recipe import Recipe
from quant.recipe_keys import SchemeName

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
FAMILIES = ("llama", "qwen3_moe", "mixtral", "phi3")
SCHEMES = sorted(get_args(SchemeName))
CLASSES = {"lm_head": "ParallelLMHead", "gate": "ReplicatedLinear"}
LINEAR = torch.nn.Linear(1, 1)


def shapes_of(family: str, layers: int, is_tied: bool) -> dict[str, tuple[int, int]]:
    """Linears of a model: hidden 256, intermediate 352, which no group of 128 or 64 divides."""
    found: dict[str, tuple[int, int]] = {} if is_tied else {"lm_head": (512, 256)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        if family == "phi3":
            found[f"{layer}.self_attn.qkv_proj"] = (512, 256)
        else:
            for leaf in FUSED["qkv_proj"]:
                found[f"{layer}.self_attn.{leaf}"] = (256 if leaf == "q_proj" else 128, 256)
        found[f"{layer}.self_attn.o_proj"] = (256, 256)
        found.update(mlp_of(family, layer, i))
    return found


def mlp_of(family: str, layer: str, index: int) -> Iterator[tuple[str, tuple[int, int]]]:
    if family == "phi3":
        yield f"{layer}.mlp.gate_up_proj", (704, 256)
        yield f"{layer}.mlp.down_proj", (256, 352)
    elif family == "llama" or (family == "qwen3_moe" and index % 3 == 1):
        yield from mlp_leaves(f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj"), 352)
    else:
        block = f"{layer}.{'mlp' if family == 'qwen3_moe' else 'block_sparse_moe'}"
        leaves = (
            ("gate_proj", "up_proj", "down_proj") if family == "qwen3_moe" else ("w1", "w3", "w2")
        )
        yield f"{block}.gate", (4, 256)
        for expert in range(4):
            yield from mlp_leaves(f"{block}.experts.{expert}", leaves, 96)


def mlp_leaves(
    prefix: str, leaves: tuple[str, ...], width: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    for leaf in leaves:
        yield f"{prefix}.{leaf}", (256, width) if leaf in ("down_proj", "w2") else (width, 256)


PARTS = (
    "*.self_attn.[qkv]_proj", "*.self_attn.*", "*.o_proj", "*.mlp.*", "*.experts.*", "*.down_proj",
    r"re:.*\.(gate|up)_proj", r"re:.*\.(gate_up|qkv)_proj", r"re:.*self_attn\.(q|k|v)_proj",
    r"re:.*\.block_sparse_moe\.experts\.\d+\.w[123]", "lm_head", "*", r"re:model\.layers\.1\d?\..*",
)  # fmt: skip
SIZES = st.sampled_from([None, 32, 64, 128, "channel"])


@st.composite
def overrides(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    rule: dict[str, Any] = {"match": draw(st.sampled_from(PARTS))}
    if draw(st.booleans()):
        rule["layers"] = draw(
            st.lists(st.integers(0, layers - 1), min_size=1, max_size=4, unique=True)
        )
    rule["scheme"] = draw(st.sampled_from(SCHEMES))
    rule["method"] = "none" if rule["scheme"] == "dense" else "rtn"
    return {**rule, **finer(draw, rule["scheme"])}


def finer(draw: st.DrawFn, scheme: str) -> dict[str, Any]:
    """Group size and symmetry, where the scheme leaves them open."""
    if scheme not in ("w3a16", "w4a16", "w8a16"):
        return {}
    found = {"group_size": draw(SIZES), "symmetric": draw(st.sampled_from([None, True, False]))}
    return {key: value for key, value in found.items() if value is not None}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    family, layers = draw(st.sampled_from(FAMILIES)), draw(st.integers(1, 12))
    shapes = shapes_of(family, layers, is_tied := draw(st.booleans()))
    scheme = draw(st.sampled_from([name for name in SCHEMES if name != "dense"]))
    recipe = {"scheme": scheme, "method": "rtn", **finer(draw, scheme)}
    recipe["overrides"] = draw(st.lists(overrides(layers), max_size=4))
    if draw(st.booleans()):
        recipe["skip"] = draw(st.lists(st.sampled_from(PARTS[:-2]), max_size=2))
    elif not is_tied and draw(st.booleans()):
        recipe["lm_head"] = "w8a16"
    config = {"architectures": ["X"], "tie_word_embeddings": is_tied, "hidden_size": 256}
    try:
        plan = make_plan(Recipe.parse(json.dumps(recipe)), shapes, layers, config)
    except (PlanError, RecipeError):
        assume(False)
    event(f"{family}, {min(4, len(set(plan.schemes().values())))} schemes")
    return plan


@given(plan=plans(), has_kv=st.booleans())
@settings(
    max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip
def test_both_ways_find_what_the_plan_says(plan: Plan, has_kv: bool) -> None:
    schemes = plan.schemes()
    written = quantization_config(schemes, kv=KVScheme() if has_kv else None)
    for config in (written, json.loads(json.dumps(written, sort_keys=True))):
        if not config:
            assert all(scheme.is_dense for scheme in schemes.values())
            continue
        groups = QuantizationConfig.model_validate(config).config_groups
        for name, scheme in schemes.items():
            assert said(compressed_tensors(name, config, groups)) == meant(scheme), name
        for module, shards in engine_modules(schemes).items():
            wanted = {json.dumps(meant(schemes[shard])) for shard in shards}
            assert len(wanted) == 1, f"{module} would be loaded from shards of several schemes"
            for is_class_first in (True, False):
                found = serving_engine(module, schemes, config, groups, is_class_first)
                assert json.dumps(said(found)) in wanted, f"{module}, class first {is_class_first}"


def compressed_tensors(
    name: str, config: Mapping[str, Any], groups: Mapping[str, QuantizationScheme]
) -> QuantizationScheme | None:
    """Its own matching on the checkpoint's name and class."""
    if match_targets(name, LINEAR, config["ignore"]):
        return None
    by_target = {target: group for group in groups.values() for target in group.targets}
    hits = match_targets(name, LINEAR, by_target)
    return by_target[hits[0]] if hits else None


def engine_modules(schemes: Mapping[str, Scheme]) -> dict[str, list[str]]:
    """What an engine builds, under the names it asks for, and the checkpoint's linears in it."""
    found: dict[str, list[str]] = {}
    for name in schemes:
        prefix, _, leaf = name.rpartition(".")
        whole = next((fused for fused, shards in FUSED.items() if leaf in shards), leaf)
        if ".experts." in name:  # one module; each of its three products is asked for
            expert = prefix.rpartition(".")[0] + ".0."
            for product in ("gate_proj", "up_proj", "down_proj"):
                found.setdefault(expert + product, []).append(name)
        else:
            found.setdefault(f"{prefix}.{whole}" if prefix else name, []).append(name)
    return found


def serving_engine(
    module: str,
    linears: Collection[str],
    config: Mapping[str, Any],
    groups: Mapping[str, QuantizationScheme],
    is_class_first: bool,
) -> QuantizationScheme | None:
    """`linears`: names in the checkpoint."""
    prefix, _, leaf = module.rpartition(".")
    # Phi-3's checkpoints have the fused modules themselves, and engines map those to themselves.
    is_fused = leaf in FUSED and module not in linears
    shards = [f"{prefix}.{part}" for part in FUSED[leaf]] if is_fused else [module]
    ignored = [any(names(entry, shard) for entry in config["ignore"]) for shard in shards]
    if is_fused and not any(names(entry, module) for entry in config["ignore"]):
        assert len(set(ignored)) == 1, f"{module}: some shards are ignored and others are not"
    if all(ignored):
        return None
    targets = [(target, group) for group in groups.values() for target in group.targets]
    first = dict(reversed(targets))
    by_name = next((t for t, _ in targets if names(t, module)), None)
    kind = CLASSES.get(leaf, "QKVParallelLinear" if is_fused else "RowParallelLinear")
    by_class = next((t for t, _ in targets if is_class(t, kind)), None)
    each = [next((t for t, _ in targets if names(t, shard)), None) for shard in shards]
    by_shards = each[0] if all(each) else None
    order = (by_name, by_class, by_shards) if is_class_first else (by_name, by_shards, by_class)
    hit = next(itertools.dropwhile(lambda target: target is None, order), None)
    return None if hit is None else first[hit]


def names(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return entry == module


def is_class(target: str, kind: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], kind) is not None
    return target.lower() in kind.lower()


def word(value: Any) -> str:
    """An enumeration's value, or a string as it is."""
    return str(getattr(value, "value", value))


def said(group: QuantizationScheme | None) -> dict[str, Any] | None:
    """What a config group makes of a module, in plain words."""
    if group is None:
        return None
    w, a = group.weights, group.input_activations
    assert w.block_structure in (None, [128, 128])
    return {
        "format": group.format,
        "weights": [w.num_bits, word(w.type), w.symmetric, word(w.strategy), w.group_size],
        "inputs": None if a is None else [a.num_bits, word(a.type), word(a.strategy), a.group_size],
        "inputs at run time": None if a is None else [a.symmetric, a.dynamic],
    }


def meant(scheme: Scheme) -> dict[str, Any] | None:
    """The same of a scheme of the plan."""
    w, a = scheme.weights, scheme.activations
    if scheme == DENSE or w is None:
        return None
    size = None if w.strategy == "block" else w.group_size
    how = "token" if a is None or a.group_size is None else "group"
    return {
        "format": scheme.layout,
        "weights": [w.num_bits, w.kind, w.symmetric, w.strategy, size],
        "inputs": None if a is None else [a.num_bits, a.kind, how, a.group_size],
        "inputs at run time": None if a is None else [True, True],
    }


@pytest.mark.parametrize("is_class_first", [True, False])
def test_the_engines_way_is_told_apart_where_targets_overlap(is_class_first: bool) -> None:
    """The documented trap: overlapping patterns are read differently, and this oracle shows it."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    wide = {**weights, "num_bits": 8}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
        "config_groups": {
            "group_0": {"targets": [r"re:.*layers\.1\..*"], "weights": weights},
            "group_1": {"targets": ["re:.*down_proj$", "re:.*gate_proj$"], "weights": wide},
            "group_2": {"targets": ["Linear"], "weights": weights},
        },
    }  # fmt: skip
    groups = QuantizationConfig.model_validate(config).config_groups
    name = "model.layers.1.mlp.down_proj"
    theirs = compressed_tensors(name, config, groups)
    engines = serving_engine(name, (), config, groups, is_class_first)
    assert theirs is not None
    assert engines is not None
    assert (theirs.weights.num_bits, engines.weights.num_bits) == (8, 4)
    fused = serving_engine("model.layers.0.mlp.gate_up_proj", (), config, groups, is_class_first)
    assert fused is not None
    assert fused.weights.num_bits == 4, "a shard's own pattern is passed over in silence"
