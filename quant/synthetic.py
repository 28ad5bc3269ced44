"""`synth:SHAPE?seed=0&layers=4`: random weights of a real shape; a device for benchmarks.

Speed, memory and disk do not depend on what a model has learnt, so a shape stands in for a
checkpoint of many gigabytes. A tensor is made when it is asked for and forgotten afterwards; it
follows from its name and the seed alone (and the device it is drawn on), in whatever order tensors
are read. Nothing here says anything about quality: such a model knows nothing.

    SHAPE       llama-3.1-8b | qwen3-14b | qwen3-32b | smollm2-135m, or a config.json to go by
    seed        another seed, other weights; default 0
    layers      only so many decoder layers; default all of the shape
    tokenizer   a directory with tokenizer files; default one made up of as many words as the
                shape's vocabulary has ids
    device      where tensors are drawn; default cpu. On cuda it is much faster, with other values
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from quant.checkpoint import Source
from quant.errors import SourceError
from quant.machine import check_device
from quant.modelling import check_family, load_tokenizer

PREFIX = "synth:"
GENERATOR_VERSION = 1
_KEYS = ("seed", "layers", "tokenizer", "device")
_LOGIT_STD = 3.0
_DRAWN_AT_ONCE = 1 << 24  # values in float32, so that a tensor costs no more than itself
_BOS, _EOS = 0, 2
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                    "chat_template.jinja", "vocab.json", "merges.txt")  # fmt: skip
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

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


class SyntheticSource(Source):
    """Random bfloat16 weights of a shape, drawn tensor by tensor.

    Raises SourceError for an unknown shape, key or value, UnsupportedModelError for a config.json
    of another family.
    """

    kind = "hf"  # names and files are those of a Hugging Face checkpoint
    dtype = torch.bfloat16

    def __init__(self, model: str) -> None:
        self._model = model
        shape, settings = _parse(model)
        self.path = Path(f"synth-{Path(shape).stem if shape.endswith('.json') else shape}")
        self.seed = _whole(model, "seed", settings.get("seed", "0"), least=0)
        self.draw_device = settings.get("device", "cpu")
        check_device(self.draw_device)
        self._tokenizer_dir = Path(settings["tokenizer"]) if "tokenizer" in settings else None
        self.config = {**_config_of(shape), "dtype": "bfloat16"}
        if "layers" in settings:
            self.config |= _cut(self.config, _whole(model, "layers", settings["layers"], least=1))
        self.config |= self._token_ids()
        check_family(self.config, model)
        names = self.skeleton.parameter_shapes
        self.names = tuple(
            n for n in names if not (self.skeleton.is_tied and n == "lm_head.weight")
        )

    @property
    def name(self) -> str:
        return self._model

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(self.shape(name)) * self.dtype.itemsize for name in self.names)

    @cached_property
    def digest(self) -> str:
        identity = [GENERATOR_VERSION, self.config, self.seed, torch.device(self.draw_device).type]
        parts = [json.dumps(identity, sort_keys=True)]
        parts += [
            f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in self.files().items()
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.skeleton.parameter_shapes[name]

    def raw_tensor(self, name: str) -> Tensor:
        return self.draw(name, self.draw_device).cpu()

    def draw(self, name: str, device: str) -> Tensor:
        """The tensor, bfloat16, drawn on `device` and left there; 1-d weights are all ones."""
        shape = self.shape(name)
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, fill, dtype=self.dtype, device=device)
        generator = torch.Generator(device).manual_seed(_seed_of(self.seed, name))
        drawn, std = torch.empty(shape, dtype=self.dtype, device=device), self._std(name)
        for rows in torch.split(drawn, max(1, _DRAWN_AT_ONCE // shape[-1])):
            values = torch.empty(rows.shape, dtype=torch.float32, device=device)
            rows.copy_(values.normal_(generator=generator).mul_(std))
        return drawn

    def _std(self, name: str) -> float:
        """Spread of a matrix. Products of normed rows with it have a spread of about one; what is
        added to the residual less, so that it stays bounded; logits are as peaked as real ones."""
        unit = 1.0 / math.sqrt(self.shape(name)[-1])
        if name == self._head_name:
            return _LOGIT_STD * unit
        if name == "model.embed_tokens.weight":
            return 1.0
        is_added = name.endswith(("o_proj.weight", "down_proj.weight"))
        return unit * math.sqrt(0.5 / self.num_layers) if is_added else unit

    @property
    def _head_name(self) -> str:
        return "model.embed_tokens.weight" if self.skeleton.is_tied else "lm_head.weight"

    def files(self) -> dict[str, bytes]:
        return self._files

    @cached_property
    def _files(self) -> dict[str, bytes]:
        if self._tokenizer_dir is not None:
            found = (self._tokenizer_dir / name for name in _TOKENIZER_FILES)
            return {path.name: path.read_bytes() for path in found if path.is_file()}
        return made_up_tokenizer(int(self.config["vocab_size"]))

    def tokenizer(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in self.files().items():
                (Path(folder) / name).write_bytes(data)
            return load_tokenizer(Path(folder))

    def _token_ids(self) -> dict[str, Any]:
        """config.json's special ids, so that they are the tokenizer's."""
        if self._tokenizer_dir is None:
            return {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _EOS}
        if "tokenizer.json" not in self._files:
            raise SourceError(f"{self._tokenizer_dir}: no tokenizer.json in it")
        tokenizer = self.tokenizer()
        vocab = int(self.config["vocab_size"])
        if len(tokenizer) > vocab:
            raise SourceError(
                f"{self._tokenizer_dir}: the tokenizer has {len(tokenizer)} ids, the shape {vocab}"
            )
        kinds = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {kind: getattr(tokenizer, kind) for kind in kinds}


def is_synthetic(model: str) -> bool:
    """Whether a model's name asks for a SyntheticSource."""
    return model.startswith(PREFIX)


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


def made_up_tokenizer(vocab: int) -> dict[str, bytes]:
    """Files of a byte-level tokenizer with `vocab` ids: special tokens, 256 bytes, made-up words.

    Every id decodes to text and every text encodes, words of the vocabulary to one id each.
    """
    tokens = [*_SPECIAL_TOKENS, *_byte_characters()]
    if vocab < len(tokens):
        raise SourceError(f"vocab_size {vocab}: a tokenizer needs at least {len(tokens)} ids")
    tokens += islice(_words(), vocab - len(tokens))
    special: list[dict[str, Any]] = [
        {"id": i, "content": text, "special": True, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i, text in enumerate(_SPECIAL_TOKENS)
    ]  # fmt: skip
    byte_level: dict[str, Any] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": True, "vocab": {text: i for i, text in enumerate(tokens)}, "merges": [],
    }  # fmt: skip
    backend = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level, "model": model,
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _SPECIAL_TOKENS[_BOS],
        "eos_token": _SPECIAL_TOKENS[_EOS], "pad_token": _SPECIAL_TOKENS[_EOS],
        "chat_template": _CHAT_TEMPLATE, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    return {
        "tokenizer.json": json.dumps(backend, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
    }


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def _words() -> Iterator[str]:
    """Words of two syllables and more, each with the space before it."""
    syllables = ["".join(pair) for pair in product("bcdfghjklmnprstvwz", "aeiou")]
    for length in range(2, 6):
        yield from ("\u0120" + "".join(parts) for parts in product(syllables, repeat=length))
