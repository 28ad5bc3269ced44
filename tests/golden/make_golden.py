"""Make the golden artifact: a two-layer model in mixed schemes, from numbers anyone can recompute.

    python tests/golden/make_golden.py tests/golden/artifact

Weights come from sha256, not from a random generator that may change with a torch release. The
committed result freezes the format: run this again only together with a new format version, and
say so in docs/artifact-format.md and CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.artifact.artifact import Artifact
from quant.artifact.layout import min_max_qparams, quantize, to_tensors
from quant.artifact.manifest import (
    CalibrationRecord,
    KVRecord,
    Manifest,
    ModuleRecord,
    RecipeRecord,
    SourceRecord,
    scheme_tables,
)
from quant.artifact.probe import ProbePrompt, ProbeRecord
from quant.artifact.scheme import DENSE, PRESETS, Scheme, with_group_size
from quant.artifact.writer import ArtifactWriter

HIDDEN, KV_WIDTH, INTERMEDIATE, VOCAB, NUM_LAYERS = 64, 32, 96, 64, 2
NUM_SHARDS = NUM_LAYERS + 1

W4_G32 = with_group_size(PRESETS["w4a16"], 32)
W4_ASYM = replace(W4_G32, weights=replace(W4_G32.weights, symmetric=False))
W8_CHANNEL = with_group_size(PRESETS["w8a16"], None)

SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_WIDTH, HIDDEN),
    "self_attn.v_proj": (KV_WIDTH, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
SCHEMES = (
    {"self_attn": W4_G32, "o_proj": W4_ASYM, "mlp": PRESETS["w8a8"], "down_proj": PRESETS["fp8"]},
    {"self_attn": W4_ASYM, "o_proj": DENSE, "mlp": W4_G32, "down_proj": W8_CHANNEL},
)
PROBE = ProbeRecord(
    prompts=(ProbePrompt(token_ids=(1, 2, 3), top_ids=(7, 5), top_logprobs=(-0.5, -1.25)),),
    tolerance=1.0,
    tolerance_reduced=1.0,
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Float32 values in [-0.5, 0.5), multiples of 1/256, drawn from sha256 of `name`."""
    count = int(torch.Size(shape).numel())
    blocks = (hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count // 32 + 1))
    raw = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8)[:count]
    return ((raw.float() - 128) / 256).reshape(shape)


def modules() -> dict[str, tuple[tuple[int, int], Scheme]]:
    """Shape and scheme of every linear, by checkpoint name."""
    found: dict[str, tuple[tuple[int, int], Scheme]] = {"lm_head": ((VOCAB, HIDDEN), DENSE)}
    for layer, schemes in enumerate(SCHEMES):
        for leaf, shape in SHAPES.items():
            block, name = leaf.split(".")
            found[f"model.layers.{layer}.{leaf}"] = (shape, schemes.get(name, schemes[block]))
    return found


def weight(name: str, shape: tuple[int, int]) -> Tensor:
    """A linear's weight; row 0 is zero, so that the all-zero group is part of the format."""
    values = numbers(name, shape)
    values[0] = 0
    return values


def module_tensors(name: str, shape: tuple[int, int], scheme: Scheme) -> dict[str, Tensor]:
    values = weight(name, shape)
    if scheme.weights is None:
        return {f"{name}.weight": values.to(torch.bfloat16)}
    scale, zero_point = min_max_qparams(values, scheme.weights, torch.bfloat16)
    stored = to_tensors(quantize(values, scale, zero_point, scheme))
    return {f"{name}.{leaf}": tensor for leaf, tensor in stored.items()}


def layer_tensors(layer: int) -> dict[str, Tensor]:
    """Everything of one decoder layer: linears, norms and KV scales."""
    prefix = f"model.layers.{layer}."
    tensors: dict[str, Tensor] = {}
    for name, (shape, scheme) in modules().items():
        if name.startswith(prefix):
            tensors |= module_tensors(name, shape, scheme)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        name = f"{prefix}{norm}.weight"
        tensors[name] = (numbers(name, (HIDDEN,)) + 1).to(torch.bfloat16)
    for leaf, value in (("k_scale", 0.0625), ("v_scale", 0.03125)):
        tensors[f"{prefix}self_attn.{leaf}"] = torch.tensor([value], dtype=torch.bfloat16)
    return tensors


def outer_tensors() -> dict[str, Tensor]:
    """Embedding, final norm and head: shard 0."""
    tensors = module_tensors("lm_head", (VOCAB, HIDDEN), DENSE)
    for name, shape in (("embed_tokens", (VOCAB, HIDDEN)), ("norm", (HIDDEN,))):
        key = f"model.{name}.weight"
        tensors[key] = (numbers(key, shape) + (1 if name == "norm" else 0)).to(torch.bfloat16)
    return tensors


def manifest() -> Manifest:
    """The manifest as a pipeline would fill it in, but for probe values that are made up."""
    schemes = {name: scheme for name, (_, scheme) in modules().items()}
    recipe = "scheme: w4a16\n"
    return Manifest(
        created_by="weighbridge 0.1.0",
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        schemes=scheme_tables(schemes),
        modules={
            name: ModuleRecord(
                scheme=scheme.label,
                shape=shape,
                method="none" if scheme.is_dense else "rtn",
                reason="skipped by the recipe" if scheme.is_dense else "",
            )
            for name, (shape, scheme) in modules().items()
        },
        kv_cache=KVRecord(modules=tuple(f"model.layers.{i}.self_attn" for i in range(NUM_LAYERS))),
        source=SourceRecord(path="golden", kind="hf", digest="0" * 64, dtype="bfloat16"),
        recipe=RecipeRecord(
            text=recipe, sha256=hashlib.sha256(recipe.encode()).hexdigest(), name="golden"
        ),
        calibration=CalibrationRecord(digest="1" * 64, samples=2, tokens=16),
        tools={"weighbridge": "0.1.0"},
        probe=PROBE,
    )


def build(out: Path, *, overwrite: bool = False) -> Artifact:
    """Write the golden artifact to `out`, resuming an unfinished one."""
    with ArtifactWriter(out, num_shards=NUM_SHARDS, job={"golden": 1}, overwrite=overwrite) as job:
        for index in sorted(set(range(NUM_SHARDS)) - job.committed):
            job.write_shard(index, layer_tensors(index - 1) if index else outer_tensors())
        job.write_file("recipe.yaml", manifest().recipe.text.encode())
        job.write_file("generation_config.json", b'{"eos_token_id": 2}\n')
        return job.seal(manifest(), CONFIG)


if __name__ == "__main__":
    sys.stdout.write(build(Path(sys.argv[1])).digest + "\n")
