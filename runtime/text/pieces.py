"""The bytes each token stands for, read from a fast tokenizer's vocabulary and decoder.

Two kinds cover every supported family: byte-level BPE (Llama 3, Qwen, SmolLM: each character of a
token names a byte) and SentencePiece-style (Llama 2, Mistral, Gemma: U+2581 is a space, `<0xE2>` is
a byte). Anything else is refused rather than decoded almost right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Bytes per token id.

    Attributes:
        raw: every token, special ones by their content; b"" where no token has that id.
        visible: the same with b"" for special tokens: what generated text shows.
        strips_first_space: decoding from the start of a text drops one leading space.
    """

    raw: list[bytes]
    visible: list[bytes]
    strips_first_space: bool


def read_pieces(vocab: Mapping[str, int], added: Mapping[int, str], special: frozenset[int],
                decoder: Mapping[str, Any]) -> Pieces:  # fmt: skip
    """Build the table. ValueError when the decoder is of neither kind."""
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if _is_byte_level(steps, vocab):
        steps, kinds = steps[-1:], {"ByteLevel"}
    to_bytes = _byte_level if kinds == {"ByteLevel"} else _sentencepiece(steps, kinds)
    raw = [b""] * (max([*vocab.values(), *added]) + 1)
    for token, index in vocab.items():
        raw[index] = to_bytes(token)
    if kinds == {"ByteLevel"}:  # added tokens are plain text there
        for index, content in added.items():
            raw[index] = content.encode()
    visible = [b"" if index in special else piece for index, piece in enumerate(raw)]
    return Pieces(raw=raw, visible=visible, strips_first_space=any(map(_strips_space, steps)))


def decoder_state(backend: Any) -> dict[str, Any]:
    """The decoder of a `tokenizers.Tokenizer` as its JSON object; {} when it has none."""
    return json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from characters to bytes: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def _is_byte_level(steps: list[dict[str, Any]], vocab: Mapping[str, int]) -> bool:
    """True where a byte-level step ends the chain and nothing before it can change a token.

    Some converters put SentencePiece's steps before it; they touch U+2581 and `<0xE2>` only, and a
    byte-level vocabulary has neither.
    """
    before = {step.get("type") for step in steps[:-1]}
    if not steps or steps[-1].get("type") != "ByteLevel":
        return False
    if not before <= {"ByteFallback", "Fuse", "Replace"}:
        return False
    rules = [step for step in steps[:-1] if step.get("type") == "Replace"]
    if not all(map(_is_space_rule, rules)):
        return False
    return not before or not any(_SPACE_MARK in t or _BYTE_TOKEN.fullmatch(t) for t in vocab)


def _sentencepiece(steps: list[dict[str, Any]], kinds: set[str | None]) -> Any:
    marks_spaces = "Metaspace" in kinds or any(_is_space_rule(step) for step in steps)
    if not marks_spaces or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        names = ", ".join(sorted(str(kind) for kind in kinds))
        raise ValueError(
            f"the tokenizer's decoder is [{names}]; byte-level BPE and SentencePiece-style "
            "decoders are supported"
        )
    has_bytes = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()

    return to_bytes


def _is_space_rule(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": _SPACE_MARK}


def _strips_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0
