"""Random models of real shapes: names, shapes and values of every tensor, without transformers.

A tensor is drawn when it is asked for. It follows from its name and the seed alone (and the kind of
device it is drawn on), in whatever order tensors are read. See `quant.synthetic` for what they are
good for and how they are named.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from quant.errors import SourceError, UnsupportedModelError
from quant.machine import check_device
from quant.random_tokenizer import made_up_tokenizer, special_ids, tokenizer_files

PREFIX = "synth:"
GENERATOR_VERSION = 1
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_KEYS = ("seed", "layers", "tokenizer", "device")
_LOGIT_STD = 3.0
_DRAWN_AT_ONCE = 1 << 24  # values in float32, so that a tensor costs no more than itself

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
# What the families' own config.json files say, but for token ids, which are the tokenizer's.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128_256,
    },
    "qwen3-14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
    "smollm2-135m": {
        **_LLAMA,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49_152,
    },
}


class RandomModel:
    """The model that `synth:SHAPE?key=value` names: config, files, and tensors on demand.

    Raises SourceError for an unknown shape, key or value, UnsupportedModelError for a config.json
    of a family that is not one of plain decoder layers.
    """

    dtype = torch.bfloat16

    def __init__(self, name: str) -> None:
        shape, settings = _parse(name)
        self.name, self.device = name, settings.get("device", "cpu")
        self.label = Path(shape).stem if shape.endswith(".json") else shape
        self.seed = _whole(name, "seed", settings.get("seed", "0"), least=0)
        check_device(self.device)
        config = {**_config_of(shape), "dtype": "bfloat16"}
        if "layers" in settings:
            config |= _cut(config, _whole(name, "layers", settings["layers"], least=1))
        vocab = int(config["vocab_size"])
        given = settings.get("tokenizer")
        self.files = made_up_tokenizer(vocab) if given is None else tokenizer_files(Path(given))
        self.config: dict[str, Any] = config | special_ids(self.files, vocab)
        self.num_layers = int(config["num_hidden_layers"])
        self.is_tied = bool(config.get("tie_word_embeddings", False))
        self.shapes = dict(_shapes(self.config))

    @property
    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear, lm_head included even where it is the embedding."""
        matrices = {name: shape for name, shape in self.shapes.items() if len(shape) == 2}
        embedding = matrices.pop(EMBEDDING)
        found = {name.removesuffix(".weight"): shape for name, shape in matrices.items()}
        return {**found, "lm_head": embedding}

    @cached_property
    def digest(self) -> str:
        """sha256, in hex, of all that the model follows from."""
        kind = torch.device(self.device).type
        parts = [json.dumps([GENERATOR_VERSION, self.config, self.seed, kind], sort_keys=True)]
        parts += [f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in self.files.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def draw(self, name: str) -> Tensor:
        """The tensor in bfloat16, on the device it is drawn on; vectors are ones, biases zeros."""
        shape = self.shapes[name]
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, fill, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(_seed_of(self.seed, name))
        drawn, std = torch.empty(shape, dtype=self.dtype, device=self.device), self._std(name)
        for rows in torch.split(drawn, max(1, _DRAWN_AT_ONCE // shape[-1])):
            values = torch.empty(rows.shape, dtype=torch.float32, device=self.device)
            rows.copy_(values.normal_(generator=generator).mul_(std))
        return drawn

    def _std(self, name: str) -> float:
        """Spread of a matrix. Products of normed rows with it have a spread of about one; what is
        added to the residual less, so that it stays bounded; logits are as peaked as real ones."""
        unit = 1.0 / math.sqrt(self.shapes[name][-1])
        if name == (EMBEDDING if self.is_tied else HEAD):
            return _LOGIT_STD * unit
        if name == EMBEDDING:
            return 1.0
        is_added = name.endswith(("o_proj.weight", "down_proj.weight"))
        return unit * math.sqrt(0.5 / self.num_layers) if is_added else unit


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's shape, in the model's order; no head where it is the embedding."""
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    yield EMBEDDING, (vocab, hidden)
    for i in range(int(config["num_hidden_layers"])):
        for leaf, shape in _layer_shapes(config):
            yield f"model.layers.{i}.{leaf}", shape
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield HEAD, (vocab, hidden)


def _layer_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    family = config.get("model_type")
    if family not in ("llama", "mistral", "qwen2", "qwen3"):
        raise UnsupportedModelError(
            f"model_type {family!r}: random models are llama, mistral, qwen2 or qwen3"
        )
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    q, kv = heads * head_dim, int(config.get("num_key_value_heads") or heads) * head_dim
    has_bias, has_mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    qkv_bias = has_bias or family == "qwen2"
    linears = {
        "self_attn.q_proj": (q, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q, has_bias),
        "mlp.gate_proj": (inner, hidden, has_mlp_bias),
        "mlp.up_proj": (inner, hidden, has_mlp_bias),
        "mlp.down_proj": (hidden, inner, has_mlp_bias),
    }
    for module, (rows, width, is_biased) in linears.items():
        yield f"{module}.weight", (rows, width)
        if is_biased:
            yield f"{module}.bias", (rows,)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= (
        {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim} if family == "qwen3" else {}
    )
    yield from ((f"{module}.weight", (width,)) for module, width in norms.items())


def _parse(model: str) -> tuple[str, dict[str, str]]:
    shape, _, query = model.removeprefix(PREFIX).partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise SourceError(
            f"{model}: expected {PREFIX}SHAPE?key=value&key=value ({error})"
        ) from None
    settings = dict(pairs)
    unknown = sorted(settings.keys() - set(_KEYS))
    if unknown or len(settings) < len(pairs):
        what = f"unknown key {unknown[0]!r}" if unknown else "a key is given twice"
        raise SourceError(f"{model}: {what}; known keys: {', '.join(_KEYS)}")
    return shape, settings


def _config_of(shape: str) -> dict[str, Any]:
    if shape in SHAPES:
        return SHAPES[shape]
    if not shape.endswith(".json"):
        known = ", ".join(SHAPES)
        raise SourceError(f"unknown shape {shape!r}; known: {known}, or a path to a config.json")
    try:
        config: dict[str, Any] = json.loads(Path(shape).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{shape}: not readable as a config.json: {error}") from error
    return config


def _cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The same model with `layers` decoder layers."""
    given = int(config["num_hidden_layers"])
    if layers > given:
        raise SourceError(f"layers={layers}: the shape has {given}")
    types = config.get("layer_types")
    kept = {"layer_types": types[:layers]} if types else {}
    return {"num_hidden_layers": layers, **kept}


def _whole(model: str, key: str, text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise SourceError(f"{model}: {key}={text}; expected a whole number from {least} on")
    return int(text)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{GENERATOR_VERSION} {seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
