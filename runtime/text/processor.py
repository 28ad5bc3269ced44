"""TextProcessor: text to token ids and back, by the artifact's own tokenizer and chat template.

Uses transformers' tokenizer and nothing else of it. Encoding goes straight to the Rust tokenizer,
whose reads are safe from several threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from runtime.text.pieces import Pieces, decoder_state, read_pieces
from runtime.text.stream import TextStream

_SAMPLE = (
    "Article 1. The Buyer pays $1,200.50\n\tby 2031-01-31;  caf\u00e9, \u5408\u540c \U0001f600!"
)


class TextError(ValueError):
    """The tokenizer or the chat template of a model is missing, broken or not supported."""


class ChatTemplateError(TextError):
    """The chat template refused a conversation; carries the template's own message."""


class TextProcessor:
    """The tokenizer of one model. Build it with `load`.

    Attributes:
        vocab_size: number of ids the tokenizer knows (the model's head may have more).
        chat_template: the template's source, None when the model has none.
        chat_template_sha256: its hash, None likewise.
        bos_token, eos_token, pad_token: as text, None where absent.
        longest_token: characters of the longest token, a bound on how much text one id can hold.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pieces = _pieces_of(tokenizer)
        self.vocab_size: int = len(self._pieces.raw)
        self.bos_token: str | None = tokenizer.bos_token
        self.eos_token: str | None = tokenizer.eos_token
        self.pad_token: str | None = tokenizer.pad_token
        self.longest_token = max(len(piece) for piece in self._pieces.raw)
        self.chat_template = _default_template(tokenizer.chat_template)
        self.chat_template_sha256 = (
            hashlib.sha256(self.chat_template.encode()).hexdigest() if self.chat_template else None
        )
        self._bos_id: int | None = tokenizer.bos_token_id
        self._adds_bos = self._bos_id is not None and self._backend.encode("a").ids[:1] == [
            self._bos_id
        ]
        self._check()

    @classmethod
    def load(cls, model_dir: Path) -> TextProcessor:
        """Read tokenizer and template from an artifact or a Hugging Face directory.

        TextError: no usable tokenizer there, or a chat template that cannot render one user turn.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TextError(f"no usable tokenizer in {model_dir}: {first}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise TextError(f"{model_dir}: no tokenizer.json could be read or made; add that file")
        return cls(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A text that already begins with BOS does not get a second one.

        TextError: the text holds lone surrogates, as Python makes of bytes that are not UTF-8.
        """
        # `encode` would hold the interpreter lock for as long as it takes, the batch call does not.
        try:
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise TextError("the text is not valid Unicode; give it as UTF-8") from error
        ids: list[int] = batch[0].ids
        doubled = self._adds_bos and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if doubled and add_special_tokens else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation: template applied once, one BOS where the tokenizer has one.

        ChatTemplateError: the model has no template, or the template refuses these messages.
        """
        text = self.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self.encode_rendered(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what `render_chat` gave."""
        ids = self.encode(text, add_special_tokens=False)
        if self._adds_bos and ids[:1] != [self._bos_id]:
            ids = [self._bos_id or 0, *ids]
        doubled = self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]
        return ids[1:] if doubled else ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as the text that `encode_chat` tokenizes. Raises as it does."""
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; use plain completions")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_kwargs,
            )
        except Exception as error:  # whatever code in the template raised is the template's answer
            raise ChatTemplateError(f"the chat template refused: {error}") from error
        return text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids` from its start; invalid or cut-off UTF-8 becomes U+FFFD."""
        table = self._pieces.visible if skip_special_tokens else self._pieces.raw
        data = b"".join(table[i] for i in ids if i < len(table))
        if self._pieces.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token (special tokens: their content; unused ids: b"")."""
        return self._pieces.raw[token_id] if token_id < len(self._pieces.raw) else b""

    def stream(
        self,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> TextStream:
        """Incremental detokenizing for one continuation of a prompt (keeps a leading space).

        TextError: a stop string is empty.
        """
        if "" in stop:
            raise TextError("a stop string is empty: it would end every answer before it begins")
        table = self._pieces.visible if skip_special_tokens else self._pieces.raw
        return TextStream(table, stop, include_stop, min_tokens)

    def _check(self) -> None:
        """Refuse a tokenizer we would decode wrongly and a template that cannot render at all."""
        ids = self.encode(_SAMPLE, add_special_tokens=False)
        theirs = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if self.decode(ids, skip_special_tokens=False) != theirs:
            raise TextError("the tokenizer decodes in a way that is not supported (sample differs)")
        if self.chat_template is not None:
            try:
                self.render_chat([{"role": "user", "content": "Hello"}])
            except ChatTemplateError as error:
                raise TextError(f"broken chat template: one user turn fails: {error}") from error


def _pieces_of(tokenizer: Any) -> Pieces:
    added = tokenizer.added_tokens_decoder
    special = {index for index, token in added.items() if token.special}
    try:
        return read_pieces(
            vocab=tokenizer.get_vocab(),
            added={index: token.content for index, token in added.items()},
            special=frozenset(special | set(tokenizer.all_special_ids)),
            decoder=decoder_state(tokenizer.backend_tokenizer),
        )
    except ValueError as error:
        raise TextError(str(error)) from error


def _default_template(template: str | dict[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, dict) else template
