"""GGUF files as a source: names and values turned back into the Hugging Face checkpoint's.

Values are dequantized to float32 (lossless: a GGUF's codes times its scales); q and k rows of the
llama family are put back into the half-split rope order, and Gemma's norms lose the one that
llama.cpp adds. Configuration and tokenizer come from transformers' own GGUF reader.

It does not know llama.cpp's other architectures: a family is one row of `GGUF_FAMILIES`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import dequantize
from tokenizers.decoders import ByteLevel
from torch import Tensor
from transformers import AutoConfig

from quant.artifact.checkpoint_files import checkpoint_digest
from quant.checkpoint import Source
from quant.errors import SourceError, UnsupportedModelError, first_line
from quant.gguf_reading import QuickReader, parsed_for_transformers
from quant.modelling import FAMILIES, check_family, check_tensors, load_tokenizer

# llama.cpp's tensor names of a decoder, without `blk.N.`; norms differ by family.
LEAVES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# The tokenizer's special tokens, by the file's keys.
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")

Fix = Callable[[str, Tensor, dict[str, Any]], Tensor]


def _keep(name: str, value: Tensor, config: dict[str, Any]) -> Tensor:
    return value


def _unpermute_rope(name: str, value: Tensor, config: dict[str, Any]) -> Tensor:
    """Rows of q and k from llama.cpp's interleaved rope pairs back to two halves per head."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    if key is None:
        return value
    paired = value.reshape(config[key], -1, 2, *value.shape[1:])
    return paired.swapaxes(1, 2).reshape(value.shape).contiguous()


def _norm_minus_one(name: str, value: Tensor, config: dict[str, Any]) -> Tensor:
    return value - 1 if name.endswith("norm.weight") else value


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """model_type the file becomes, its norm names, and what llama.cpp did to the values."""

    model_type: str
    norms: dict[str, str]
    fix: Fix = _keep


GGUF_FAMILIES = {
    "llama": GGUFFamily(model_type="llama", norms=TWO_NORMS, fix=_unpermute_rope),
    "qwen2": GGUFFamily(model_type="qwen2", norms=TWO_NORMS),
    "qwen3": GGUFFamily(model_type="qwen3", norms=TWO_NORMS),
    "gemma3": GGUFFamily(model_type="gemma3_text", norms=FOUR_NORMS, fix=_norm_minus_one),
}

# What transformers adds to a config that says nothing about the model.
NOISE = frozenset({
    "_name_or_path", "_model_name_or_path", "transformers_version", "chunk_size_feed_forward",
    "id2label", "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict",
})  # fmt: skip


class GGUFSource(Source):
    """One GGUF file, as if it were a float32 Hugging Face checkpoint."""

    kind = "gguf"
    dtype = torch.float32

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open_reader(path)
        architecture = str(self._field("general.architecture"))
        if architecture not in GGUF_FAMILIES:
            raise UnsupportedModelError(
                f"{path}: GGUF architecture {architecture!r} is not supported; supported are "
                f"{', '.join(GGUF_FAMILIES)}"
            )
        self._family = GGUF_FAMILIES[architecture]
        self._by_name = self._index()
        self.names = tuple(self._by_name)
        self.config = self._make_config()
        check_family(self.config, str(path))
        self._refuse_rope_scaling(architecture)
        check_tensors(self.skeleton, {n: self.shape(n) for n in self.names}, str(path))

    def _field(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _index(self) -> dict[str, Any]:
        """GGUF tensors under checkpoint names; a name that is not understood is an error."""
        leaves = LEAVES | self._family.norms
        found: dict[str, Any] = {}
        for tensor in self._reader.tensors:
            match = BLOCK.fullmatch(tensor.name)
            if tensor.name in OUTER:
                found[OUTER[tensor.name]] = tensor
            elif match and match[2] in leaves:
                found[f"model.layers.{match[1]}.{leaves[match[2]]}.{match[3]}"] = tensor
            elif tensor.name == "rope_freqs.weight":
                raise UnsupportedModelError(
                    f"{self.path}: rope scaling factors inside a GGUF file (rope_freqs.weight, "
                    "Llama 3.1 and later) are not supported; use the Hugging Face checkpoint"
                )
            else:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {tensor.name} is not part of a supported decoder"
                )
        return found

    def _make_config(self) -> dict[str, Any]:
        try:
            with parsed_for_transformers(self.path, self._reader):
                read = AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name)
        except Exception as error:  # it checks the config it makes of the fields
            raise SourceError(
                f"{self.path}: its metadata makes no model configuration "
                f"({type(error).__name__}: {first_line(error)}); fetch the file again"
            ) from error
        parsed = read.to_dict()
        config = {key: value for key, value in parsed.items() if key not in NOISE}
        config["model_type"] = self._family.model_type
        config["architectures"] = [FAMILIES[self._family.model_type].architecture]
        config["dtype"] = "float32"
        config["tie_word_embeddings"] = "lm_head.weight" not in self.names
        return config

    def _refuse_rope_scaling(self, architecture: str) -> None:
        kind = self._field(f"{architecture}.rope.scaling.type")
        if kind not in (None, "none"):
            raise UnsupportedModelError(
                f"{self.path}: rope scaling {kind!r} in a GGUF file is not supported; use the "
                "Hugging Face checkpoint"
            )

    @cached_property
    def digest(self) -> str:
        return checkpoint_digest(self.path)

    @property
    def num_bytes(self) -> int:
        return sum(int(stored.n_bytes) for stored in self._by_name.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._by_name[name].shape))

    def raw_tensor(self, name: str) -> Tensor:
        stored = self._by_name[name]
        values = np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        restored = torch.from_numpy(values).reshape(self.shape(name))
        return self._family.fix(name, restored, self.config)

    @cached_property
    def _made(self) -> tuple[Any, dict[str, bytes]]:
        """The tokenizer and its files, saved before anyone can have changed its settings."""
        with parsed_for_transformers(self.path, self._reader):
            tokenizer = load_tokenizer(self.path.parent, gguf_file=self.path.name)
        self._mend(tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        return tokenizer, files

    def _mend(self, tokenizer: Any) -> None:
        """What the file says outranks what a release of transformers makes of it: 5.17 takes the
        first special token for the end of text, and puts SentencePiece's steps into the decoder of
        a byte-level vocabulary."""
        for name, key in _SPECIAL_IDS.items():
            index = self._field(f"tokenizer.ggml.{key}")
            if index is not None and index < len(tokenizer):
                setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(index)))
        if self._field("tokenizer.ggml.model") == "gpt2":
            tokenizer.backend_tokenizer.decoder = ByteLevel()

    def tokenizer(self) -> Any:
        return self._made[0]

    def files(self) -> dict[str, bytes]:
        """Tokenizer, chat template and generation config, made from the GGUF's metadata."""
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation = {key: self.config[key] for key in keys if self.config.get(key) is not None}
        text = json.dumps(generation, indent=2, sort_keys=True) + "\n"
        return {**self._made[1], "generation_config.json": text.encode()}


def _open_reader(path: Path) -> QuickReader:
    try:
        return QuickReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise SourceError(f"{path}: not a readable GGUF file: {error}") from error
