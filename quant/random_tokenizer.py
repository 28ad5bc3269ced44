"""Tokenizer files for random models, made up or a given directory's, and their special ids.

Plain JSON in and out; what a tokenizer computes is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any

from quant.errors import SourceError

_BOS, _EOS = 0, 2
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "chat_template.jinja", "vocab.json", "merges.txt")  # fmt: skip
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """The tokenizer's files in `directory`; SourceError without a tokenizer.json."""
    found = {n: (directory / n).read_bytes() for n in _FILES if (directory / n).is_file()}
    if "tokenizer.json" not in found:
        raise SourceError(f"{directory}: no tokenizer.json in it")
    return found


def special_ids(files: Mapping[str, bytes], vocab: int) -> dict[str, int | None]:
    """config.json's bos, eos and pad ids; SourceError where `vocab` ids are too few."""
    backend = json.loads(files["tokenizer.json"])
    ids: dict[str, int] = {**backend["model"]["vocab"]}
    ids |= {token["content"]: token["id"] for token in backend["added_tokens"]}
    if max(ids.values()) >= vocab:
        raise SourceError(f"the tokenizer has ids up to {max(ids.values())}, the shape {vocab} ids")
    settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    return {f"{kind}_token_id": ids.get(_content(settings, kind)) for kind in ("bos", "eos", "pad")}


def _content(settings: Mapping[str, Any], kind: str) -> str:
    token = settings.get(f"{kind}_token") or ""
    return str(token["content"] if isinstance(token, dict) else token)


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
