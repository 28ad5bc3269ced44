"""Defects: what a self-test plants into a copy of the base, each a change of weights or of files.

Every one of them has been shipped by somebody: too few bits, a layer that was packed wrongly, the
tokenizer or the chat template of another model. Knows no gate.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.self_test_models import Change, is_linear, layer_of
from quant.artifact.layout import dequantize, min_max_qparams, quantize
from quant.artifact.scheme import Scheme, WeightScheme

GROUP = 64
_INT3 = WeightScheme(num_bits=3, kind="int", symmetric=True, strategy="group", group_size=GROUP)
_SCHEME = Scheme(layout="pack-quantized", weights=_INT3)
_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
_NO_ROLES = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
_NO_GENERATION_PROMPT = "{% set add_generation_prompt = false %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDefect:
    """A fault in the weights. `change(layers)` plants it into a model of so many layers."""

    name: str
    title: str
    planted: str
    change: Callable[[int], Change]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file defect is planted into: the template in use, tokens that the suite uses, most
    frequent first."""

    template: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDefect:
    """A fault in how text is read. `plant(folder, reading)` edits a copy of the model's files and
    says why it could not, "" when it could."""

    name: str
    title: str
    planted: str
    plant: Callable[[Path, Reading], str]
    is_template: bool


def frequent_tokens(rows: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Token ids, the most frequent first."""
    counts = Counter(token for row in rows for token in row)
    return tuple(sorted(counts, key=lambda token: (-counts[token], token)))


def _three_bits(layers: int) -> Change:
    def change(name: str, value: Tensor) -> Tensor:
        if layer_of(name) is None or not is_linear(name, value.ndim):
            return value
        width = value.shape[1]
        padded = torch.nn.functional.pad(value.float(), (0, -width % GROUP))
        scale, zero_point = min_max_qparams(padded, _INT3, torch.float32)
        rounded = dequantize(quantize(padded, scale, zero_point, _SCHEME))
        return rounded[:, :width].to(value.dtype)

    return change


def _in_middle_layer(spoil: Callable[[str, Tensor], Tensor]) -> Callable[[int], Change]:
    def planted(layers: int) -> Change:
        def change(name: str, value: Tensor) -> Tensor:
            if layer_of(name) != layers // 2 or not is_linear(name, value.ndim):
                return value
            return spoil(name, value)

        return change

    return planted


def _noise(name: str, value: Tensor) -> Tensor:
    """Normal noise with the mean and spread of the weights; the same for the same name."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(value.shape, generator=random)
    found = value.float()
    return (drawn * found.std() + found.mean()).to(value.dtype)


def _zeros(name: str, value: Tensor) -> Tensor:
    return torch.zeros_like(value)


def _exchanged_rows(layers: int) -> Change:
    def change(name: str, value: Tensor) -> Tensor:
        if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return value
        even = len(value) - len(value) % 2
        pairs = value[:even].view(-1, 2, value.shape[1]).flip(1).flatten(0, 1)
        return torch.cat((pairs, value[even:]))

    return change


def _lose_roles(folder: Path, reading: Reading) -> str:
    return _write_template(folder, reading, _NO_ROLES)


def _lose_generation_prompt(folder: Path, reading: Reading) -> str:
    if "add_generation_prompt" not in (reading.template or ""):
        return "the chat template writes no generation prompt"
    return _write_template(folder, reading, f"{_NO_GENERATION_PROMPT}{reading.template}")


def _write_template(folder: Path, reading: Reading, template: str) -> str:
    if reading.template is None:
        return "the model has no chat template"
    (folder / _TEMPLATE).write_text(template, encoding="utf-8")
    return ""


def _exchange_tokens(folder: Path, reading: Reading) -> str:
    path = folder / _TOKENIZER
    if not path.is_file():
        return f"the model has no {_TOKENIZER}"
    content = json.loads(path.read_text(encoding="utf-8"))
    added = {entry["id"] for entry in content.get("added_tokens", ())}
    ids = [token for token in reading.token_ids if token not in added][:2]
    if len(ids) < 2 or not _swap(content["model"].get("vocab"), *ids):
        return "its vocabulary is of a kind in which no two ids can be exchanged"
    path.write_text(json.dumps(content), encoding="utf-8")
    return ""


def _swap(vocabulary: Any, one: int, other: int) -> bool:
    """Exchange two ids of {token: id}, or of a list in the order of ids."""
    if isinstance(vocabulary, list):
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        return True
    if not isinstance(vocabulary, dict):
        return False
    names = {index: token for token, index in vocabulary.items()}
    if one not in names or other not in names:
        return False
    vocabulary[names[one]], vocabulary[names[other]] = other, one
    return True


FILE_DEFECTS = (
    FileDefect(
        name="template-roles",
        title="chat template: roles lost",
        planted="the template writes the messages without saying whose they are",
        plant=_lose_roles,
        is_template=True,
    ),
    FileDefect(
        name="template-prompt",
        title="chat template: no generation prompt",
        planted="the template does not open the assistant's turn",
        plant=_lose_generation_prompt,
        is_template=True,
    ),
    FileDefect(
        name="tokenizer",
        title="tokenizer: two ids exchanged",
        planted="the two tokens that the suite uses most have each other's id",
        plant=_exchange_tokens,
        is_template=False,
    ),
)
WEIGHT_DEFECTS = (
    WeightDefect(
        name="3-bit",
        title="3-bit rounding, groups of 64",
        planted="every linear of every layer rounded to nearest on 8 levels",
        change=_three_bits,
    ),
    WeightDefect(
        name="noise-layer",
        title="one layer of noise",
        planted="the linears of the middle layer replaced by noise of the same spread",
        change=_in_middle_layer(_noise),
    ),
    WeightDefect(
        name="zero-layer",
        title="one layer of zeros",
        planted="the linears of the middle layer set to zero",
        change=_in_middle_layer(_zeros),
    ),
    WeightDefect(
        name="vocabulary",
        title="weights of another tokenizer",
        planted="neighbouring ids exchanged in embedding and output head, files as they were: what "
        "the comparison of tokenizers cannot see",
        change=_exchanged_rows,
    ),
)
NAMES = tuple(defect.name for defect in (*FILE_DEFECTS, *WEIGHT_DEFECTS))
