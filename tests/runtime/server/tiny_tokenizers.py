"""Small tokenizers of both supported kinds, trained on a few lines, saved as model directories."""

from __future__ import annotations

from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "alpha beta gamma delta. The Buyer pays the Seller within thirty days of the invoice.",
    '{"party": "Acme", "amount": "1,200.50"} caf\u00e9 na\u00efve \u5408\u540c\u7b2c\u4e00\u6761',
    "def f(x):\n    return x + 1\n",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '')"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% for m in messages %}{% if m.tool_calls is defined %}"
    "{{ '[CALLS]' + (m.tool_calls | tojson) }}"
    "{% else %}{{ '[' + m['role'] + ']' + m['content'] }}{% endif %}{% endfor %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant roles, not ' + m['role']) }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def byte_level(directory: Path, *, bos: bool = False, template: str | None = CHATML) -> Path:
    """A byte-level BPE of about 330 ids; with `bos`, `<s>` is put before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", *SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return _save(tokenizer, directory, bos, template)


def sentencepiece(directory: Path, *, template: str | None = CHATML) -> Path:
    """A BPE with U+2581 for spaces and byte fallback, in the manner of Llama 2; adds `<s>`."""
    alphabet = sorted({c for line in CORPUS for c in line.replace(" ", "\u2581") if c.isascii()})
    tokens = ["<s>", *SPECIAL, "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *alphabet]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", *SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return _save(tokenizer, directory, True, template)


def _save(tokenizer: Tokenizer, directory: Path, bos: bool, template: str | None) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if bos else None,
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
    )
    fast.chat_template = template
    fast.save_pretrained(str(directory))
    return directory
